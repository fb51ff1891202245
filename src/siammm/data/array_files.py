"""Opening files of arrays and tables: headers are checked before any data is read, and nothing is unpickled.

What is compressed is unpacked within a budget: a file of megabytes can claim to hold terabytes.
"""

from __future__ import annotations

import math
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from siammm.core.errors import InputError, StoredFileError
from siammm.core.memory import free_memory
from siammm.core.reading import open_regular
from siammm.core.text import listed, one_line, shape_text, shown

Header = tuple[tuple[int, ...], "np.dtype[Any]"]
"""Shape and type of a stored array."""
Headers = Mapping[str, Header]


# Arrays that unpack to more than this must not be so many times larger than their file: no data are so regular.
_LARGE, _MOST_TIMES = 2**30, 200
# So many rows of a Parquet file are unpacked at a time, before their size is looked at: of numbers, of text, of files.
_ROWS, _ROWS_OF_TEXT, _ROWS_OF_FILES = 65_536, 1024, 64


def npy_header(file: IO[bytes], name: str) -> Header:
    """Shape and type of a stored array, from its first bytes."""
    try:
        with _silent():
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
    except Exception as error:
        # NumPy reads the header as Python: a damaged one can raise nearly anything, down to a TokenError.
        raise StoredFileError(f"{name} is not a NumPy array, or its start is damaged; write it again.") from error
    if any(side < 0 for side in shape):
        raise StoredFileError(f"{name} claims the shape {shape_text(shape)}, so its start is damaged; write it again.")
    return shape, dtype


def map_npy(path: Path) -> np.ndarray:
    """The array of a ``.npy`` file, memory-mapped; check its header first."""
    try:
        with _silent():
            return np.lib.format.open_memmap(path, mode="r")
    except (ValueError, OverflowError) as error:
        raise StoredFileError(f"{shown(path)} is shorter than its header says; write it again.") from error


def npz_headers(path: Path) -> dict[str, Header]:
    """Shape and type of every array in a ``.npz`` file."""
    headers: dict[str, Header] = {}
    with _whole_npz(path), open_regular(path) as opened, zipfile.ZipFile(opened) as archive:
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
    headers: Headers,
    key: str | None,
    usual: Sequence[str],
    likely: Sequence[str],
    *,
    flag: str,
    what: str,
    path: Path,
    otherwise: str,
) -> str:
    """The name of the array to read: the given one, else the first with a usual name, else the only likely one.

    ``otherwise`` is what to do if it holds something else.
    """
    contents = listed(f"{name} {shape_text(shape)} {dtype.name}" for name, (shape, dtype) in headers.items())
    contents = contents or "nothing"
    if key is not None and key not in headers:
        raise InputError(f"{shown(path)} has no array {key!r}; give {flag} one of: {contents}.")
    if key is None:
        key = next((name for name in usual if name in headers), None)
    if key is None and not likely:
        raise InputError(f"{shown(path)} has no array that could be {what}, but holds {contents}; {otherwise}.")
    if key is None and len(likely) != 1:
        raise InputError(
            f"{shown(path)} has {len(likely)} arrays that could be {what}; choose one with {flag}: {contents}."
        )
    return key or likely[0]


def load_npz(path: Path, *keys: str | None) -> list[np.ndarray | None]:
    """The arrays of these names, None for None. ``npz_headers`` has checked that they are what they claim to be."""
    with _whole_npz(path), open_regular(path) as opened:
        with zipfile.ZipFile(opened) as archive:
            wanted = [member for member in archive.infolist() if member.filename.removesuffix(".npy") in keys]
            stored, unpacked = (
                sum(sizes) for sizes in zip(*((m.compress_size, m.file_size) for m in wanted), strict=True)
            )
        if unpacked > max(_LARGE, _MOST_TIMES * stored):
            raise InputError(
                f"{shown(path)} would unpack to {unpacked / 2**30:.1f} GiB from {stored / 2**20:.1f} MiB, more than "
                f"{_MOST_TIMES} times as much; if you trust it, save its arrays as .npy."
            )
        check_fits(unpacked, f"The arrays of {shown(path)}", "save them as .npy, which is memory-mapped")
        opened.seek(0)
        with _silent(), np.load(opened, allow_pickle=False) as arrays:
            return [None if key is None else arrays[key] for key in keys]


def check_fits(size: int, what: str, remedy: str) -> None:
    """Refuse to read so many bytes into memory where there is not so much."""
    free = free_memory()
    if size > free:
        raise InputError(f"{what} need {size / 2**30:.1f} GiB of memory, but {free / 2**30:.1f} are free; {remedy}.")


@contextmanager
def _silent() -> Iterator[None]:
    """Without NumPy's warning of headers that Python 2 may have written: they are read, or refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


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
    except OSError as error:
        raise StoredFileError(f"{shown(path)} cannot be read ({one_line(error)}); check the file.") from error
    except Exception as error:
        # The readers of zip files and of what is packed in them raise nearly anything where bytes are damaged.
        raise StoredFileError(
            f"{shown(path)} is not a complete .npz file ({one_line(error)}); write it again."
        ) from error


@contextmanager
def parquet_file(path: Path) -> Iterator[Any]:
    """A ``pyarrow.parquet.ParquetFile``; whatever is wrong with it until the block ends is one sentence."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Opened by us, so that an OSError with a number means the file system and anything else the contents.
        with open_regular(path) as opened, pq.ParquetFile(opened) as file:
            yield file
    except MemoryError as error:  # Arrow's own too
        raise _too_large(path) from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise StoredFileError(f"{shown(path)} cannot be read ({one_line(error)}); check the file.") from error
        raise StoredFileError(
            f"{shown(path)} is not a complete Parquet file ({one_line(error)}); write it again."
        ) from error


def _too_large(path: Path) -> InputError:
    return InputError(f"The contents of {shown(path)} need more memory than is free; split it into several files.")


def parquet_columns(file: Any, columns: Sequence[str], path: Path, *, groups: Sequence[int] | None = None) -> Any:
    """These columns of an open Parquet file as a ``pyarrow.Table``, if what they unpack to fits into memory.

    In small parts, whose size is looked at: a page that repeats one value unpacks to any size, and says nothing of it.
    One thread: a process that was forked may have none of Arrow's.
    """
    import pyarrow as pa

    names = {*columns, *(name.partition(".")[0] for name in columns)}
    kinds = [field.type for field in file.schema_arrow if field.name in names]
    rows = _ROWS if all(pa.types.is_primitive(kind) for kind in kinds) else _ROWS_OF_TEXT
    if any(pa.types.is_struct(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind) for kind in kinds):
        rows = _ROWS_OF_FILES
    batches = file.iter_batches(rows, columns=list(columns), row_groups=groups, use_threads=False)
    budget, parts = free_memory(), list[Any]()
    for batch in batches:
        batch.validate(full=True)  # text whose bytes are none is noticed here, not where it is first used
        parts.append(batch)
        budget -= batch.nbytes
        if budget < 0:
            raise _too_large(path)
    return pa.Table.from_batches(parts) if parts else file.schema_arrow.empty_table().select(list(columns))


def in_plain_form(values: np.ndarray) -> np.ndarray:
    """Bytes as text, and anything else in the order of bytes of this machine, which Arrow needs."""
    if values.dtype.kind == "S":
        return np.char.decode(values, "utf-8", "backslashreplace")
    return values.astype(values.dtype.newbyteorder("="), copy=False)
