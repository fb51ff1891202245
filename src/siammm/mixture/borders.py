"""Borders between groups: a linear discriminant, and how far its scores may be believed.

One Gaussian per group, all with the same covariance, gives each group a linear score. Asked about the very rows that it
was made from, such a rule is far too certain. Two things mend that (``docs/decisions/0053``):

- Rows are scored by a discriminant of *other* rows (five parts, each scored by the rest).
- What counts as right is not the rule's own answer but the community that a row came from, which the rule did not
  choose: the neighbour graph and the discriminant are two opinions of the same row, and where they differ the border is
  not sure.

One factor for all scores makes the communities most likely. It changes no row's group, only how certain it is, and is
part of the scores from then on.

Legend:  N samples, P principal directions, C communities, G groups.
"""

from __future__ import annotations

# scikit-learn and scipy have no types.
# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false
import numpy as np
from scipy.optimize import minimize_scalar

from siammm.mixture.covariance import shrunk_covariance
from siammm.mixture.graph import Array

_PARTS = 5
# The factor is looked for between exp of these, where 1 makes the middle score differ from its rival by 1.
_LOG_FACTORS = (-12.0, 6.0)


def discriminant(z_NP: Array, label_N: Array) -> tuple[Array, Array]:
    """Log density of each group, as a linear function, with the same covariance for all."""
    mean_GP, whitening_PP, share_G = within(z_NP, label_N)
    weight_GP = mean_GP @ whitening_PP @ whitening_PP.T
    return weight_GP, np.log(share_G) - 0.5 * (weight_GP * mean_GP).sum(axis=1)


def calibrated(z_NP: Array, label_N: Array, community_N: Array, seed: int) -> tuple[Array, Array]:
    """The discriminant of these groups, no more certain than it is about rows that it was not made from.

    ``community_N`` are the groups that these borders began with.
    """
    weight_GP, offset_G = discriminant(z_NP, label_N)
    # Each community is the group that most of it went to: one whose rows all went elsewhere is none any more.
    table_CG = np.zeros((int(community_N.max()) + 1, len(offset_G)), dtype=np.int64)
    np.add.at(table_CG, (community_N, label_N), 1)
    factor = best_factor(scores_by_others(z_NP, label_N, seed), table_CG.argmax(axis=1)[community_N])
    return factor * weight_GP, factor * offset_G


def assigned(z_NP: Array, label_N: Array) -> Array:
    """The group of each row by the discriminant of these groups, numbered without gaps."""
    weight_GP, offset_G = discriminant(z_NP, label_N)
    return np.unique((z_NP @ weight_GP.T + offset_G).argmax(axis=1), return_inverse=True)[1]


def within(z_NP: Array, label_N: Array) -> tuple[Array, Array, Array]:
    """The means of the groups, a matrix that whitens the covariance within them, and their shares of the rows."""
    count_G = np.bincount(label_N)
    sum_GP = np.zeros((len(count_G), z_NP.shape[1]))
    np.add.at(sum_GP, label_N, z_NP)
    mean_GP = sum_GP / count_G[:, None]
    # Shrunk towards a multiple of the identity, because there are few rows for so many directions.
    covariance_PP = shrunk_covariance(z_NP - mean_GP[label_N])
    value_P, vector_PP = np.linalg.eigh(covariance_PP)
    floor = 1e-9 + 1e-6 * float(value_P.mean())
    return mean_GP, vector_PP / np.sqrt(np.maximum(value_P, floor)), count_G / len(label_N)


def scores_by_others(z_NP: Array, label_N: Array, seed: int) -> Array:
    """The scores of each row by a discriminant that did not see it, (N, G); -inf for a group without other rows."""
    count_G = np.bincount(label_N)
    # Each group is dealt out to the parts in turn, so that two rows of it are never in the same.
    drawn = np.random.default_rng(seed).permutation(len(label_N))
    drawn = drawn[np.argsort(label_N[drawn], kind="stable")]
    part_N = np.empty(len(label_N), dtype=np.int64)
    part_N[drawn] = (np.arange(len(label_N)) - np.repeat(np.cumsum(count_G) - count_G, count_G)) % _PARTS
    score_NG = np.full((len(label_N), len(count_G)), -np.inf)
    for part in range(_PARTS):
        rows, others = np.flatnonzero(part_N == part), np.flatnonzero(part_N != part)
        if len(rows) and len(others):
            present, label_M = np.unique(label_N[others], return_inverse=True)
            weight_GP, offset_G = discriminant(z_NP[others], label_M)
            score_NG[np.ix_(rows, present)] = z_NP[rows] @ weight_GP.T + offset_G
    return score_NG


def best_factor(score_NG: Array, right_N: Array) -> float:
    """By what the scores are multiplied so that these groups are most likely.

    As if one row more had been seen, whose group is its second choice: where no row is wrong, that is not known better.
    """
    own_N = score_NG[np.arange(len(right_N)), right_N]
    rivals_NG = score_NG.copy()
    rivals_NG[np.arange(len(right_N)), right_N] = -np.inf
    rival_N = rivals_NG.max(axis=1)
    known = np.isfinite(own_N) & np.isfinite(rival_N)
    n, scale = int(known.sum()), float(np.median(np.abs(own_N - rival_N)[known])) if known.any() else 0.0
    if not 0 < scale < np.inf:
        return 1.0
    own_N, rival_N = own_N[known] / scale, rival_N[known] / scale
    below_NG = score_NG[known] / scale
    highest_N = np.maximum(own_N, rival_N)
    below_NG -= highest_N[:, None]
    target_N = own_N - (own_N - rival_N) / (n + 2) - highest_N

    def loss(log_factor: float) -> float:
        factor = np.exp(log_factor)
        return float((np.log(np.exp(factor * below_NG).sum(axis=1)) - factor * target_N).mean())

    best = minimize_scalar(loss, bounds=_LOG_FACTORS, method="bounded")
    return float(np.exp(best.x)) / scale
