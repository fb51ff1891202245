"""Random images: arrays for the resident loader, JPEG files for the streaming one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

_QUALITY = 90
# Different images in a folder; the others are copies, which take as long to decode.
_DIFFERENT = 64


def arrays(n: int, side: int, seed: int) -> np.ndarray:
    """Images N x side x side x 3, uint8."""
    return np.random.default_rng(seed).integers(0, 256, (n, side, side, 3), dtype=np.uint8)


def write_jpegs(folder: Path, n: int, seed: int, *, shape: tuple[int, int] = (375, 500)) -> None:
    """Write n JPEG files into a new folder, by default as large as ImageNet's in pixels and in bytes."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    contents: list[bytes] = []
    for number in range(n):
        path = folder / f"{number:06d}.jpg"
        if number < _DIFFERENT:
            Image.fromarray(_photograph(*shape, rng)).save(path, quality=_QUALITY)
            contents.append(path.read_bytes())
        else:
            path.write_bytes(contents[number % _DIFFERENT])


def _photograph(height: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """Noise at several scales, which compresses and decodes about like a photograph."""
    picture = np.zeros((height, width, 3), dtype=np.float32)
    for side, strength in ((4, 90.0), (16, 45.0), (64, 22.0)):
        coarse = Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8))
        fine = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)
        picture += strength / 128 * (fine - 128)
    picture += rng.normal(0, 18, picture.shape).astype(np.float32)
    return (picture + 128).clip(0, 255).astype(np.uint8)
