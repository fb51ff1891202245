"""What a finished run leaves in its folder, and how its encoder is stored and found again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from siammm.core.errors import StoredFileError
from siammm.core.files import write_text, written_whole
from siammm.data.view_settings import ViewSettings, views
from siammm.learn.build import build_network
from siammm.learn.loop import Trained
from siammm.learn.networks import SiameseNetwork
from siammm.runs import folder as run
from siammm.runs.folder import RunFolder
from siammm.settings.stored import as_plain, from_plain
from siammm.settings.training import TrainConfig

_FORMAT = 1


def leave(folder: RunFolder, trained: Trained) -> None:
    """Write everything but the checkpoints and the metrics, which are there already."""
    try:
        _leave(folder, trained)
    except (OSError, SafetensorError) as error:
        raise run.unwritable(folder.path, error) from error


def _leave(folder: RunFolder, trained: Trained) -> None:
    save_network(folder.path / run.ENCODER, trained.network, trained.config, trained.clean_view)
    if trained.mixture is not None:
        trained.mixture.save(folder.path / run.MIXTURE)
        _write_array(folder.path / run.EMBEDDINGS, trained.embeddings.astype(np.float16))
        _write_table(folder.path / run.ASSIGNMENTS, assignments(trained))
        merges = trained.mixture.merges_
        assert merges is not None, "training keeps the history of its merges, also where there are none"
        text = json.dumps(
            {
                "linkage": merges.linkage.tolist(),
                "n_merges": merges.n_merges,
                "n_components": merges.n_components,
                "groups": trained.groups.label_K.tolist() if trained.groups is not None else None,
                "nodes": trained.merge_nodes,
                "n_clusters_by_epoch": [
                    [row["epoch"], row["n_clusters"]] for row in trained.metrics if "n_clusters" in row
                ],
            }
        )
        write_text(folder.path / run.MERGES, text + "\n")


def assignments(trained: Trained) -> pa.Table:
    """One row an image: what it is called, its cluster and group, how surely, how unusual it is, and its label."""
    assert trained.groups is not None, "a mixture has groups, if only of one cluster each"
    columns: dict[str, Any] = {
        "id": pa.array(trained.ids),
        "cluster": pa.array(trained.clusters, type=pa.int32()),
        "group": pa.array(trained.groups.label_K[trained.clusters], type=pa.int32()),
        "probability": pa.array(trained.probability),
        "outlier_score": pa.array(trained.outlier_score),
    }
    if trained.label_values is not None:
        columns["label"] = pa.array(trained.label_values)
    return pa.table(columns)


def save_network(path: Path, network: SiameseNetwork, config: TrainConfig, view: ViewSettings) -> None:
    """All networks in one file, with the settings that build them in its header."""
    header = {"format": _FORMAT, "settings": as_plain(config), "image_size": view.size}
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in network.state_dict().items()}
    with written_whole(path) as scratch:
        save_file(tensors, scratch, metadata={"siammm": json.dumps(header)})


def load_network(path: Path) -> tuple[SiameseNetwork, TrainConfig, ViewSettings]:
    """The networks that ``save_network`` wrote, in evaluation mode, with their settings and those of a clean view."""
    if not path.is_file():
        raise StoredFileError(f"There is no file {path}; give a folder that siammm train or SiamMM.save wrote.")
    try:
        with safe_open(path, framework="pt") as stored:
            header: dict[str, Any] = json.loads((stored.metadata() or {})["siammm"])
            tensors: dict[str, Tensor] = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        if header["format"] != _FORMAT:
            raise StoredFileError(f"{path} is of another version of siammm; use the version that wrote it.")
        config, size = from_plain(header["settings"], path), int(header["image_size"])
        with torch.random.fork_rng(devices=[]):  # new weights are drawn only to be replaced
            network = build_network(config, size)
        network.load_state_dict(tensors, strict=True)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, StoredFileError):
            raise
        raise StoredFileError(f"{path} is not an encoder saved by siammm, or it is damaged.") from error
    return network.eval(), config, views(size, config.views.augmentation)[0]


def _write_table(path: Path, table: pa.Table) -> None:
    with written_whole(path) as scratch:
        pq.write_table(table, scratch)


def _write_array(path: Path, array: np.ndarray) -> None:
    with written_whole(path) as scratch, scratch.open("wb") as file:
        np.save(file, array)
