"""One indexable source of images, whatever they are stored in."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from siammm.data import decode
from siammm.data.decode import BadImage

_LOOKED_AT_FOR_SHAPE = 64
_LOOKED_AT_FOR_FINGERPRINT = 256


class Source(ABC):
    """Images that are read by their position, 0 to ``len(source) - 1``, in an order that never changes.

    Threads may read at the same time. A source can be pickled, so worker processes can be given it; what is expensive
    (a table in memory) is read again there, not sent. Images in an array that only this process has are sent whole.
    """

    kind: ClassVar[str]
    """How the images are stored: folder, array, parquet, datasets, tar, torchvision or digits."""
    name: str
    """What the user gave, for messages and records."""
    labels: np.ndarray | None = None
    """int64, one for each image, 0 or more; for judging only. None where there are none or some are missing."""
    label_names: list[str] | None = None
    """The name of label 0, 1, ..., where known. Two sources may number the same classes differently."""
    note: str | None = None
    """A sentence that the user should see before a long run, such as that random access will be slow."""
    has_own_files: ClassVar[bool] = False
    """Whether every image is a file of its own."""
    digest_N: np.ndarray | None = None
    """Where digests of such files are noted as they are read, while somebody wants them: see ``inventory.py``."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def image(self, i: int) -> np.ndarray:
        """The pixels of image ``i``: uint8, H x W x 3, RGB; the caller's own copy. Raises ``decode.BadImage``."""

    def reduced(self, i: int, least_side: int, *, of_longer: bool = False) -> tuple[np.ndarray, tuple[int, int]]:
        """Image ``i``, perhaps smaller where that saves work, and its true height and width.

        Its shorter side, or its longer one, is not below ``least_side`` unless the image is. See ``decode_reduced``.
        """
        image = self.image(i)
        return image, (image.shape[0], image.shape[1])

    def size(self, i: int) -> tuple[int, int]:
        """Height and width of image ``i``, where possible without decoding it. Raises ``decode.BadImage``."""
        height, width, _ = self.image(i).shape
        return height, width

    def content(self, i: int) -> bytes:
        """The stored bytes of image ``i``, or its pixels, for telling contents apart. Raises ``decode.BadImage``."""
        return self.image(i).tobytes()

    def identifier(self, i: int) -> str:
        """What the user knows image ``i`` by: its relative path, its key or its row. Valid Unicode, and unique."""
        return str(self._check_position(i))

    def images(self) -> np.ndarray | None:
        """All images at once, uint8, N x H x W x 3, where they are stored as pixels of one size; else None."""
        return None

    def uniform_shape(self) -> tuple[int, int] | None:
        """Height and width of all images, by a look at the headers of up to 64; None if they differ."""
        shapes: set[tuple[int, int]] = set()
        for i in self.spread(_LOOKED_AT_FOR_SHAPE):
            try:
                shapes.add(self.size(int(i)))
            except BadImage:
                continue
            if len(shapes) > 1:
                return None
        return shapes.pop() if shapes else None

    def fingerprint(self) -> str:
        """A sha256 that tells whether these are the same images in the same order, wherever they are kept.

        It covers the number of images, all identifiers, and the content of 256 images spread over the set: a
        change to another image goes unnoticed, and a million images take seconds.
        """
        digest = hashlib.sha256(f"siammm images 1\n{len(self)}\n".encode())
        for i in range(len(self)):
            _add(digest, self.identifier(i).encode("utf-8", "backslashreplace"))
        for i in self.spread(_LOOKED_AT_FOR_FINGERPRINT):
            try:
                _add(digest, self.content(int(i)))
            except BadImage:
                # Why it cannot be read is no part of it: messages depend on the machine.
                _add(digest, b"unreadable")
        return digest.hexdigest()

    def stored_in(self) -> Iterator[tuple[str, str]] | None:
        """Name and path of every file that the images are in, in a fixed order; None where that is not known.

        A name does not change when the whole set is moved.
        """
        return None

    def spread(self, count: int) -> np.ndarray:
        """Up to ``count`` positions, spread evenly over the set."""
        return np.unique(np.linspace(0, len(self) - 1, min(count, len(self))).round().astype(np.int64))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in self._not_sent()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open_again()

    def _not_sent(self) -> tuple[str, ...]:
        """Attributes that are not pickled; ``_open_again`` makes them anew in the other process."""
        return ("digest_N",)

    def _open_again(self) -> None:  # noqa: B027 - most sources have nothing to open
        """Make what was not pickled."""

    def _check_position(self, i: int) -> int:
        """``i`` as a position from the start; negative ones count from the end, as in a list."""
        n = len(self)
        if not -n <= i < n:
            raise IndexError(f"image {i} of {n}")
        return int(i) % n

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {len(self)} images>"


def _add(digest: hashlib._Hash, part: bytes) -> None:
    """Add a part with its length, so that no two lists of parts read the same."""
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


def content_digest(content: bytes | memoryview) -> int:
    """A number that tells contents apart; never 0, which stands for one that is not known."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") or 1


def container_files(paths: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """``Source.stored_in`` of files that hold many images each: their names below the folder that they share."""
    root = os.path.commonpath([path.parent for path in paths])
    for path in paths:
        # A file that stands alone may be renamed.
        yield "" if len(paths) == 1 else os.path.relpath(path, root), str(path)


class EncodedSource(Source):
    """A source whose images are stored as files are: JPEG, PNG and the like."""

    max_pixels: int = decode.MAX_PIXELS

    @abstractmethod
    def encoded(self, i: int) -> bytes | memoryview:
        """The stored bytes of image ``i``. Raises ``decode.BadImage``."""

    def image(self, i: int) -> np.ndarray:
        """See ``Source.image``."""
        return decode.decode(self.encoded(i), max_pixels=self.max_pixels)

    def reduced(self, i: int, least_side: int, *, of_longer: bool = False) -> tuple[np.ndarray, tuple[int, int]]:
        """See ``Source.reduced``."""
        return decode.decode_reduced(self.encoded(i), least_side, of_longer=of_longer, max_pixels=self.max_pixels)

    def size(self, i: int) -> tuple[int, int]:
        """See ``Source.size``."""
        return decode.read_size(self.encoded(i), max_pixels=self.max_pixels)

    def content(self, i: int) -> bytes:
        """See ``Source.content``."""
        return bytes(self.encoded(i))


class DerivedSource(Source):
    """A source that reads its images from another one."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.name, self.note = source.name, source.note
        self.labels, self.label_names = source.labels, source.label_names

    def __len__(self) -> int:
        return len(self.source)

    def image(self, i: int) -> np.ndarray:
        """See ``Source.image``."""
        return self.source.image(self._position(i))

    def reduced(self, i: int, least_side: int, *, of_longer: bool = False) -> tuple[np.ndarray, tuple[int, int]]:
        """See ``Source.reduced``."""
        return self.source.reduced(self._position(i), least_side, of_longer=of_longer)

    def size(self, i: int) -> tuple[int, int]:
        """See ``Source.size``."""
        return self.source.size(self._position(i))

    def content(self, i: int) -> bytes:
        """See ``Source.content``."""
        return self.source.content(self._position(i))

    def identifier(self, i: int) -> str:
        """See ``Source.identifier``."""
        return self.source.identifier(self._position(i))

    def _position(self, i: int) -> int:
        """The position in the other source."""
        return self._check_position(i)


def located(ends: np.ndarray, i: int) -> tuple[int, int]:
    """The number of the part that holds item ``i`` and its place in it, where part n ends before ``ends[n]``."""
    part = int(np.searchsorted(ends, i, side="right"))
    return part, i - (int(ends[part - 1]) if part else 0)


class Names:
    """Many short byte strings in two arrays: a list of millions costs several times more, and is copied by a fork."""

    def __init__(self, names: Iterable[bytes]) -> None:
        names = list(names)
        self._ends = np.cumsum([len(name) for name in names], dtype=np.int64)
        self._joined = b"".join(names)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, i: int) -> bytes:
        start = int(self._ends[i - 1]) if i > 0 else 0
        return self._joined[start : int(self._ends[i])]

    def text(self, i: int) -> str:
        r"""Name ``i`` as valid Unicode; a byte that is none is written like ``\xff``."""
        return self[i].decode("utf-8", "backslashreplace")
