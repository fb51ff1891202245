"""The rows that ``siammm cluster`` clustered: of unit length as runs keep them, and read again from a table.

Legend:  N rows, D dimensions, B rows of a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from siammm.core.errors import InputError, SiamMMError
from siammm.core.text import one_line, shown
from siammm.data.array_files import check_fits
from siammm.data.embedding_table import PATH_KEYS
from siammm.data.embeddings import read_embeddings
from siammm.runs.summary import Summary

_ROWS_AT_ONCE = 32_768


def table_again(summary: Summary, given: str) -> np.ndarray:
    """The rows of the table that was clustered, of unit length, in float16; ``given`` is the run's name."""
    settings, place = summary.settings, shown(summary.data)
    keys: dict[str, Any] = {name: settings.get(name) for name in ("key", "id_column", "label_column")}
    remedy = "put it back, or cluster the table again"
    try:
        table = read_embeddings(summary.data, **keys)
    except SiamMMError as error:
        reason = f"cannot be read ({one_line(error).partition(';')[0]})"
        raise InputError(f"The table that {given} was clustered from {reason}; {remedy}.") from error
    if summary.fingerprint not in (None, table.fingerprint()):
        raise InputError(f"The table {place} has changed since {given} was clustered from it; {remedy}.")
    n, d = table.embeddings.shape
    check_fits(2 * n * d, f"The embeddings of {place}", "use a machine with more memory")
    unit_ND = np.empty((n, d), np.float16)
    start = 0
    for unit_BD in unit_parts(table.embeddings):
        unit_ND[start : start + len(unit_BD)] = unit_BD
        start += len(unit_BD)
    return unit_ND


def path_columns(table: pa.Table) -> list[list[str | None]]:
    """The columns of a result that may hold the files of images."""
    named = [name for name in PATH_KEYS if name in table.column_names]
    return [table.column(name).to_pylist() for name in named if _is_text(table.schema.field(name).type)]


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def unit_parts(rows: np.ndarray) -> Iterator[np.ndarray]:
    """The rows in float16 and of unit length, a few thousand at a time; rows of zeros stay so."""
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part_BD = np.asarray(rows[start : start + _ROWS_AT_ONCE], dtype=np.float64)
        length_B1 = np.linalg.norm(part_BD, axis=1, keepdims=True)
        yield (part_BD / np.where(length_B1 > 0, length_B1, 1.0)).astype(np.float16)
