"""A diagnosis, never a result: the true labels in the place of the clusters.

Where training is worse with clusters than without, either the clusters are bad or the loss is. With the classes
themselves as clusters the first is ruled out: what is then left is the loss. Nothing else may use this, and
``study_table.py`` keeps its cells out of every comparison.

Legend:  N images, K classes, D dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from siammm.learn.clustering import Clustering
from siammm.learn.loop import Training
from siammm.mixture.components import VonMisesFisherComponents
from siammm.mixture.samples import Samples

_ROWS_AT_ONCE = 65_536


class OracleClustering(Clustering):
    """Clusters that are the classes: their directions and concentrations move with the encoder, nothing else does."""

    def give_labels(self, label_N: Tensor) -> None:
        """Say which class each image has, from 0 to K - 1."""
        self.label_N = label_N.to(self.index_NH.device, torch.int64)

    def expectation_and_maximisation(self, samples: Samples) -> float:
        """The M step of the classes; there is no E step, as each image stays in its class."""
        k, device = self.n_start, samples.device
        sum_KD = torch.zeros(k, samples.n_columns, dtype=samples.dtype, device=device)
        for start, x_ND in samples.chunks(_ROWS_AT_ONCE):
            sum_KD.index_add_(0, self.label_N[start : start + len(x_ND)], x_ND.to(samples.dtype))
        count_K = torch.bincount(self.label_N, minlength=k).to(samples.parameter_device, torch.float64)
        mean_KD = sum_KD.to(count_K) / count_K.clamp_min(1)[:, None]
        started = VonMisesFisherComponents.started(mean_KD, self._concentration_settings(samples))
        self.components = started.estimated(count_K, mean_KD)
        index_NH = self.label_N[:, None]
        kappa_K = self._loss_concentrations(samples, self.label_N)
        self.refill(index_NH, torch.ones_like(index_NH, dtype=torch.float32), kappa_K)
        return 0.0

    def merge(self, samples: Samples, within_GD: Tensor | None = None) -> None:
        """Classes stay as many as they are."""


def with_oracle(training: Training, label_N: Tensor) -> None:
    """Put the labels in place of the clusters of a training before it runs; its ``n_neighbours`` must be 1."""
    (plain,) = training.clusterings
    n_classes = int(label_N.max()) + 1
    assert plain.n_start == n_classes, "set n_components to the number of classes"
    assert plain.objective.n_neighbours == 1, "an image has one class"
    oracle = OracleClustering(
        n_classes, len(label_N), plain.mu_KD.shape[1], training.device,
        objective=plain.objective, settings=plain.settings, seed=plain.seed,
    )  # fmt: skip
    oracle.give_labels(label_N)
    if plain.components is not None:  # of a training that goes on
        oracle.restore(plain.as_tensors())
    training.clusterings[0] = training.clustering = oracle
