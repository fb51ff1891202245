"""The files that a set of images consists of, as they were when a training began: has any changed since?

A look at 100,000 files takes a second: of each its size and time. Only where these differ are contents compared, by a
digest. Of a file that holds one image, the digest is taken when training reads it anyway; of a file that holds many, it
is taken of the whole, or of blocks spread over it where the files are large.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from siammm.core.errors import StoredFileError
from siammm.core.files import written_whole
from siammm.core.text import one_line, printable
from siammm.data import decode
from siammm.data.decode import BadImage
from siammm.data.source import DerivedSource, Source, content_digest

_COLUMNS = ("size", "modified", "digest")
# Files with many images are read whole up to this many bytes together, and in so many blocks each beyond that.
_WHOLE_BYTES, _BLOCKS, _BLOCK_BYTES = 2**28, 64, 2**16
_SHOWN = 3


@dataclass
class Differences:
    """What has changed between two looks at a set, by the names of files."""

    changed: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def any(self) -> bool:
        """Whether there are any that can be named."""
        return bool(self.changed or self.added or self.missing)

    def __str__(self) -> str:
        """Such as "344 changed (a.png, b.png, c.png, ...), 1 missing (d.png)"."""
        parts = (("changed", self.changed), ("added", self.added), ("missing", self.missing))
        # A source that is one file has no name within itself.
        listed = {word: f" ({_listed(names)})" if any(names) else "" for word, names in parts}
        return ", ".join(f"{len(names):,} {word}{listed[word]}" for word, names in parts if names)

    def counts(self) -> dict[str, int]:
        """How many of each."""
        return {"changed": len(self.changed), "added": len(self.added), "missing": len(self.missing)}


@dataclass
class Inventory:
    """Name, size, time of the last change (in ns) and digest of each file; a digest of 0 is not known."""

    names: list[str]
    size_N: np.ndarray
    modified_N: np.ndarray
    digest_N: np.ndarray

    @classmethod
    def of(cls, source: Source) -> Self | None:
        """A look at the files of a source; None where it has none that are known.

        The digests of images that are files of their own are filled in while they are read.
        """
        files = source.stored_in()
        if files is None:
            return None
        names, paths = _named(files)
        size_N, modified_N = _looked_at(paths)
        found = cls(names, size_N, modified_N, np.zeros(len(names), dtype=np.uint64))
        if source.has_own_files:
            source.digest_N = found.digest_N
        else:
            share = _WHOLE_BYTES // max(1, len(paths))
            found.digest_N[:] = [
                _digest_of_file(path, int(size), share) for path, size in zip(paths, size_N, strict=True)
            ]
        return found

    def compared(self, now: Inventory, source: Source) -> Differences:
        """What has changed in ``now``, a new look at ``source``; the digests of what has not go over to it."""
        then = {name: i for i, name in enumerate(self.names)}
        found = Differences(added=[name for name in now.names if name not in then])
        there = set(now.names)
        found.missing = [name for name in self.names if name not in there]
        pairs = [(then[name], i) for i, name in enumerate(now.names) if name in then]
        touched: list[tuple[int, int]] = []
        for before, i in pairs:
            if self.size_N[before] != now.size_N[i]:
                found.changed.append(now.names[i])
            elif self.modified_N[before] != now.modified_N[i]:
                touched.append((before, i))
            else:
                now.digest_N[i] = self.digest_N[before]
        if source.has_own_files and touched:
            with ThreadPoolExecutor(decode.default_threads()) as pool:
                now.digest_N[[i for _, i in touched]] = list(
                    pool.map(lambda pair: _digest_of_image(source, pair[1]), touched)
                )
        for before, i in touched:
            if self.digest_N[before] != now.digest_N[i]:
                found.changed.append(now.names[i])
        return found

    def write(self, path: Path) -> None:
        """Write it as a table."""
        columns = dict(zip(_COLUMNS, (self.size_N, self.modified_N, self.digest_N), strict=True))
        with written_whole(path) as scratch:
            pq.write_table(pa.table({"file": pa.array(self.names, pa.string()), **columns}), scratch)

    @classmethod
    def read(cls, path: Path) -> Self:
        """What ``write`` wrote."""
        try:
            table = pq.read_table(path)
            size_N, modified_N, digest_N = (table.column(name).to_numpy() for name in _COLUMNS)
            names = [str(name) for name in table.column("file").to_pylist()]
            kinds = {size_N.dtype.kind + modified_N.dtype.kind, digest_N.dtype.kind}
            if kinds != {"ii", "u"}:
                raise ValueError("its columns are not numbers")
        except (OSError, KeyError, ValueError, pa.ArrowException) as error:
            raise StoredFileError(
                f"{path} cannot be read ({one_line(error)}); remove it to compare the images less closely."
            ) from error
        return cls(names, size_N, modified_N, digest_N)


def stamp(source: Source) -> str:
    """A sha256 that also changes with the size or the time of any file of a source, where it has files.

    The fingerprint alone covers the contents of 256 images, and is the same for copies with other times.
    """
    digest = hashlib.sha256(source.fingerprint().encode())
    while isinstance(source, DerivedSource):
        source = source.source
    names, paths = _named(source.stored_in() or ())
    digest.update("\0".join(names).encode("utf-8", "backslashreplace"))
    for values in _looked_at(paths):
        digest.update(values.tobytes())
    return digest.hexdigest()


def _looked_at(paths: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The sizes of files and the times of their last change; a size of -1 where there is none."""
    size_N, modified_N = (np.zeros(len(paths), dtype=np.int64) for _ in range(2))
    for i, path in enumerate(paths):
        try:
            status = os.stat(path)
            size_N[i], modified_N[i] = status.st_size, status.st_mtime_ns
        except OSError:  # a link to nothing; whether it can be read is judged elsewhere
            size_N[i] = -1
    return size_N, modified_N


def _named(files: Iterable[tuple[str, str]]) -> tuple[list[str], list[str]]:
    names: list[str] = []
    paths: list[str] = []
    for name, path in files:
        names.append(name)
        paths.append(path)
    return names, paths


def _digest_of_image(source: Source, i: int) -> int:
    try:
        return content_digest(source.content(i))
    except BadImage:
        return 0


def _digest_of_file(path: str, size: int, share: int) -> int:
    """The digest of a file of up to ``share`` bytes, or of blocks of it."""
    digest = hashlib.blake2b(digest_size=8)
    try:
        with open(path, "rb") as file:
            if size <= share:
                while block := file.read(2**20):
                    digest.update(block)
            else:
                for start in np.linspace(0, size - _BLOCK_BYTES, _BLOCKS).astype(np.int64).tolist():
                    file.seek(max(0, start))
                    digest.update(file.read(_BLOCK_BYTES))
    except OSError:
        return 0
    return int.from_bytes(digest.digest(), "little") or 1


def _listed(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > _SHOWN else ""
    return ", ".join(printable(name) for name in names[:_SHOWN]) + more
