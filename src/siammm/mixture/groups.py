"""Groups of components: a coarser answer to "how many are there?", where there is one.

A class of images may well be ten components. Which of them belong together shows in the *second* nearest component of
each sample, which is hard to tell from the first. Counted over all samples this gives a graph of components, and its
communities are the groups: parts with many more second choices inside than their sizes let expect (modularity; found by
Louvain's method in a fixed order, so the same graph has the same groups).

Random graphs have communities too, and the fewer neighbours a component has, the higher their modularity. So it is
compared with the highest of randomly placed components (``chance``) of the same number and number of neighbours (the
exponential of the entropy of a component's edges, on average). Below that, or with fewer than three neighbours, every
component is its own group. The components must have been merged until they are separate, because the parts of a single
cluster have groups too. The figures are in ``docs/decisions/0027``.

Legend:  N samples, K components, E edges, G groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

# Neighbours that a component must have on average: the graph of nearest neighbours alone falls apart by itself.
LEAST_NEIGHBOURS = 3.0
# Sweeps end when no node moves; this limit is far above what was ever seen.
_SWEEPS = 100

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Groups:
    """The group of every component."""

    label_K: Array
    """Numbered by size, the group with the most samples first; 0 to K - 1 if every component is its own group."""
    modularity: float
    """Of the communities, also where they are rejected; at most 1."""
    neighbours: float
    """How many others a component has as neighbours, on average."""

    @classmethod
    def none(cls, k: int) -> Groups:
        """Each of ``k`` components as its own group, without a search."""
        return cls(np.arange(k), 0.0, 0.0)

    @property
    def n_groups(self) -> int:
        """How many there are."""
        return int(self.label_K.max()) + 1 if len(self.label_K) else 0

    @property
    def is_coarser(self) -> bool:
        """Whether any group has more than one component."""
        return self.n_groups < len(self.label_K)


def chance(neighbours: float, k: int) -> float:
    """The modularity that ``k`` random components stay below, fitted for 20 to 1,500 in 2 to 256 dimensions."""
    return (1.05 + 0.3 * max(0.0, math.log10(k / 30))) * neighbours**-0.36


def found(first_N: Array, second_N: Array, k: int) -> Groups:
    """The groups of ``k`` components, from the nearest and second nearest component of every sample."""
    size_K = np.bincount(first_N, minlength=k)
    low_N, high_N = np.minimum(first_N, second_N), np.maximum(first_N, second_N)
    code_E, count_E = np.unique((low_N.astype(np.int64) * k + high_N)[low_N != high_N], return_counts=True)
    if k < 3 or not len(code_E):
        return Groups.none(k)
    low_E, high_E, weight_E = code_E // k, code_E % k, count_E.astype(np.float64)
    label_K, modularity = communities(low_E, high_E, weight_E, k)
    neighbours = _neighbours(low_E, high_E, weight_E, k)
    if neighbours < LEAST_NEIGHBOURS or modularity < chance(neighbours, k):
        return Groups(np.arange(k), modularity, neighbours)
    total_G = np.bincount(label_K, weights=size_K)
    rank_G = np.empty(len(total_G), dtype=np.int64)
    rank_G[np.argsort(-total_G, kind="stable")] = np.arange(len(total_G))
    return Groups(rank_G[label_K], modularity, neighbours)


def _neighbours(low_E: Array, high_E: Array, weight_E: Array, k: int) -> float:
    """exp of the entropy of a component's edges, averaged by what they weigh."""
    end, weight = np.concatenate([low_E, high_E]), np.concatenate([weight_E, weight_E])
    degree_K = np.bincount(end, weights=weight, minlength=k)
    return math.exp(float(-(weight * np.log(weight / degree_K[end])).sum() / weight.sum()))


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
        low, high = community[low], community[high]
        low, high = np.minimum(low, high), np.maximum(low, high)
        code, place = np.unique((low * n + high)[low != high], return_inverse=True)
        weight = np.bincount(place, weights=weight[low != high], minlength=len(code))
        low, high = code // n, code % n
    inside = float(weight_E[label_K[low_E] == label_K[high_E]].sum())
    return label_K, 2 * inside / total - resolution * float(((degree / total) ** 2).sum())


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
