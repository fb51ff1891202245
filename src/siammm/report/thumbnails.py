"""Thumbnails in sheets: pictures of many small images each, which a page loads at once.

All thumbnails have one size; an image of another aspect ratio is padded with transparent pixels.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from PIL import Image

from siammm.data.decode import BadImage, default_threads
from siammm.data.source import Source
from siammm.report.schema import Sheet, Thumbnails

MEDIA_TYPE = "image/webp"
MOST_BYTES = 14 * 2**20
"""Of all sheets within a page: base64 makes a third more of it, and the page is to stay below 25 MB."""

# A sheet is about so many pixels a side: WebP takes 16,383, but a browser keeps it decoded.
_SHEET_SIDE = 1536
_LARGEST, _SMALLEST = 96, 32
# Small pictures show what is lost, and cost little.
_QUALITY, _QUALITY_OF_SMALL, _SMALL = 80, 88, 48
_LOOKED_AT = 64
# An image with a longer side of this or less is enlarged as the pixels that it has, as the page does.
_PIXELS_ARE_SEEN = 40


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The size of all thumbnails, and how they lie in a sheet."""

    width: int
    height: int
    enlarge: int
    """Each pixel of an image becomes so many a side, where images are very small; 1 where they are reduced to fit."""
    most: int | None = None
    """Thumbnails of a sheet, about; None: as many as fit."""

    @property
    def columns(self) -> int:
        """Thumbnails beside each other."""
        return max(1, _SHEET_SIDE // self.width)

    @property
    def per_sheet(self) -> int:
        """Thumbnails of a full sheet."""
        n_rows = max(1, _SHEET_SIDE // self.height)
        return self.columns * (n_rows if self.most is None else max(1, min(n_rows, self.most // self.columns)))


def layout(source: Source | None, n_thumbnails: int, wanted: int | None) -> Layout:
    """A size that suits the images and their number; ``wanted`` sets the longer side."""
    shape = _shape(source)
    longer = max(shape) if shape is not None else _LARGEST
    if wanted is not None:
        side, enlarge = wanted, max(1, wanted // longer)
    elif longer < _SMALLEST:
        # Eight pixels would be lost on a screen, and blurred by whatever enlarges them.
        enlarge = _SMALLEST // longer
        side = longer * enlarge
    else:
        most = _LARGEST if n_thumbnails <= 2500 else 64 if n_thumbnails <= 6000 else 48
        side, enlarge = min(most, longer), 1
    if shape is None:
        return Layout(width=side, height=side, enlarge=enlarge)
    scale = side / longer
    height, width = (max(1, round(scale * length)) for length in shape)
    # Very long images are padded, or their sheets would have no room for them.
    return Layout(width=max(width, side // 4), height=max(height, side // 4), enlarge=enlarge)


def _shape(source: Source | None) -> tuple[int, int] | None:
    """Height and width where all have the same aspect, by a look at a few; otherwise a square of the largest side."""
    if source is None:
        return None
    if (shape := source.uniform_shape()) is not None:
        return shape
    longest = 0
    for i in source.spread(_LOOKED_AT):
        with suppress(BadImage):
            longest = max(longest, *source.size(int(i)))
    return (longest, longest) if longest else None


def thumbnail(image: np.ndarray, layout: Layout) -> Image.Image:
    """An image in its cell, as large as fits: RGB where it fills the cell, otherwise RGBA."""
    height, width = image.shape[:2]
    scale = min(layout.width / width, layout.height / height)
    size = (max(1, min(layout.width, round(scale * width))), max(1, min(layout.height, round(scale * height))))
    small = Image.fromarray(image)
    if scale > 1 and max(width, height) <= _PIXELS_ARE_SEEN:
        # Each pixel first becomes whole pixels, so that it stays a square with sharp borders.
        times = math.ceil(scale)
        small = small.resize((times * width, times * height), Image.Resampling.NEAREST)
        small = small.resize(size, Image.Resampling.BOX)
    elif size != small.size:
        small = small.resize(size, Image.Resampling.LANCZOS, reducing_gap=2.0)
    if size == (layout.width, layout.height):
        return small
    cell = Image.new("RGBA", (layout.width, layout.height), (0, 0, 0, 0))
    cell.paste(small, ((layout.width - size[0]) // 2, (layout.height - size[1]) // 2))
    return cell


def read_image(source: Source, position: int) -> np.ndarray | None:
    """An image of a source; None where it cannot be read."""
    if position < 0:
        return None
    try:
        return source.image(position)
    except (BadImage, IndexError):
        return None


def read_reduced(source: Source, position: int, longer: int) -> tuple[np.ndarray, tuple[int, int]] | None:
    """The same as small as its longer side may be, with its true height and width."""
    if position < 0:
        return None
    try:
        return source.reduced(position, longer, of_longer=True)
    except (BadImage, IndexError):
        return None


def read_thumbnail(source: Source, position: int, layout: Layout) -> Image.Image | None:
    """The thumbnail of an image of a source; None where it cannot be read."""
    read = read_reduced(source, position, max(layout.width, layout.height))
    return None if read is None else thumbnail(read[0], layout)


def encoded(picture: Image.Image, layout: Layout) -> bytes:
    """A picture as WebP; without loss where each pixel of an image is to be seen."""
    stream = io.BytesIO()
    if layout.enlarge > 1:
        picture.save(stream, "WEBP", lossless=True, quality=50, method=3)
    else:
        small = max(layout.width, layout.height) <= _SMALL
        picture.save(stream, "WEBP", quality=_QUALITY_OF_SMALL if small else _QUALITY, method=3)
    return stream.getvalue()


def sheet(cells: Sequence[Image.Image | None], layout: Layout) -> bytes:
    """A sheet of these thumbnails; a cell without one stays empty."""
    n_rows = -(-len(cells) // layout.columns)
    transparent = any(cell is None or cell.mode == "RGBA" for cell in cells)
    mode, empty = ("RGBA", (0, 0, 0, 0)) if transparent else ("RGB", (255, 255, 255))
    picture = Image.new(mode, (layout.columns * layout.width, n_rows * layout.height), empty)
    for number, cell in enumerate(cells):
        if cell is not None:
            row, column = divmod(number, layout.columns)
            picture.paste(cell, (column * layout.width, row * layout.height))
    return encoded(picture, layout)


def make_sheets(
    source: Source,
    positions: Sequence[int],
    layout: Layout,
    progress: Callable[[int, int], None],
    on_image: Callable[[int, np.ndarray, tuple[int, int]], None] = lambda at, image, shape: None,
    least_side: int = 1,
) -> tuple[list[bytes], list[int]]:
    """The sheets, and the number of each image's thumbnail; -1 for an image that cannot be read.

    ``on_image`` is called in threads with the place among ``positions`` of each image that could be read, the image
    with a longer side of ``least_side`` or more, and its true height and width.
    """
    longer = max(least_side, layout.width, layout.height)

    def read(at: int) -> Image.Image | None:
        found = read_reduced(source, int(positions[at]), longer)
        if found is None:
            return None
        on_image(at, *found)
        return thumbnail(found[0], layout)

    number_M, n_made, step = [-1] * len(positions), 0, 256
    data: list[bytes] = []
    waiting: list[Image.Image] = []
    # Pillow lets go of the interpreter while it decodes, so threads are enough.
    with ThreadPoolExecutor(default_threads(), thread_name_prefix="siammm-thumbnail") as pool:
        for start in range(0, len(positions), step):
            part = range(start, min(start + step, len(positions)))
            for at, cell in zip(part, pool.map(read, part), strict=True):
                if cell is None:
                    continue
                number_M[at] = n_made
                n_made += 1
                waiting.append(cell)
                if len(waiting) == layout.per_sheet:
                    data.append(sheet(waiting, layout))
                    waiting.clear()
            progress(min(start + step, len(positions)), len(positions))
    if waiting:
        data.append(sheet(waiting, layout))
    return data, number_M


def sheets_entry(layout: Layout, n_thumbnails: int, urls: Sequence[str | None]) -> Thumbnails:
    """How the thumbnails lie in the sheets, of which there is one for each of ``urls``."""
    full = layout.per_sheet
    return Thumbnails(
        width=layout.width,
        height=layout.height,
        columns=layout.columns,
        per_sheet=full,
        media_type=MEDIA_TYPE,
        sheets=[Sheet(url=url, n_thumbnails=min(full, n_thumbnails - full * i)) for i, url in enumerate(urls)],
    )


def n_within(
    sheets: Sequence[bytes], layout: Layout, n_thumbnails: int, max_thumbnails: int, most_bytes: int = MOST_BYTES
) -> int:
    """How many of the sheets the page holds itself: the first ones, up to a number of thumbnails and of bytes."""
    most = len(sheets) if n_thumbnails <= max_thumbnails else max_thumbnails // layout.per_sheet
    total = 0
    for number, data in enumerate(sheets[:most]):
        total += len(data)
        if total > most_bytes:
            return number
    return most
