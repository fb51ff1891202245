"""The result of ``siammm cluster`` on disk: the table of samples, the mixture and a summary."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from siammm.commands.find_clusters import Found, spread_of_components
from siammm.commands.shards import refused_together, rows_of_all
from siammm.core import ranks
from siammm.core.folders import new_folder
from siammm.core.version import __version__
from siammm.export.tables import ImageTable, write_parquet
from siammm.mixture.shard import gathered
from siammm.runs import files
from siammm.runs.by_hand import carry_over
from siammm.runs.clustered import write_clustered
from siammm.settings.commands import ClusterConfig


def write(
    found: Found,
    config: ClusterConfig,
    output: Path,
    *,
    images: dict[str, Any] | None = None,
    embedded: ImageTable | None = None,
) -> str:
    """Write the result; for images also their embeddings, and what is known of their encoder.

    What a person has made in an earlier result stays, where it can; the sentence says what became of it.
    """
    facts = summary(found, config)
    facts["input"] |= images or {
        "path": table_path(config.data),
        "fingerprint": found.table.fingerprint(gathered),
    }
    failing, by_hand = "write the result", ""
    with contextlib.ExitStack() as stack:
        folder, writer = None, None
        with refused_together(failing):
            if ranks.is_writer():
                new = new_folder(output, overwrite=config.overwrite, ours=files.CLUSTERED_NAMES)
                folder = stack.enter_context(new)
        for piece in rows_of_all(assignments(found)):
            with refused_together(failing):
                if folder is not None:
                    if writer is None:
                        writer = pq.ParquetWriter(folder / files.ASSIGNMENTS, piece.schema)
                        stack.callback(writer.close)
                    writer.write_table(piece)
        with refused_together(failing):
            if folder is not None:
                rows = None if embedded is None else embedded.rows
                write_clustered(folder, found.mixture, facts, rows)
                if embedded is not None:
                    write_parquet(folder / files.IMAGES_TABLE, embedded)
                assert writer is not None, "there is a row at least"
                writer.close()
                by_hand = carry_over(output, folder)
        with refused_together(failing):
            stack.close()
    return by_hand


def table_path(data: str) -> str:
    """A table of embeddings as it is found from any folder."""
    return os.path.abspath(os.path.expanduser(data))


def assignments(found: Found) -> pa.Table:
    """The table of results: one row per sample, in the order of the input."""
    table = found.table
    numbers = np.arange(table.first_row, table.first_row + len(found.clusters))
    columns = {
        "id": pa.array(numbers if table.ids is None else table.ids),
        "cluster": pa.array(found.clusters.astype(np.int32)),
        "group": pa.array(found.group_labels.astype(np.int32)),
        "probability": pa.array(found.probability),
        "group_probability": pa.array(found.group_probability),
        "outlier_score": pa.array(found.outlier_score),
    }
    if table.labels is not None:
        columns["label"] = pa.array(table.labels)
    for name in [] if table.columns is None else table.columns.column_names:
        ours = name
        while ours in columns:
            # If the input is itself a result, its old clusters are kept under another name.
            ours = f"input_{ours}"
        columns[ours] = table.columns.column(name)  # pyright: ignore[reportOptionalMemberAccess]
    return pa.table(columns)


def summary(found: Found, config: ClusterConfig) -> dict[str, Any]:
    """The result and its settings as plain values."""
    mixture, merges = found.mixture, found.mixture.merges_
    n, d = found.table.n_samples, found.table.embeddings.shape[1]
    spread = "concentrations" if config.family == "von-mises-fisher" else "variances"
    return {
        "input": {"file": str(found.table.source), "n_samples": n, "n_dimensions": d},
        "n_components": int(mixture.n_components_),
        "n_groups": found.groups.n_groups,
        "groups": found.groups.label_K.tolist(),
        "ratio_of_groups": found.groups.ratio,
        "n_merged": found.n_merged,
        "converged": bool(mixture.converged_),
        "n_iter": int(mixture.n_iter_),
        "lower_bound": float(mixture.lower_bound_),
        "sizes": found.sizes.tolist(),
        "weights": np.asarray(mixture.weights_, dtype=float).tolist(),
        spread: spread_of_components(mixture).tolist(),
        "n_components_by_round": None if merges is None else [int(k) for k in merges.n_components],
        "scores": None if found.scores is None else dataclasses.asdict(found.scores),
        "scores_of_groups": None if found.group_scores is None else dataclasses.asdict(found.group_scores),
        "seconds": found.seconds,
        "settings": dataclasses.asdict(config) | {"n_components": found.n_start},
        "versions": {"siammm": __version__, "torch": str(torch.__version__), "numpy": np.__version__},
    }
