"""What each rank found of its rows, as one process would have it of all: in order, in pieces, or counted.

Nothing here holds all rows of a table at once. Every rank must call each function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from siammm.core import ranks
from siammm.metrics.labels import label_codes
from siammm.metrics.outliers import outlier_score
from siammm.mixture.shard import gathered

# Rows that a rank sends, and numbers that it compares with its own, at a time.
_ROWS, _NUMBERS = 2**18, 2**20


def refused_together(what: str = "use its input") -> contextlib.AbstractContextManager[None]:
    """See ``ranks.refused_together``; alone, what is raised goes on as it is."""
    return ranks.refused_together(ranks.transport(), what)


def outlier_scores(log_density: np.ndarray) -> np.ndarray:
    """``outlier_score`` of this rank's rows among those of all ranks."""
    if not ranks.active():
        return outlier_score(log_density)
    counts = ranks.all_gather_counts(len(log_density), ranks.transport())
    mine, likelier = np.sort(log_density), np.zeros(len(log_density), dtype=np.int64)
    for start in range(0, max(counts), _NUMBERS):
        theirs = np.sort(gathered(mine[start : start + _NUMBERS]))
        likelier += len(theirs) - np.searchsorted(theirs, log_density, side="right")
    return (likelier / max(1, sum(counts) - 1)).astype(np.float32)


def rows_of_all(table: pa.Table) -> Iterator[pa.Table]:
    """Every rank's rows in the order of ranks, some at a time, on every rank."""
    if not ranks.active():
        yield from (table.slice(start, _ROWS) for start in range(0, len(table), _ROWS))
        return
    device = ranks.transport()
    with ranks.refused_together(device):
        sent = table.schema.serialize().to_pybytes()
    schemas = [pa.ipc.read_schema(pa.py_buffer(schema)) for schema in ranks.all_gather_bytes(sent)]
    with ranks.refused_together(device):
        # A column without a gap on one rank may have a narrower type there.
        table = table.cast(pa.unify_schemas(schemas, promote_options="permissive"))
    for source, count in enumerate(ranks.all_gather_counts(len(table), device)):
        for start in range(0, count, _ROWS):
            mine = _as_bytes(table.slice(start, _ROWS)) if source == ranks.rank() else b""
            yield pa.ipc.open_stream(pa.py_buffer(ranks.broadcast_bytes(mine, source))).read_all()


def labelled_rows(
    labels: np.ndarray, clusters: np.ndarray, groups: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Label, cluster and group of every row of all ranks, in no particular order: all that scores depend on.

    Only how often each combination occurs travels.
    """
    if not ranks.active():
        return labels, clusters, groups
    with ranks.refused_together(ranks.transport()):
        codes, names = label_codes(labels)
        every = np.stack([codes, clusters, groups], axis=1).astype(np.int64)
        combination, count = np.unique(every, axis=0, return_counts=True)
        counted = pa.table({
            "label": pa.array([None if code < 0 else names[code] for code in combination[:, 0].tolist()]),
            "cluster": combination[:, 1], "group": combination[:, 2], "count": count,
        })  # fmt: skip
    table = pa.concat_tables(list(rows_of_all(counted)))
    times = table.column("count").to_numpy()
    label = table.column("label")
    values = np.empty(len(label), dtype=object)
    values[:] = label.to_pylist()
    values = values if label.null_count or pa.types.is_string(label.type) else label.to_numpy()
    cluster, group = (np.repeat(table.column(name).to_numpy(), times) for name in ("cluster", "group"))
    return np.repeat(values, times), cluster, group


def _as_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue().to_pybytes()
