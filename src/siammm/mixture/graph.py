"""The neighbour graph of samples and its communities, which need no centres and no shape of a cluster.

Each sample is linked to its nearest ones. The weights fall from 1 at the nearest to a fixed sum over all, so that each
sample has a scale of its own (as in UMAP), and links are made mutual. Communities are parts with many more links inside
than their degrees let expect: modularity, found by Louvain's method in a fixed order, so that the same graph has the
same communities.

Legend:  N samples, D dimensions, E edges, H neighbours, K nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

# Louvain's sweeps end when no node moves; this limit is far above what was ever seen.
_SWEEPS = 100
# Communities at this resolution become the nodes from which coarser ones are found: the same ones, in a tenth of the
# time.
_FINEST = 12.0
# Within these resolutions a number of communities is looked for, so many times.
_RESOLUTION_RANGE, _HALVINGS = (0.02, 100.0), 20
_ROWS_AT_ONCE = 1000

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Graph:
    """Links between nodes, each given once, without loops. ``degree_K`` also counts what lies within a node."""

    low_E: Array
    high_E: Array
    weight_E: Array
    degree_K: Array

    def communities(self, resolution: float) -> tuple[Array, float]:
        """A label for every node, and the loss: 1 - modularity.

        The loss is the share of links between communities, plus ``resolution`` times the share that chance puts inside.
        """
        k = len(self.degree_K)
        label_K, _ = communities(self.low_E, self.high_E, self.weight_E, k, resolution, self.degree_K)
        return label_K, self.loss(label_K, resolution)

    def loss(self, label_K: Array, resolution: float) -> float:
        """The loss of these communities."""
        between = float(self.weight_E[label_K[self.low_E] != label_K[self.high_E]].sum())
        share = np.bincount(label_K, weights=self.degree_K) / float(self.degree_K.sum())
        return 2 * between / float(self.degree_K.sum()) + resolution * float((share**2).sum())

    def coarse(self, label_K: Array) -> Graph:
        """The graph whose nodes are these communities."""
        n = int(label_K.max()) + 1
        low_E, high_E, weight_E = _joined(label_K[self.low_E], label_K[self.high_E], self.weight_E, n)
        return Graph(low_E, high_E, weight_E, np.bincount(label_K, weights=self.degree_K, minlength=n))


def neighbour_graph(x_ND: Array, n_neighbours: int) -> Graph:
    """The graph of the samples by Euclidean distance, which orders rows of unit length as their angle does."""
    n = len(x_ND)
    index_NH, distance_NH = nearest(x_ND, n_neighbours)
    beyond_NH = distance_NH - distance_NH[:, :1]
    low_N1, high_N1 = np.zeros((n, 1)), np.full((n, 1), 10 * float(distance_NH.max()) + 1e-9)
    for _ in range(40):  # the scale at which the weights sum to log2 of their number
        scale_N1 = np.maximum((low_N1 + high_N1) / 2, 1e-12)
        above = np.exp(-beyond_NH / scale_N1).sum(axis=1, keepdims=True) > np.log2(n_neighbours)
        low_N1, high_N1 = np.where(above, low_N1, scale_N1), np.where(above, scale_N1, high_N1)
    weight = np.exp(-beyond_NH / np.maximum(high_N1, 1e-12)).ravel()
    source, other = np.repeat(np.arange(n), n_neighbours), index_NH.ravel()
    code, place = np.unique(np.minimum(source, other) * n + np.maximum(source, other), return_inverse=True)
    # Of two weights a and b, a + b - ab is 1 - (1 - a) (1 - b), also where b is 0.
    left_E = np.ones(len(code))
    np.multiply.at(left_E, place, 1 - np.minimum(weight, 1 - 1e-9))
    low_E, high_E, weight_E = code // n, code % n, 1 - left_E
    degree_N = np.bincount(low_E, weight_E, minlength=n) + np.bincount(high_E, weight_E, minlength=n)
    return Graph(low_E, high_E, weight_E, degree_N)


def path(graph: Graph, resolutions: Array) -> list[tuple[Array, float]]:
    """The communities of the graph at each resolution, and their loss."""
    fine_N = graph.communities(_FINEST)[0]
    coarse = graph.coarse(fine_N)
    found = [coarse.communities(float(resolution)) for resolution in resolutions]
    return [(label_K[fine_N], loss) for label_K, loss in found]


def so_many_communities(graph: Graph, count: int) -> Array:
    """The communities of the graph at a resolution where there are so many of them, or as nearly as there are.

    Parts without a link between them stay apart, however few are asked for.
    """
    fine_N = graph.communities(max(_FINEST, float(count)))[0]
    coarse = graph.coarse(fine_N)
    low, high = _RESOLUTION_RANGE
    best_K, least = np.arange(len(coarse.degree_K)), math.inf
    for _ in range(_HALVINGS):
        resolution = (low * high) ** 0.5
        label_K = coarse.communities(resolution)[0]
        found = int(label_K.max()) + 1
        if abs(found - count) < least:
            best_K, least = label_K, abs(found - count)
        if found == count:
            break
        low, high = (resolution, high) if found < count else (low, resolution)
    return best_K[fine_N]


def communities(
    low_E: Array, high_E: Array, weight_E: Array, k: int, resolution: float = 1.0, degree_K: Array | None = None
) -> tuple[Array, float]:
    """Louvain's communities of a graph without loops, each edge given once: a label for every node, and modularity.

    A higher ``resolution`` gives more and smaller communities; 1 is modularity as it is usually defined. ``degree_K``
    is what the edges of a node weigh together, for loops that are not among the edges but count.
    """
    label_K = np.arange(k)
    if degree_K is None:
        degree_K = np.bincount(low_E, weight_E, minlength=k) + np.bincount(high_E, weight_E, minlength=k)
    degree, total = degree_K, float(degree_K.sum())
    low, high, weight, n = low_E, high_E, weight_E, k
    while True:
        moved = _moved(low, high, weight, degree, total / resolution)
        names, community = np.unique(moved, return_inverse=True)
        if len(names) == n:
            break
        # Each community becomes a node; what lies within it counts in its degree alone.
        label_K, n = community[label_K], len(names)
        degree = np.bincount(community, weights=degree, minlength=n)
        low, high, weight = _joined(community[low], community[high], weight, n)
    inside = float(weight_E[label_K[low_E] == label_K[high_E]].sum())
    return label_K, 2 * inside / total - resolution * float(((degree / total) ** 2).sum())


def _joined(source_E: Array, other_E: Array, weight_E: Array, n: int) -> tuple[Array, Array, Array]:
    """The edges between different nodes, each pair of nodes once."""
    low, high = np.minimum(source_E, other_E), np.maximum(source_E, other_E)
    between = low != high
    code, place = np.unique((low * n + high)[between], return_inverse=True)
    return code // n, code % n, np.bincount(place, weights=weight_E[between], minlength=len(code))


def _moved(low_E: Array, high_E: Array, weight_E: Array, degree_K: Array, total: float) -> list[int]:
    """The community of every node, after moving each to the one that gains most until none moves."""
    n = len(degree_K)
    source, other = np.concatenate([low_E, high_E]), np.concatenate([high_E, low_E])
    order = np.argsort(source, kind="stable")
    begin: list[int] = np.searchsorted(source[order], np.arange(n + 1)).tolist()
    neighbour: list[int] = other[order].tolist()
    weight: list[float] = np.concatenate([weight_E, weight_E])[order].tolist()
    degree: list[float] = degree_K.tolist()
    community, degree_of = list(range(n)), list(degree)
    for _ in range(_SWEEPS):
        changed = False
        for node in range(n):
            links: dict[int, float] = {}
            for edge in range(begin[node], begin[node + 1]):
                where = community[neighbour[edge]]
                links[where] = links.get(where, 0.0) + weight[edge]
            own, share = community[node], degree[node] / total
            degree_of[own] -= degree[node]
            best, most = own, links.get(own, 0.0) - degree_of[own] * share
            for where, linked in links.items():
                gain = linked - degree_of[where] * share
                if gain > most + 1e-9 * total:
                    best, most = where, gain
            degree_of[best] += degree[node]
            if best != own:
                community[node], changed = best, True
        if not changed:
            break
    return community


def nearest(x_ND: Array, count: int) -> tuple[Array, Array]:
    """The nearest other rows of each row and their distances, nearest first."""
    square_N = (x_ND**2).sum(axis=1)
    index: list[Array] = []
    distance: list[Array] = []
    for start in range(0, len(x_ND), _ROWS_AT_ONCE):
        part = x_ND[start : start + _ROWS_AT_ONCE]
        squared = square_N - 2 * (part @ x_ND.T)  # less the row's own square, which changes no order
        squared[np.arange(len(part)), start + np.arange(len(part))] = np.inf
        value, found = torch.as_tensor(squared).topk(count, dim=1, largest=False)
        index.append(found.numpy())
        distance.append(np.sqrt(np.clip(value.numpy() + square_N[start : start + len(part), None], 0, None)))
    return np.concatenate(index), np.concatenate(distance).astype(np.float64)
