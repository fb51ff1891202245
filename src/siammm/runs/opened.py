"""A finished run, opened to be looked at: its clusters, its embeddings and, where they are still there, its images.

Legend:  N images of the run, in the order of its table; D dimensions, K clusters.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.lib.format import open_memmap
from safetensors import SafetensorError, safe_open

from siammm.core.errors import InputError, SiamMMError, StoredFileError
from siammm.core.text import one_line, printable, shown
from siammm.data.decode import SetAside
from siammm.data.loader import open_loader
from siammm.data.sources import Source, open_source
from siammm.data.subset import SourceSubset
from siammm.data.view_settings import ViewSettings
from siammm.learn.encode import encode
from siammm.learn.networks import SiameseNetwork
from siammm.metrics.clustering import label_codes
from siammm.mixture.estimator import VonMisesFisherMixture
from siammm.runs import folder as run
from siammm.runs import results
from siammm.runs.folder import RunFolder
from siammm.settings.training import DataConfig, TrainConfig

Tell = Callable[[str, int, int], None]
"""Is told what is being done, how much of it is done, and how much there is (0 where that is not known)."""


@dataclass(frozen=True, kw_only=True)
class Assigned:
    """What is known of a run without its encoder and its images: enough to put another run beside it."""

    path: Path
    name: str
    config: TrainConfig
    facts: dict[str, Any]
    metrics: list[dict[str, Any]]
    merges: dict[str, Any]
    """The tree of merges, as the run left it; empty where it left none."""
    mixture: VonMisesFisherMixture
    ids: list[str]
    """What the images are called; unique."""
    cluster_N: np.ndarray
    probability_N: np.ndarray
    outlier_N: np.ndarray
    label_N: np.ndarray
    """Index in ``label_names``, -1 where there is none."""
    label_names: list[str] | None

    @property
    def n_images(self) -> int:
        """Images of the run."""
        return len(self.ids)

    @property
    def n_clusters(self) -> int:
        """Clusters, also those that no image is in."""
        return int(self.mixture.n_components_)

    @property
    def mean_KD(self) -> np.ndarray:
        """The mean direction of each cluster."""
        return torch.as_tensor(self.mixture.mean_directions_).double().cpu().numpy()

    @property
    def concentration_K(self) -> np.ndarray:
        """The concentration of each cluster."""
        return torch.as_tensor(self.mixture.concentrations_).double().cpu().numpy()

    @property
    def weight_K(self) -> np.ndarray:
        """The weight of each cluster."""
        return torch.as_tensor(self.mixture.weights_).double().cpu().numpy()


@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A run with its embeddings and its images."""

    found: Assigned
    embedding_ND: np.ndarray
    """float16, perhaps mapped from its file."""
    source: Source | None
    """None where the images are gone, or are others now."""
    data: str
    """Where they are, or were."""
    position_N: np.ndarray
    """Position in the source of each image, -1 where it is not there."""
    image_size: int
    device: torch.device
    notes: list[str] = field(default_factory=list)
    """What a reader should know."""


# -- the tables --------------------------------------------------------------------------------------------------------


def read_assigned(path: Path) -> Assigned:
    """Read all of a run but its embeddings and images. Refuses, in one sentence, whatever is no finished run."""
    given = path
    path = path.expanduser()
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise InputError(f"{shown(given)} {what}, but a run folder that siammm train wrote is needed; check the path.")
    if not (path / run.CONFIG).is_file():
        if (path / run.MIXTURE).is_file() and (path / run.ASSIGNMENTS).is_file():
            raise InputError(
                f"{shown(given)} was written by siammm cluster, which has no images to show; give a run folder that "
                "siammm train wrote."
            )
        raise InputError(
            f"{shown(given)} is no run folder: it has no {run.CONFIG}; give a folder that siammm train wrote."
        )
    folder, config, facts = RunFolder.open(path)
    if not (path / run.ENCODER).is_file():
        raise InputError(
            f"The run {shown(given)} has not finished; go on with: siammm train --resume {shlex.quote(str(given))}."
        )
    if not (path / run.MIXTURE).is_file():
        raise InputError(
            f"The run {shown(given)} has no clusters to show, because it was trained without a mixture; train with "
            "another --method or --cluster-loss."
        )
    mixture = VonMisesFisherMixture.load(path / run.MIXTURE)
    ids, columns, label_N, label_names = _read_table(path / run.ASSIGNMENTS)
    cluster_N = columns["cluster"].astype(np.int64)
    if len(cluster_N) and not 0 <= cluster_N.min() <= cluster_N.max() < mixture.n_components_:
        raise StoredFileError(
            f"{path / run.ASSIGNMENTS} names a cluster that {run.MIXTURE} has not; they are not of one run."
        )
    return Assigned(
        path=path,
        name=printable(path.resolve().name),
        config=config,
        facts=facts,
        metrics=[row for row in folder.metrics() if isinstance(row, dict)],
        merges=_read_merges(path / run.MERGES),
        mixture=mixture,
        ids=ids,
        cluster_N=cluster_N,
        probability_N=columns["probability"],
        outlier_N=columns["outlier_score"],
        label_N=label_N,
        label_names=label_names,
    )


def _read_table(path: Path) -> tuple[list[str], dict[str, np.ndarray], np.ndarray, list[str] | None]:
    try:
        table = pq.read_table(path)
        ids = [printable(name) for name in table.column("id").to_pylist()]
        columns = {name: table.column(name).to_numpy() for name in ("cluster", "probability", "outlier_score")}
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise StoredFileError(
            f"{path} cannot be read ({one_line(error)}); copy the whole run folder, or train again."
        ) from error
    if not ids:
        raise StoredFileError(f"{path} holds no images; train again.")
    label_N, names = np.full(len(ids), -1), None
    if "label" in table.column_names:
        label_N, names = named_labels(table.column("label").to_pylist())
    return ids, columns, label_N, names


def named_labels(values: Sequence[Any]) -> tuple[np.ndarray, list[str] | None]:
    """Labels as numbers, in the order of their names, and these names; (all -1, None) where there are none."""
    objects = np.empty(len(values), dtype=object)
    objects[:] = list(values)
    codes_N, classes = label_codes(objects)
    if not classes:
        return np.full(len(values), -1), None
    order = sorted(range(len(classes)), key=lambda c: _natural(classes[c]))
    place = np.empty(len(classes) + 1, dtype=np.int64)
    place[order] = np.arange(len(order))
    place[-1] = -1  # where -1, no label, finds itself
    return place[codes_N], [printable(classes[c]) for c in order]


def _natural(label: Any) -> tuple[int, float, str]:
    """Numbers by their value, then text by its letters: "10" comes after "9"."""
    text = str(label)
    return (0, float(text), text) if text.isascii() and text.isdigit() else (1, 0.0, text)


def _read_merges(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoredFileError(f"{path} cannot be read ({one_line(error)}); remove it, or train again.") from error
    return stored if isinstance(stored, dict) else {}


# -- images and embeddings ---------------------------------------------------------------------------------------------


def open_run(
    path: Path, *, data: str | None, reading: DataConfig, device: torch.device, tell: Tell, seed: int = 0
) -> OpenRun:
    """Open a run with its images, and embed these again where the run did not keep its embeddings."""
    tell("reading the run", 0, 0)
    found = read_assigned(path)
    notes: list[str] = []
    wanted = data if data is not None else str(found.facts.get("data_path", found.config.data))
    tell("looking for the images", 0, 0)
    source, position_N = _find_images(found, wanted, data is not None, reading, notes)
    if source is not None and found.label_names is None:
        found = _with_labels_of(found, source, position_N)
    embedding_ND = stored_embeddings(found)
    if embedding_ND is None:
        embedding_ND = _encoded_again(found, source, wanted, position_N, reading, device, tell, seed)
    return OpenRun(
        found=found,
        embedding_ND=embedding_ND,
        source=source,
        data=printable(wanted),
        position_N=position_N,
        image_size=image_size_of(found),
        device=device,
        notes=notes,
    )


def _find_images(
    found: Assigned, data: str, was_given: bool, reading: DataConfig, notes: list[str]
) -> tuple[Source | None, np.ndarray]:
    """The images and where each is among them. Images that were given must be there; the run's own may be gone."""
    stored = found.config.reading
    nowhere_N = np.full(found.n_images, -1)
    try:
        source = open_source(
            data,
            image_key=reading.image_key or stored.image_key,
            label_key=stored.label_key if reading.label_key is None else reading.label_key,
            max_pixels=stored.max_pixels if reading.max_pixels == DataConfig().max_pixels else reading.max_pixels,
        )
    except SiamMMError as error:
        if was_given:
            raise
        notes.append(
            f"The images of this run could not be opened, so none are shown; say where they are with --data "
            f"({printable(one_line(error))})."
        )
        return None, nowhere_N
    same = source.fingerprint() == found.facts.get("fingerprint")
    position_N = _positions(source, found.ids)
    if same:
        return source, position_N
    n_there = int((position_N >= 0).sum())
    # Rows that are numbered say nothing about what is in them, but a file that has kept its name is likely the same.
    if n_there == 0 or _is_numbered(source):
        sentence = f"The images in {shown(printable(data))} are not those that the run was trained on"
        if was_given:
            raise InputError(f"{sentence}; give --data their present place, or leave it out.")
        notes.append(f"{sentence}, so none are shown; say where these are with --data.")
        return None, nowhere_N
    gone = f" ({found.n_images - n_there:,} are gone)" if n_there < found.n_images else ""
    notes.append(
        f"The images in {shown(printable(data))} have changed since the run{gone}; what is shown is found by name."
    )
    return source, position_N


def _positions(source: Source, ids: Sequence[str]) -> np.ndarray:
    places = {printable(source.identifier(i)): i for i in range(len(source))}
    return np.array([places.get(name, -1) for name in ids], dtype=np.int64)


def _is_numbered(source: Source) -> bool:
    return all(source.identifier(int(i)) == str(i) for i in source.spread(16))


def _with_labels_of(found: Assigned, source: Source, position_N: np.ndarray) -> Assigned:
    """Labels that the run was not told of, where the images have them."""
    if source.labels is None or (position_N < 0).any():
        return found
    codes_N = np.asarray(source.labels)[position_N]
    names = source.label_names
    label_N, label_names = named_labels([names[c] if names else str(c) for c in codes_N.tolist()])
    return dataclasses.replace(found, label_N=label_N, label_names=label_names)


def stored_embeddings(found: Assigned) -> np.ndarray | None:
    """The embeddings that the run kept, mapped from its file; None for a run of an earlier version."""
    path = found.path / run.EMBEDDINGS
    if not path.is_file():
        return None
    try:
        embedding_ND = open_memmap(path, mode="r")
    except (OSError, ValueError) as error:
        raise StoredFileError(f"{path} cannot be read ({one_line(error)}); remove it to embed again.") from error
    wanted = (found.n_images, int(found.mixture.n_features_in_))
    if embedding_ND.shape != wanted or embedding_ND.dtype.kind != "f":
        raise StoredFileError(
            f"{path} has the shape {embedding_ND.shape}, but the run has {wanted}; remove it to embed again."
        )
    return embedding_ND


def _encoded_again(
    found: Assigned,
    source: Source | None,
    data: str,
    position_N: np.ndarray,
    reading: DataConfig,
    device: torch.device,
    tell: Tell,
    seed: int,
) -> np.ndarray:
    if source is None or (position_N < 0).any():
        raise InputError(
            f"The run {shown(found.path)} kept no embeddings, and its images are no longer all in "
            f"{shown(printable(data))}; say with --data where they are."
        )
    network, _, view = load_encoder(found.path, device)
    try:
        loader = open_loader(
            SourceSubset(source, position_N),
            (view, view),
            device,
            kind=reading.loader,
            seed=seed,
            workers=reading.workers,
            limit=0.0,  # a row that is missing would shift all others
            progress=lambda done, total: tell("reading the images again", done, total),
        )
    except InputError as error:
        raise InputError(
            f"The run {shown(found.path)} kept no embeddings, and not all of its images can be read again "
            f"({one_line(error).partition('; remove them')[0]}); put them back, or say with --data where they are."
        ) from error
    try:
        tell("embedding the images again", 0, 0)
        return encode(network, loader, "embeddings").cpu().numpy().astype(np.float16)
    finally:
        loader.close()


def load_encoder(path: Path, device: torch.device) -> tuple[SiameseNetwork, TrainConfig, ViewSettings]:
    """The run's networks on a device, their settings and those of a clean view."""
    network, config, view = results.load_network(path / run.ENCODER)
    return network.to(device), config, view


def image_size_of(found: Assigned) -> int:
    """Pixels of the side of an image as the encoder sees it, from the header of its file."""
    path = found.path / run.ENCODER
    try:
        with safe_open(path, framework="pt") as stored:
            return int(json.loads((stored.metadata() or {})["siammm"])["image_size"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise StoredFileError(f"{path} is not an encoder saved by siammm, or it is damaged.") from error


def n_set_aside(found: Assigned) -> int:
    """Images that training could not read."""
    try:
        return len(json.loads((found.path / SetAside.FILE_NAME).read_text(encoding="utf-8"))["set_aside"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
