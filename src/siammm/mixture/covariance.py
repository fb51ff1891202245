"""A covariance that few rows for many directions can estimate: shrunk towards a multiple of the identity.

The shrinkage of Ledoit and Wolf (2004), as ``sklearn.covariance.ledoit_wolf`` has it for rows whose mean is known to be
0. It is asked many times for the number of groups, and takes one product of matrices here in place of three.

Legend:  N rows, P directions.
"""

from __future__ import annotations

import numpy as np

from siammm.mixture.graph import Array


def shrunk_covariance(x_NP: Array) -> Array:
    """The covariance of rows whose mean is 0, (P, P)."""
    n, p = x_NP.shape
    if p == 1:
        return np.array([[float(np.mean(x_NP**2))]])
    covariance_PP = x_NP.T @ x_NP / n
    mean = float(np.trace(covariance_PP)) / p
    square = float((covariance_PP**2).sum())
    # How far the covariance is from the multiple of the identity, and how much of that is chance. The sum of the fourth
    # powers of the lengths is that of all entries of (x * x)' (x * x), without making it.
    distance = square / p - mean**2
    chance = (float(((x_NP**2).sum(axis=1) ** 2).sum()) / n - square) / (n * p)
    shrinkage = 0.0 if chance <= 0 or distance <= 0 else min(chance, distance) / distance
    covariance_PP *= 1 - shrinkage
    covariance_PP.flat[:: p + 1] += shrinkage * mean
    return covariance_PP
