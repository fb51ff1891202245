"""Spherical k-means on features.

Legend:  N samples, D dimensions.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from siammm.core.errors import InputError, ZeroRowWarning
from siammm.mixture.estimator import VonMisesFisherMixture

MOST_STEPS = 50
# Converged: the mean cosine of samples and their centroids changes by less than this in a step.
_TOLERANCE = 1e-5


def k_means(x_ND: Tensor, n_clusters: int, *, seed: int = 0) -> VonMisesFisherMixture:
    """Spherical k-means of the rows, on their device; the clusters are in ``labels_`` and by ``predict``.

    A von Mises-Fisher mixture in which every sample has one component, and all components have the same concentration
    and weight, is spherical k-means step for step. A cluster that loses all its samples is refilled by splitting a
    large one.
    """
    if not 1 <= n_clusters <= x_ND.shape[0]:
        n = x_ND.shape[0]
        raise InputError(f"k-means was asked for {n_clusters:,} clusters of {n:,} samples; ask for 1 to {n:,}.")
    mixture = VonMisesFisherMixture(
        n_clusters, n_neighbours=1, concentration=1.0, max_iter=MOST_STEPS, tol=_TOLERANCE, random_state=seed
    )
    with without_zero_warnings():
        return mixture.fit(x_ND)


def clusters_of(mixture: VonMisesFisherMixture, x_ND: Tensor) -> np.ndarray:
    """The cluster of each row, on the host."""
    with without_zero_warnings():
        return torch.as_tensor(mixture.predict(x_ND)).cpu().numpy()


@contextlib.contextmanager
def without_zero_warnings() -> Iterator[None]:
    """Without warnings about rows of zeros, which a weak encoder may make of images, or clusters that still move."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", ZeroRowWarning)
        yield
