"""A few dozen photographs, and the run that ``siammm cluster`` makes of them with the real encoder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from siammm.cli import main

N = 40
# By seed 1 no image lies between two clusters, where rounding would decide.
QUICK = ["--image-size", "32", "--n-components", "4", "--merge", "none", "--device", "cpu", "--random-state", "1"]


def four_kinds() -> np.ndarray:
    """Four kinds of images: stripes across and down, a gradient, noise."""
    random = np.random.default_rng(0)
    across, down = np.meshgrid(np.arange(32), np.arange(32))
    kinds = [across // 4 % 2 * 255, down // 4 % 2 * 255, (across + down) * 4, random.integers(0, 256, (32, 32))]
    images = np.stack([kinds[i % 4] for i in range(N)])[..., None].repeat(3, axis=3)
    return np.clip(images + random.normal(0, 20, images.shape), 0, 255).astype(np.uint8)


def write_photos(folder: Path) -> Path:
    """These images as files, in a folder for each kind."""
    for i, image in enumerate(four_kinds()):
        kind = folder / "photos" / f"kind{i % 4}"
        kind.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(kind / f"{i:02}.png")
    return folder / "photos"


def clustered_run(folder: Path, *flags: str) -> Path:
    """The run ``photos-clusters`` beside its images."""
    photos, output = write_photos(folder), folder / "photos-clusters"
    assert main(["cluster", str(photos), *QUICK, "--output", str(output), *flags]) == 0
    return output
