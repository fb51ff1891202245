"""Opening files of arrays and tables: headers are checked before any data is read, and nothing is unpickled."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from siammm.core.errors import InputError, StoredFileError
from siammm.core.text import listed, one_line, shape_text, shown

Header = tuple[tuple[int, ...], "np.dtype[Any]"]
"""Shape and type of a stored array."""
Headers = Mapping[str, Header]


def npy_header(file: IO[bytes], name: str) -> Header:
    """Shape and type of a stored array, from its first bytes."""
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    except (ValueError, EOFError, SyntaxError, UnicodeDecodeError) as error:
        raise StoredFileError(f"{name} is not a NumPy array, or its start is damaged; write it again.") from error
    return shape, dtype


def map_npy(path: Path) -> np.ndarray:
    """The array of a ``.npy`` file, memory-mapped; check its header first."""
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise StoredFileError(f"{shown(path)} is shorter than its header says; write it again.") from error


def npz_headers(path: Path) -> dict[str, Header]:
    """Shape and type of every array in a ``.npz`` file."""
    headers: dict[str, Header] = {}
    with _whole_npz(path), zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name in headers:
                raise StoredFileError(f"{shown(path)} holds two arrays called {name!r}; save it with different names.")
            with archive.open(member) as file:
                shape, dtype = headers[name] = npy_header(file, f"{name!r} in {shown(path)}")
                stored = member.file_size - file.tell()
            if not dtype.hasobject and stored != math.prod(shape) * dtype.itemsize:
                raise StoredFileError(
                    f"{name!r} in {shown(path)} has {stored} bytes, but its header says {shape_text(shape)} of "
                    f"{dtype.name}; write it again."
                )
    return headers


def choose_array(
    headers: Headers, key: str | None, usual: Sequence[str], likely: Sequence[str], *, flag: str, what: str, path: Path
) -> str:
    """The name of the array to read: the given one, else the first with a usual name, else the only likely one."""
    contents = listed(f"{name} {shape_text(shape)} {dtype.name}" for name, (shape, dtype) in headers.items())
    contents = contents or "(it holds none)"
    if key is not None and key not in headers:
        raise InputError(f"{shown(path)} has no array {key!r}; give {flag} one of: {contents}.")
    if key is None:
        key = next((name for name in usual if name in headers), None)
    if key is None and len(likely) != 1:
        raise InputError(
            f"{shown(path)} has {len(likely)} arrays that could be {what}; choose one with {flag}: {contents}."
        )
    return key or likely[0]


def load_npz(path: Path, *keys: str | None) -> list[np.ndarray | None]:
    """The arrays of these names, None for None."""
    with _whole_npz(path), np.load(path, allow_pickle=False) as stored:
        return [None if key is None else stored[key] for key in keys]


@contextmanager
def _whole_npz(path: Path) -> Iterator[None]:
    try:
        yield
    except (InputError, StoredFileError):
        raise
    except MemoryError as error:
        raise InputError(
            f"The arrays of {shown(path)} need more memory than there is; save them as .npy, which is memory-mapped."
        ) from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, KeyError) as error:
        raise StoredFileError(f"{shown(path)} is not a whole .npz file ({one_line(error)}); write it again.") from error
    except OSError as error:
        raise StoredFileError(f"{shown(path)} cannot be read ({one_line(error)}); check the file.") from error


@contextmanager
def parquet_file(path: Path) -> Iterator[Any]:
    """A ``pyarrow.parquet.ParquetFile``; whatever is wrong with it until the block ends is one sentence."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Opened by us, so that an OSError with a number means the file system and anything else the contents.
        with path.open("rb") as opened, pq.ParquetFile(opened) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise StoredFileError(f"{shown(path)} cannot be read ({one_line(error)}); check the file.") from error
        raise StoredFileError(
            f"{shown(path)} is not a whole Parquet file ({one_line(error)}); write it again."
        ) from error


def decoded_text(values: np.ndarray) -> np.ndarray:
    """Bytes as text; anything else as it is."""
    return np.char.decode(values, "utf-8", "backslashreplace") if values.dtype.kind == "S" else values
