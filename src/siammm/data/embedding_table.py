"""A table of embeddings, with its ids and labels: what is read, and which share of its rows.

One row is one sample. Numbers are checked for shape and type. That they are finite is checked by the mixture, which
reads them anyway.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from siammm.core.errors import InputError, StoredFileError
from siammm.core.reading import check_regular
from siammm.core.text import one_line, shape_text

if TYPE_CHECKING:
    import pyarrow as pa

# The names that are looked for, the first that exists wins.
EMBEDDING_KEYS = ("embeddings", "embedding", "features", "feature", "vectors", "vector", "X", "x")
ID_KEYS = ("id", "ids", "path", "paths", "filename", "filenames")
PATH_KEYS = ("filepath", "path", "image", "file", "filename")
"""Where a table may say which file the image of a row is."""

_ROWS_IN_FINGERPRINT = 512


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
    """Embeddings, one row per sample, and what is known about each sample."""

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


@contextmanager
def readable(path: Path) -> Iterator[None]:
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


def check_matrix(shape: tuple[int, ...], dtype: np.dtype[Any], name: str) -> None:
    """Refuse an array that cannot be embeddings; ``name`` is what a message calls it."""
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
