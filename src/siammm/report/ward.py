"""Ward's tree of groups that are known by their sizes and means, and groups within a cluster.

Legend:  G groups, D dimensions, N samples.
"""

from __future__ import annotations

import numpy as np

_STEPS = 15
_SAMPLES_A_GROUP = 64
_ROWS_AT_ONCE = 16_384


def ward(count_G: np.ndarray, mean_GD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Join groups pairwise, each time those whose union adds least to the sum of squares; (G - 1, 2) nodes and heights.

    Node G + i is join i. Heights are scipy's: two groups of one sample each join at their distance. A chain of nearest
    neighbours finds all joins in O(G^2), whatever the data.
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
    """The joins from the lowest to the highest, with the numbers of the nodes that they join.

    A chain finds joins in another order than their height; one never lies below those that it is made of, but for
    rounding, which must not put it before them.
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
    """The group of each row, numbered from 0 without gaps: k-means, from a part of the rows where there are many.

    Fewer groups than asked for come out where rows are alike.
    """
    n = len(x_ND)
    if n_groups < 2 or n < 2:
        return np.zeros(n, dtype=np.int64)
    part = x_ND
    if n > _SAMPLES_A_GROUP * n_groups:
        part = x_ND[random.choice(n, _SAMPLES_A_GROUP * n_groups, replace=False)]
    centre_GD = _seeds(part, n_groups, random)
    for _ in range(_STEPS):
        nearest = _nearest(part, centre_GD)
        count_G = np.bincount(nearest, minlength=len(centre_GD))
        order = np.argsort(nearest, kind="stable")
        filled = np.flatnonzero(count_G)
        sum_GD = np.add.reduceat(part[order], np.cumsum(count_G[filled]) - count_G[filled], axis=0)
        moved = centre_GD[filled]
        centre_GD = sum_GD / count_G[filled, None]
        if len(filled) == len(moved) and np.allclose(moved, centre_GD, atol=1e-4):
            break
    return np.unique(_nearest(x_ND, centre_GD), return_inverse=True)[1]


def _seeds(x_ND: np.ndarray, n_groups: int, random: np.random.Generator) -> np.ndarray:
    """k-means++: each next seed is drawn with a chance that grows with its squared distance from those before.

    A few are drawn at a time, and the one that brings all rows nearest is kept: single draws often fall into one group
    twice.
    """
    tries = 2 + int(np.log(n_groups))
    square_N = (x_ND**2).sum(axis=1)

    def gaps(rows: np.ndarray) -> np.ndarray:
        return np.maximum(square_N - 2 * (x_ND[rows] @ x_ND.T) + square_N[rows, None], 0.0)

    chosen = [int(random.integers(len(x_ND)))]
    gap_N = gaps(np.array(chosen))[0]
    for _ in range(n_groups - 1):
        # Rounding leaves a little between equal rows.
        total = np.cumsum(np.where(gap_N > 1e-6, gap_N, 0.0), dtype=np.float64)
        if total[-1] <= 0:
            break
        drawn = np.searchsorted(total, random.random(tries) * total[-1], side="right").clip(max=len(x_ND) - 1)
        gap_TN = np.minimum(gap_N, gaps(drawn))
        best = int(gap_TN.sum(axis=1).argmin())
        chosen.append(int(drawn[best]))
        gap_N = gap_TN[best]
    return x_ND[chosen]


def _nearest(x_ND: np.ndarray, centre_GD: np.ndarray) -> np.ndarray:
    half_G = 0.5 * (centre_GD**2).sum(axis=1)
    parts = [
        np.argmax(x_ND[start : start + _ROWS_AT_ONCE] @ centre_GD.T - half_G, axis=1)
        for start in range(0, len(x_ND), _ROWS_AT_ONCE)
    ]
    return np.concatenate(parts)
