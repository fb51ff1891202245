"""Writes the folder of a run of ``siammm cluster``: the table of samples, the mixture, a summary, and embeddings."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from siammm.cluster.find_clusters import Found
from siammm.cluster.shards import refused_together, rows_of_all
from siammm.core import ranks
from siammm.core.folders import new_folder
from siammm.runs import files
from siammm.runs.assignments import assignments_table
from siammm.runs.by_hand import carry_over
from siammm.runs.clustered_rows import unit_parts
from siammm.runs.image_table import ImageTable, write_parquet
from siammm.runs.summary import noted_of_table, summary_of, write_summary
from siammm.settings.commands import ClusterConfig


def write_clustered(
    found: Found,
    config: ClusterConfig,
    output: Path,
    *,
    images: dict[str, Any] | None = None,
    embedded: ImageTable | None = None,
) -> str:
    """Write the result; for images also their embeddings, and what is noted of them. Every rank must call this.

    What a person has made in an earlier result stays, where it can; the sentence says what became of it.
    """
    summary = summary_of(found, config, noted_of_table(found, config) if images is None else images)
    failing, by_hand = "write the result", ""
    with contextlib.ExitStack() as stack:
        folder, writer = None, None
        with refused_together(failing):
            if ranks.is_writer():
                new = new_folder(output, overwrite=config.overwrite, ours=files.CLUSTERED_NAMES)
                folder = stack.enter_context(new)
        for piece in rows_of_all(_assignments(found)):
            with refused_together(failing):
                if folder is not None:
                    if writer is None:
                        writer = pq.ParquetWriter(folder / files.ASSIGNMENTS, piece.schema)
                        stack.callback(writer.close)
                    writer.write_table(piece)
        with refused_together(failing):
            if folder is not None:
                found.mixture.save(folder / files.MIXTURE)
                if embedded is not None:
                    _write_unit_rows(folder / files.EMBEDDINGS, embedded.rows)
                    write_parquet(folder / files.IMAGES_TABLE, embedded)
                write_summary(folder, summary)
                assert writer is not None, "there is a row at least"
                writer.close()
                by_hand = carry_over(output, folder)
        with refused_together(failing):
            stack.close()
    return by_hand


def _assignments(found: Found) -> pa.Table:
    """The table of results: one row per sample, in the order of the input."""
    table = found.table
    numbers = np.arange(table.first_row, table.first_row + len(found.clusters))
    ours = assignments_table(
        ids=numbers if table.ids is None else table.ids,
        clusters=found.clusters,
        groups=found.group_labels,
        probability=found.probability,
        group_probability=found.group_probability,
        outlier_score=found.outlier_score,
        labels=table.labels,
    )
    for given in [] if table.columns is None else table.columns.column_names:
        name = given
        while name in ours.column_names:
            # If the input is itself a result, its old clusters are kept under another name.
            name = f"input_{name}"
        ours = ours.append_column(name, table.columns.column(given))  # pyright: ignore[reportOptionalMemberAccess]
    return ours


def _write_unit_rows(path: Path, rows: np.ndarray) -> None:
    with path.open("wb") as file:
        facts = {"descr": "<f2", "fortran_order": False, "shape": tuple(rows.shape)}
        np.lib.format.write_array_header_1_0(file, facts)
        for unit_BD in unit_parts(rows):
            file.write(unit_BD.astype("<f2", copy=False).tobytes())
