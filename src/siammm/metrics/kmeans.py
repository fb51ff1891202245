"""k-means on features: clusters for an encoder that brings none, and for comparison with one that does.

Legend:  N samples, D dimensions.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from siammm.core.errors import InputError, ZeroRowWarning
from siammm.mixture.estimator import VonMisesFisherMixture

# Lloyd's steps at most; most runs settle earlier.
MOST_STEPS = 50
# Settled: the mean cosine of samples and their centroids moves by less than this in a step.
SETTLED = 1e-5


def k_means(x_ND: Tensor, n_clusters: int, *, seed: int = 0) -> VonMisesFisherMixture:
    """Spherical k-means of the rows' directions, on their device; ``labels_`` and ``predict`` have the clusters.

    A von Mises-Fisher mixture in which every sample has one component, and all have the same concentration and weight,
    is spherical k-means step for step. So the mixture's engine serves, which is made for tens of thousands of clusters
    of a million samples. A cluster that loses all its samples is filled again by splitting a large one.
    """
    if not 1 <= n_clusters <= x_ND.shape[0]:
        raise InputError(
            f"{n_clusters:,} clusters were asked of k-means for {x_ND.shape[0]:,} samples; ask for 1 to "
            f"{x_ND.shape[0]:,}."
        )
    mixture = VonMisesFisherMixture(
        n_clusters, n_neighbours=1, concentration=1.0, max_iter=MOST_STEPS, tol=SETTLED, random_state=seed
    )
    with without_zero_warnings():
        return mixture.fit(x_ND)


def clusters_of(mixture: VonMisesFisherMixture, x_ND: Tensor) -> np.ndarray:
    """The cluster of each row, on the host."""
    with without_zero_warnings():
        return torch.as_tensor(mixture.predict(x_ND)).cpu().numpy()


@contextlib.contextmanager
def without_zero_warnings() -> Iterator[None]:
    """Features that are all zero are a weak encoder's business, and cost it its score; they need no warning here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ZeroRowWarning)
        yield
