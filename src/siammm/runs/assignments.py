"""The table of a run's images: the cluster, the group and the label of each.

Legend:  N images in the order of the table, K clusters.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from siammm.core.errors import StoredFileError
from siammm.core.text import one_line, printable
from siammm.metrics.clustering import label_codes
from siammm.runs import files


def assignments_table(
    *,
    ids: Any,
    clusters: Any,
    groups: Any,
    probability: Any,
    group_probability: Any,
    outlier_score: Any,
    labels: Any,
) -> pa.Table:
    """One row per image or row of a table: name, cluster, group, probabilities, outlier score and, if any, label."""
    columns: dict[str, Any] = {
        "id": pa.array(ids),
        "cluster": pa.array(clusters, type=pa.int32()),
        "group": pa.array(groups, type=pa.int32()),
        "probability": pa.array(probability),
        "group_probability": pa.array(group_probability),
        "outlier_score": pa.array(outlier_score),
    }
    if labels is not None:
        columns["label"] = pa.array(labels)
    return pa.table(columns)


def read_assignments(path: Path, n_clusters: int, *, ids_are_text: bool, again: str) -> pa.Table:
    """Read and check the table; ``again`` is what to do if it cannot be read, such as "train again"."""
    try:
        table = pq.read_table(path)
        table.validate(full=True)
        cluster_N = table.column("cluster").cast(pa.int64()).to_numpy()
        if "id" not in table.column_names:
            raise ValueError("it has no ids")
        if ids_are_text and (table.column("id").null_count or not pa.types.is_string(table.schema.field("id").type)):
            raise ValueError("its ids are not text")
        has_groups = "group" in table.column_names
        of_groups = [name for name in ("group", "group_probability") if name in table.column_names]
        for name in ("cluster", "probability", "outlier_score", *of_groups):
            column = table.column(name)
            if column.null_count or not pa.types.is_primitive(column.type):
                raise ValueError(f"{name} is not a number in every row")
        if has_groups and len(table) and table.column("group").cast(pa.int64()).to_numpy().min() < 0:
            raise ValueError("a group is below 0")
        if "label" in table.column_names and pa.types.is_nested(table.schema.field("label").type):
            raise ValueError("its labels are lists")
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        remedy = f"copy the whole run folder, or {again}"
        raise StoredFileError(f"{path} cannot be read ({one_line(error)}); {remedy}.") from error
    if not len(table):
        raise StoredFileError(f"{path} holds no images; {again}.")
    if not 0 <= cluster_N.min() <= cluster_N.max() < n_clusters:
        raise StoredFileError(
            f"{path} names a cluster that {files.MIXTURE} does not have; the files belong to different runs."
        )
    return table


def group_numbers(table: pa.Table, path: Path, *, again: str) -> np.ndarray:
    """The column of groups as whole numbers."""
    try:
        return table.column("group").cast(pa.int64()).to_numpy()
    except (ValueError, pa.ArrowException) as error:
        raise StoredFileError(f"{path} has groups that are no whole numbers; {again}.") from error


def groups_of_most_images(cluster_N: np.ndarray, group_N: np.ndarray, n_clusters: int) -> tuple[np.ndarray, np.ndarray]:
    """The group that most images of each cluster are in, and whether a cluster has images.

    Groups are numbered without gaps.
    """
    table_KG = np.zeros((n_clusters, int(group_N.max()) + 1), dtype=np.int64)
    np.add.at(table_KG, (cluster_N, group_N), 1)
    return table_KG.argmax(axis=1), table_KG.sum(axis=1) > 0


def named_labels(values: Sequence[Any]) -> tuple[np.ndarray, list[str] | None]:
    """Labels as numbers, in the order of their names, and these names; (all -1, None) if there are none."""
    objects = np.empty(len(values), dtype=object)
    objects[:] = list(values)
    codes_N, classes = label_codes(objects)
    if not classes:
        return np.full(len(values), -1), None
    order = sorted(range(len(classes)), key=lambda c: _natural(classes[c]))
    rank = np.empty(len(classes) + 1, dtype=np.int64)
    rank[order] = np.arange(len(order))
    rank[-1] = -1  # that of no label, whose code is -1
    return rank[codes_N], [printable(classes[c]) for c in order]


def _natural(label: Any) -> tuple[int, float, str]:
    """Numbers by their value, then text by its letters: "10" comes after "9"."""
    text = str(label)
    return (0, float(text), text) if text.isascii() and text.isdigit() else (1, 0.0, text)
