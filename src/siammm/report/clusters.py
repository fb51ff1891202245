"""The clusters and groups as the page shows them: what they are, and the images that stand for each.

Legend:  N images, D dimensions, K clusters, M rows of the page's table of images.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from siammm.core.errors import StoredFileError
from siammm.core.progress import Progress
from siammm.metrics.kmeans import without_zero_warnings
from siammm.report import history
from siammm.report.catch_alls import Mixing
from siammm.report.json_numbers import number
from siammm.report.schema import Cluster, Group
from siammm.runs.run import Run

MOST_ROWS = 20_000
"""Images on a page, at most; a map of more is a blur, and the page would be slow."""
# Images of a label in a cluster, and labels of a cluster, at most.
_MOST_OF_A_LABEL, _MOST_LABELS = 12, 12
# Images that stand for a group, at most.
_MOST_OF_A_GROUP = 24
_ROWS_AT_ONCE = 32_768
_NEAREST = 8
# A border is where the shares of the first and the second cluster differ by less than this: 0.75 and 0.25.
_LARGEST_GAP = 0.5
# An outlier is among the fifth of all images that the mixture finds least likely.
_LEAST_OUTLIER = 0.8


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One pass over the embeddings."""

    cosine_N: np.ndarray
    """With the mean direction of its cluster."""
    gap_N: np.ndarray
    """Between the shares of the likeliest and the second cluster; 1 where there is no second."""
    sum_KD: np.ndarray
    """The sum of each cluster's embeddings."""
    sum_GD: np.ndarray
    """The sum of each group's embeddings."""
    count_K: np.ndarray


def measure(run: Run, tell: Progress) -> Measured:
    """Measure every image and every cluster."""
    k, n = run.n_clusters, run.n_images
    mean_KD = run.mean_KD.astype(np.float32)
    cosine_N, gap_N = np.zeros(n, np.float32), np.ones(n, np.float32)
    sum_KD, sum_GD = np.zeros((k, mean_KD.shape[1])), np.zeros((run.n_groups, mean_KD.shape[1]))
    run.mixture.set_params(device=str(run.device))
    for start, x_BD in chunks(run.embeddings):
        stop = start + len(x_BD)
        if not np.isfinite(x_BD).all():
            raise StoredFileError(f"The embeddings of {run.given} hold NaN or infinity; make the run again.")
        cluster_B = run.cluster_N[start:stop]
        cosine_N[start:stop] = np.einsum("bd,bd->b", x_BD, mean_KD[cluster_B])
        _add_sums(sum_KD, x_BD, cluster_B)
        _add_sums(sum_GD, x_BD, run.group_N[start:stop])
        if k > 1:
            with without_zero_warnings():
                share = run.mixture.predict_proba(x_BD)
            h = int(share.indptr[1])
            if h > 1:
                share_BH = np.sort(share.data.reshape(-1, h), axis=1)
                gap_N[start:stop] = share_BH[:, -1] - share_BH[:, -2]
        tell("looking at the clusters", stop, n)
    count_K = np.bincount(run.cluster_N, minlength=k)
    return Measured(cosine_N=cosine_N, gap_N=gap_N, sum_KD=sum_KD, sum_GD=sum_GD, count_K=count_K)


def _add_sums(sum_PD: np.ndarray, x_BD: np.ndarray, part_B: np.ndarray) -> None:
    """Add these rows to the sums of their parts."""
    # Sorted by part, the rows of each are one block.
    order = np.argsort(part_B, kind="stable")
    present, first = np.unique(part_B[order], return_index=True)
    sum_PD[present] += np.add.reduceat(x_BD[order].astype(np.float64), first, axis=0)


def chunks(embedding_ND: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The embeddings in float32, a few thousand at a time."""
    for start in range(0, len(embedding_ND), _ROWS_AT_ONCE):
        yield start, np.asarray(embedding_ND[start : start + _ROWS_AT_ONCE], dtype=np.float32)


def members(cluster_N: np.ndarray, n_clusters: int) -> list[np.ndarray]:
    """The positions of each cluster's images, ascending."""
    order = np.argsort(cluster_N, kind="stable")
    return np.split(order, np.cumsum(np.bincount(cluster_N, minlength=n_clusters))[:-1])


class Rows:
    """The rows of the page's table: each image that is shown anywhere gets one, when it is first asked for."""

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
        """Add random images up to this number of rows: the map shows where all of them lie."""
        missing = np.flatnonzero(self._row_N < 0)
        room = max(0, most - len(self))
        drawn = missing if len(missing) <= room else np.random.default_rng(seed).choice(missing, room, replace=False)
        self.of(np.sort(drawn).tolist())

    @property
    def image_M(self) -> np.ndarray:
        """The image of each row."""
        return np.array(self._image, dtype=np.int64)


def n_examples(n_clusters: int) -> dict[str, int]:
    """Images of each kind per cluster, so that all clusters stay below ``MOST_ROWS``, with room for the tree."""

    def share(of_all: int, most: int) -> int:
        return min(most, of_all // max(1, n_clusters))

    return {
        "central": max(1, share(5000, 24)),
        "boundary": share(2000, 12),
        "outliers": share(2000, 12),
        "sample": share(3000, 24),
        "by_label": share(4000, 96),  # of all its labels together
    }


def build_clusters(run: Run, measured: Measured, mixing: Mixing, rows: Rows, *, seed: int) -> list[Cluster]:
    """All clusters with their images, which get rows."""
    most = n_examples(run.n_clusters)
    random = np.random.default_rng(seed)
    merged = history.merges_of_clusters(run)
    nearest = _nearest_clusters(run.mean_KD)
    sum_K = np.bincount(run.cluster_N, weights=measured.cosine_N, minlength=run.n_clusters)
    cohesion_K = np.clip(sum_K / np.maximum(measured.count_K, 1), -1.0, 1.0)
    inside_K = members(run.cluster_N, run.n_clusters)
    in_group_K = np.bincount(run.cluster_N[run.group_N == run.group_K[run.cluster_N]], minlength=run.n_clusters)
    ordered_K = [inside[np.argsort(-measured.cosine_N[inside], kind="stable")] for inside in inside_K]
    # The central images of all clusters come first: the page holds their thumbnails itself before any others.
    central = [rows.of(inside[: most["central"]].tolist()) for inside in ordered_K]
    clusters: list[Cluster] = []
    for k, inside in enumerate(inside_K):
        gap, outlier = measured.gap_N[inside], run.outlier_N[inside]
        n_boundary = min(most["boundary"], int((gap < _LARGEST_GAP).sum()))
        n_outliers = min(most["outliers"], int((outlier >= _LEAST_OUTLIER).sum()))
        label_counts = _label_counts(run.label_N[inside])
        label, purity = _majority(label_counts)
        clusters.append(
            Cluster(
                group=int(run.group_K[k]),
                n_in_group=int(in_group_K[k]),
                size=int(measured.count_K[k]),
                weight=number(run.mixture.weights_[k]),
                concentration=number(run.mixture.concentrations_[k]),
                cohesion=number(cohesion_K[k], 4),
                foreign=_share(mixing.foreign_P[k]),
                is_catch_all=bool(mixing.is_catch_all_P[k]),
                label=label,
                purity=purity,
                label_counts=label_counts,
                central=central[k],
                boundary=rows.of(inside[np.argsort(gap, kind="stable")][:n_boundary].tolist()),
                outliers=rows.of(inside[np.argsort(-outlier, kind="stable")][:n_outliers].tolist()),
                sample=rows.of(random.permutation(inside)[: most["sample"]].tolist()),
                by_label=[
                    (label, rows.of(images))
                    for label, images in _by_label(ordered_K[k], run.label_N, label_counts, most["by_label"])
                ],
                nearest=nearest[k],
                n_merged=merged[k][0],
                merges=merged[k][1],
            )
        )
    return clusters


def central_of_groups(run: Run, measured: Measured, rows: Rows) -> list[list[int]]:
    """The images that stand for each group, which get rows: the first of all, for the page shows them first."""
    most = min(_MOST_OF_A_GROUP, n_examples(run.n_groups)["central"])
    inside_G = members(run.group_N, run.n_groups)
    return [
        rows.of(_in_turn(inside, run.cluster_N, measured.cosine_N, run.group_K == g)[:most].tolist())
        for g, inside in enumerate(inside_G)
    ]


def build_groups(
    run: Run, clusters: list[Cluster], mixing: Mixing, names: list[str], central_G: list[list[int]]
) -> list[Group]:
    """All groups, of their own images."""
    own_G: list[list[int]] = [[] for _ in names]
    for k in sorted(range(len(clusters)), key=lambda k: -clusters[k]["size"]):
        own_G[clusters[k]["group"]].append(k)
    groups: list[Group] = []
    inside_G = members(run.group_N, run.n_groups)
    for g, (name, inside, own, central) in enumerate(zip(names, inside_G, own_G, central_G, strict=True)):
        label_counts = _label_counts(run.label_N[inside])
        label, purity = _majority(label_counts)
        groups.append(
            Group(
                name=name,
                size=len(inside),
                clusters=own,
                n_in_clusters=sum(clusters[k]["n_in_group"] for k in own),
                concentration=number(mixing.concentration_P[g]),
                foreign=_share(mixing.foreign_P[g]),
                is_catch_all=bool(mixing.is_catch_all_P[g]),
                central=central,
                label=label,
                purity=purity,
                label_counts=label_counts,
            )
        )
    return groups


def _share(value: float) -> float | None:
    return None if np.isnan(value) else number(value, 4)


def _in_turn(inside: np.ndarray, cluster_N: np.ndarray, cosine_N: np.ndarray, is_own_K: np.ndarray) -> np.ndarray:
    """These images: the most central one of each cluster, then the next of each, those of the largest parts first.

    So a few of them look like all of a group. Those in clusters of other groups come last: they are at its border.
    """
    ordered = inside[np.lexsort((-cosine_N[inside], cluster_N[inside]))]
    _, first, part, count = np.unique(cluster_N[ordered], return_index=True, return_inverse=True, return_counts=True)
    turn = np.arange(len(ordered)) - first[part]
    return ordered[np.lexsort((cluster_N[ordered], -count[part], turn, ~is_own_K[cluster_N[ordered]]))]


def _label_counts(label_N: np.ndarray) -> list[tuple[int, int]]:
    """Labels and how many images have each, most frequent first."""
    labels, times = np.unique(label_N, return_counts=True)
    order = np.argsort(-times, kind="stable")
    return [(int(labels[i]), int(times[i])) for i in order if labels[i] >= 0]


def _majority(label_counts: list[tuple[int, int]]) -> tuple[int, float | None]:
    """The first label and its share; (-1, None) if there are none."""
    if not label_counts:
        return -1, None
    return label_counts[0][0], number(label_counts[0][1] / sum(count for _, count in label_counts), 4)


def _by_label(
    central: np.ndarray, label_N: np.ndarray, label_counts: list[tuple[int, int]], most: int
) -> list[tuple[int, list[int]]]:
    """The most central images of each of a cluster's most common labels."""
    wanted = label_counts[: min(_MOST_LABELS, most)]
    each = min(_MOST_OF_A_LABEL, most // max(1, len(wanted)))
    label = label_N[central]
    return [(code, central[label == code][:each].tolist()) for code, _ in wanted]


def _nearest_clusters(mean_KD: np.ndarray) -> list[list[tuple[int, float]]]:
    """For each cluster the others whose mean directions are nearest, and their cosines."""
    k = len(mean_KD)
    nearest: list[list[tuple[int, float]]] = []
    for start in range(0, k, 1024):
        cosine_BK = mean_KD[start : start + 1024] @ mean_KD.T
        own = np.arange(len(cosine_BK))
        cosine_BK[own, start + own] = -np.inf
        order_BH = np.argsort(-cosine_BK, axis=1, kind="stable")[:, : min(_NEAREST, k - 1)]
        value_BH = np.clip(np.take_along_axis(cosine_BK, order_BH, axis=1), -1.0, 1.0)
        nearest += [
            [(int(other), number(value, 4)) for other, value in zip(others, values, strict=True)]
            for others, values in zip(order_BH, value_BH, strict=True)
        ]
    return nearest
