"""Clusters and groups that hold what was left over, rather than images of one kind.

Legend:  N images, S of them drawn, D dimensions, K clusters, G groups, P parts: clusters or groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from siammm.mixture.vmf import concentration_mle
from siammm.report.mixing import foreign_neighbours, nearest_samples
from siammm.runs.run import Run

# A catch-all has more than this share of neighbours in other parts, and a concentration lower than usual by at least
# this on a logarithmic scale (a tenth). Fewer parts have no usual concentration.
_MIXED, _LEAST_SPREAD, _LEAST_PARTS = 0.4, 0.1, 3
# Images among which neighbours are looked for.
_MOST_FOR_NEIGHBOURS = 5000


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """How widely the images of each part are spread, and how mixed they are with those of others."""

    concentration_P: np.ndarray
    foreign_P: np.ndarray
    """The share of neighbours in other parts; NaN where it is not known."""
    is_catch_all_P: np.ndarray
    """Whether the concentration is unusually low among the parts, and much of the neighbourhood in others."""


def mixing(run: Run, sum_GD: np.ndarray, *, seed: int) -> tuple[Mixing, Mixing]:
    """Of the clusters and of the groups; ``sum_GD`` is the sum of the unit embeddings of each group."""
    drawn = np.sort(np.random.default_rng(seed).permutation(run.n_images)[:_MOST_FOR_NEIGHBOURS])
    near_SH = nearest_samples(np.asarray(run.embeddings[drawn], dtype=np.float32))
    of_clusters = _mixing(near_SH, run.cluster_N[drawn], np.asarray(run.mixture.concentrations_, dtype=float))
    if not run.is_grouped:
        return of_clusters, of_clusters
    length_G = np.linalg.norm(sum_GD, axis=1) / np.maximum(np.bincount(run.group_N, minlength=run.n_groups), 1)
    concentration_G = concentration_mle(torch.from_numpy(length_G), sum_GD.shape[1]).numpy()
    return of_clusters, _mixing(near_SH, run.group_N[drawn], concentration_G)


def _mixing(near_SH: np.ndarray, part_S: np.ndarray, concentration_P: np.ndarray) -> Mixing:
    foreign_P = foreign_neighbours(near_SH, part_S, len(concentration_P))
    spread_P = -np.log(np.maximum(concentration_P, 1e-9))
    middle = float(np.median(spread_P))
    wide = max(_LEAST_SPREAD, 2 * 1.4826 * float(np.median(np.abs(spread_P - middle))))
    is_catch_all_P = (spread_P > middle + wide) & (np.nan_to_num(foreign_P) > _MIXED)
    return Mixing(
        concentration_P=concentration_P,
        foreign_P=foreign_P,
        is_catch_all_P=is_catch_all_P & (len(concentration_P) >= _LEAST_PARTS),
    )
