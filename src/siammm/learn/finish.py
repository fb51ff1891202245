"""The end of a run: the mixture settled on the final embeddings, and everything that the run leaves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from siammm.core import ranks
from siammm.data.view_settings import ViewSettings
from siammm.learn.networks import SiameseNetwork
from siammm.metrics.outliers import outlier_score
from siammm.mixture.estimator import VonMisesFisherMixture
from siammm.mixture.group_rule import Groups, of_these_components
from siammm.mixture.groups import found as find_groups
from siammm.mixture.numbering import number_by_size
from siammm.settings.training import TrainConfig

if TYPE_CHECKING:
    from siammm.learn.loop import Training


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Everything that a run leaves. What describes clusters is None for a run without them."""

    network: SiameseNetwork
    config: TrainConfig
    clean_view: ViewSettings
    """How an image is read without augmentation."""
    ids: list[str]
    """The images, in the order of all rows below."""
    label_values: np.ndarray | list[str] | None
    """Their labels, by name where the labels have names; None if the images have no labels."""
    embeddings: np.ndarray
    """Embeddings of the images without augmentation, of unit length."""
    mixture: VonMisesFisherMixture | None = None
    clusters: np.ndarray | None = None
    """The cluster of each image."""
    probability: np.ndarray | None = None
    """Its share in that cluster."""
    outlier_score: np.ndarray | None = None
    group_labels: np.ndarray | None = None
    """The group of each image."""
    group_probability: np.ndarray | None = None
    """How probable that group is."""
    merge_nodes: list[int] | None = None
    """The node of each cluster in the tree of merges."""
    metrics: list[dict[str, Any]]
    """What was measured, one row per epoch."""

    @property
    def groups(self) -> Groups | None:
        """How many kinds of images there are; the clusters, where no other groups were found."""
        return None if self.mixture is None else self.mixture.groups_


def finish(training: Training) -> Trained:
    """Settle the mixture on the embeddings of the images without augmentation."""
    loader, clustering = training.loader, training.clustering
    embedding_ND = training.clean_embeddings()

    def of_all(rows: Tensor) -> np.ndarray:
        return ranks.all_gather_rows(rows.to(training.device), training.device).cpu().numpy()

    labels, names = loader.labels, loader.source.label_names
    trained = Trained(
        network=training.network,
        config=training.config,
        clean_view=training.clean_view,
        ids=loader.identifiers(),
        label_values=labels if labels is None or names is None else [names[code] for code in labels],
        embeddings=of_all(embedding_ND),
        metrics=training.metrics,
    )
    if clustering.components is None:
        return trained
    groups = None if training.grouping is None else training.grouping.finish(training.joined(embedding_ND))
    mixture = clustering.finish(training.joined(embedding_ND), embedding_ND, training.group_directions)
    order = number_by_size(
        mixture, np.bincount(of_all(torch.as_tensor(mixture.labels_)), minlength=mixture.n_components_)
    )
    # Of components that coincide, the first has the images: so that ``predict`` agrees, in the order that it sees.
    mixture.labels_, share_N, log_density_N = mixture.assign(embedding_ND)
    clusters = of_all(torch.as_tensor(mixture.labels_))
    k, seed, centres = int(mixture.n_components_), training.config.run.random_state, mixture.mean_directions_
    asked = training.config.clustering.n_groups
    # A number of clusters that was given is not questioned.
    if groups is None and (training.config.clustering.merge == "auto" or asked is not None):
        index_N2 = of_all(torch.as_tensor(mixture.nearest(embedding_ND)))
        groups = find_groups(
            trained.embeddings, index_N2, k, unit=True, separate=True, seed=seed, centre_KD=centres, so_many=asked
        )
    groups = groups or Groups.none(k)
    groups = of_these_components(groups, trained.embeddings, clusters, k, centres, keeps_all=asked is not None)
    mixture.groups_ = groups
    probability = of_all(share_N.float())
    group_labels, group_probability = groups.assign(trained.embeddings, clusters, probability)
    return replace(
        trained,
        mixture=mixture,
        clusters=clusters,
        probability=probability,
        outlier_score=outlier_score(of_all(log_density_N)),
        group_labels=group_labels,
        group_probability=group_probability,
        merge_nodes=clustering.history.as_tensors()["node"].numpy()[order].tolist(),
    )
