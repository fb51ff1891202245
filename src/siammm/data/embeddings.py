"""Reading a table of embeddings, with its ids and labels, from the files that people keep them in.

One row is one sample. Several Parquet files are one table, and one of several processes can read its share of the rows
alone. What is wrong with a file is said in one sentence before anything is computed. Numbers are
checked for shape and type here; that they are finite is checked by the mixture, which reads them anyway.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from siammm.core.errors import InputError, StoredFileError
from siammm.core.reading import check_regular, open_regular
from siammm.core.text import listed, one_line, shape_text, shown
from siammm.data import tar_source
from siammm.data.array_files import (
    Headers,
    check_fits,
    choose_array,
    in_plain_form,
    load_npz,
    map_npy,
    npy_header,
    npz_headers,
    parquet_columns,
    parquet_file,
)  # fmt: skip
from siammm.data.labels import LABEL_KEYS

if TYPE_CHECKING:
    import pyarrow as pa

# The names that are looked for, the first that exists wins.
EMBEDDING_KEYS = ("embeddings", "embedding", "features", "feature", "vectors", "vector", "X", "x")
ID_KEYS = ("id", "ids", "path", "paths", "filename", "filenames")
PATH_KEYS = ("filepath", "path", "image", "file", "filename")
"""Where a table may say which file the image of a row is."""

# A converted copy of a memory-mapped table goes to a temporary file beyond this size, and not into memory; the rows of
# Parquet files, which cannot be mapped, beyond the second size.
_LARGEST_COPY_IN_MEMORY, _LARGEST_IN_MEMORY = 2**30, 2**31
_ROWS_AT_A_TIME, _VALUES_AT_A_TIME = 65_536, 2**26
_ROWS_IN_FINGERPRINT = 512
_PANDAS_INDEX = re.compile(r"__index_level_\d+__")


@dataclass(frozen=True)
class Share:
    """Which of several shares of the rows to read: contiguous, and of equal size up to one row. By default all rows."""

    number: int = 0
    of: int = 1

    def rows(self, n: int) -> range:
        """These rows of ``n``; the first share is empty only if there are none."""
        return range(-(-n * self.number // self.of), -(-n * (self.number + 1) // self.of))


EVERYTHING = Share()


@dataclass(frozen=True, kw_only=True)
class EmbeddingTable:
    """Embeddings, one row a sample, and what is known about each sample."""

    embeddings: np.ndarray
    """float32 or float64, N x d; a read-only memory map of a ``.npy``, or of a copy if they are large."""
    ids: np.ndarray | None = None
    """N names of the samples: integers or strings."""
    labels: np.ndarray | None = None
    """N labels: numbers or strings; a missing one is None, NaN or an empty string."""
    source: Path
    """The file that was read."""
    columns: pa.Table | None = None
    """The other columns of a Parquet file that hold one value a row; of other files, those with paths of images."""
    rows: range | None = None
    """Which rows of the whole table these are; None if they are all."""
    n_total: int | None = None
    """The rows of the whole table; None if they are these."""

    @property
    def n_samples(self) -> int:
        """The rows of the whole table."""
        return len(self.embeddings) if self.n_total is None else self.n_total

    @property
    def first_row(self) -> int:
        """The number of the first of these rows in the whole table."""
        return 0 if self.rows is None else self.rows.start

    def fingerprint(self, joined: Callable[[np.ndarray], np.ndarray] | None = None) -> str:
        """Identifies the embeddings by their shape and a few hundred rows spread over them.

        If these rows are a share of the whole table, ``joined`` puts the rows of all shares one under the other.
        """
        n, d = self.n_samples, self.embeddings.shape[1]
        digest = hashlib.sha256(f"siammm embeddings 1\n{n} {d}\n".encode())
        some = np.unique(np.linspace(0, n - 1, min(n, _ROWS_IN_FINGERPRINT)).astype(np.int64)) - self.first_row
        some = some[(some >= 0) & (some < len(self.embeddings))]
        rows = np.ascontiguousarray(self.embeddings[some], dtype="<f4")
        digest.update((rows if joined is None else joined(rows)).tobytes())
        return digest.hexdigest()


def read_embeddings(
    path: str | Path,
    *,
    key: str | None = None,
    id_column: str | None = None,
    label_column: str | None = None,
    share: Share = EVERYTHING,
) -> EmbeddingTable:
    """Read a table of embeddings from a ``.npy``, ``.npz``, Parquet or safetensors file.

    Several Parquet files are one table, their rows in the order of the files: ``part-*.parquet``, in the order of their
    names, or ``part-{000..146}.parquet``. ``key``, ``id_column`` and ``label_column`` name the arrays or columns to use
    in place of those found by their usual names; an empty ``id_column`` or ``label_column`` reads none. Of a ``share``,
    only these rows are read where the format allows it: ``.npz`` is read whole first.
    """
    several = several_tables(str(path))
    if several is not None:
        return _read_files(several, key, id_column, label_column, share, Path(path))
    path = Path(path)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise InputError(
            f"{path} ends in {path.suffix!r}, but embeddings are read from {', '.join(_READERS)}; "
            "save them as one of these."
        )
    with _readable(path):
        return reader(path, key, id_column, label_column, share)


def several_tables(data: str) -> list[Path] | None:
    """The Parquet files that a name with ``*`` or with ranges stands for; None if it is another name."""
    path = os.path.expanduser(data)
    is_pattern = "*" in path or tar_source.has_range(path)
    if not is_pattern or os.path.exists(path) or Path(path).suffix.lower() not in PARQUET_SUFFIXES:
        return None
    if tar_source.has_range(path):
        return [Path(name) for name in tar_source.expand(path)]
    found = sorted(glob.glob(path))
    if not found:
        raise StoredFileError(f"There is no file {shown(data)}; check the path.")
    return [Path(name) for name in found]


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """A file with something in it; whatever the file system says until the block ends is one sentence."""
    try:
        if path.is_dir():
            raise StoredFileError(f"{path} is a folder, but a file of embeddings is needed; name the file inside it.")
        if check_regular(path).st_size == 0:
            raise StoredFileError(f"{path} is empty (0 bytes); write the embeddings again.")
        yield
    except FileNotFoundError:
        raise StoredFileError(f"{path} does not exist; check the path.") from None
    except OSError as error:
        raise StoredFileError(f"{path} cannot be read ({one_line(error)}); check the file.") from error


def _read_npy(
    path: Path, key: str | None, id_column: str | None, label_column: str | None, share: Share
) -> EmbeddingTable:
    if key or id_column or label_column:
        raise InputError(
            f"{path} holds one array without names, so there is no {key or id_column or label_column!r} in it; "
            "use .npz or Parquet to keep ids and labels beside the embeddings."
        )
    with open_regular(path) as file:
        _check_matrix(*npy_header(file, str(path)), str(path))
    mapped = map_npy(path)
    rows = share.rows(len(mapped))
    embeddings = _as_float(mapped[rows.start : rows.stop])
    return EmbeddingTable(embeddings=embeddings, source=path, rows=rows, n_total=len(mapped))


def _read_npz(
    path: Path, key: str | None, id_column: str | None, label_column: str | None, share: Share
) -> EmbeddingTable:
    arrays = npz_headers(path)
    name, id_key, label_key = _choose_arrays(arrays, key, id_column, label_column, path)
    paths = [key for key in PATH_KEYS if key in arrays and key not in {name, id_key, label_key}]
    paths = [key for key in paths if arrays[key][0] == arrays[name][0][:1] and arrays[key][1].kind in "US"]
    embeddings, ids, labels, *others = load_npz(path, name, id_key, label_key, *paths)
    assert embeddings is not None
    n_total = len(embeddings)
    rows = share.rows(n_total)
    if share != EVERYTHING:  # copies, because a view would keep the whole array
        parts = (embeddings, ids, labels, *others)
        embeddings, ids, labels, *others = (
            None if part is None else part[rows.start : rows.stop].copy() for part in parts
        )
        assert embeddings is not None
    ids, labels, *others = (None if values is None else in_plain_form(values) for values in (ids, labels, *others))
    return EmbeddingTable(
        embeddings=_as_float(embeddings), ids=ids, labels=labels, source=path, columns=_table(paths, others),
        rows=rows, n_total=n_total,
    )  # fmt: skip


def _table(names: list[str], arrays: list[Any]) -> pa.Table | None:
    import pyarrow as pa

    return pa.table(dict(zip(names, arrays, strict=True))) if names else None


def _read_safetensors(
    path: Path, key: str | None, id_column: str | None, label_column: str | None, share: Share
) -> EmbeddingTable:
    from safetensors import SafetensorError, safe_open

    try:
        # Through torch, because NumPy has no bfloat16.
        with safe_open(path, framework="pt") as stored:
            tensors: dict[str, Any] = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
            arrays = {
                name: (tuple(tensor.get_shape()), _safetensors_dtype(tensor.get_dtype()))
                for name, tensor in tensors.items()
            }
            name, id_key, label_key = _choose_arrays(arrays, key, id_column, label_column, path)
            n_total = arrays[name][0][0]
            rows = share.rows(n_total)
            embeddings = tensors[name][rows.start : rows.stop]
            if embeddings.dtype.itemsize < 4 or not embeddings.dtype.is_floating_point:
                embeddings = embeddings.float()
            keys = (id_key, label_key)
            ids, labels = (None if k is None else tensors[k][rows.start : rows.stop].numpy() for k in keys)
    except SafetensorError as error:
        raise StoredFileError(f"{path} is not a whole safetensors file ({one_line(error)}); write it again.") from error
    return EmbeddingTable(
        embeddings=embeddings.numpy(), ids=ids, labels=labels, source=path, rows=rows, n_total=n_total
    )


def _safetensors_dtype(name: str) -> np.dtype[Any]:
    """The NumPy type of the same kind; the width does not matter to the choice of a key."""
    kinds = {"F": "float32", "BF": "float32", "I": "int64", "U": "uint64", "BOOL": "bool", "C": "complex64"}
    return np.dtype(kinds.get(re.sub(r"\d.*", "", name), "V1"))


# ------------------------------------------------------------------------------------------------------------- Parquet


def _read_parquet(
    path: Path, key: str | None, id_column: str | None, label_column: str | None, share: Share
) -> EmbeddingTable:
    return _read_files([path], key, id_column, label_column, share, path)


def _read_files(
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
    matrix = _Matrix(len(rows), _float_of(footers, names), source)
    tables, start = list[Any](), 0
    for footer in footers:
        part = range(max(rows.start - start, 0), min(rows.stop - start, footer.n))
        start += footer.n
        if not part:
            continue
        with _readable(footer.path), parquet_file(footer.path) as file:
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
        with _readable(path), parquet_file(path) as file:
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


class _Matrix:
    """An array that is filled row by row: in memory or, where it is large, in a file without a name."""

    def __init__(self, n: int, dtype: np.dtype[Any], source: Path) -> None:
        self.n, self.dtype, self.source = n, dtype, source
        self.width: int | None = None
        self._array: np.ndarray | None = None
        self._file: IO[bytes] | None = None
        self._row = 0

    def check_fits(self, n_values: int) -> None:
        """Refuse so many numbers in all where there is no room for them."""
        size = n_values * self.dtype.itemsize
        if size <= _LARGEST_IN_MEMORY:
            check_fits(size, f"The embeddings of {self.source}", "save them as .npy, which is mapped")
            return
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
        if size > free:
            raise InputError(
                f"The embeddings of {self.source} need {size / 2**30:.1f} GiB of temporary files, but {folder} has "
                f"{free / 2**30:.1f} free; set TMPDIR to a folder with more, or save them as .npy, which is mapped."
            )

    def add(self, block: np.ndarray) -> None:
        """The next rows."""
        if self.width is None:
            self.width = width = block.shape[1]
            self.check_fits(self.n * width)
            if self.n * width * self.dtype.itemsize > _LARGEST_IN_MEMORY:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it is gone with the array
            else:
                self._array = np.empty((self.n, width), self.dtype)
        if self._array is not None:
            self._array[self._row : self._row + len(block)] = block
        elif self._file is not None:
            try:  # not through a map, so that a full disk is an error and not a dead process
                self._file.write(np.ascontiguousarray(block, dtype=self.dtype).data)
                self._file.flush()
            except OSError as error:
                raise InputError(
                    f"A copy of {self.source} cannot be written to {tempfile.gettempdir()} ({one_line(error)}); set "
                    "TMPDIR to a folder with more room."
                ) from error
        self._row += len(block)

    def finished(self, width: int) -> np.ndarray:
        """The array; ``width`` is that of an array without rows."""
        assert self._row == self.n
        if self._array is not None:
            return self._array
        if self._file is None:
            return np.empty((0, width), self.dtype)
        with self._file as file:
            return np.memmap(file, dtype=self.dtype, mode="r", shape=(self.n, self.width or 0))


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
    file: Any, names: list[str], groups: list[int], before: int, part: range, path: Path, matrix: _Matrix
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
            _check_matrix((max(1, len(part)), width), matrix.dtype, f"Column {names[0]!r} of {path}")
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


# -------------------------------------------------------------------------------------------------- what they all share

_READERS: dict[str, Callable[[Path, str | None, str | None, str | None, Share], EmbeddingTable]] = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".parquet": _read_parquet,
    ".pq": _read_parquet,
    ".safetensors": _read_safetensors,
}
SUFFIXES = tuple(_READERS)
PARQUET_SUFFIXES = (".parquet", ".pq")


def _choose_arrays(
    arrays: Headers, key: str | None, id_column: str | None, label_column: str | None, path: Path
) -> tuple[str, str | None, str | None]:
    """The names of the arrays of embeddings, and of ids and of labels, where there are any."""
    likely = [name for name, (shape, dtype) in arrays.items() if len(shape) == 2 and dtype.kind == "f"]
    words = {"what": "embeddings (2-D, floating point)", "otherwise": "if these are images, use siammm embed first"}
    key = choose_array(arrays, key, EMBEDDING_KEYS, likely, flag="--key", path=path, **words)
    _check_matrix(*arrays[key], f"{key!r} in {path}")
    n = arrays[key][0][0]
    sides: list[str | None] = []
    for usual, given, flag in ((ID_KEYS, id_column, "--id-column"), (LABEL_KEYS, label_column, "--label-column")):
        if given and given not in arrays:
            raise InputError(f"{path} has no array {given!r}; give {flag} one of: {listed(arrays)}.")
        candidates = usual if given is None else (given,)
        name = next((name for name in candidates if name in arrays and name != key), None)
        sides.append(name)
        if name is None:
            continue
        shape, dtype = arrays[name]
        if dtype.kind not in "iufbUS":
            raise InputError(
                f"{name!r} in {path} is an array of {dtype.name}; save ids and labels as numbers or strings, "
                f'or leave them out with {flag} "".'
            )
        if shape != (n,):
            raise InputError(
                f"{name!r} in {path} has the shape {shape_text(shape)}, but there are {n} embeddings; it needs one "
                f'value for each, or leave it out with {flag} "".'
            )
    return key, sides[0], sides[1]


def _check_matrix(shape: tuple[int, ...], dtype: np.dtype[Any], name: str) -> None:
    if dtype.kind == "O":
        raise InputError(f"{name} is an array of Python objects, which is never unpickled; save it as float32.")
    if dtype.kind not in "fiu":
        raise InputError(f"{name} is an array of {dtype.name}, but embeddings are real numbers; save it as float32.")
    if len(shape) != 2:
        hint = "; if these are images, use siammm embed first" if len(shape) in (3, 4) else ""
        raise InputError(
            f"{name} has the shape {shape_text(shape)}, but embeddings are 2-D; reshape to samples x dimensions{hint}."
        )
    if shape[0] == 0:
        raise InputError(f"{name} has 0 rows; at least one embedding is needed.")
    if shape[1] == 0:
        raise InputError(f"{name} has 0 columns; embeddings need at least one dimension.")


def _as_float(array: np.ndarray) -> np.ndarray:
    """The array itself where torch can read it, otherwise a copy in float32."""
    if array.dtype in (np.float32, np.float64) and array.dtype.isnative:
        return array
    if not isinstance(array, np.memmap) or array.size * 4 <= _LARGEST_COPY_IN_MEMORY:
        return array.astype(np.float32)
    # Written through the file and not through a map, so that a full disk is an error and not a dead process. The file
    # has no name: it is gone with the array.
    with tempfile.TemporaryFile() as file:
        for start in range(0, len(array), _ROWS_AT_A_TIME):
            file.write(np.ascontiguousarray(array[start : start + _ROWS_AT_A_TIME], dtype=np.float32).data)
        file.flush()
        return np.memmap(file, dtype=np.float32, mode="r", shape=array.shape)
