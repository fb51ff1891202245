"""Groups among components: the second nearest of a sample is hard to tell from the nearest, and this joins the two.

Counted over all samples that gives a graph of components, and its communities may be groups.

Legend:  N samples, K components, E edges.
"""

from __future__ import annotations

import math

import numpy as np

from siammm.mixture.graph import Array, communities
from siammm.mixture.shard import Shard

# Neighbours that a component must have on average: the graph of nearest neighbours alone falls apart by itself.
LEAST_NEIGHBOURS = 3.0


def of_components(first_N: Array, second_N: Array, k: int, shard: Shard | None = None) -> Array | None:
    """The group of each of ``k`` components, from the nearest and second nearest of every sample, or None.

    Random graphs have communities too, and the fewer neighbours a component has, the higher their modularity. So it is
    compared with ``chance``. The components must have been merged until they are separate, because the parts of a
    single cluster have groups too.
    """
    low_N, high_N = np.minimum(first_N, second_N), np.maximum(first_N, second_N)
    shard = Shard(len(first_N)) if shard is None else shard
    code_E, count_E = shard.counted((low_N.astype(np.int64) * k + high_N)[low_N != high_N])
    if k < 3 or not len(code_E):
        return None
    low_E, high_E, weight_E = code_E // k, code_E % k, count_E.astype(np.float64)
    label_K, modularity = communities(low_E, high_E, weight_E, k)
    neighbours = _neighbours(low_E, high_E, weight_E, k)
    is_clear = neighbours >= LEAST_NEIGHBOURS and modularity >= chance(neighbours, k)
    return label_K if is_clear and 0 < label_K.max() < k - 1 else None


def chance(neighbours: float, k: int) -> float:
    """The modularity that ``k`` random components stay below, fitted for 20 to 1,500 in 2 to 256 dimensions."""
    return (1.05 + 0.3 * max(0.0, math.log10(k / 30))) * neighbours**-0.36


def _neighbours(low_E: Array, high_E: Array, weight_E: Array, k: int) -> float:
    """How many others a component has as neighbours: exp of the entropy of its edges, averaged by what they weigh."""
    end, weight = np.concatenate([low_E, high_E]), np.concatenate([weight_E, weight_E])
    degree_K = np.bincount(end, weights=weight, minlength=k)
    return math.exp(float(-(weight * np.log(weight / degree_K[end])).sum() / weight.sum()))
