"""Probes: how good the features and clusters are by labels, measured during training and without effect on it.

kNN accuracy, and a linear probe where there is a labelled set beside labelled training images; ten times by default.

Legend:  N images, S some of them, Q images of the other set, D dimensions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from siammm.core import ranks
from siammm.core.errors import InputError
from siammm.data.loader import Loader
from siammm.data.sources import open_source
from siammm.data.view_settings import ViewSettings
from siammm.learn.build import open_images
from siammm.learn.clustering import Clustering
from siammm.learn.encode import encode
from siammm.learn.networks import SiameseNetwork
from siammm.metrics.clustering import clustering_scores
from siammm.metrics.knn import knn_accuracy
from siammm.metrics.linear import linear_accuracy
from siammm.mixture.samples import Samples
from siammm.settings.training import TrainConfig

# Of a labelled training set, at most so many images are compared with each other, which grows with their square, and
# at most so many train a linear probe.
_MOST = 50_000
# A linear probe chooses its penalty on parts of the training images, which need some of each class.
_FEWEST_OF_A_CLASS = 5


class Probes:
    """When to measure, and on what: a labelled set of its own, or the labels that the training images have."""

    def __init__(self, config: TrainConfig, loader: Loader, view: ViewSettings, device: torch.device) -> None:
        self.config, self.loader, self.device = config, loader, device
        # Opened now, and not at the first measurement, hours from here.
        self._own_set = None if config.run.probe is None else _opened(config, view, device)

    def is_due(self, epoch: int) -> bool:
        """Whether to measure after so many epochs."""
        epochs = self.config.optimisation.epochs
        every = self.config.run.probe_every or max(1, epochs // 10)
        labelled = self._own_set is not None or self.loader.labels is not None
        return labelled and (epoch % every == 0 or epoch == epochs)

    def measured(
        self, network: SiameseNetwork, clustering: Clustering, samples: Callable[[], Samples], *, autocast: bool = False
    ) -> dict[str, float]:
        """Accuracies of the backbone's features, scores of the clusters of ``samples``, and seconds it took.

        ``autocast`` computes the features in bf16, as training does.
        """
        started = time.monotonic()
        found = dict(self._accuracies(network, autocast))
        if self.loader.labels is not None and clustering.components is not None:
            clusters = ranks.all_gather_rows(clustering.nearest(samples()), self.device).cpu().numpy()
            scores = clustering_scores(self.loader.labels, clusters)
            found |= {"ami": scores.ami, "majority_accuracy": scores.majority_accuracy}
        return found | {"probe_seconds": time.monotonic() - started}

    def close(self) -> None:
        """Stop the worker processes."""
        if self._own_set is not None:
            self._own_set.close()

    def _accuracies(self, network: SiameseNetwork, autocast: bool) -> Iterator[tuple[str, float]]:
        own, beside = self.loader.labels, self._own_set

        def features(loader: Loader) -> Tensor:
            return encode(network, loader, "features", autocast=autocast)

        if own is None:
            assert beside is not None
            query_QD, labels = features(beside), _labels(beside)
            yield "knn", knn_accuracy(query_QD, labels, query_QD, labels, leave_one_out=True, k=_voters(labels))
            return
        features_ND = features(self.loader)
        some = np.unique(np.linspace(0, len(own) - 1, min(len(own), _MOST)).round().astype(np.int64))
        some_SD = features_ND[torch.from_numpy(some).to(self.device)]
        if beside is None:
            labels = own[some]
            yield "knn", knn_accuracy(some_SD, labels, some_SD, labels, leave_one_out=True, k=_voters(labels))
            return
        query_QD, labels = features(beside), _labels(beside)
        codes = _codes_like(self.loader, beside)
        yield "knn", knn_accuracy(query_QD, labels, features_ND, codes, k=_voters(codes))
        counts = np.unique(codes[some], return_counts=True)[1]
        if len(counts) > 1 and counts.min() >= _FEWEST_OF_A_CLASS:
            yield "linear", linear_accuracy(some_SD, codes[some], query_QD, labels)


def _labels(loader: Loader) -> np.ndarray:
    assert loader.labels is not None
    return loader.labels


def _opened(config: TrainConfig, view: ViewSettings, device: torch.device) -> Loader:
    """The labelled set, read as the training images are."""
    reading = config.reading
    assert config.run.probe is not None
    source = open_source(
        config.run.probe,
        image_key=reading.image_key,
        label_key=reading.label_key or None,  # "" reads no labels for training, but a probe is there for its own
        max_pixels=reading.max_pixels,
    )
    if source.labels is None:
        raise InputError(f"The probe {source.name} has no labels, but kNN accuracy needs them; leave it out.")
    return open_images(config, source, (view, view), device, seed=0)


def _voters(labels_N: np.ndarray) -> int:
    """Neighbours that vote: 200, but no more than half of an average class, or the others outvote it."""
    return max(1, min(200, len(labels_N) // (2 * len(np.unique(labels_N)))))


def _codes_like(bank: Loader, probe: Loader) -> np.ndarray:
    """The labels of the training images in the numbers of the probe's labels, by name where both have names."""
    labels = bank.labels
    ours: Sequence[str] | None = bank.source.label_names
    theirs: Sequence[str] | None = probe.source.label_names
    assert labels is not None
    if ours is None or theirs is None or list(ours) == list(theirs):
        return labels
    number = {name: code for code, name in enumerate(theirs)}
    # A class that the probe lacks gets a number of its own: it may be predicted, and is then wrong.
    codes = np.array([number.setdefault(name, len(number)) for name in ours])
    return codes[labels]
