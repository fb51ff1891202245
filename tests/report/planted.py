"""A folder of pictures with something wrong planted among them, and the run that ``siammm cluster`` makes of it.

No two pictures look alike, but for the copies; ``COPIES`` names them with their originals.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter
from scipy.ndimage import gaussian_filter

from siammm.cli import main

N = 40
COPIES = {
    "copy-compressed.jpg": "0003.png",
    "copy-small.png": "0007.png",
    "copy-mirrored.png": "0011.png",
    "copy-darker.png": "0015.png",
}
ODD = {"blurred": "odd-blurred.png", "dark": "odd-dark.png", "shape": "odd-shape.png", "size": "odd-size.png"}


def picture(seed: int) -> Image.Image:
    """Shapes of a dark and a light colour, 128 x 96 pixels."""
    random = np.random.default_rng(seed)
    shapes = gaussian_filter(random.normal(size=(96, 128)), 4 + 2 * (seed % 4))[..., None]
    colours = random.uniform(20, 100, 3), random.uniform(140, 235, 3)
    pixels = np.where(shapes > 0, *colours) + random.normal(0, 4, (96, 128, 3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def planted_folder(folder: Path) -> Path:
    """The pictures, the copies and the odd ones."""
    photos = folder / "photos"
    photos.mkdir()
    for seed in range(N):
        picture(seed).save(photos / f"{seed:04}.png")
    picture(3).save(photos / "copy-compressed.jpg", quality=40)
    picture(7).resize((96, 72)).save(photos / "copy-small.png")
    picture(11).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(photos / "copy-mirrored.png")
    ImageEnhance.Brightness(picture(15)).enhance(0.85).save(photos / "copy-darker.png")
    picture(100).filter(ImageFilter.GaussianBlur(6)).save(photos / "odd-blurred.png")
    ImageEnhance.Brightness(picture(101)).enhance(0.15).save(photos / "odd-dark.png")
    picture(102).resize((600, 60)).save(photos / "odd-shape.png")
    picture(103).resize((1024, 768)).save(photos / "odd-size.png")
    return photos


def planted_run(folder: Path) -> Path:
    """The run of these pictures, with the encoder that pip installs."""
    settings = ["--encoder", "lite", "--image-size", "64", "--n-components", "4", "--merge", "none", "--device", "cpu"]
    output = folder / "run"
    assert main(["cluster", str(planted_folder(folder)), *settings, "--output", str(output)]) == 0
    return output
