"""Images that somebody should look at: near duplicates, and those that are blurred, dark, bright, plain or of odd size.

All images of the page are looked at, which are all of a set of up to 20,000.

Legend:  M rows of the page's table, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from siammm.core.progress import Progress, silent
from siammm.data.decode import default_threads
from siammm.data.source import Source
from siammm.report.duplicates import duplicate_sets, near_duplicates
from siammm.report.image_quality import LOOKED_AT_SIDE, Look, look, odd_images
from siammm.report.json_numbers import number
from siammm.report.schema import DuplicateSet, OddImages, Quality
from siammm.report.thumbnails import read_reduced
from siammm.runs.run import Run

_AT_ONCE = 256


def look_at_all(source: Source, positions: Sequence[int], tell: Progress = silent) -> list[Look | None]:
    """Look at these images of a source; None for those that cannot be read."""

    def look_at(position: int) -> Look | None:
        read = read_reduced(source, position, LOOKED_AT_SIDE)
        return None if read is None else look(*read)

    looks: list[Look | None] = []
    with ThreadPoolExecutor(default_threads(), thread_name_prefix="siammm-look") as pool:
        for start in range(0, len(positions), _AT_ONCE):
            looks += pool.map(look_at, positions[start : start + _AT_ONCE])
            tell("looking at the images", len(looks), len(positions))
    return looks


def quality(run: Run, image_M: np.ndarray, look_M: list[Look | None]) -> Quality:
    """What was found among the images of the page, by a look at each of them; None where there was none."""
    sizes = [(0, 0) if one is None else (one.width, one.height) for one in look_M]
    odd: list[OddImages] = []
    for kind, found in odd_images(look_M).items():
        rows, values = [row for row, _ in found], [number(value, 4) for _, value in found]
        odd.append(OddImages(kind=kind, images=rows, values=values, sizes=[sizes[row] for row in rows]))
    return Quality(
        n_images=sum(one is not None for one in look_M), duplicates=_duplicates(run, image_M, look_M, sizes), odd=odd
    )


def _duplicates(
    run: Run, image_M: np.ndarray, look_M: list[Look | None], sizes: list[tuple[int, int]]
) -> list[DuplicateSet]:
    """Sets of near duplicates, each with its largest image first, to which the others are compared."""
    hash_M, mirrored_M = (
        np.array([0 if one is None else getattr(one, name) for one in look_M], dtype=np.uint64)
        for name in ("hash", "mirrored_hash")
    )
    x_MD = np.asarray(run.embeddings[image_M], dtype=np.float32)
    pairs = near_duplicates(x_MD, hash_M, mirrored_M, run.cluster_N[image_M])
    found: list[DuplicateSet] = []
    for part in duplicate_sets(pairs, len(image_M)):
        rows = sorted(part.tolist(), key=lambda row: (-sizes[row][0] * sizes[row][1], run.ids[image_M[row]]))
        cosine = np.clip(x_MD[rows] @ x_MD[rows[0]], -1.0, 1.0)
        found.append(
            DuplicateSet(
                images=rows, similarities=[number(value, 4) for value in cosine], sizes=[sizes[row] for row in rows]
            )
        )
    return found
