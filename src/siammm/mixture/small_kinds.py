"""The number of kinds where each has few samples, so that the scatter has no elbow.

With about a dozen samples of a kind, Ward's tree mixes neighbouring kinds, and the scatter goes on falling beyond their
number. Pairs of samples still tell: in the space that is whitened by the differences between neighbours, the cosine of
two samples of one kind is around .3, whichever set they are from, and that of two kinds around 0. So groups are joined
as long as their samples have a mean cosine of at least ``_COSINE`` (average linkage), which does not depend on how many
samples a kind has.

Stray samples stay alone and make many small groups, so these are not counted but weighed: the *effective number* of
groups is the exponential of the entropy of their shares. Figures, and what was tried besides, are in
``docs/decisions/0055``.

Legend:  N samples, D dimensions, P principal directions.
"""

from __future__ import annotations

# scipy has no types.
# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false
import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from siammm.mixture.elbow import principal_scores, whitened_by_neighbours
from siammm.mixture.graph import Array

_DIRECTIONS = 128
_COSINE = 0.15


def effective_number(x_ND: Array, seed: int = 0) -> int:
    """How many groups of alike samples there are, by their shares."""
    direction_NP = whitened_by_neighbours(principal_scores(x_ND, _DIRECTIONS, seed))
    distance_NN = np.maximum(1 - direction_NP @ direction_NP.T, 0)
    np.fill_diagonal(distance_NN, 0)
    tree = linkage(squareform(distance_NN, checks=False), "average")
    size = np.bincount(fcluster(tree, 1 - _COSINE, "distance"))[1:]
    share = size / size.sum()
    return round(float(np.exp(-(share * np.log(share)).sum())))
