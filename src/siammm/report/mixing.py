"""How mixed a cluster is with others, by the nearest neighbours of its samples.

Legend:  N samples, D dimensions, K clusters, H neighbours, R rows of a block.
"""

from __future__ import annotations

import numpy as np

_ROWS_AT_ONCE = 1024
# Clusters with fewer samples have too few neighbours of their own to judge.
_LEAST = 5


def foreign_neighbours(
    embedding_ND: np.ndarray, cluster_N: np.ndarray, n_clusters: int, *, n_neighbours: int = 10
) -> np.ndarray:
    """The share of its samples' nearest neighbours that are in other clusters, for each cluster; NaN for small ones.

    ``embedding_ND`` has unit rows. A cluster of few samples is asked for no more neighbours than it has itself.
    """
    count_K = np.bincount(cluster_N, minlength=n_clusters)
    foreign_K, asked_K = np.zeros(n_clusters), np.zeros(n_clusters)
    h = min(n_neighbours, len(embedding_ND) - 1)
    if h < 1:
        return np.full(n_clusters, np.nan)
    most_N = np.minimum(h, count_K - 1)[cluster_N]
    for start in range(0, len(embedding_ND), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        cosine_RN = embedding_ND[rows] @ embedding_ND.T
        own = np.arange(len(cosine_RN))
        cosine_RN[own, start + own] = -np.inf
        top_RH = np.argpartition(-cosine_RN, h - 1, axis=1)[:, :h]
        order_RH = np.argsort(-np.take_along_axis(cosine_RN, top_RH, axis=1), axis=1, kind="stable")
        near_RH = cluster_N[np.take_along_axis(top_RH, order_RH, axis=1)]
        is_asked = np.arange(h) < most_N[rows, None]
        is_foreign = is_asked & (near_RH != cluster_N[rows, None])
        np.add.at(foreign_K, cluster_N[rows], is_foreign.sum(axis=1))
        np.add.at(asked_K, cluster_N[rows], is_asked.sum(axis=1))
    return np.where(count_K >= _LEAST, foreign_K / np.maximum(asked_K, 1), np.nan)
