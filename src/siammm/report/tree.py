"""The tree of clusters: joined up to one, and split down into finer parts, so that it can be cut at any K.

The clusters that were found are one level of it. Ward's method joins those that have most of their images in one group,
by their sizes and means, and then what this makes of each group. Below the clusters, k-means splits each of them in the
final embeddings: the components of earlier epochs are not stored, and the embeddings have moved since.

Legend:  N images, D dimensions, K clusters, L finest parts (the leaves).
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
    joins = _joins(leaves, run.mean_KD, run.group_K)
    return _tree(leaves, joins, run, rows)


def n_leaves(n_start: int, n_images: int, n_clusters: int) -> int:
    """The finest parts, at most: as many as training began with, but few enough to be read, and to mean something."""
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
    """How many parts each cluster is split into: more where its images are more, and less alike."""
    count_K = measured.count_K
    scatter_K = np.maximum(count_K - (measured.sum_KD**2).sum(axis=1) / np.maximum(count_K, 1), 0.0)
    total = float(scatter_K.sum())
    if total <= 0:
        return np.ones(len(count_K), dtype=np.int64)
    more_K = np.floor((most - len(count_K)) * scatter_K / total).astype(np.int64)
    return np.clip(1 + more_K, 1, np.maximum(1, count_K // 2))


class _Joins:
    """All joins, those within clusters first, then those within groups; heights never fall."""

    def __init__(self, n_leaves: int) -> None:
        self._n = n_leaves
        self.left: list[int] = []
        self.right: list[int] = []
        self.height: list[float] = []

    def add(self, sets: list[tuple[list[int], np.ndarray, np.ndarray]]) -> list[int]:
        """Join each set of nodes, given with their sizes and means, to one, and lower joins of all before higher ones.

        Returns the node that each set became.
        """
        pending: list[tuple[float, int, int, int, int]] = []  # height, set, number there, and its two nodes there
        for at, (_, count_G, mean_GD) in enumerate(sets):
            pairs, heights = ward(count_G, mean_GD)
            pending += [(float(heights[j]), at, j, int(pairs[j, 0]), int(pairs[j, 1])) for j in range(len(heights))]
        nodes = [list(own) for own, _, _ in sets]  # the whole tree's number of each set's own nodes
        for value, at, _, a, b in sorted(pending):
            self.left.append(nodes[at][a])
            self.right.append(nodes[at][b])
            # A large set may fall apart at a greater height than that at which two small ones join.
            self.height.append(max(value, self.height[-1]) if self.height else value)
            nodes[at].append(self._n + len(self.left) - 1)
        return [own[-1] for own in nodes]


def _joins(leaves: list[_Leaf], mean_KD: np.ndarray, group_K: np.ndarray) -> _Joins:
    joins = _Joins(len(leaves))
    count_L = np.array([leaf.count for leaf in leaves])
    sum_LD = np.stack([leaf.sum_D for leaf in leaves])
    of_cluster = members(np.array([leaf.cluster for leaf in leaves]), len(mean_KD))
    mean_LD = sum_LD / np.maximum(count_L, 1)[:, None]
    top_K = np.array(joins.add([(own.tolist(), count_L[own], mean_LD[own]) for own in of_cluster]))
    count_K = np.array([count_L[own].sum() for own in of_cluster])
    sum_KD = np.stack([sum_LD[own].sum(axis=0) for own in of_cluster])
    # A cluster that no image is in has a direction all the same.
    sum_KD[count_K == 0] = mean_KD[count_K == 0]
    count_K = np.maximum(count_K, 1)
    group_K = np.unique(group_K, return_inverse=True)[1]  # a group may have no cluster
    of_group = members(group_K, int(group_K.max()) + 1)
    mean_KD = sum_KD / count_K[:, None]
    top_G = joins.add([(top_K[own].tolist(), count_K[own], mean_KD[own]) for own in of_group])
    count_G = np.array([count_K[own].sum() for own in of_group])
    mean_GD = np.stack([sum_KD[own].sum(axis=0) for own in of_group]) / count_G[:, None]
    joins.add([(top_G, count_G, mean_GD)])
    return joins


def _tree(leaves: list[_Leaf], joins: _Joins, run: Run, rows: Rows) -> Tree:
    """What the page shows of each node."""
    size, cluster = [leaf.count for leaf in leaves], [leaf.cluster for leaf in leaves]
    group = run.group_K[cluster].tolist()
    labels, sums = [leaf.labels for leaf in leaves], [leaf.sum_D for leaf in leaves]
    examples = [leaf.examples for leaf in leaves]
    most = max((len(own) for own in examples), default=1)
    embedding = {image: np.asarray(run.embeddings[image], dtype=np.float64) for own in examples for image in own}
    for a, b in zip(joins.left, joins.right, strict=True):
        size.append(size[a] + size[b])
        cluster.append(cluster[a] if cluster[a] == cluster[b] else -1)
        group.append(group[a] if group[a] == group[b] else -1)
        labels.append(labels[a] + labels[b])
        sums.append(sums[a] + sums[b])
        candidates = sorted(examples[a] + examples[b], key=lambda image: (-float(embedding[image] @ sums[-1]), image))
        examples.append(candidates[:most])
    # The most common label of each node and its share; -1 where none has one.
    commonest = [max(counts.items(), key=lambda item: (item[1], -item[0]), default=(-1, 0)) for counts in labels]
    shares = [n / counts.total() if n else None for (_, n), counts in zip(commonest, labels, strict=True)]
    return Tree(
        n_leaves=len(leaves),
        n_clusters=run.n_clusters,
        n_groups=len(np.unique(run.group_K)),
        left=joins.left,
        right=joins.right,
        height=[number(value) for value in joins.height],
        size=size,
        cluster=cluster,
        group=group,
        label=[label for label, _ in commonest],
        purity=[None if share is None else number(share, 4) for share in shares],
        examples=[rows.of(own) for own in examples],
    )
