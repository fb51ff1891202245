"""What can be wrong with an image whatever it shows: blur, darkness, glare, no contrast, an odd shape or size.

An image is odd if a measure is beyond a fixed limit and also unusual for its set: among night photographs, a dark one
is not worth a remark.

Legend:  N images, H and W pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image
from scipy.fft import dctn
from scipy.ndimage import uniform_filter, uniform_filter1d

OddKind = Literal["blurred", "dark", "bright", "plain", "shape", "size"]

LOOKED_AT_SIDE = 256
"""Pixels of the longer side at which an image is measured, if it is larger: blur that a reader sees on a screen is seen
here, and time is bounded."""

# Smaller images are too coarse to tell blur from what they show.
_LEAST_SIDE_FOR_BLUR = 64
# Pixels of the window that an image is blurred by to measure how blurred it was, and the least contrast for that.
_WINDOW, _LEAST_CONTRAST = 13, 0.02
# A mean over so many pixels comes first: the steps of 8 bits in a smooth image are no sharp edges, nor is noise.
_SMOOTHED = 3
_HASH_SIDE, _HASH_BITS = 32, 8
# Below this an image of its own would look like many others by so few coefficients.
_LEAST_SIDE_FOR_HASH = 16
# Limits of the measures, beyond which an image may be odd.
_BLURRED, _DARK, _BRIGHT = 0.7, 0.3, 0.92
_SHAPE, _SIZE = math.log(3.0), math.log(4.0)
# Deviations from the median that are unusual; the factor makes of a median deviation a standard one, if it is normal.
_DEVIATIONS, _NORMAL = 3.0, 1.4826


@dataclass(frozen=True, kw_only=True)
class Look:
    """What is measured of one image. Brightness is from 0 to 1."""

    width: int
    height: int
    blur: float
    """0 for a sharp image, 1 for one that is all blur (Crete et al. 2007); NaN where that cannot be told."""
    shadows: float
    """The brightness that 5 % of the pixels are below."""
    lights: float
    """The brightness that 99 % of the pixels are below."""
    contrast: float
    """The standard deviation of the brightness."""
    hash: int
    """64 bits that hardly change with size, compression and brightness; 0 for an image without any structure."""
    mirrored_hash: int
    """That of the mirrored image."""


def look(image: np.ndarray, shape: tuple[int, int] | None = None) -> Look:
    """Measure one image: uint8, H x W x 3; ``shape`` is its true height and width where this is a reduced copy."""
    height, width = shape or image.shape[:2]
    grey = Image.fromarray(image).convert("L")
    small = grey.copy()
    small.thumbnail((LOOKED_AT_SIDE, LOOKED_AT_SIDE), Image.Resampling.BILINEAR, reducing_gap=2.0)
    grey_HW = np.asarray(small, dtype=np.float32) / 255
    shadows, lights = (float(level) for level in np.percentile(grey_HW, (5, 99)))
    contrast = float(grey_HW.std())
    can_blur = min(grey_HW.shape) >= _LEAST_SIDE_FOR_BLUR and contrast >= _LEAST_CONTRAST
    has_hash = min(height, width) >= _LEAST_SIDE_FOR_HASH and contrast >= _LEAST_CONTRAST
    hashes = perceptual_hashes(grey) if has_hash else (0, 0)
    return Look(
        width=width,
        height=height,
        blur=blur(grey_HW) if can_blur else math.nan,
        shadows=shadows,
        lights=lights,
        contrast=contrast,
        hash=hashes[0],
        mirrored_hash=hashes[1],
    )


def blur(grey_HW: np.ndarray) -> float:
    """How blurred an image is, from 0 to 1: what was blurred before loses little by being blurred again.

    The share of the differences between neighbouring pixels that is left after a mean over a window, along the axis
    where more is left: a camera that moves blurs one axis alone.
    """
    grey_HW, left = uniform_filter(grey_HW, _SMOOTHED), list[float]()
    for axis in (0, 1):
        before = np.abs(np.diff(grey_HW, axis=axis))
        after = np.abs(np.diff(uniform_filter1d(grey_HW, _WINDOW, axis=axis), axis=axis))
        total = float(before.sum())
        left.append(1.0 - float(np.maximum(before - after, 0).sum()) / total if total > 0 else 0.0)
    return max(left)


def perceptual_hashes(grey: Image.Image) -> tuple[int, int]:
    """The hash of an image and that of its mirror image: the signs of its coarsest waves around their median."""
    small = np.asarray(grey.resize((_HASH_SIDE, _HASH_SIDE), Image.Resampling.BOX), dtype=np.float32)
    wave = np.asarray(dctn(small, norm="ortho"))[:_HASH_BITS, :_HASH_BITS]
    mirrored = wave * np.where(np.arange(_HASH_BITS) % 2, -1.0, 1.0)  # odd waves change their sign
    first, second = (_bits(each.ravel()[1:]) for each in (wave, mirrored))  # all but the mean
    return first, second


def _bits(wave: np.ndarray) -> int:
    """One bit for each coefficient; the last is always set, so that no hash is 0."""
    return int.from_bytes(np.packbits(np.append(wave > np.median(wave), True)).tobytes(), "big")


def odd_images(looks: list[Look | None]) -> dict[OddKind, list[tuple[int, float]]]:
    """Which images are odd in each way, the oddest first, with the value that says so; None: could not be read."""
    seen = [i for i, one in enumerate(looks) if one is not None]
    known = [one for one in looks if one is not None]

    def values(name: str) -> np.ndarray:
        return np.array([getattr(one, name) for one in known], dtype=np.float64)

    width_N, height_N, contrast_N = values("width"), values("height"), values("contrast")
    shape_N, size_N = np.log(width_N / height_N), 0.5 * np.log(width_N * height_N)
    from_middle = {name: value - _median(value) for name, value in (("shape", shape_N), ("size", size_N))}
    # A value that grows with how odd an image is, and what is shown.
    measures: dict[OddKind, tuple[np.ndarray, float, np.ndarray]] = {
        "blurred": (values("blur"), _BLURRED, values("blur")),
        "dark": (-values("lights"), -_DARK, values("lights")),
        "bright": (values("shadows"), _BRIGHT, values("shadows")),
        "plain": (-contrast_N, -_LEAST_CONTRAST, contrast_N),
        "shape": (np.abs(from_middle["shape"]), _SHAPE, width_N / height_N),
        "size": (np.abs(from_middle["size"]), _SIZE, np.sqrt(width_N * height_N)),
    }
    found: dict[OddKind, list[tuple[int, float]]] = {}
    for kind, (value_N, limit, shown_N) in measures.items():
        odd = np.flatnonzero(beyond(value_N, limit))
        order = odd[np.argsort(-value_N[odd], kind="stable")]
        found[kind] = [(seen[i], float(shown_N[i])) for i in order.tolist()]
    return found


def beyond(value_N: np.ndarray, limit: float) -> np.ndarray:
    """Which values are above a limit, and unusually large among all of them as well; NaN is neither."""
    middle = _median(value_N)
    spread = _NORMAL * _median(np.abs(value_N - middle))
    return np.nan_to_num(value_N, nan=-np.inf) > max(limit, middle + _DEVIATIONS * spread)


def _median(value_N: np.ndarray) -> float:
    known = value_N[~np.isnan(value_N)]
    return float(np.median(known)) if len(known) else 0.0
