"""The loss of a batch, put together from ``losses.py`` as the settings say: every variant of the paper is one switch.

Legend:  B images of a batch, H neighbours, D dimensions; v predictions, v_m targets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from siammm.config import ObjectiveConfig
from siammm.learn import losses
from siammm.learn.clustering import Clustering
from siammm.learn.distributed import all_gather_batch, rank


@dataclass(frozen=True)
class BatchLoss:
    """The loss and its two parts, scalars."""

    total: Tensor
    instance: Tensor
    cluster: Tensor


def batch_loss(
    config: ObjectiveConfig,
    v_BD: tuple[Tensor, Tensor],
    target_BD: tuple[Tensor, Tensor],
    position_B: Tensor,
    clustering: Clustering,
    *,
    clustered: bool,
    negative_index: Tensor | None = None,
) -> BatchLoss:
    """Eq. 13 for one batch. ``clustered``: whether the clusters count yet."""
    nothing = v_BD[0].new_zeros((), dtype=torch.float32)
    instance = nothing
    if config.instance_loss in ("cosine", "simsiam"):
        instance = losses.instance_loss(*v_BD, *target_BD)
    elif config.instance_loss == "contrastive":
        instance = losses.contrastive_instance_loss(
            *v_BD, *target_BD, temperature=config.contrastive_temperature, all_gather=_all_keys
        )
    cluster = nothing
    if clustered and config.cluster_loss != "none":
        cluster = _cluster_loss(config, v_BD, target_BD, position_B, clustering, negative_index)
    return BatchLoss(losses.final_loss(cluster, instance, config.cluster_weight), instance, cluster)


def _cluster_loss(
    config: ObjectiveConfig,
    v_BD: tuple[Tensor, Tensor],
    target_BD: tuple[Tensor, Tensor],
    position_B: Tensor,
    clustering: Clustering,
    negative_index: Tensor | None,
) -> Tensor:
    """The cluster loss of both views, summed as Eq. 12 sums the instance loss of both."""
    index_BH = clustering.index_NH[position_B]
    if config.cluster_loss == "mle":
        normaliser_BH = clustering.log_normaliser_K[index_BH] if config.normaliser else None
        tables = (
            clustering.mu_KD[index_BH],
            clustering.kappa_K[index_BH],
            clustering.weight_NH[position_B],
            normaliser_BH,
        )
        return losses.soft_assignment_loss(v_BD[0], *tables) + losses.soft_assignment_loss(v_BD[1], *tables)
    positive_B = index_BH[:, 0]
    if config.cluster_loss == "nce-centroids":
        k = clustering.n_components
        mu_KD, kappa_K = clustering.mu_KD[:k], clustering.kappa_K[:k]
        return sum(
            (losses.negative_centroids_loss(v, mu_KD, kappa_K, positive_B, negative_index) for v in v_BD),
            start=v_BD[0].new_zeros(()),
        )
    mu_BD, kappa_B = clustering.mu_KD[positive_B], clustering.kappa_K[positive_B]
    cluster_M = all_gather_batch(positive_B)
    return sum(
        (
            losses.negative_samples_loss(v, positive_B, mu_BD, kappa_B, all_gather_batch(other), cluster_M)
            for v, other in zip(v_BD, reversed(target_BD), strict=True)
        ),
        start=v_BD[0].new_zeros(()),
    )


def _all_keys(keys: Tensor) -> tuple[Tensor, int]:
    return all_gather_batch(keys), rank() * keys.shape[0]
