"""How many groups there are: the elbow of the scatter within them, where neighbours are the measure of what is near.

Two ideas, neither of which needs a label or a number:

1. **Neighbours are mostly of one kind.** So the covariance of the differences between neighbours is an estimate of the
   covariance *within* kinds, and the space that is whitened by it is nearly that of a linear discriminant
   (``whitened_by_neighbours``). Kinds that were long and thin become round, and k-means that is told their number
   finds them better.
2. **Each kind that is told apart removes as much scatter as the one before; the parts of a kind remove less.** The
   scatter within K groups is that of Ward's tree. Its logarithm is compared with that of one Gaussian of the same mean
   and covariance, which went through the same whitening. The difference, the *gain*, rises with K as long as kinds are
   told apart, and has an elbow at their number: ``2 gain(K) - gain(K / 2) - gain(2 K)`` is largest there.

The gain is averaged over three spaces (``_DIRECTIONS``), because the number of principal directions that hold the kinds
is not known. Figures, and what was tried besides, are in ``docs/decisions/0037``.

Legend:  N samples, P principal directions, H neighbours, K groups.
"""

from __future__ import annotations

# scikit-learn and scipy have no types.
# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false
from dataclasses import dataclass

import numpy as np
from scipy.cluster.hierarchy import linkage
from sklearn.covariance import ledoit_wolf
from sklearn.utils.extmath import randomized_svd

from siammm.mixture.graph import Array, nearest

_DIRECTIONS = (32, 64, 128)
_NEIGHBOURS = 10
# The space is whitened so often. Neighbours change each time: a direction in which a kind is long counts less and less.
# A kind that is seven times as long in one direction is found whole with four and more.
_WHITENINGS = 6
_MOST_GROUPS = 400
_LEAST_PER_GROUP = 4
# Rows for every principal direction and for every neighbour, so that both can be estimated.
_ROWS_PER_DIRECTION, _ROWS_PER_NEIGHBOUR = 4, 8


@dataclass(frozen=True)
class Elbow:
    """The number of groups at the elbow, and how sharp it is."""

    n_groups: int
    sharpness: float
    gain_K: Array
    """How much less scatter K = 1, 2, ... groups leave than those of one Gaussian do, as a difference of logarithms."""


def elbow(x_ND: Array, seed: int = 0) -> Elbow:
    """The number of groups of these rows, by Euclidean distance."""
    gains: list[Array] = []
    for number, directions in enumerate(_DIRECTIONS):
        z_NP = principal_scores(x_ND, directions, seed)
        gains.append(_log_scatter(gaussian_twin(z_NP, seed + number)) - _log_scatter(z_NP))
    gain_K = np.mean(gains, axis=0)
    gain_K = gain_K - gain_K[0]
    return Elbow(*sharpest(gain_K), gain_K)


def sharpest(gain_K: Array) -> tuple[int, float]:
    """The number where the gain bends most: an octave of K before against an octave after; and by how much it bends."""
    most = len(gain_K) // 2
    if most < 2:
        return 1, 0.0
    number = np.arange(2, most + 1)
    log_number = np.log(np.arange(1, len(gain_K) + 1))

    def at(value: Array) -> Array:
        return np.interp(np.log(value), log_number, gain_K)

    bend = 2 * at(number) - at(number / 2) - at(2.0 * number)
    best = int(np.argmax(bend))
    return int(number[best]), float(bend[best])


def whitened_by_neighbours(z_NP: Array) -> Array:
    """The rows as directions of unit length, in the space where differences between neighbours are alike in all ways.

    The rows must have a mean of 0.
    """
    count = max(1, min(_NEIGHBOURS, len(z_NP) // _ROWS_PER_NEIGHBOUR))
    for _ in range(_WHITENINGS):
        difference = (z_NP[:, None, :] - z_NP[nearest(z_NP, count)[0]]).reshape(-1, z_NP.shape[1])
        # Shrunk towards a multiple of the identity, because there are few rows for so many directions.
        covariance_PP = ledoit_wolf(difference, assume_centered=True)[0]
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


def gaussian_twin(x_ND: Array, seed: int) -> Array:
    """As many rows from one Gaussian of the same mean and covariance: no groups, but the same shape."""
    n, mean_D = len(x_ND), x_ND.mean(axis=0)
    weight_NN = np.random.default_rng(seed).standard_normal((n, n), dtype=np.float32) / np.sqrt(n)
    return weight_NN @ (x_ND - mean_D) + mean_D


def _log_scatter(z_NP: Array) -> Array:
    """The logarithm of the sum of squares within 1, 2, ... groups of Ward's tree, in the whitened space."""
    tree = linkage(whitened_by_neighbours(z_NP), "ward")
    within_K = np.cumsum(tree[:, 2] ** 2 / 2)[::-1]  # from one group to as many as there are joins
    most = max(2, min(_MOST_GROUPS, len(z_NP) // _LEAST_PER_GROUP))
    return np.log(np.maximum(within_K[:most], 1e-300))
