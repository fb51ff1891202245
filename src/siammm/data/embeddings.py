"""Reading a table of embeddings, with its ids and labels, from the files that people keep them in.

What is wrong with a file is said in one sentence before anything is computed.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from siammm.core.errors import InputError, StoredFileError
from siammm.core.reading import open_regular
from siammm.core.text import listed, one_line, shape_text, shown
from siammm.data import tar_source
from siammm.data.array_files import Headers, choose_array, in_plain_form, load_npz, map_npy, npy_header, npz_headers
from siammm.data.embedding_table import (
    EMBEDDING_KEYS,
    EVERYTHING,
    ID_KEYS,
    PATH_KEYS,
    EmbeddingTable,
    Share,
    check_matrix,
    readable,
)  # fmt: skip
from siammm.data.labels import LABEL_KEYS
from siammm.data.large_arrays import as_float
from siammm.data.parquet_embeddings import read_parquet_files

if TYPE_CHECKING:
    import pyarrow as pa


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
        return read_parquet_files(several, key, id_column, label_column, share, Path(path))
    path = Path(path)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise InputError(
            f"{path} ends in {path.suffix!r}, but embeddings are read from {', '.join(_READERS)}; "
            "save them as one of these."
        )
    with readable(path):
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


def _read_npy(
    path: Path, key: str | None, id_column: str | None, label_column: str | None, share: Share
) -> EmbeddingTable:
    if key or id_column or label_column:
        raise InputError(
            f"{path} holds one array without names, so there is no {key or id_column or label_column!r} in it; "
            "use .npz or Parquet to keep ids and labels beside the embeddings."
        )
    with open_regular(path) as file:
        check_matrix(*npy_header(file, str(path)), str(path))
    mapped = map_npy(path)
    rows = share.rows(len(mapped))
    embeddings = as_float(mapped[rows.start : rows.stop])
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
        embeddings=as_float(embeddings), ids=ids, labels=labels, source=path, columns=_table(paths, others),
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
        raise StoredFileError(
            f"{path} is not a complete safetensors file ({one_line(error)}); write it again."
        ) from error
    return EmbeddingTable(
        embeddings=embeddings.numpy(), ids=ids, labels=labels, source=path, rows=rows, n_total=n_total
    )


def _safetensors_dtype(name: str) -> np.dtype[Any]:
    """The NumPy type of the same kind; the width does not matter to the choice of a key."""
    kinds = {"F": "float32", "BF": "float32", "I": "int64", "U": "uint64", "BOOL": "bool", "C": "complex64"}
    return np.dtype(kinds.get(re.sub(r"\d.*", "", name), "V1"))


def _read_parquet(
    path: Path, key: str | None, id_column: str | None, label_column: str | None, share: Share
) -> EmbeddingTable:
    return read_parquet_files([path], key, id_column, label_column, share, path)


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
    check_matrix(*arrays[key], f"{key!r} in {path}")
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
