"""Ward's tree of groups given by their sizes and means, and k-means groups within a cluster.

Legend:  G groups, D dimensions, N samples.
"""

from __future__ import annotations

import warnings

import numpy as np
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning

_STEPS = 15
_SAMPLES_PER_GROUP = 64


def ward(count_G: np.ndarray, mean_GD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ward's method: join the two groups whose union adds least to the sum of squares. Nodes (G - 1, 2), and heights.

    Node G + i is join i. Heights are scipy's: two groups of one sample each join at their distance. scipy's linkage
    takes no sizes, hence this one. A chain of nearest neighbours finds all joins in O(G^2).
    """
    g = len(count_G)
    size = np.maximum(np.asarray(count_G, dtype=np.float64), 1e-9)
    square_G = (mean_GD**2).sum(axis=1)
    gap_GG = np.maximum(square_G[:, None] + square_G - 2 * mean_GD @ mean_GD.T, 0.0)
    gap_GG *= 2 * size[:, None] * size / (size[:, None] + size)
    np.fill_diagonal(gap_GG, np.inf)
    active = np.ones(g, dtype=bool)
    joins: list[tuple[float, int, int]] = []
    chain: list[int] = []
    while len(joins) < g - 1:
        if not chain:
            chain.append(int(np.argmax(active)))
        last = chain[-1]
        nearest = int(np.argmin(gap_GG[last]))
        if len(chain) < 2 or gap_GG[last, chain[-2]] > gap_GG[last, nearest]:
            chain.append(nearest)
            continue
        # Each is the other's nearest: they join, and the earlier one stands for both.
        other = chain[-2]
        del chain[-2:]
        gap = float(gap_GG[last, other])
        joins.append((gap, other, last))
        total = size[last] + size[other] + size
        row = ((size[last] + size) * gap_GG[last] + (size[other] + size) * gap_GG[other] - size * gap) / total
        active[last] = False
        row[~active] = np.inf
        row[other] = np.inf
        size[other] += size[last]
        gap_GG[other], gap_GG[:, other] = row, row
        gap_GG[last], gap_GG[:, last] = np.inf, np.inf
    return _numbered(joins, g)


def _numbered(joins: list[tuple[float, int, int]], g: int) -> tuple[np.ndarray, np.ndarray]:
    """The joins in the order of their height, with the numbers of the nodes that they join.

    A chain finds joins in another order. Rounding must not put a join before those that it is made of.
    """
    node = list(range(g))  # of the group that stands for a union
    height_of = [0.0] * g
    raised: list[float] = []
    for gap, kept, absorbed in joins:
        height_of[kept] = max(gap, height_of[kept], height_of[absorbed])
        raised.append(height_of[kept])
    pair_J2, height_J = np.zeros((len(joins), 2), dtype=np.int64), np.zeros(len(joins))
    for number, j in enumerate(sorted(range(len(joins)), key=lambda j: (raised[j], j))):
        _, kept, absorbed = joins[j]
        pair_J2[number] = node[kept], node[absorbed]
        height_J[number] = np.sqrt(max(raised[j], 0.0))
        node[kept] = g + number
    return pair_J2, height_J


def groups_within(x_ND: np.ndarray, n_groups: int, random: np.random.Generator) -> np.ndarray:
    """The group of each row, numbered from 0 without gaps: k-means, fitted on a sample where there are many rows.

    There are fewer groups than asked for where rows are equal.
    """
    n = len(x_ND)
    if n_groups < 2 or n < 2:
        return np.zeros(n, dtype=np.int64)
    sample_ND = x_ND
    if n > _SAMPLES_PER_GROUP * n_groups:
        sample_ND = x_ND[random.choice(n, _SAMPLES_PER_GROUP * n_groups, replace=False)]
    seed = int(random.integers(2**31))
    n_clusters = min(n_groups, len(sample_ND))
    model = KMeans(n_clusters, n_init=1, max_iter=_STEPS, random_state=seed)  # pyright: ignore[reportArgumentType]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # of fewer distinct rows than groups
        model.fit(sample_ND)
    return np.unique(model.predict(x_ND), return_inverse=True)[1]
