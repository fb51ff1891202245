"""The number of kinds at the elbow of the scatter that two halves of the directions share.

Three ideas, none of which needs a label or a number:

1. **Neighbours are mostly of one kind.** So the covariance of the differences between neighbours is an estimate of the
   covariance *within* kinds, and the space that is whitened by it is nearly that of a linear discriminant
   (``whitened_by_neighbours``). Kinds that were long and thin become round, and k-means that is told their number
   finds them better.
2. **Within a kind, what a sample is like in some directions says nothing about the others; its kind says it for all.**
   So the directions are rotated at random and cut into two halves, and groups that were found in one half (Ward's tree)
   are judged in the other, by how much less the samples scatter within groups there. A single cloud gains nothing,
   however often it is divided, so there is nothing to compare with.
3. **Each kind that is told apart removes as much scatter as the one before; the parts of a kind remove less.** The
   *gain*, minus the logarithm of the scatter that is left within K groups, rises with K as long as kinds are told
   apart, and has an elbow at their number: ``2 gain(K) - gain(K / 2) - gain(2 K)`` is largest there. Kinds of kinds
   have an elbow at each level: those whose sharpness is at least ``_NEARLY`` of the sharpest are ``levels``.

The scatter is averaged over three spaces (``_DIRECTIONS``), because the number of principal directions that hold the
kinds is not known, and over rotations. Figures, and what was tried besides, are in ``docs/decisions/0037`` and
``0041``.

Legend:  N samples, P principal directions, Q half of them, H neighbours, K groups.
"""

from __future__ import annotations

# scikit-learn and scipy have no types.
# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false
from dataclasses import dataclass

import numpy as np
from scipy.cluster.hierarchy import linkage
from sklearn.utils.extmath import randomized_svd

from siammm.mixture.covariance import shrunk_covariance
from siammm.mixture.graph import Array, nearest

_DIRECTIONS = (32, 64, 128)
# Rotations: the fewest and the most, and so many for this number of rows. With 2 of 1,000 rows the number depends on
# the seed (22 to 29 for twenty kinds), with 8 hardly (22 to 25). More rows need fewer, and each takes longer.
_ROTATIONS, _ROWS_OVER_ALL = (3, 8), 8000
_NEIGHBOURS = 10
# The space is whitened so often. Neighbours change each time: a direction in which a kind is long counts less and less.
# A kind that is seven times as long in one direction is found whole with four and more.
_WHITENINGS = 6
_MOST_GROUPS = 500
_LEAST_PER_GROUP = 4
# An elbow counts if it is so sharp, relative to the sharpest; and how far apart two elbows are at least.
_NEARLY, _APART = 0.25, 1.5
# Rows for every principal direction and for every neighbour, so that both can be estimated.
_ROWS_PER_DIRECTION, _ROWS_PER_NEIGHBOUR = 4, 8


@dataclass(frozen=True)
class Elbow:
    """The numbers of groups at which the gain has an elbow, and how much of the scatter is between groups."""

    levels: list[int]
    """From the fewest groups to the most."""
    gain_K: Array
    """Minus the logarithm of the share of the scatter that is left within K = 1, 2, ... groups."""

    def shared(self, n_groups: int) -> float:
        """The share of the scatter in half of the directions that is between groups of the other; 0 by chance."""
        return 1 - float(np.exp(-self.gain_K[n_groups - 1]))


def elbow(x_ND: Array, seed: int = 0) -> Elbow:
    """The numbers of groups that these rows may have, by Euclidean distance."""
    random = np.random.default_rng(seed)
    number_K = np.arange(1, max(2, min(_MOST_GROUPS, len(x_ND) // _LEAST_PER_GROUP)) + 1)
    fewest, most = _ROTATIONS
    rotations = min(max(fewest, _ROWS_OVER_ALL // len(x_ND)), most)
    left: list[Array] = []
    for directions in _DIRECTIONS:
        z_NP = whitened_by_neighbours(principal_scores(x_ND, directions, seed))
        p = z_NP.shape[1]
        for _ in range(rotations if p > 1 else 0):
            turned_NP = z_NP @ np.linalg.qr(random.normal(size=(p, p)))[0]
            halves = turned_NP[:, : p // 2], turned_NP[:, p // 2 :]
            for own_NQ, other_NQ in (halves, halves[::-1]):
                left.append(_scatter(linkage(own_NQ, "ward"), other_NQ)[: len(number_K)])
    if not left:
        return Elbow([], np.zeros(len(number_K)))
    # So many groups leave (N - K) / (N - 1) of the scatter by chance.
    left_K = np.mean(left, axis=0) * (len(x_ND) - 1) / (len(x_ND) - number_K)
    gain_K = -np.log(np.maximum(left_K, 1e-12))
    return Elbow(levels(gain_K), gain_K)


def levels(gain_K: Array) -> list[int]:
    """The numbers where the gain bends more than around them, and not much less than where it bends most."""
    bend = bends(gain_K)
    number = 2 + np.arange(len(bend))
    found: list[int] = []
    for here, much in zip(number.tolist(), bend.tolist(), strict=True):
        near = (number >= here / _APART) & (number <= here * _APART)
        if much == bend[near].max() and much >= _NEARLY * bend.max() > 0:
            found.append(here)
    return found


def bends(gain_K: Array) -> Array:
    """How much more an octave of K before gains than an octave after, at K = 2, 3, ..."""
    number = np.arange(2, max(2, len(gain_K) // 2 + 1))
    log_number = np.log(np.arange(1, len(gain_K) + 1))

    def at(value: Array) -> Array:
        return np.interp(np.log(value), log_number, gain_K)

    return 2 * at(number) - at(number / 2) - at(2.0 * number)


def whitened_by_neighbours(z_NP: Array) -> Array:
    """The rows as directions of unit length, in the space where differences between neighbours are alike in all ways.

    The rows must have a mean of 0.
    """
    count = max(1, min(_NEIGHBOURS, len(z_NP) // _ROWS_PER_NEIGHBOUR))
    for _ in range(_WHITENINGS):
        difference = (z_NP[:, None, :] - z_NP[nearest(z_NP, count)[0]]).reshape(-1, z_NP.shape[1])
        # Shrunk towards a multiple of the identity, because there are few rows for so many directions.
        covariance_PP = shrunk_covariance(difference)
        value_P, vector_PP = np.linalg.eigh(covariance_PP)
        floor = 1e-12 + 1e-6 * float(value_P.mean())
        z_NP = z_NP @ (vector_PP / np.sqrt(np.maximum(value_P, floor)))
        z_NP = z_NP / np.maximum(np.linalg.norm(z_NP, axis=1, keepdims=True), 1e-12)
    return z_NP


def principal_scores(x_ND: Array, directions: int, seed: int) -> Array:
    """The rows less their mean, along at most so many principal directions."""
    n, d = x_ND.shape
    centred_ND = x_ND - x_ND.mean(axis=0)
    count = max(1, min(directions, d, n // _ROWS_PER_DIRECTION))
    return centred_ND @ randomized_svd(centred_ND, count, random_state=seed)[2].T


def _scatter(tree: Array, y_NQ: Array) -> Array:
    """The share of the sum of squares of the rows that is within 1, 2, ... groups of a tree, which others have made."""
    n = len(y_NQ)
    sum_MQ = np.concatenate([y_NQ - y_NQ.mean(axis=0), np.zeros((n - 1, y_NQ.shape[1]))])
    between = [float(row @ row) for row in sum_MQ[:n]]  # of one node: its sum squared over its number of rows
    count = [1] * n
    lost = np.empty(n - 1)
    for join, (left, right) in enumerate(tree[:, :2].astype(np.int64).tolist()):
        row = sum_MQ[left] + sum_MQ[right]
        sum_MQ[n + join] = row
        count.append(count[left] + count[right])
        between.append(float(row @ row) / count[-1])
        lost[join] = between[left] + between[right] - between[-1]
    within = np.cumsum(lost)
    total = float(within[-1])
    return within[::-1] / total if total > 0 else np.ones(n - 1)
