"""Which images stand for a cluster: its most central ones, those at its border, those that fit nowhere, and any.

Legend:  N images, D dimensions, K clusters, M rows of the page's table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from siammm.metrics.kmeans import without_zero_warnings
from siammm.runs.opened import OpenRun, Tell

MOST_ROWS = 20_000
"""Images that a page knows at most; a map of more is a blur, and the page would be slow."""

_ROWS_AT_ONCE = 32_768
# A border is where the shares of the first and the second cluster are nearer than this: 0.75 and 0.25, or nearer.
_LARGEST_GAP = 0.5
# An outlier is among the fifth of all images that the mixture finds least likely.
_LEAST_OUTLIER = 0.8


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How many images each cluster shows of each kind."""

    central: int
    boundary: int
    outliers: int
    sample: int
    by_label: int
    """Images of all its labels together."""

    @classmethod
    def of(cls, n_clusters: int) -> Counts:
        """As many as leave the table of all clusters below ``MOST_ROWS``, with room for the tree and for suspects."""

        def share(of_all: int, most: int, least: int = 0) -> int:
            return max(least, min(most, of_all // max(1, n_clusters)))

        return cls(
            central=share(5000, 24, least=1),
            boundary=share(2000, 12),
            outliers=share(2000, 12),
            sample=share(3000, 24),
            by_label=share(4000, 96),
        )


MOST_LABELS, MOST_OF_A_LABEL = 12, 12


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is asked of every image."""

    cosine_N: np.ndarray
    """With the mean direction of its cluster."""
    gap_N: np.ndarray
    """Between the shares of the likeliest and the second cluster; 1 where there is no second."""
    sum_KD: np.ndarray
    """The sum of each cluster's embeddings."""
    count_K: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The images of one cluster, as rows of the run, most telling first."""

    central: list[int]
    boundary: list[int]
    outliers: list[int]
    sample: list[int]
    by_label: list[tuple[int, list[int]]]
    label_counts: list[tuple[int, int]]


def measure(run: OpenRun, tell: Tell) -> Measured:
    """One pass over all embeddings."""
    found = run.found
    k, n = found.n_clusters, found.n_images
    mean_KD = found.mean_KD.astype(np.float32)
    cosine_N, gap_N = np.zeros(n, np.float32), np.ones(n, np.float32)
    sum_KD = np.zeros((k, mean_KD.shape[1]))
    found.mixture.set_params(device=str(run.device))
    for start, x_BD in chunks(run.embedding_ND):
        stop = start + len(x_BD)
        cluster_B = found.cluster_N[start:stop]
        cosine_N[start:stop] = np.einsum("bd,bd->b", x_BD, mean_KD[cluster_B])
        _add(sum_KD, cluster_B, x_BD)
        if k > 1:
            with without_zero_warnings():
                share = found.mixture.predict_proba(x_BD)
            h = int(share.indptr[1])
            if h > 1:
                share_BH = np.sort(share.data.reshape(-1, h), axis=1)
                gap_N[start:stop] = share_BH[:, -1] - share_BH[:, -2]
        tell("looking at the clusters", stop, n)
    return Measured(cosine_N=cosine_N, gap_N=gap_N, sum_KD=sum_KD, count_K=np.bincount(found.cluster_N, minlength=k))


def _add(sum_KD: np.ndarray, cluster_B: np.ndarray, x_BD: np.ndarray) -> None:
    """Add rows to the sums of their clusters: sorted, each cluster's rows are one block."""
    order = np.argsort(cluster_B, kind="stable")
    present, first = np.unique(cluster_B[order], return_index=True)
    sum_KD[present] += np.add.reduceat(x_BD[order].astype(np.float64), first, axis=0)


def chunks(embedding_ND: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The embeddings in float32, a few thousand at a time."""
    for start in range(0, len(embedding_ND), _ROWS_AT_ONCE):
        yield start, np.asarray(embedding_ND[start : start + _ROWS_AT_ONCE], dtype=np.float32)


def members(cluster_N: np.ndarray, n_clusters: int) -> list[np.ndarray]:
    """The rows of each cluster's images, ascending."""
    order = np.argsort(cluster_N, kind="stable")
    return np.split(order, np.cumsum(np.bincount(cluster_N, minlength=n_clusters))[:-1])


def choose(run: OpenRun, measured: Measured, *, seed: int) -> list[Shown]:
    """The images that stand for each cluster."""
    found = run.found
    counts = Counts.of(found.n_clusters)
    random = np.random.default_rng(seed)
    shown: list[Shown] = []
    for rows in members(found.cluster_N, found.n_clusters):
        central = rows[np.argsort(-measured.cosine_N[rows], kind="stable")]
        gap, outlier = measured.gap_N[rows], found.outlier_N[rows]
        boundary = rows[np.argsort(gap, kind="stable")][: min(counts.boundary, int((gap < _LARGEST_GAP).sum()))]
        unusual = int((outlier >= _LEAST_OUTLIER).sum())
        outliers = rows[np.argsort(-outlier, kind="stable")][: min(counts.outliers, unusual)]
        labels, times = np.unique(found.label_N[rows], return_counts=True)
        order = np.argsort(-times, kind="stable")
        label_counts = [(int(labels[i]), int(times[i])) for i in order if labels[i] >= 0]
        shown.append(
            Shown(
                central=central[: counts.central].tolist(),
                boundary=boundary.tolist(),
                outliers=outliers.tolist(),
                sample=random.permutation(rows)[: counts.sample].tolist(),
                by_label=_by_label(central, found.label_N, label_counts, counts.by_label),
                label_counts=label_counts,
            )
        )
    return shown


def _by_label(
    central: np.ndarray, label_N: np.ndarray, label_counts: list[tuple[int, int]], budget: int
) -> list[tuple[int, list[int]]]:
    """The most central images of each of a cluster's commonest labels."""
    wanted = label_counts[: min(MOST_LABELS, budget)]
    if not wanted:
        return []
    each = min(MOST_OF_A_LABEL, budget // len(wanted))
    label = label_N[central]
    return [(code, central[label == code][:each].tolist()) for code, _ in wanted]


class Rows:
    """The table's rows: each image that is named anywhere gets one, in the order in which they are asked for."""

    def __init__(self, n_images: int) -> None:
        self._row_N = np.full(n_images, -1, dtype=np.int64)
        self._image: list[int] = []

    def __len__(self) -> int:
        return len(self._image)

    def of(self, images: Iterable[int]) -> list[int]:
        """The rows of these images."""
        return [self.add(image) for image in images]

    def add(self, image: int) -> int:
        """The row of an image, a new one if it has none yet."""
        row = int(self._row_N[image])
        if row < 0:
            row = len(self._image)
            self._row_N[image] = row
            self._image.append(int(image))
        return row

    def fill(self, most: int, *, seed: int) -> None:
        """Add images, drawn at random, up to so many: the map shows where all of them lie."""
        missing = np.flatnonzero(self._row_N < 0)
        room = max(0, most - len(self))
        drawn = missing if len(missing) <= room else np.random.default_rng(seed).choice(missing, room, replace=False)
        for image in np.sort(drawn).tolist():
            self.add(image)

    @property
    def image_M(self) -> np.ndarray:
        """The image of each row."""
        return np.array(self._image, dtype=np.int64)
