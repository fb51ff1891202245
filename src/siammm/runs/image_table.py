"""A table of images with their embeddings, and how it is written for other tools: Parquet and .npz.

Row groups are written one after another from the file that the pass left, so that memory holds one of them.

Legend:  N images, D columns of a row.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from siammm.core.text import printable
from siammm.core.version import __version__
from siammm.data.folder_source import FolderSource
from siammm.data.loader import Loader
from siammm.data.source import Source
from siammm.metrics.outliers import outlier_score
from siammm.runs.encoded_images import EncodedImages

_BYTES_OF_A_GROUP, _LEAST_ROWS = 2**26, 1024


@dataclass(frozen=True, kw_only=True)
class ImageTable:
    """One row per image."""

    rows: np.ndarray
    """N x D, written as float32."""
    columns: dict[str, pa.Array]
    """What else is known of each image, in the order in which it is written."""

    def __len__(self) -> int:
        return len(self.rows)


def image_table(loader: Loader, found: EncodedImages) -> ImageTable:
    """What is known of the images of a pass.

    The outlier score is among these images; for those that a run was trained on, it is that of its assignments.
    """
    columns: dict[str, pa.Array] = {"id": pa.array(loader.identifiers(), pa.string())}
    paths = file_paths(loader.source, loader.sample_N.numpy())
    if paths is not None:
        columns["filepath"] = pa.array(paths, pa.string())
    if found.cluster_N is not None:
        assert found.log_density_N is not None
        columns["cluster"] = pa.array(found.cluster_N, pa.int32())
        if found.group_N is not None:
            columns["group"] = pa.array(found.group_N, pa.int32())
        columns["probability"] = pa.array(found.probability_N, pa.float32())
        if found.group_probability_N is not None:
            columns["group_probability"] = pa.array(found.group_probability_N, pa.float32())
        columns["outlier_score"] = pa.array(outlier_score(found.log_density_N), pa.float32())
    labels, names = loader.labels, loader.source.label_names
    if labels is not None:
        columns["label"] = pa.array(labels if names is None else [names[code] for code in labels.tolist()])
    return ImageTable(rows=found.row_ND, columns=columns)


def file_paths(source: Source, samples: np.ndarray) -> list[str | None] | None:
    """The file of each image if images are files; None for a name that is no Unicode, which no table can hold."""
    if not isinstance(source, FolderSource):
        return None
    paths = [str(source.path(i)) for i in samples.tolist()]
    return [path if printable(path) == path else None for path in paths]


def write_parquet(path: Path, table: ImageTable, *, name: str = "embedding") -> None:
    """Write the images with their embeddings as lists of one length, so that vector functions know it."""
    n, width = table.rows.shape
    vector = pa.list_(pa.float32(), width)
    fields = [pa.field(column, values.type) for column, values in table.columns.items()]
    # After the id, where people look first.
    fields.insert(1, pa.field(name, vector, nullable=False))
    facts = {"version": __version__, "n_images": n, "n_dimensions": width}
    schema = pa.schema(fields, metadata={"siammm": json.dumps(facts)})
    # Dictionaries are for words that come back; in numbers that never do they cost time and room.
    repeated: Any = [one.name for one in fields if pa.types.is_string(one.type) or pa.types.is_integer(one.type)]
    group = max(_LEAST_ROWS, min(2**17, _BYTES_OF_A_GROUP // (4 * width)))
    with pq.ParquetWriter(path, schema, use_dictionary=repeated) as writer:
        for first in range(0, n, group):
            last = min(first + group, n)
            arrays: dict[str, Any] = {name: vectors(table.rows[first:last])}
            arrays |= {column: values.slice(first, last - first) for column, values in table.columns.items()}
            batch = pa.record_batch([arrays[field.name] for field in fields], schema=schema)
            writer.write_batch(batch, row_group_size=last - first)


def write_npz(path: Path, table: ImageTable, *, name: str = "embeddings") -> None:
    """Write one array for each column; without pickle, so that anybody may load it."""
    plural = {"id": "ids", "label": "labels"}
    arrays: dict[str, np.ndarray] = {name: table.rows}
    for column, values in table.columns.items():
        if column == "filepath":  # a name may be missing, for which .npz has no value; the ids are there
            continue
        array = values.to_numpy(zero_copy_only=False)
        arrays[plural.get(column, column)] = array.astype(str) if array.dtype == object else array
    with path.open("wb") as file:
        np.savez(file, **arrays)  # pyright: ignore[reportArgumentType] - its allow_pickle is no array


def vectors(row_ND: np.ndarray) -> pa.FixedSizeListArray:
    """Rows as lists of one length, in float32."""
    values = pa.array(np.ascontiguousarray(row_ND, dtype=np.float32).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(values, type=pa.list_(pa.float32(), row_ND.shape[1]))
