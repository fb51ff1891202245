"""Rules for the number of groups in the space that is whitened by neighbours: what decision 0041 was chosen from.

All work on Ward's trees in the space of ``whitened_by_neighbours``, averaged over the principal directions of
``SPACES``. Some compare with one Gaussian of the same covariance. The others rotate the directions at random, cut them
into two halves, and compare the tree of one half with the other half. Groups are the communities of the neighbour graph
at the number that a rule gives, so that rules differ in the number alone.

Legend:  N samples, P directions, Q half of them, K groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from scipy.cluster.hierarchy import cut_tree, linkage
from scipy.special import gammaln

from siammm.mixture.elbow import bends, elbow, levels, principal_scores, whitened_by_neighbours
from siammm.mixture.graph import Graph, neighbour_graph, so_many_communities
from siammm.mixture.groups import gaussian_twin

Labels = np.ndarray
SPACES = (32, 64, 128)
ROTATIONS = 2
NEIGHBOURS = 15
MOST, LEAST_PER_GROUP = 500, 4


@dataclass(frozen=True)
class Curves:
    """What is known about each number of groups, at the numbers ``tried_T`` or from 1 on (``_K``)."""

    tried_T: np.ndarray
    against_gaussian_K: np.ndarray
    """The logarithm of the scatter within K groups of one Gaussian, less that of the samples."""
    shared_K: np.ndarray
    """Minus the logarithm of the scatter that is left in one half of the directions within groups of the other."""
    information_T: np.ndarray
    """Mutual information of the groups of two halves, less that of permuted ones, in nats."""
    agreement_T: np.ndarray
    """The same, as a share of the groups' entropy (AMI)."""
    error_T: np.ndarray
    """The scatter around the group in one half that the other half predicts (Gabriel's cross-validation)."""


def at_number(rule: Callable[[np.ndarray, int], int], x_ND: np.ndarray, seed: int) -> Labels:
    """Communities of the whitened space at the number that a rule gives."""
    space_NP, graph = whitened_graph(x_ND, seed)
    number = rule(x_ND, seed)
    return so_many_communities(graph, number) if number > 1 else np.zeros(len(space_NP), int)


def whitened_graph(x_ND: np.ndarray, seed: int) -> tuple[np.ndarray, Graph]:
    space_NP = whitened_by_neighbours(principal_scores(x_ND.astype(np.float64), 64, seed))
    return space_NP, neighbour_graph(space_NP, NEIGHBOURS)


def by_curve(pick: Callable[[Curves], int], x_ND: np.ndarray, seed: int) -> int:
    return int(pick(_curves(x_ND.tobytes(), len(x_ND), seed)))


@lru_cache(maxsize=1)  # rules share the curves of a set
def _curves(x: bytes, n: int, seed: int) -> Curves:
    x_ND = np.frombuffer(x, np.float32).reshape(n, -1).astype(np.float64)
    random = np.random.default_rng(seed)
    most = max(2, min(MOST, n // LEAST_PER_GROUP))
    tried_T = np.unique(np.r_[1:17, np.round(2 ** np.arange(4, np.log2(max(17, most)), 0.125))].astype(int))
    tried_T = tried_T[tried_T <= most]
    against: list[np.ndarray] = []
    pairs: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for number, directions in enumerate(SPACES):
        z_NP = principal_scores(x_ND, directions, seed)
        w_NP = whitened_by_neighbours(z_NP)
        twin_NP = whitened_by_neighbours(gaussian_twin(z_NP, seed + number))
        against.append(_log_scatter(twin_NP, most) - _log_scatter(w_NP, most))
        for _ in range(ROTATIONS):
            turned_NP = w_NP @ np.linalg.qr(random.normal(size=(w_NP.shape[1],) * 2))[0]
            half = w_NP.shape[1] // 2
            pairs.append(_of_halves(turned_NP[:, :half], turned_NP[:, half:], tried_T, random))
    information_T, entropy_T, error_T = (np.mean([pair[i] for pair in pairs], axis=0) for i in range(3))
    against_K, shared_K = np.mean(against, axis=0), elbow(x_ND, seed).gain_K
    return Curves(tried_T, against_K, shared_K, information_T, information_T / np.maximum(entropy_T, 1e-9), error_T)


def _log_scatter(z_NP: np.ndarray, most: int) -> np.ndarray:
    """The logarithm of the sum of squares within 1, 2, ... groups of Ward's tree."""
    within_K = np.cumsum(linkage(z_NP, "ward")[:, 2] ** 2 / 2)[::-1]
    return np.log(np.maximum(within_K[:most], 1e-300))


def _of_halves(
    a_NQ: np.ndarray, b_NQ: np.ndarray, tried_T: np.ndarray, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Information, entropy and error of cross-validation at each number."""
    of_a, of_b = (cut_tree(linkage(half, "ward"), n_clusters=tried_T).T for half in (a_NQ, b_NQ))
    rows: list[tuple[float, float, float]] = []
    for own, other in zip(of_a, of_b, strict=True):
        chance = _information(own, random.permutation(other))[0]
        shared, entropy = _information(own, other)
        error = (_error(a_NQ, b_NQ, other) + _error(b_NQ, a_NQ, own)) / 2
        rows.append((shared - chance, entropy - chance, error))
    shared_T, entropy_T, error_T = np.array(rows).T
    return shared_T, entropy_T, error_T


def _information(own: Labels, other: Labels) -> tuple[float, float]:
    """Mutual information, and the mean of the two entropies."""
    table = np.zeros((own.max() + 1, other.max() + 1))
    np.add.at(table, (own, other), 1 / len(own))

    def entropy(share: np.ndarray) -> float:
        share = share[share > 0]
        return float(-(share * np.log(share)).sum())

    single = entropy(table.sum(axis=0)), entropy(table.sum(axis=1))
    return sum(single) - entropy(table.ravel()), sum(single) / 2


def _error(own_NQ: np.ndarray, other_NQ: np.ndarray, label_N: Labels) -> float:
    """How far a row's other half is from the mean of the group whose own half it is nearest to, without itself."""
    count_K = np.bincount(label_N)
    centre_KQ, mean_KQ = (
        np.stack([np.bincount(label_N, column) for column in rows.T], axis=1) / count_K[:, None]
        for rows in (own_NQ, other_NQ)
    )
    row, without = np.arange(len(label_N)), (count_K / np.maximum(count_K - 1, 1))[label_N] ** 2
    distance_NK = (own_NQ**2).sum(axis=1)[:, None] - 2 * own_NQ @ centre_KQ.T + (centre_KQ**2).sum(axis=1)
    distance_NK[row, label_N] *= np.where(count_K[label_N] > 1, without, np.inf)
    predicted = distance_NK.argmin(axis=1) if len(count_K) > 1 else label_N
    error_N = ((other_NQ - mean_KQ[predicted]) ** 2).sum(axis=1)
    return float((error_N * np.where(predicted == label_N, without, 1)).sum())


def sharpest(tried: np.ndarray, *curves: np.ndarray) -> int:
    """Where the curves bend most together, each relative to its own sharpest bend."""
    number = np.arange(1, tried[-1] + 1)
    bent = [bends(np.interp(np.log(number), np.log(tried), curve)) for curve in curves]
    if not len(bent[0]):
        return 1
    return 2 + int(np.argmax(sum(bend / max(float(bend.max()), 1e-12) for bend in bent)))


def by_description(x_ND: np.ndarray, seed: int) -> int:
    """The fewest nats that describe the graph and its groups: a stochastic block model that knows the degrees."""
    graph = whitened_graph(x_ND, seed)[1]
    n, edges = len(x_ND), len(graph.weight_E)
    degree_N = np.bincount(graph.low_E, minlength=n) + np.bincount(graph.high_E, minlength=n)
    best, least = 1, np.inf
    for count in sorted({int(k) for k in np.round(2 ** np.arange(0, np.log2(min(MOST, n // 4)), 0.5))}):
        label_N = so_many_communities(graph, count) if count > 1 else np.zeros(n, int)
        size_K = np.bincount(label_N)
        k = len(size_K)
        between_KK = np.zeros((k, k))
        np.add.at(between_KK, (label_N[graph.low_E], label_N[graph.high_E]), 1)
        between_KK += between_KK.T
        degree_K = np.bincount(label_N, degree_N, k)
        share_KK = between_KK / np.maximum(degree_K[:, None] * degree_K, 1)
        links = -0.5 * float((between_KK * np.log(np.where(between_KK > 0, share_KK, 1))).sum())
        pairs = k * (k + 1) / 2
        tables = gammaln(pairs + edges) - gammaln(pairs) - gammaln(edges + 1)
        labels = gammaln(n + 1) - gammaln(size_K + 1).sum() + np.log(n) + gammaln(n) - gammaln(k) - gammaln(n - k + 1)
        total = links + float(tables + labels)
        if total < least:
            best, least = k, total
    return best


CURVES: dict[str, Callable[[Curves], int]] = {
    "elbow against one Gaussian": lambda c: 2 + int(np.argmax(bends(c.against_gaussian_K))),
    "gap to one Gaussian": lambda c: 1 + int(np.argmax(c.against_gaussian_K)),
    "elbow of shared scatter": lambda c: 2 + int(np.argmax(bends(c.shared_K))),
    "its finest elbow": lambda c: max(levels(c.shared_K), default=1),
    "elbow of shared information": lambda c: sharpest(c.tried_T, c.information_T),
    "both elbows": lambda c: sharpest(c.tried_T, c.shared_K[c.tried_T - 1], c.information_T),
    "halves agree": lambda c: c.tried_T[np.argmax(c.agreement_T)],
    "halves predict": lambda c: c.tried_T[np.argmin(c.error_T)],
}
NUMBERS = {name: partial(by_curve, pick) for name, pick in CURVES.items()} | {"block model": by_description}
RULES: dict[str, Callable[[np.ndarray, int], Labels]] = {
    f"whitened, {name}": partial(at_number, rule) for name, rule in NUMBERS.items()
}
