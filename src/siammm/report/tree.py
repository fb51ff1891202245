"""The tree of clusters: joined up to one, and split down into finer groups, so that it can be cut at any K.

The clusters that training found are one level of it. Above that level, Ward's method joins them by their sizes and
means. Below it, k-means splits each cluster in the final embeddings: the components of earlier epochs are not stored,
and the embeddings have moved since.

Legend:  N images, D dimensions, K clusters, G finest groups (the leaves).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from siammm.core.progress import Progress
from siammm.report.clusters import Measured, Rows, members
from siammm.report.history import starting_clusters
from siammm.report.json_numbers import number
from siammm.report.schema import Tree
from siammm.report.ward import groups_within, ward
from siammm.runs.run import Run

MOST_CLUSTERS = 4096
"""Beyond so many clusters there is no tree: nobody could read it."""
_MOST_LEAVES = 512
_IMAGES_A_LEAF = 5
# Images that stand for all leaves together, and for one at most.
_EXAMPLES, _MOST_EXAMPLES = 2000, 4


@dataclass(frozen=True, kw_only=True)
class _Leaf:
    cluster: int
    count: int
    sum_D: np.ndarray
    labels: Counter[int]
    examples: list[int]


def build_tree(run: Run, measured: Measured, rows: Rows, *, seed: int, tell: Progress) -> Tree | None:
    """The tree, or None for too many clusters; its examples get rows."""
    k = run.n_clusters
    if k > MOST_CLUSTERS:
        return None
    leaves = _leaves(run, measured, n_leaves(starting_clusters(run), run.n_images, k), seed, tell)
    left, right, height = _joins(leaves, run.mean_KD, k)
    return _tree(leaves, left, right, height, k, run, rows)


def n_leaves(n_start: int, n_images: int, n_clusters: int) -> int:
    """The finest groups, at most: as many as training began with, but few enough to be read, and to mean something."""
    return max(n_clusters, min(n_start, _MOST_LEAVES, n_images // _IMAGES_A_LEAF))


def _leaves(run: Run, measured: Measured, most: int, seed: int, tell: Progress) -> list[_Leaf]:
    random = np.random.default_rng(seed)
    examples = max(1, min(_MOST_EXAMPLES, _EXAMPLES // most))
    leaves: list[_Leaf] = []
    rows_of = members(run.cluster_N, run.n_clusters)
    for cluster, (rows, n_groups) in enumerate(zip(rows_of, _allotted(measured, most), strict=True)):
        x_ND = np.asarray(run.embeddings[rows], dtype=np.float32)
        group_N = groups_within(x_ND, int(n_groups), random)
        for group in range(int(group_N.max()) + 1 if len(rows) else 1):
            inside = np.flatnonzero(group_N == group)
            x_GD = x_ND[inside]
            sum_D = x_GD.sum(axis=0, dtype=np.float64)
            central = np.argsort(-(x_GD @ sum_D.astype(np.float32)), kind="stable")[:examples]
            labels = run.label_N[rows[inside]]
            leaves.append(
                _Leaf(
                    cluster=cluster,
                    count=len(inside),
                    sum_D=sum_D,
                    labels=Counter(labels[labels >= 0].tolist()),
                    examples=rows[inside[central]].tolist(),
                )
            )
        tell("splitting the clusters", cluster + 1, len(rows_of))
    return leaves


def _allotted(measured: Measured, most: int) -> np.ndarray:
    """How many groups each cluster is split into: more where its images are more, and less alike."""
    count_K = measured.count_K
    scatter_K = np.maximum(count_K - (measured.sum_KD**2).sum(axis=1) / np.maximum(count_K, 1), 0.0)
    total = float(scatter_K.sum())
    if total <= 0:
        return np.ones(len(count_K), dtype=np.int64)
    more_K = np.floor((most - len(count_K)) * scatter_K / total).astype(np.int64)
    return np.clip(1 + more_K, 1, np.maximum(1, count_K // 2))


def _joins(leaves: list[_Leaf], mean_KD: np.ndarray, k: int) -> tuple[list[int], list[int], list[float]]:
    """All joins, those within clusters first; heights never fall."""
    n = len(leaves)
    within: list[tuple[float, int, int, int, int]] = []  # height, cluster, number there, and its two nodes there
    of_cluster: list[list[int]] = [[] for _ in range(k)]
    for at, leaf in enumerate(leaves):
        of_cluster[leaf.cluster].append(at)
    for cluster, own in enumerate(of_cluster):
        pairs, heights = ward(*_statistics([leaves[at] for at in own]))
        within += [(float(heights[j]), cluster, j, int(pairs[j, 0]), int(pairs[j, 1])) for j in range(len(heights))]
    node: list[list[int]] = [list(own) for own in of_cluster]  # the whole tree's number of each cluster's own nodes
    left: list[int] = []
    right: list[int] = []
    height: list[float] = []
    for value, cluster, _, a, b in sorted(within):
        left.append(node[cluster][a])
        right.append(node[cluster][b])
        height.append(value)
        node[cluster].append(n + len(left) - 1)
    top = [own[-1] for own in node]
    count_K = np.array([sum(leaves[at].count for at in own) for own in of_cluster])
    sum_KD = np.stack([sum((leaves[at].sum_D for at in own), np.zeros(mean_KD.shape[1])) for own in of_cluster])
    # A cluster that no image is in has a direction all the same.
    centre_KD = np.where(count_K[:, None] > 0, sum_KD / np.maximum(count_K, 1)[:, None], mean_KD)
    pairs, heights = ward(np.maximum(count_K, 1), centre_KD)
    for (a, b), value in zip(pairs.tolist(), heights.tolist(), strict=True):
        left.append(top[a])
        right.append(top[b])
        height.append(value)
        top.append(n + len(left) - 1)
    # A large cluster may fall apart at a greater height than that at which two small ones join.
    return left, right, np.maximum.accumulate(height).tolist() if height else []


def _statistics(leaves: list[_Leaf]) -> tuple[np.ndarray, np.ndarray]:
    count_G = np.array([leaf.count for leaf in leaves])
    sum_GD = np.stack([leaf.sum_D for leaf in leaves])
    return count_G, sum_GD / np.maximum(count_G, 1)[:, None]


def _tree(
    leaves: list[_Leaf], left: list[int], right: list[int], height: list[float], k: int, run: Run, rows: Rows
) -> Tree:
    """What the page shows of each node."""
    size, cluster = [leaf.count for leaf in leaves], [leaf.cluster for leaf in leaves]
    labels, sums = [leaf.labels for leaf in leaves], [leaf.sum_D for leaf in leaves]
    examples = [leaf.examples for leaf in leaves]
    most = max((len(own) for own in examples), default=1)
    embedding = {image: np.asarray(run.embeddings[image], dtype=np.float64) for own in examples for image in own}
    for a, b in zip(left, right, strict=True):
        size.append(size[a] + size[b])
        cluster.append(cluster[a] if cluster[a] == cluster[b] else -1)
        labels.append(labels[a] + labels[b])
        sums.append(sums[a] + sums[b])
        candidates = sorted(examples[a] + examples[b], key=lambda image: (-float(embedding[image] @ sums[-1]), image))
        examples.append(candidates[:most])
    # The most common label of each node and its share; -1 where none has one.
    commonest = [max(counts.items(), key=lambda item: (item[1], -item[0]), default=(-1, 0)) for counts in labels]
    shares = [n / counts.total() if n else None for (_, n), counts in zip(commonest, labels, strict=True)]
    return Tree(
        n_leaves=len(leaves),
        n_clusters=k,
        left=left,
        right=right,
        height=[number(value) for value in height],
        size=size,
        cluster=cluster,
        label=[label for label, _ in commonest],
        purity=[None if share is None else number(share, 4) for share in shares],
        examples=[rows.of(own) for own in examples],
    )
