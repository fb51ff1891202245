"""Reading a table of embeddings, with its ids and labels, from the files that people keep them in.

One row is one sample. What is wrong with a file is said in one sentence before anything is computed. Numbers are
checked for shape and type here; that they are finite is checked by the mixture, which reads them anyway.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from siammm.core.errors import InputError, StoredFileError
from siammm.core.reading import check_regular, open_regular
from siammm.core.text import listed, one_line, shape_text
from siammm.data.array_files import (
    Headers,
    check_fits,
    choose_array,
    decoded_text,
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

# A converted copy of a memory-mapped table goes to a temporary file beyond this size, and not into memory.
_LARGEST_COPY_IN_MEMORY = 2**30
_ROWS_AT_A_TIME, _VALUES_AT_A_TIME = 65_536, 2**26
_ROWS_IN_FINGERPRINT = 512
_PANDAS_INDEX = re.compile(r"__index_level_\d+__")


@dataclass(frozen=True, kw_only=True)
class EmbeddingTable:
    """Embeddings, one row a sample, and what is known about each sample."""

    embeddings: np.ndarray
    """float32 or float64, N x d; a read-only memory map when the file is a ``.npy``."""
    ids: np.ndarray | None = None
    """N names of the samples: integers or strings."""
    labels: np.ndarray | None = None
    """N labels: numbers or strings; a missing one is None, NaN or an empty string."""
    source: Path
    """The file that was read."""
    columns: pa.Table | None = None
    """The other columns of a Parquet file that hold one value a row; of other files, those with paths of images."""

    def fingerprint(self) -> str:
        """Identifies the embeddings by their shape and a few hundred rows spread over them."""
        n, d = self.embeddings.shape
        digest = hashlib.sha256(f"siammm embeddings 1\n{n} {d}\n".encode())
        some = np.unique(np.linspace(0, n - 1, min(n, _ROWS_IN_FINGERPRINT)).astype(np.int64))
        digest.update(np.ascontiguousarray(self.embeddings[some], dtype="<f4").tobytes())
        return digest.hexdigest()


def read_embeddings(
    path: str | Path, *, key: str | None = None, id_column: str | None = None, label_column: str | None = None
) -> EmbeddingTable:
    """Read a table of embeddings from a ``.npy``, ``.npz``, Parquet or safetensors file.

    ``key``, ``id_column`` and ``label_column`` name the arrays or columns to use in place of those found by their usual
    names; an empty ``id_column`` or ``label_column`` reads none.
    """
    path = Path(path)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise InputError(
            f"{path} ends in {path.suffix!r}, but embeddings are read from {', '.join(_READERS)}; "
            "save them as one of these."
        )
    try:
        if path.is_dir():
            raise StoredFileError(f"{path} is a folder, but a file of embeddings is needed; name the file inside it.")
        if check_regular(path).st_size == 0:
            raise StoredFileError(f"{path} is empty (0 bytes); write the embeddings again.")
        return reader(path, key, id_column, label_column)
    except FileNotFoundError:
        raise StoredFileError(f"{path} does not exist; check the path.") from None
    except OSError as error:
        raise StoredFileError(f"{path} cannot be read ({one_line(error)}); check the file.") from error


def _read_npy(path: Path, key: str | None, id_column: str | None, label_column: str | None) -> EmbeddingTable:
    if key or id_column or label_column:
        raise InputError(
            f"{path} holds one array without names, so there is no {key or id_column or label_column!r} in it; "
            "use .npz or Parquet to keep ids and labels beside the embeddings."
        )
    with open_regular(path) as file:
        _check_matrix(*npy_header(file, str(path)), str(path))
    return EmbeddingTable(embeddings=_as_float(map_npy(path)), source=path)


def _read_npz(path: Path, key: str | None, id_column: str | None, label_column: str | None) -> EmbeddingTable:
    arrays = npz_headers(path)
    name, id_key, label_key = _choose_arrays(arrays, key, id_column, label_column, path)
    paths = [key for key in PATH_KEYS if key in arrays and key not in {name, id_key, label_key}]
    paths = [key for key in paths if arrays[key][0] == arrays[name][0][:1] and arrays[key][1].kind in "US"]
    embeddings, ids, labels, *others = load_npz(path, name, id_key, label_key, *paths)
    assert embeddings is not None
    ids, labels, *others = (None if values is None else decoded_text(values) for values in (ids, labels, *others))
    return EmbeddingTable(
        embeddings=_as_float(embeddings), ids=ids, labels=labels, source=path, columns=_table(paths, others)
    )


def _table(names: list[str], arrays: list[Any]) -> pa.Table | None:
    import pyarrow as pa

    return pa.table(dict(zip(names, arrays, strict=True))) if names else None


def _read_safetensors(path: Path, key: str | None, id_column: str | None, label_column: str | None) -> EmbeddingTable:
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
            embeddings = stored.get_tensor(name)
            if embeddings.dtype.itemsize < 4 or not embeddings.dtype.is_floating_point:
                embeddings = embeddings.float()
            ids, labels = (None if k is None else stored.get_tensor(k).numpy() for k in (id_key, label_key))
    except SafetensorError as error:
        raise StoredFileError(f"{path} is not a whole safetensors file ({one_line(error)}); write it again.") from error
    return EmbeddingTable(embeddings=embeddings.numpy(), ids=ids, labels=labels, source=path)


def _safetensors_dtype(name: str) -> np.dtype[Any]:
    """The NumPy type of the same kind; the width does not matter to the choice of a key."""
    kinds = {"F": "float32", "BF": "float32", "I": "int64", "U": "uint64", "BOOL": "bool", "C": "complex64"}
    return np.dtype(kinds.get(re.sub(r"\d.*", "", name), "V1"))


# ------------------------------------------------------------------------------------------------------------- Parquet


def _read_parquet(path: Path, key: str | None, id_column: str | None, label_column: str | None) -> EmbeddingTable:
    import pyarrow as pa

    with parquet_file(path) as file:
        schema, n = file.schema_arrow, file.metadata.num_rows
        repeated = sorted({name for name in schema.names if schema.names.count(name) > 1})
        if repeated:
            raise StoredFileError(f"{path} has two columns called {repeated[0]!r}; save it with different names.")
        if n == 0:
            raise InputError(f"{path} has 0 rows; at least one embedding is needed.")
        scalars = [field.name for field in schema if not pa.types.is_nested(field.type)]
        id_name = _named_column(ID_KEYS, id_column, scalars, schema.names, "--id-column", path)
        label_name = _named_column(LABEL_KEYS, label_column, scalars, schema.names, "--label-column", path)
        names = _embedding_columns(schema, key, {id_name, label_name}, path)
        embeddings = _read_matrix(file, names, n, path)
        others = [name for name in scalars if name not in {*names, id_name, label_name}]
        wanted = [name for name in (id_name, label_name) if name is not None]
        table = parquet_columns(file, [*others, *wanted], path)
    ids, labels = (None if name is None else _arrow_values(table.column(name)) for name in (id_name, label_name))
    columns = table.select(others) if others else None
    return EmbeddingTable(embeddings=embeddings, ids=ids, labels=labels, source=path, columns=columns)


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


def _read_matrix(file: Any, names: list[str], n: int, path: Path) -> np.ndarray:
    """The embeddings as one array, a batch of rows at a time so that Arrow's copy of them is never whole."""
    import pyarrow as pa

    field = file.schema_arrow.field(names[0])
    as_lists = pa.types.is_nested(field.type)
    kinds = [field.type.value_type] if as_lists else [file.schema_arrow.field(name).type for name in names]
    dtype = np.float64 if any(kind == pa.float64() for kind in kinds) else np.float32
    n_values = _n_values(file, names)
    check_fits(n_values * np.dtype(dtype).itemsize, f"The embeddings of {path}", "save them as .npy, which is mapped")
    rows_at_a_time = max(1, min(_ROWS_AT_A_TIME, _VALUES_AT_A_TIME * n // max(1, n_values)))
    matrix, row = None, 0
    for batch in file.iter_batches(batch_size=rows_at_a_time, columns=names):
        rows = slice(row, row + batch.num_rows)
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
            width = int(lengths[0]) if matrix is None else matrix.shape[1]
            if (lengths != width).any():
                odd = int(np.argmax(lengths != width))
                raise InputError(
                    f"Row {row + odd} of column {names[0]!r} in {path} has {lengths[odd]} values, but the first row "
                    f"has {width}; every embedding needs the same length."
                )
            _check_matrix((n, width), np.dtype(dtype), f"Column {names[0]!r} of {path}")
            block = values.to_numpy(zero_copy_only=False).reshape(-1, width)
        else:
            block = np.stack([batch.column(name).to_numpy(zero_copy_only=False) for name in names], axis=1)
        if matrix is None:
            matrix = np.empty((n, block.shape[1]), dtype)
        if rows.stop <= n:
            matrix[rows] = block
        row += batch.num_rows
    if matrix is None or row != n:
        raise StoredFileError(f"{path} has {row} rows, but says that it has {n}; write it again.")
    return matrix


def _n_values(file: Any, names: list[str]) -> int:
    """How many numbers these columns hold, as the file says."""
    groups = (file.metadata.row_group(number) for number in range(file.metadata.num_row_groups))
    chunks = (group.column(number) for group in groups for number in range(group.num_columns))
    return sum(chunk.num_values for chunk in chunks if chunk.path_in_schema.partition(".")[0] in names)


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

_READERS: dict[str, Callable[[Path, str | None, str | None, str | None], EmbeddingTable]] = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".parquet": _read_parquet,
    ".pq": _read_parquet,
    ".safetensors": _read_safetensors,
}
SUFFIXES = tuple(_READERS)


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
