"""Safe decoding: bytes that claim to be an image become pixels, or a ``BadImage`` with the reason.

Nothing here trusts a file. The format is found by content and must be one of a few, the size is read from the header
and checked before any pixel, and whatever Pillow makes of a damaged file ends as a ``BadImage``, never as a warning or
a crash. What is done to unusual images: the first frame of an animation is used, transparency is laid over white,
EXIF orientation is applied, 16-bit greys keep their upper 8 bits (rounded), CMYK is converted as Pillow does, and
colour profiles are ignored.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from PIL import Image

from siammm.core.errors import SiamMMError
from siammm.core.reading import open_regular
from siammm.core.text import one_line

MAX_PIXELS = 178_956_970
"""The default limit on an image's pixels, where Pillow too refuses: half a gigabyte once decoded."""

# Formats that are read; others of Pillow's run programs (EPS), or are seldom images (PDF, FITS).
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"}
    | {".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".jp2", ".j2k"}
)
"""How the names of image files end, in lower case."""

# Of a damaged image Pillow also logs what it then raises; without a handler that goes to standard error.
logging.getLogger("PIL").addHandler(logging.NullHandler())

_ORIENTATION_TAG = 0x0112
_TURN = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = frozenset({5, 6, 7, 8})
# So many first bytes tell the format.
_BEGINNING = 16
# Files of more bytes are only read if they begin as an image does.
_LARGE = 2**24

EncodedImage = bytes | bytearray | memoryview | str | Path | IO[bytes]


class BadImage(SiamMMError):  # noqa: N818 - a finding about data, which is usually collected and not raised further
    """An image that cannot be used; the message is the reason, to be read after the image's name."""


def decode(file: EncodedImage, *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """The pixels of an encoded image as uint8, H x W x 3, RGB, upright. Raises ``BadImage``.

    ``file`` is the encoded bytes, a path, or a file opened for reading bytes.
    """
    with _opened(file, max_pixels) as image:
        return _pixels(image)


def decode_reduced(
    file: EncodedImage, least_side: int, *, of_longer: bool = False, max_pixels: int = MAX_PIXELS
) -> tuple[np.ndarray, tuple[int, int]]:
    """The same for somebody who needs few pixels, with the height and width of the whole image.

    A JPEG may come at a half, a quarter or an eighth of its size, which is less work, as long as its shorter side (or
    its longer one) is not below ``least_side``. Every byte is read all the same, so that damage is seen.
    """
    with _opened(file, max_pixels) as image:
        width, height = image.size
        shorter, longer = sorted(image.size)
        least = least_side * shorter // longer if of_longer else least_side
        image.draft(None, (max(1, least),) * 2)  # pyright: ignore[reportArgumentType] - the mode may be left
        pixels = _pixels(image)
        is_sideways = image.format != "TIFF" and _orientation(image) in _SIDEWAYS  # Pillow turns a TIFF as it reads it
        return pixels, (width, height) if is_sideways else (height, width)


def _pixels(image: Image.Image) -> np.ndarray:
    image.load()
    orientation = _orientation(image)
    rgb = _rgb(image)
    if orientation in _TURN:
        rgb = rgb.transpose(_TURN[orientation])
    return np.array(rgb)


def read_size(file: EncodedImage, *, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Height and width of an encoded image from its header alone. Raises ``BadImage``."""
    with _opened(file, max_pixels) as image:
        width, height = image.size
        # Pillow turns the size of a TIFF itself; a PNG's EXIF data may lie behind its pixels, and is seldom there.
        has_exif = image.format != "TIFF" and (image.format != "PNG" or "exif" in image.info)
        return (width, height) if has_exif and _orientation(image) in _SIDEWAYS else (height, width)


@contextlib.contextmanager
def _opened(file: EncodedImage, max_pixels: int) -> Iterator[Image.Image]:
    """The image with its header read and its size checked; any failure until the block ends is a ``BadImage``."""
    stream = io.BytesIO(read_file(file, max_pixels=max_pixels))
    try:
        with _quiet_pillow, _recognised(stream) as image:
            width, height = image.size
            if width < 1 or height < 1:
                raise BadImage(f"has no pixels ({width} x {height})")
            if width * height > max_pixels:
                raise BadImage(f"has {width} x {height} pixels, more than the limit of {max_pixels:,}")
            yield image
    except BadImage:
        raise
    except MemoryError as error:
        raise BadImage("needs more memory than there is") from error
    except Exception as error:
        # A damaged file can raise nearly anything, from OSError to struct.error and KeyError.
        raise BadImage(f"is damaged ({one_line(error)})") from error


def read_file(file: EncodedImage, *, max_pixels: int = MAX_PIXELS) -> bytes:
    """The bytes of an encoded image, unless they are too many for the limit on pixels. Raises ``BadImage``."""
    if isinstance(file, bytes | bytearray | memoryview):
        check_bytes(len(file), max_pixels)
        return bytes(file)
    try:
        if isinstance(file, str | Path):
            with open_regular(file) as opened:
                # Asked for first, and no more is read: files of the kernel have no bytes, and some of them no end.
                size = os.fstat(opened.fileno()).st_size
                check_bytes(size, max_pixels)
                if size > _LARGE:
                    _check_beginning(opened.read(_BEGINNING))
                    opened.seek(0)
                return opened.read(size)
        parts: list[bytes] = []
        while part := file.read(2**20):
            parts.append(part)
            check_bytes(2**20 * len(parts), max_pixels)
        return b"".join(parts)
    except OSError as error:
        raise BadImage(f"cannot be read ({one_line(error)})") from error


def check_bytes(count: int, max_pixels: int) -> None:
    """Raise ``BadImage`` for more bytes than four 16-bit channels need without compression, and some for the rest."""
    if count > 8 * max_pixels + 2**24:
        raise BadImage(f"has {count:,} bytes, too many for at most {max_pixels:,} pixels")


def _recognised(stream: io.BytesIO) -> Image.Image:
    """The image, opened by the first of our formats that accepts its beginning.

    This is what ``Image.open`` does, except for its check of the size: that is tied to a limit which is global to the
    process, and we have our own.
    """
    claimed, problem = "", ""
    for name in _check_beginning(stream.read(_BEGINNING)):
        stream.seek(0)
        try:
            return Image.OPEN[name][0](stream, "")
        except SyntaxError as error:
            # Pillow's way of saying that the header is not what its first bytes promise.
            claimed, problem = name, one_line(error)
    raise BadImage(f"is damaged (a {claimed} file by its first bytes, but {problem})")


def _check_beginning(beginning: bytes) -> list[str]:
    """The formats that a file could be by its first bytes. Raises ``BadImage`` where there are none."""
    if not beginning:
        raise BadImage("is empty (0 bytes)")
    formats = [
        name for name in _known_formats() if (accept := Image.OPEN[name][1]) is None or accept(beginning) is True
    ]
    if not formats:
        raise BadImage(f"is not an image in a supported format ({', '.join(_FORMATS)})")
    return formats


@functools.cache
def _known_formats() -> tuple[str, ...]:
    """Those of our formats that this Pillow was built with."""
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION_TAG, 1))
    except Exception:
        # Damaged EXIF data says nothing about the pixels, which may be whole.
        return 1


def _rgb(image: Image.Image) -> Image.Image:
    mode = image.mode
    if mode.startswith("I;16") or (mode == "I" and image.format in ("PNG", "PPM")):
        # Pillow would clip at 255.
        grey = (np.clip(np.asarray(image).astype(np.int64), 0, 65535) + 128) // 257
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if mode in ("I", "F"):
        raise BadImage(f"has 32-bit pixels (mode {mode}) of unknown range; save it with 8 or 16 bits")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image if mode == "RGB" else image.convert("RGB")


class _QuietPillow:
    """Silences Pillow's warnings, and no others, while any thread decodes.

    ``warnings.catch_warnings`` puts back a whole list of filters, so threads that overlap can bring back a list that
    another one meant to be rid of. Here one entry is added to the list by the first thread in, and taken out by the
    last one out; whatever others do to the list meanwhile stays done.
    """

    _ENTRY = ("ignore", None, Warning, re.compile(r"PIL\b"), 0)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        # From Python 3.14 on, warnings can belong to a context, hence to a thread; then each thread catches its own.
        self._by_thread = bool(getattr(sys.flags, "context_aware_warnings", False))
        self._local = threading.local()

    def __enter__(self) -> None:
        if self._by_thread:
            self._local.caught = warnings.catch_warnings()
            self._local.caught.__enter__()
            warnings.filterwarnings("ignore", module=r"PIL\b")
            return
        with self._lock:
            self._inside += 1
            # Asked for each time: the list may have been replaced since, by somebody's catch_warnings.
            filters = cast("list[Any]", warnings.filters)
            if not filters or filters[0] is not self._ENTRY:
                filters.insert(0, self._ENTRY)

    def __exit__(self, *error: object) -> None:
        if self._by_thread:
            self._local.caught.__exit__(*error)
            return
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                filters = cast("list[Any]", warnings.filters)
                while self._ENTRY in filters:
                    filters.remove(self._ENTRY)


_quiet_pillow = _QuietPillow()
# A child that is forked while another thread decodes would inherit a lock that nobody releases.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_quiet_pillow.__init__)


def fit(image: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """The image at ``shape`` (height, width): its largest centred part of that aspect, resized (bilinear, antialiased).

    The same as resizing the shorter side and cropping the centre, in one step. An image of that shape is returned as
    it is.
    """
    height, width = image.shape[:2]
    if (height, width) == tuple(shape):
        return image
    scale = min(height / shape[0], width / shape[1])
    part_height, part_width = scale * shape[0], scale * shape[1]
    left, top = max(0.0, (width - part_width) / 2), max(0.0, (height - part_height) / 2)
    box = (left, top, min(width, left + part_width), min(height, top + part_height))
    return np.array(Image.fromarray(image).resize((shape[1], shape[0]), Image.Resampling.BILINEAR, box=box))


def default_threads() -> int:
    """Threads to decode with: one for each core that this process may use, at most 16."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 16)
