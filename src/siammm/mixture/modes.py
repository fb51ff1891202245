"""How many modes the density of some rows has, where its scale grows with the number of rows.

The density at a row is that of its k-th nearest neighbour. Two rows are joined as soon as a path of steps leads from
one to the other on which the density is nowhere lower (single linkage of the *mutual reachability* distance, the tree
of HDBSCAN). A join of two parts that both have a dense pair of rows is a valley between two modes. So the number of
modes is one more than the number of such joins.

With few neighbours noise has modes, with many neighbours kinds share one. On embeddings of images the count is near the
number of kinds where k is about a fifth of the rows of a kind, whatever their number. That is not known, so k is set by
the number of rows alone: the count errs, but for other reasons than the elbow of ``elbow.py``.

Legend:  N samples, D dimensions.
"""

from __future__ import annotations

# scipy has no types.
# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false
import math

import numpy as np
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import pdist, squareform

from siammm.mixture.graph import Array

# So many neighbours, times the number of rows to this power; the count is the mean over the three.
_NEIGHBOURS, _POWER = (0.57, 0.7, 0.85), 0.4


def modes(x_ND: Array) -> float:
    """The number of modes by Euclidean distance: the geometric mean over three scales."""
    n = len(x_ND)
    distance_NN = squareform(pdist(x_ND))
    scales = [min(max(1, round(factor * n**_POWER)), n - 1) for factor in _NEIGHBOURS]
    sorted_NN = np.partition(distance_NN, sorted(set(scales)), axis=1)
    return math.exp(float(np.mean([math.log(_modes_at(distance_NN, sorted_NN[:, k])) for k in scales])))


def _modes_at(distance_NN: Array, core_N: Array) -> int:
    """The number of modes, given the distance of each row to its k-th nearest neighbour."""
    reach_NN = np.maximum(distance_NN, np.maximum(core_N[:, None], core_N))
    np.fill_diagonal(reach_NN, 0)
    tree = linkage(squareform(reach_NN, checks=False), "single")
    size = np.concatenate([np.ones(len(core_N)), tree[:, 3]])
    smaller = size[tree[:, :2].astype(np.int64)].min(axis=1)
    return 1 + int(np.count_nonzero(smaller >= 2))
