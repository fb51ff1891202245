"""Reading embeddings from Parquet files: several files are one table, and only the rows of a share are read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from siammm.core.errors import InputError, StoredFileError
from siammm.core.text import listed
from siammm.data.array_files import parquet_columns, parquet_file
from siammm.data.embedding_table import EMBEDDING_KEYS, ID_KEYS, EmbeddingTable, Share, check_matrix, readable
from siammm.data.labels import LABEL_KEYS
from siammm.data.large_arrays import FilledRows

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS_AT_A_TIME, _VALUES_AT_A_TIME = 65_536, 2**26
_PANDAS_INDEX = re.compile(r"__index_level_\d+__")


def read_parquet_files(
    paths: Sequence[Path],
    key: str | None,
    id_column: str | None,
    label_column: str | None,
    share: Share,
    source: Path,
) -> EmbeddingTable:
    """One table of Parquet files. Of files without a row of this share, only the footer is read."""
    import pyarrow as pa

    footers = [_Footer.of(path) for path in paths]
    n_total = sum(footer.n for footer in footers)
    if n_total == 0:
        raise InputError(f"{source} has 0 rows; at least one embedding is needed.")
    first = footers[0]
    repeated = sorted({name for name in first.schema.names if first.schema.names.count(name) > 1})
    if repeated:
        raise StoredFileError(f"{first.path} has two columns called {repeated[0]!r}; save it with different names.")
    scalars = [field.name for field in first.schema if not pa.types.is_nested(field.type)]
    id_name = _named_column(ID_KEYS, id_column, scalars, first.schema.names, "--id-column", first.path)
    label_name = _named_column(LABEL_KEYS, label_column, scalars, first.schema.names, "--label-column", first.path)
    names = _embedding_columns(first.schema, key, {id_name, label_name}, first.path)
    others = [name for name in scalars if name not in {*names, id_name, label_name}]
    wanted = [*others, *(name for name in (id_name, label_name) if name is not None)]
    for footer in footers[1:]:
        footer.check_alike(first, names, wanted)
    rows = share.rows(n_total)
    matrix = FilledRows(len(rows), _float_of(footers, names), source)
    tables, start = list[Any](), 0
    for footer in footers:
        part = range(max(rows.start - start, 0), min(rows.stop - start, footer.n))
        start += footer.n
        if not part:
            continue
        with readable(footer.path), parquet_file(footer.path) as file:
            if file.metadata.num_rows != footer.n:
                raise StoredFileError(f"{footer.path} has changed while it was read; start again.")
            groups, before = footer.groups(part)
            _read_matrix(file, names, groups, before, part, footer.path, matrix)
            table = parquet_columns(file, wanted, footer.path, groups=groups)
            tables.append(table.slice(part.start - before, len(part)))
    table = pa.concat_tables(tables) if tables else first.schema.empty_table().select(wanted)
    ids, labels = (None if name is None else _arrow_values(table.column(name)) for name in (id_name, label_name))
    return EmbeddingTable(
        embeddings=matrix.finished(_width(footers, names)),
        ids=ids,
        labels=labels,
        source=source,
        columns=table.select(others) if others else None,
        rows=rows,
        n_total=n_total,
    )


@dataclass(frozen=True)
class _Footer:
    """What the end of a Parquet file says of it."""

    path: Path
    schema: pa.Schema
    rows_of_groups: list[int]
    values_of_columns: dict[str, int]

    @classmethod
    def of(cls, path: Path) -> _Footer:
        with readable(path), parquet_file(path) as file:
            groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
            values: dict[str, int] = {}
            for group in groups:
                for chunk in (group.column(number) for number in range(group.num_columns)):
                    name = chunk.path_in_schema.partition(".")[0]
                    values[name] = values.get(name, 0) + chunk.num_values
            return cls(path, file.schema_arrow, [group.num_rows for group in groups], values)

    @property
    def n(self) -> int:
        return sum(self.rows_of_groups)

    def groups(self, part: range) -> tuple[list[int], int]:
        """The row groups that hold these rows, and the number of the first of their rows."""
        found, first, start = list[int](), 0, 0
        for number, n in enumerate(self.rows_of_groups):
            if start < part.stop and start + n > part.start:
                first = start if not found else first
                found.append(number)
            start += n
        return found, first

    def check_alike(self, first: _Footer, names: list[str], wanted: list[str]) -> None:
        """Refuse a file whose columns are others than those of the first."""
        for name in [*names, *wanted]:
            if self.schema.names.count(name) != 1:
                raise InputError(
                    f"{self.path} has no column {name!r}, but {first.path} has; give each the same columns."
                )
            kind, expected = self.schema.field(name).type, first.schema.field(name).type
            same_form = is_vector(kind) == is_vector(expected) and _is_number(kind) == _is_number(expected)
            if kind != expected and not (name in names and same_form):
                raise InputError(
                    f"Column {name!r} of {self.path} holds {kind}, but {expected} in {first.path}; save it as the same."
                )


def _float_of(footers: list[_Footer], names: list[str]) -> np.dtype[Any]:
    """float64 where a column holds it, otherwise float32."""
    import pyarrow as pa

    kinds = [footer.schema.field(name).type for footer in footers for name in names]
    kinds = [kind.value_type if pa.types.is_nested(kind) else kind for kind in kinds]
    return np.dtype(np.float64 if any(kind == pa.float64() for kind in kinds) else np.float32)


def _width(footers: list[_Footer], names: list[str]) -> int:
    """The length of the rows, as the files say it: for a share without any."""
    filled = next(footer for footer in footers if footer.n)
    return sum(filled.values_of_columns.get(name, 0) for name in names) // filled.n


def _named_column(
    usual: Iterable[str], given: str | None, scalars: list[str], names: list[str], flag: str, path: Path
) -> str | None:
    if given == "":
        return None
    if given is None:
        return next((name for name in usual if name in scalars), None)
    if given not in names:
        raise InputError(f"{path} has no column {given!r}; give {flag} one of: {listed(names)}.")
    if given not in scalars:
        raise InputError(
            f"Column {given!r} of {path} holds several values a row; give {flag} one of: {listed(scalars)}."
        )
    return given


def _embedding_columns(schema: pa.Schema, key: str | None, taken: set[str | None], path: Path) -> list[str]:
    """The one column of vectors, or, where no column holds vectors, every column of numbers."""
    vectors = [field.name for field in schema if is_vector(field.type)]
    if key is not None:
        if key not in schema.names:
            raise InputError(f"{path} has no column {key!r}; give --key one of: {listed(vectors or schema.names)}.")
        if key not in vectors:
            raise InputError(
                f"Column {key!r} of {path} holds {schema.field(key).type}, but embeddings are a list of numbers a row; "
                f"give --key one of: {listed(vectors) or '(none here)'}."
            )
        return [key]
    usual = [name for name in EMBEDDING_KEYS if name in vectors]
    if usual or len(vectors) == 1:
        return [(usual or vectors)[0]]
    if vectors:
        raise InputError(f"{path} has {len(vectors)} columns of vectors; choose one with --key: {listed(vectors)}.")
    numbers = [field.name for field in schema if _is_number(field.type) and field.name not in taken]
    numbers = [name for name in numbers if not _PANDAS_INDEX.fullmatch(name)]
    if not numbers:
        raise InputError(f"{path} has no column of numbers among {listed(schema.names)}; add a column of embeddings.")
    return numbers


def is_vector(kind: pa.DataType) -> bool:
    """Whether a column of this type holds a list of numbers a row."""
    import pyarrow as pa

    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return is_list and _is_number(kind.value_type)


def _is_number(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return pa.types.is_floating(kind) or pa.types.is_integer(kind)


def _read_matrix(
    file: Any, names: list[str], groups: list[int], before: int, part: range, path: Path, matrix: FilledRows
) -> None:
    """Add these rows of a file, a batch at a time so that Arrow's copy of them is never whole.

    ``groups`` are the row groups that hold them, and ``before`` is the number of rows before these groups.
    """
    import pyarrow as pa

    as_lists = pa.types.is_nested(file.schema_arrow.field(names[0]).type)
    n, n_values = _n_in_groups(file, names, groups)
    matrix.check_fits(n_values * len(part) // max(1, n))
    rows_at_a_time = max(1, min(_ROWS_AT_A_TIME, _VALUES_AT_A_TIME * n // max(1, n_values)))
    row = before
    for batch in file.iter_batches(batch_size=rows_at_a_time, row_groups=groups, columns=names):
        for name in names:
            missing = batch.column(name).null_count
            if missing:
                first = row + int(np.argmax(batch.column(name).is_null().to_numpy(zero_copy_only=False)))
                raise InputError(f"Row {first} of column {name!r} in {path} is empty; fill it or leave the row out.")
        if as_lists:
            column = batch.column(names[0])
            values = column.flatten()
            if values.null_count:
                raise InputError(
                    f"Column {names[0]!r} of {path} has vectors with empty entries; fill them or leave the rows out."
                )
            lengths = column.value_lengths().to_numpy(zero_copy_only=False)
            width = int(lengths[0]) if matrix.width is None else matrix.width
            if (lengths != width).any():
                odd = int(np.argmax(lengths != width))
                raise InputError(
                    f"Row {row + odd} of column {names[0]!r} in {path} has {lengths[odd]} values, but the first row "
                    f"has {width}; every embedding needs the same length."
                )
            check_matrix((max(1, len(part)), width), matrix.dtype, f"Column {names[0]!r} of {path}")
            block = values.to_numpy(zero_copy_only=False).reshape(-1, width)
        else:
            block = np.stack([batch.column(name).to_numpy(zero_copy_only=False) for name in names], axis=1)
        matrix.add(block[max(0, part.start - row) : max(0, part.stop - row)])
        row += batch.num_rows
    if row != before + n:
        raise StoredFileError(f"{path} has {row - before} rows, but says that it has {n}; write it again.")


def _n_in_groups(file: Any, names: list[str], numbers: list[int]) -> tuple[int, int]:
    """How many rows these groups have and how many numbers these columns of them hold, as the file says."""
    groups = [file.metadata.row_group(number) for number in numbers]
    chunks = (group.column(number) for group in groups for number in range(group.num_columns))
    values = sum(chunk.num_values for chunk in chunks if chunk.path_in_schema.partition(".")[0] in names)
    return sum(group.num_rows for group in groups), values


def _arrow_values(column: pa.ChunkedArray) -> np.ndarray:
    """A column of ids or labels as an array; one with gaps becomes an array of objects with None in the gaps."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if column.null_count or pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        values = np.empty(len(column), dtype=object)
        values[:] = column.to_pylist()
        return values
    return column.to_numpy()
