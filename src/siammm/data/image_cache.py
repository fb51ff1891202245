"""Large images, shrunken once and kept on disk as JPEG, so that later epochs and runs decode few pixels.

To decode a photograph takes many times as long as to decode what training needs of it. The first look at an image
writes a copy whose shorter side is half as long again as a view; everything after that reads the copy. An image that is
small already is read where it is.

The folder has one subfolder for each set of images (by its fingerprint) and size, so that sets, and runs with other
views, can share it. A copy is written under another name and renamed: what has its name is whole.
"""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
from PIL import Image

from siammm.core.errors import InputError
from siammm.core.files import unwritable, written_whole
from siammm.data import decode
from siammm.data.decode import BadImage
from siammm.data.source import EncodedSource, Source

# The shorter side of a copy, in sides of a view: a crop of a tenth of the image still has half of a view's pixels.
_SIDES = 1.5
# Shrinking by less than this saves little, and costs a second loss of quality.
_LEAST_GAIN = 1.25
_QUALITY = 92
_FILES_IN_A_FOLDER = 1000


class ShrunkenSource(Source):
    """A source whose large images are read from small copies; everything else is as in the source itself."""

    def __init__(self, source: Source, folder: Path, *, view_size: int) -> None:
        self._source = source
        self.side = math.ceil(_SIDES * view_size)
        self.kind = source.kind  # pyright: ignore[reportAttributeAccessIssue] - of the class elsewhere
        self.name, self.note = source.name, source.note
        self.labels, self.label_names = source.labels, source.label_names
        self.folder = folder / f"{source.fingerprint()[:16]}-{self.side}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self.folder, error) from error

    def __len__(self) -> int:
        return len(self._source)

    def image(self, i: int) -> np.ndarray:
        """See ``Source.image``: of the copy, also when it has only just been made."""
        path = self._copy(i)
        try:
            return decode.decode(path)
        except BadImage:  # not there yet, or spoilt
            pass
        small = self._shrunken(i)
        if small is None:
            return self._source.image(i)
        content = _as_jpeg(small)
        _write(path, content)
        return decode.decode(content)

    def size(self, i: int) -> tuple[int, int]:
        """See ``Source.size``."""
        return self._source.size(i)

    def content(self, i: int) -> bytes:
        """See ``Source.content``."""
        return self._source.content(i)

    def identifier(self, i: int) -> str:
        """See ``Source.identifier``."""
        return self._source.identifier(i)

    def _copy(self, i: int) -> Path:
        i = self._check_position(i)
        return self.folder / str(i // _FILES_IN_A_FOLDER) / f"{i}.jpg"

    def _shrunken(self, i: int) -> np.ndarray | None:
        """The image at the size of its copy; None where it is small already."""
        height, width = self._source.size(i)
        if min(height, width) < _LEAST_GAIN * self.side:
            return None
        if isinstance(self._source, EncodedSource):
            encoded, limit = self._source.encoded(i), self._source.max_pixels
            pixels = decode.decode(encoded, max_pixels=limit, least_side=self.side)
        else:
            pixels = self._source.image(i)
        height, width = pixels.shape[:2]
        scale = self.side / min(height, width)
        wanted = max(self.side, round(width * scale)), max(self.side, round(height * scale))
        return np.asarray(Image.fromarray(pixels).resize(wanted, Image.Resampling.BILINEAR))


def _as_jpeg(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    # Colours at full resolution: crops are enlarged.
    Image.fromarray(pixels).save(stream, "JPEG", quality=_QUALITY, subsampling=0)
    return stream.getvalue()


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(exist_ok=True)
        with written_whole(path, flush=False) as scratch:
            scratch.write_bytes(content)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> InputError:
    return unwritable(path, error, "make room there, or give another --image-cache or none")
