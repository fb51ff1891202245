"""How much faster are large photographs read from the copies of ``--image-cache``?

    python benchmarks/image_cache.py

Photographs of several sizes are made up, with noise as cameras have it, and saved as JPEG. Each is read three ways, in
one thread: as it is, for the first time with a cache (which also writes the copy), and from its copy.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

import record
from siammm.data.image_cache import CachedSource
from siammm.data.sources import open_source

SIZES = [(640, 480), (1600, 1200), (4000, 3000)]
VIEW = 224


def photograph(width: int, height: int, seed: int) -> Image.Image:
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 255, (height // 40, width // 40, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    return Image.fromarray((smooth + rng.integers(-12, 13, smooth.shape, dtype=np.int16)).clip(0, 255).astype(np.uint8))


def seconds(read: Callable[[int], object], count: int) -> float:
    """The median over the images."""
    found: list[float] = []
    for i in range(count):
        started = time.perf_counter()
        read(i)
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=15, help="of each size")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows: list[list[str]] = []
    for width, height in SIZES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "photographs"
            folder.mkdir()
            for i in range(args.images):
                photograph(width, height, i).save(folder / f"{i}.jpg", quality=90)
            source = open_source(folder)
            small = CachedSource(source, Path(name) / "cache", view_size=VIEW)
            times = [seconds(read, args.images) for read in (source.image, small.image, small.image)]
            bytes_of = [statistics.median(p.stat().st_size for p in f.rglob("*.jpg")) for f in (folder, small.folder)]
        rows.append(
            [
                f"{width} x {height}",
                *(f"{1000 * t:.1f}" for t in times),
                f"{times[0] / times[2]:.0f}",
                *(f"{n / 1000:,.0f}" for n in bytes_of),
            ]
        )
        print(rows[-1], flush=True)
    header = [
        "photograph",
        "as it is, ms",
        "first look, ms",
        "from its copy, ms",
        "times as fast",
        "kB",
        "kB of the copy",
    ]
    path = record.write(
        "image-cache", "Photographs read from small copies", record.table(header, rows), seeds="0",
        n=f"{args.images} images of each size, for views of {VIEW} pixels; medians", output=args.output,
    )  # fmt: skip
    print(path.read_text())


if __name__ == "__main__":
    main()
