"""How well clusters agree with labels.

Two accuracies are always given together, because papers use both under one name: Hungarian matching gives every class
at most one cluster; the majority vote gives every cluster its commonest class, and reaches 1 with as many clusters as
samples. AMI and ARI correct for chance and can be compared between different numbers of clusters; NMI cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse
from scipy.sparse.csgraph import min_weight_full_bipartite_matching
from scipy.special import gammaln
from scipy.stats import entropy
from sklearn.metrics import adjusted_rand_score, mutual_info_score, normalized_mutual_info_score

from siammm.core.errors import InputError
from siammm.metrics.labels import label_codes


@dataclass(frozen=True, kw_only=True)
class ClusteringScores:
    """Agreement of a clustering with labels; 1 is perfect everywhere."""

    ami: float
    """Mutual information, adjusted for chance: 0 for a random clustering with any number of clusters."""
    nmi: float
    """Mutual information over the mean of the two entropies; it grows with the number of clusters."""
    ari: float
    """Rand index, adjusted for chance: pairs of samples on which clusters and labels agree."""
    hungarian_accuracy: float
    """Share of samples that are right when clusters and classes are matched one to one, in the best way."""
    majority_accuracy: float
    """Share of samples that are right when every cluster predicts its commonest class."""
    n_classes: int
    """Different labels among the scored samples."""
    n_clusters: int
    """Clusters that have a scored sample."""
    n_samples: int
    """Samples that were scored."""
    n_unlabelled: int
    """Samples left out because their label is missing."""


def clustering_scores(
    labels_true: Sequence[Any] | np.ndarray, labels_pred: Sequence[int] | np.ndarray
) -> ClusteringScores:
    """Compare clusters with labels, which may be numbers or strings.

    A sample whose label is None, NaN or an empty string is left out and counted. Any other value is a class, -1 too.
    """
    table = _Table.of(labels_true, labels_pred)
    counts_CK, n = table.counts_CK, len(table.true)
    n_classes, n_clusters = _shape(counts_CK)
    return ClusteringScores(
        ami=_adjusted_mutual_information(counts_CK),
        nmi=float(normalized_mutual_info_score(table.true, table.pred)),
        ari=float(adjusted_rand_score(table.true, table.pred)),
        hungarian_accuracy=_largest_matching(counts_CK) / n,
        majority_accuracy=float(counts_CK.max(axis=0).toarray().sum() / n),
        n_classes=n_classes, n_clusters=n_clusters, n_samples=n, n_unlabelled=table.n_unlabelled,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Purities:
    """Purity of each class and of each cluster."""

    classes: list[Any]
    """The labels, in the order of the two lists below."""
    class_purity: list[float]
    """Of the samples of each class, the share in clusters where theirs is the commonest class."""
    class_size: list[int]
    """Samples of each class."""
    clusters: list[int]
    """The clusters that have a scored sample, in the order of the three lists below."""
    cluster_purity: list[float]
    """Of the samples of each cluster, the share of its commonest class."""
    cluster_size: list[int]
    """Samples of each cluster."""
    cluster_class: list[Any]
    """The commonest class of each cluster; of equally common ones the first in ``classes``."""


def purities(labels_true: Sequence[Any] | np.ndarray, labels_pred: Sequence[int] | np.ndarray) -> Purities:
    """Purity of every class and of every cluster. Weighted by size, the mean of either is the majority accuracy.

    Samples without a label are left out, as in ``clustering_scores``.
    """
    table = _Table.of(labels_true, labels_pred)
    commonest_K = _commonest(table.counts_CK)
    won = commonest_K[table.pred] == table.true
    class_size, cluster_size = np.bincount(table.true), np.bincount(table.pred)
    return Purities(
        classes=table.classes,
        class_purity=(np.bincount(table.true, weights=won) / class_size).tolist(),
        class_size=class_size.tolist(),
        clusters=table.clusters.tolist(),
        cluster_purity=(np.bincount(table.pred, weights=won) / cluster_size).tolist(),
        cluster_size=cluster_size.tolist(),
        cluster_class=[table.classes[c] for c in commonest_K.tolist()],
    )


def mapped_accuracy(
    labels_known: np.ndarray, clusters_known: np.ndarray, labels_new: np.ndarray, clusters_new: np.ndarray
) -> float:
    """The share of new samples that are right when a cluster stands for its commonest class among the known ones.

    Unlike the majority accuracy of the new samples themselves, having many clusters does not make it grow: a cluster
    without a known sample is wrong. Labels are whole numbers from 0, the same in both.
    """
    n_clusters = int(max(clusters_known.max(), clusters_new.max())) + 1
    n_classes = int(max(labels_known.max(), labels_new.max())) + 1
    counts_CK = sparse.coo_array(
        (np.ones(len(labels_known), np.int64), (labels_known, clusters_known)), shape=(n_classes, n_clusters)
    ).tocsr()
    filled_K = np.bincount(clusters_known, minlength=n_clusters) > 0
    stands_for_K = np.where(filled_K, _commonest(counts_CK), -1)
    return float((stands_for_K[clusters_new] == labels_new).mean())


@dataclass(frozen=True)
class _Table:
    """Classes against clusters, without the samples that have no label."""

    true: np.ndarray
    pred: np.ndarray
    classes: list[Any]
    clusters: np.ndarray
    counts_CK: sparse.csr_array
    n_unlabelled: int

    @classmethod
    def of(cls, labels_true: Sequence[Any] | np.ndarray, labels_pred: Sequence[int] | np.ndarray) -> _Table:
        pred = np.asarray(labels_pred)
        true, classes = label_codes(labels_true)
        if true.shape != pred.shape or pred.ndim != 1:
            raise InputError(f"There are {true.shape[0]} labels for {pred.shape[0]} samples; give one label for each.")
        labelled = true >= 0
        n = int(labelled.sum())
        if n == 0:
            raise InputError(f"None of the {pred.shape[0]} samples has a label; leave the labels out or fill them in.")
        clusters, pred = np.unique(pred[labelled], return_inverse=True)
        true = true[labelled]
        counts_CK = sparse.coo_array((np.ones(n, np.int64), (true, pred))).tocsr()
        counts_CK.sum_duplicates()
        return cls(true, pred, classes, clusters, counts_CK, len(labelled) - n)


def _commonest(counts_CK: sparse.csr_array) -> np.ndarray:
    """The class with the most samples in each cluster, the first of equals; never dense."""
    table = sparse.csc_array(counts_CK)
    table.sort_indices()
    columns = np.repeat(np.arange(_shape(counts_CK)[1]), np.diff(table.indptr))
    # Sorted by cluster, then by count, the largest and of these the first class last, so that it is what stays.
    order = np.lexsort((-table.indices, table.data, columns))
    commonest_K = np.zeros(_shape(counts_CK)[1], dtype=np.int64)
    commonest_K[columns[order]] = table.indices[order]
    return commonest_K


def _shape(counts_CK: sparse.csr_array) -> tuple[int, int]:
    """Classes and clusters; scipy's stubs do not know that a matrix has two dimensions."""
    rows, columns = counts_CK.shape  # pyright: ignore
    return int(rows), int(columns)


def _largest_matching(counts_CK: sparse.csr_array) -> int:
    """The most samples that a one-to-one matching of classes and clusters can get right.

    The table of counts is nearly all zeros when clusters are many, so the matching is sparse: 100 k clusters against
    1 k classes would be 800 MB dense. A sparse matching must match every row, so each row gets a column of its own that
    counts nothing; adding one to every entry keeps "nothing" from being read as "no edge", and is taken off at the end.
    """
    n_classes, n_clusters = _shape(counts_CK)
    counts = counts_CK if n_classes <= n_clusters else sparse.csr_array(counts_CK.T)
    edges = counts.astype(np.float64)
    edges.data += 1
    edges = sparse.csr_array(sparse.hstack([edges, sparse.eye_array(min(n_classes, n_clusters))]))
    rows, columns = min_weight_full_bipartite_matching(edges, maximize=True)
    return round(float(edges[rows, columns].sum())) - len(rows)


def _adjusted_mutual_information(counts_CK: sparse.csr_array) -> float:
    """AMI with the arithmetic mean, as ``sklearn.metrics.adjusted_mutual_info_score`` defines it.

    scikit-learn's takes 38 s for 1 M samples in 100 k clusters and 1 k classes, and 7 minutes for 10 k and 10 k, all of
    it in the expectation; this takes about a second.
    """
    if _shape(counts_CK) == (1, 1):
        return 1.0
    class_sizes, cluster_sizes = counts_CK.sum(axis=1), counts_CK.sum(axis=0)
    expected = _expected_mutual_information(class_sizes, cluster_sizes)
    information = float(mutual_info_score(None, None, contingency=sparse.csr_matrix(counts_CK)))
    spread = 0.5 * float(entropy(class_sizes) + entropy(cluster_sizes)) - expected
    # All samples apart, or the like: both differences are zero up to rounding.
    smallest = float(np.finfo(np.float64).eps)
    spread = min(spread, -smallest) if spread < 0 else max(spread, smallest)
    return float((information - expected) / spread)


def _expected_mutual_information(class_sizes: np.ndarray, cluster_sizes: np.ndarray) -> float:
    """Mutual information of two random partitions with these sizes.

    A term depends on the two sizes alone, so equal sizes are counted once: of N samples there are at most sqrt(2 N)
    different sizes, however many clusters there are. How many samples a class of size a and a cluster of size b share
    is hypergeometric; beyond 10 deviations and 50 of its mean the chance is below 1e-20, and is not summed.
    """
    n = int(class_sizes.sum())
    sizes_a, times_a = np.unique(class_sizes, return_counts=True)
    sizes_b, times_b = np.unique(cluster_sizes, return_counts=True)
    if len(sizes_a) > len(sizes_b):
        sizes_a, times_a, sizes_b, times_b = sizes_b, times_b, sizes_a, times_a
    log_factorial = gammaln(np.arange(n + 1) + 1.0)
    total = 0.0
    for a, times in zip(sizes_a.tolist(), times_a.tolist(), strict=True):
        mean = a * sizes_b / n
        reach = 10 * np.sqrt(mean * (1 - a / n)) + 50
        low = np.maximum.reduce([np.ones_like(sizes_b), a + sizes_b - n, np.floor(mean - reach).astype(np.int64)])
        high = np.minimum.reduce([np.full_like(sizes_b, a), sizes_b, np.ceil(mean + reach).astype(np.int64)])
        widths = np.maximum(high - low + 1, 0)
        # One long row of (size of b, shared samples), without a ragged loop.
        which = np.repeat(np.arange(len(sizes_b)), widths)
        shared = low[which] + np.arange(len(which)) - np.repeat(np.cumsum(widths) - widths, widths)
        b = sizes_b[which]
        above = log_factorial[a] + log_factorial[b] + log_factorial[n - a] + log_factorial[n - b]
        below = log_factorial[n] + log_factorial[shared] + log_factorial[a - shared] + log_factorial[b - shared]
        log_chance = above - below - log_factorial[n - a - b + shared]
        terms = np.exp(log_chance) * (shared / n) * np.log(n * shared / (float(a) * b))
        total += times * float(terms @ times_b[which])
    return total
