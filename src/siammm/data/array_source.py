"""Images that are pixels already: arrays in memory, ``.npy`` and ``.npz`` files, and scikit-learn's digits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from siammm.core.errors import InputError, StoredFileError
from siammm.core.reading import open_regular
from siammm.core.text import listed, one_line, shape_text, shown
from siammm.data import labels as labelling
from siammm.data.array_files import Headers, choose_array, in_plain_form, load_npz, map_npy, npy_header, npz_headers
from siammm.data.labels import LABEL_KEYS, NAME_KEYS
from siammm.data.source import Source, container_files

IMAGE_KEYS = ("images", "image", "x", "X", "data")
_CHECKED_AT_A_TIME = 2**24


class ArraySource(Source):
    """Images of one size in a uint8 array: N x H x W x 3, N x 3 x H x W, or grey, with one channel or no axis for it.

    A ``.npy`` file is memory-mapped, a ``.npz`` file is read into memory; both are opened again by a process that is
    given the source. Floating-point images are taken only where nothing is lost: where every value is a whole number
    of 255ths, from 0 to 1.
    """

    kind = "array"

    def __init__(
        self, images: np.ndarray, *, name: str, labels: np.ndarray | None = None, label_names: list[str] | None = None
    ) -> None:
        self.name, self.labels, self.label_names = name, labels, label_names
        self._layout = _layout(images.shape, shown(name))
        self._images = _as_bytes(images, shown(name))
        # The file and the array in it to open again elsewhere, where there is one.
        self._file: tuple[Path, str | None] | None = None

    def __len__(self) -> int:
        return len(self._images)

    def image(self, i: int) -> np.ndarray:
        """See ``Source.image``."""
        i = self._check_position(i)
        return np.array(self._as_rgb(np.asarray(self._images[i : i + 1]))[0], order="C")

    def images(self) -> np.ndarray:
        """See ``Source.images``."""
        return np.ascontiguousarray(self._as_rgb(np.asarray(self._images)))

    def _as_rgb(self, pixels: np.ndarray) -> np.ndarray:
        if self._layout == "channels first":
            pixels = pixels.transpose(0, 2, 3, 1)
        elif self._layout == "grey":
            pixels = pixels[..., None]
        return np.broadcast_to(pixels, (*pixels.shape[:3], 3))

    def size(self, i: int) -> tuple[int, int]:
        """See ``Source.size``."""
        return self.uniform_shape()

    def uniform_shape(self) -> tuple[int, int]:
        """Height and width of all images."""
        shape = self._images.shape
        return shape[2:4] if self._layout == "channels first" else shape[1:3]

    def stored_in(self) -> Iterator[tuple[str, str]] | None:
        """See ``Source.stored_in``: the file, where the array is of one."""
        return None if self._file is None else container_files([self._file[0]])

    def _not_sent(self) -> tuple[str, ...]:
        return () if self._file is None else ("_images",)

    def _open_again(self) -> None:
        if self._file is not None:
            path, key = self._file
            stored = _map_npy(path) if key is None else load_npz(path, key)[0]
            assert stored is not None
            self._images = _as_bytes(stored, shown(path))


class DigitsSource(ArraySource):
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels; their greys of 0 to 16 become 0 to 255."""

    kind = "digits"

    def __init__(self, name: str = "digits") -> None:
        from sklearn.datasets import load_digits

        bunch: Any = load_digits()
        images = np.round(bunch.images * (255 / 16)).astype(np.uint8)
        names = [str(name) for name in bunch.target_names]
        super().__init__(images, name=name, labels=bunch.target.astype(np.int64), label_names=names)


# --------------------------------------------------------------------------------------------------------------- files


def open_npy(path: Path, *, name: str, image_key: str | None = None, label_key: str | None = None) -> ArraySource:
    """The images of a ``.npy`` file, memory-mapped; there are no labels in it."""
    if image_key or label_key:
        raise InputError(
            f"{shown(name)} holds one array without names, so there is no {image_key or label_key!r} in it; "
            "use .npz to keep labels beside the images."
        )
    source = ArraySource(_map_npy(path), name=name)
    source._file = (path.absolute(), None)
    return source


def open_npz(path: Path, *, name: str, image_key: str | None = None, label_key: str | None = None) -> ArraySource:
    """The images of a ``.npz`` file, with its labels and their names where it has them."""
    headers = npz_headers(path)
    key = _choose_images(headers, image_key, path)
    n = headers[key][0][0]
    label_name = _choose_labels(headers, label_key, key, n, path)
    names_key = next((other for other in NAME_KEYS if other in headers and headers[other][1].kind in "US"), None)
    images, values, names = load_npz(path, key, label_name, names_key)
    assert images is not None
    source = ArraySource(images, name=name)
    if values is not None:
        known = None if names is None else [str(value) for value in in_plain_form(names)]
        source.labels, source.label_names = labelling.from_values(values, known)
    source._file = (path.absolute(), key)
    return source


def _map_npy(path: Path) -> np.ndarray:
    try:
        with open_regular(path) as file:
            shape, dtype = npy_header(file, shown(path))
        _check_type(dtype, shown(path))
        _layout(shape, shown(path))
        return map_npy(path)
    except OSError as error:
        raise StoredFileError(f"{shown(path)} cannot be read ({one_line(error)}); check the file.") from error


def _choose_images(headers: Headers, image_key: str | None, path: Path) -> str:
    likely = [name for name, (shape, _) in headers.items() if len(shape) in (3, 4)]
    words = {"what": "images (3-D or 4-D)", "otherwise": "if these are embeddings, use siammm cluster"}
    key = choose_array(headers, image_key, IMAGE_KEYS, likely, flag="--image-key", path=path, **words)
    shape, dtype = headers[key]
    _check_type(dtype, f"{key!r} in {shown(path)}")
    _layout(shape, f"{key!r} in {shown(path)}")
    return key


def _choose_labels(headers: Headers, label_key: str | None, image_key: str, n: int, path: Path) -> str | None:
    if label_key == "":
        return None
    if label_key is not None and label_key not in headers:
        raise InputError(f"{shown(path)} has no array {label_key!r}; give --label-key one of: {listed(headers)}.")
    key = label_key or next((key for key in LABEL_KEYS if key in headers and key != image_key), None)
    if key is None:
        return None
    shape, dtype = headers[key]
    if shape != (n,) or dtype.kind not in "iubUS":
        raise InputError(
            f"{key!r} in {shown(path)} is {shape_text(shape)} of {dtype.name}, but labels are {n} integers or "
            'strings, one for each image; save them so, or leave them out with --label-key "".'
        )
    return key


# ----------------------------------------------------------------------------------------- what an array must look like


def _layout(shape: tuple[int, ...], name: str) -> str:
    """Where the channels are; refuses what is not an array of images."""
    if len(shape) == 4 and shape[3] in (1, 3):
        layout = "channels last"
    elif len(shape) == 4 and shape[1] in (1, 3):
        layout = "channels first"
    elif len(shape) == 3 and shape[2] != 3:
        layout = "grey"
    else:
        hints = {3: "; one image is given as [image]", 2: "; if these are embeddings, use siammm cluster"}
        problem = hints.get(len(shape), "")
        raise InputError(
            f"{name} has the shape {shape_text(shape)}, but images are N x H x W x 3, N x 3 x H x W or N x H x W; "
            f"reshape it{problem}."
        )
    if 0 in shape:
        raise InputError(f"{name} has the shape {shape_text(shape)}, so there are no pixels in it; check the data.")
    return layout


def _check_type(dtype: np.dtype[Any], name: str) -> None:
    if dtype.kind == "O":
        raise InputError(f"{name} is an array of Python objects, which is never unpickled; save it as uint8.")
    if dtype != np.uint8 and dtype.kind != "f":
        remedy = "(images * 255).astype('uint8')" if dtype.kind == "b" else "scale to 0..255 and use .astype('uint8')"
        raise InputError(f"{name} is an array of {dtype.name}, but images are uint8 from 0 to 255; {remedy}.")


def _as_bytes(images: np.ndarray, name: str) -> np.ndarray:
    """The array itself if it is uint8; a float array as uint8, if every value is k / 255."""
    _check_type(images.dtype, name)
    if images.dtype == np.uint8:
        return images
    converted = np.empty(images.shape, np.uint8)
    rows = max(1, _CHECKED_AT_A_TIME // max(1, images[0].size))
    # Half precision keeps 11 bits, so its 255ths are off by more than those of float32.
    tolerance = 0.13 if images.dtype.itemsize == 2 else 1e-3
    for start in range(0, len(images), rows):
        values = np.asarray(images[start : start + rows], dtype=np.float64)
        lowest, highest = values.min(), values.max()
        if not (lowest >= 0 and highest <= 1):
            raise InputError(
                f"{name} holds {images.dtype.name} values from {lowest:g} to {highest:g}, but images are uint8 from 0 "
                "to 255; scale them and use .round().astype('uint8')."
            )
        scaled = values * 255
        whole = scaled.round()
        if np.abs(scaled - whole).max() > tolerance:
            raise InputError(
                f"{name} holds {images.dtype.name} values that are not multiples of 1/255, so uint8 would lose some of "
                "them; round them yourself with (images * 255).round().astype('uint8')."
            )
        converted[start : start + rows] = whole
    return converted
