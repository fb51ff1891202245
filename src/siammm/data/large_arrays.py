"""Arrays that may be larger than memory: filled part by part in a file without a name, where they are large."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from siammm.core.errors import InputError
from siammm.core.text import one_line
from siammm.data.array_files import check_fits

# A converted copy of a memory-mapped table goes to a temporary file beyond this size, and not into memory; the rows of
# Parquet files, which cannot be mapped, beyond the second size.
_LARGEST_COPY_IN_MEMORY, _LARGEST_IN_MEMORY = 2**30, 2**31
_ROWS_AT_A_TIME = 65_536


class FilledRows:
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


def as_float(array: np.ndarray) -> np.ndarray:
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
