"""Made-up images: arrays for the resident loader, JPEG files for the streaming one.

Noise of several scales, so that a JPEG of the usual quality takes about as many bytes as a photograph, and decoding it
about as long.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

# A photograph of ImageNet is about this large, in pixels and as a file.
PHOTOGRAPH = (375, 500)
_QUALITY = 90
# Different pictures in a folder; the others are copies, since a decoder takes as long for either.
_DIFFERENT = 64


def arrays(n: int, side: int, seed: int) -> np.ndarray:
    """Images N x side x side x 3, uint8."""
    return np.random.default_rng(seed).integers(0, 256, (n, side, side, 3), dtype=np.uint8)


def photograph(height: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """One picture of height x width x 3, uint8, with coarse shapes and fine texture."""
    picture = np.zeros((height, width, 3), dtype=np.float32)
    for side, strength in ((4, 90.0), (16, 45.0), (64, 22.0)):
        coarse = Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8))
        fine = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)
        picture += strength / 128 * (fine - 128)
    picture += rng.normal(0, 18, picture.shape).astype(np.float32)
    return (picture + 128).clip(0, 255).astype(np.uint8)


def write_jpegs(folder: Path, n: int, seed: int, *, shape: tuple[int, int] = PHOTOGRAPH) -> int:
    """Write n JPEG files into a new folder; returns the bytes they take in all."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    contents: list[bytes] = []
    total = 0
    for number in range(n):
        path = folder / f"{number:06d}.jpg"
        if number < _DIFFERENT:
            Image.fromarray(photograph(*shape, rng)).save(path, quality=_QUALITY)
            contents.append(path.read_bytes())
        else:
            path.write_bytes(contents[number % _DIFFERENT])
        total += len(contents[number % _DIFFERENT])
    return total
