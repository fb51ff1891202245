"""How mixed a cluster is with others, by the nearest neighbours of its samples.

Legend:  N samples, D dimensions, K clusters, H neighbours, R rows of a block.
"""

from __future__ import annotations

import numpy as np

_ROWS_AT_ONCE = 1024
# Clusters with fewer samples have too few neighbours of their own to judge.
_LEAST = 5


def nearest_samples(embedding_ND: np.ndarray, *, n_neighbours: int = 10) -> np.ndarray:
    """The other samples nearest to each, nearest first, (N, H). ``embedding_ND`` has unit rows."""
    h = max(0, min(n_neighbours, len(embedding_ND) - 1))
    near_NH = np.empty((len(embedding_ND), h), dtype=np.int64)
    for start in range(0, len(embedding_ND) if h else 0, _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        cosine_RN = embedding_ND[rows] @ embedding_ND.T
        own = np.arange(len(cosine_RN))
        cosine_RN[own, start + own] = -np.inf
        top_RH = np.argpartition(-cosine_RN, h - 1, axis=1)[:, :h]
        order_RH = np.argsort(-np.take_along_axis(cosine_RN, top_RH, axis=1), axis=1, kind="stable")
        near_NH[rows] = np.take_along_axis(top_RH, order_RH, axis=1)
    return near_NH


def foreign_neighbours(near_NH: np.ndarray, cluster_N: np.ndarray, n_clusters: int) -> np.ndarray:
    """The share of its samples' nearest neighbours that are in other clusters, for each cluster; NaN for small ones.

    A cluster of few samples is asked for no more neighbours than it has itself.
    """
    count_K = np.bincount(cluster_N, minlength=n_clusters)
    h = near_NH.shape[1]
    if h < 1:
        return np.full(n_clusters, np.nan)
    is_asked_NH = np.arange(h) < np.minimum(h, count_K - 1)[cluster_N][:, None]
    is_foreign_NH = is_asked_NH & (cluster_N[near_NH] != cluster_N[:, None])
    asked_K, foreign_K = (
        np.bincount(cluster_N, weights=which_NH.sum(axis=1), minlength=n_clusters)
        for which_NH in (is_asked_NH, is_foreign_NH)
    )
    return np.where(count_K >= _LEAST, foreign_K / np.maximum(asked_K, 1), np.nan)
