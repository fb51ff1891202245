"""A cache of small JPEG copies of large images on disk, so that later epochs and runs decode fewer pixels.

Decoding a photograph takes many times as long as decoding what training needs of it. The first read of an image writes
a copy whose shorter side is 1.5 times that of a view; every later read uses the copy. Images that are already small are
read from the source.

The folder has one subfolder per set of images and size, so that sets, and runs with other views, can share it. A set
is known by the names, sizes and times of all its files (``inventory.stamp``): where one has changed, all copies are
made anew, and the old ones can be removed. A copy is written under a temporary name and renamed, so that it is whole or
absent.
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
from siammm.data.inventory import stamp
from siammm.data.source import DerivedSource, Source

# The shorter side of a copy, in sides of a view: a crop of a tenth of the image still has half of a view's pixels.
_SIDES = 1.5
# Shrinking by less than this saves little, and costs a second loss of quality.
_LEAST_GAIN = 1.25
_QUALITY = 92
_FILES_IN_A_FOLDER = 1000


class CachedSource(DerivedSource):
    """A source whose large images are read from small copies; everything else is as in the source itself."""

    def __init__(self, source: Source, folder: Path, *, view_size: int) -> None:
        super().__init__(source)
        self.side = math.ceil(_SIDES * view_size)
        self.kind = source.kind  # pyright: ignore[reportAttributeAccessIssue] - of the class elsewhere
        self.folder = folder / f"{stamp(source)[:16]}-{self.side}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self.folder, error) from error

    def image(self, i: int) -> np.ndarray:
        """See ``Source.image``: of the copy, also when it has only just been made."""
        path = self._copy(i)
        try:
            return decode.decode(path)
        except BadImage:  # not there yet, or spoilt
            pass
        small = self._small_copy(i)
        if small is None:
            return self.source.image(i)
        content = _as_jpeg(small)
        _write(path, content)
        return decode.decode(content)

    def reduced(self, i: int, least_side: int, *, of_longer: bool = False) -> tuple[np.ndarray, tuple[int, int]]:
        """See ``Source.reduced``: of the copy."""
        return Source.reduced(self, i, least_side, of_longer=of_longer)

    def _copy(self, i: int) -> Path:
        i = self._check_position(i)
        return self.folder / str(i // _FILES_IN_A_FOLDER) / f"{i}.jpg"

    def _small_copy(self, i: int) -> np.ndarray | None:
        """The image at the size of its copy; None where it is small already."""
        height, width = self.source.size(i)
        if min(height, width) < _LEAST_GAIN * self.side:
            return None
        pixels, _ = self.source.reduced(i, self.side)
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
