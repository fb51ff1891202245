"""The loss of a batch, put together from ``losses.py`` as the settings say: every variant of the paper is one switch.

Legend:  B images of a batch, H neighbours, D dimensions, K clusters or prototypes, Q rows of a queue; v predictions,
z projections, v_m targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from siammm.core.ranks import all_gather_batch, rank, sum_over_ranks, world_size
from siammm.learn import losses, peer_losses
from siammm.learn.clustering import Clustering
from siammm.learn.grouping import Grouping
from siammm.learn.losses import Gather
from siammm.learn.networks import Predictions
from siammm.learn.queue import Queued
from siammm.settings.training import NCE_CONCENTRATION, ObjectiveConfig


class Stage(IntEnum):
    """What counts in the loss: the instance loss alone, clusters as well, or groups of images."""

    INSTANCES = 0
    CLUSTERS = 1
    GROUPS = 2


@dataclass(frozen=True)
class BatchLoss:
    """The loss and its two parts, scalars."""

    total: Tensor
    instance: Tensor
    cluster: Tensor


def batch_loss(
    config: ObjectiveConfig,
    predictions: Predictions,
    target_BD: tuple[Tensor, Tensor],
    position_B: Tensor,
    clusterings: Sequence[Clustering],
    *,
    clustered: bool,
    grouping: Grouping | None = None,
    negatives: Sequence[Tensor | None] | None = None,
    queued: Queued | None = None,
    temperature: float | Tensor | None = None,
) -> BatchLoss:
    """Eq. 13 for one batch; with several clusterings, their mean is the cluster loss.

    ``clustered``: whether the mixture's clusters count yet. ``grouping``: the groups, once they count. ``negatives``:
    for each clustering, the centroids that nce-centroids contrasts with, None for all. ``temperature``: that of the
    contrastive loss now, where it changes.
    """
    v_BD = (predictions.v_1.float(), predictions.v_2.float())
    nothing = v_BD[0].new_zeros((), dtype=torch.float32)
    instance = cluster = nothing
    if config.instance_loss in ("cosine", "simsiam"):
        instance = losses.instance_loss(*v_BD, *target_BD)
    elif config.instance_loss == "contrastive":
        temperature = config.contrastive_temperature if temperature is None else temperature
        instance = losses.contrastive_instance_loss(*v_BD, *target_BD, temperature, _keys(queued))
    if config.cluster_loss == "swapped":
        assert predictions.scores is not None, "swapped prediction needs prototypes"
        cluster = _swapped(config, predictions.scores, queued)
    elif clustered and config.uses_mixture and (grouping is None or config.group_levels == "both"):
        parts = [
            _cluster_loss(config, predictions, target_BD, position_B, clustering, drawn)
            for clustering, drawn in zip(clusterings, negatives or [None] * len(clusterings), strict=True)
        ]
        cluster = torch.stack(parts).mean()
        if config.sharpened:  # concentrations multiply the gradient too; without them it is about that of Eq. 9
            cluster = cluster / NCE_CONCENTRATION
    total = losses.final_loss(cluster, instance, config.cluster_weight)
    if grouping is not None:
        group_B, weight_B = grouping.group_N[position_B], grouping.weight_N[position_B]
        # Both views at once, summed as Eq. 12 sums the instance loss of both.
        group = 2 * losses.group_loss(torch.cat(v_BD), grouping.mu_GD, group_B.repeat(2), weight_B.repeat(2))
        total, cluster = total + config.group_weight * group, cluster + group
    return BatchLoss(total, instance, cluster)


def draw_negatives(
    config: ObjectiveConfig, clusterings: Sequence[Clustering], seed: int, number: int, device: torch.device
) -> list[Tensor | None] | None:
    """The centroids of each clustering to contrast with in update ``number``, where nce-centroids draws them."""
    if config.cluster_loss != "nce-centroids":
        return None
    wanted, generator = config.n_negatives, torch.Generator().manual_seed(seed * 1_000_003 + number)
    return [
        torch.randint(k, (wanted,), generator=generator).to(device) if k > wanted else None
        for k in (clustering.n_components for clustering in clusterings)
    ]


def _cluster_loss(
    config: ObjectiveConfig,
    predictions: Predictions,
    target_BD: tuple[Tensor, Tensor],
    position_B: Tensor,
    clustering: Clustering,
    negative_index: Tensor | None,
) -> Tensor:
    """The cluster loss of both views, summed as Eq. 12 sums the instance loss of both."""
    v_BD = (predictions.v_1.float(), predictions.v_2.float())
    index_BH = clustering.index_NH[position_B]
    if config.cluster_loss == "mle":
        # Both views at once: the kernels are so short that a step pays for their number.
        twice = torch.cat([index_BH, index_BH])
        return 2 * losses.soft_assignment_loss(
            torch.cat(v_BD),
            clustering.mu_KD[twice],
            clustering.kappa_K[twice],
            clustering.weight_NH[position_B].repeat(2, 1),
            clustering.log_normaliser_K[twice] if config.normaliser else None,
        )
    positive_B = index_BH[:, 0]
    if config.cluster_loss == "nce-centroids":
        k = clustering.n_components
        mu_KD, kappa_K = clustering.mu_KD[:k], clustering.kappa_K[:k]
        return _of_both(losses.negative_centroids_loss(v, mu_KD, kappa_K, positive_B, negative_index) for v in v_BD)
    if config.cluster_loss == "scattering":
        # Of the projections, which are what is clustered: the predictor has no part in it.
        k, tau = clustering.mu_KD.shape[0], config.prototype_temperature
        z_BD = (predictions.z_1.float(), predictions.z_2.float())
        return _of_both(
            peer_losses.prototype_scattering_loss(z, other, positive_B, k, tau, sum_over_ranks=sum_over_ranks)
            for z, other in zip(z_BD, reversed(target_BD), strict=True)
        )
    mu_BD, kappa_B = clustering.mu_KD[positive_B], clustering.kappa_K[positive_B]
    cluster_M = all_gather_batch(positive_B)
    return _of_both(
        losses.negative_samples_loss(v, positive_B, mu_BD, kappa_B, all_gather_batch(other), cluster_M)
        for v, other in zip(v_BD, reversed(target_BD), strict=True)
    )


def _of_both(parts: Iterable[Tensor]) -> Tensor:
    first, second = parts
    return first + second


def _swapped(config: ObjectiveConfig, scores: tuple[Tensor, Tensor], queued: Queued | None) -> Tensor:
    """SwAV's loss; the queue takes part in the balance of the codes, and is then done with."""
    codes: list[Tensor] = []
    for view, score_BK in enumerate(scores):
        all_scores, weight = score_BK.detach(), None
        if queued is not None:
            assert queued.scores is not None
            assert queued.counts is not None
            queue_QK = queued.scores[view]
            all_scores = torch.cat([all_scores, queue_QK.detach()])
            # Every rank has the same queue, which is to count once.
            weight = torch.cat(
                [score_BK.new_ones(score_BK.shape[0]), queued.counts.expand(queue_QK.shape[0]) / world_size()]
            )
        code = peer_losses.balanced_codes(all_scores, weight_B=weight, sum_over_ranks=sum_over_ranks)
        codes.append(code[: score_BK.shape[0]])
    return peer_losses.swapped_prediction_loss(*scores, *codes, temperature=config.prototype_temperature)


def _keys(queued: Queued | None) -> Gather:
    """The keys of all ranks, and behind them the queue; asked for those of view 2 first, then for those of view 1."""
    queues = iter(() if queued is None else (queued.view_2QD[1], queued.view_2QD[0]))

    def gathered(keys: Tensor) -> tuple[Tensor, int]:
        everybody = all_gather_batch(keys)
        queue_QD = next(queues, None)
        if queue_QD is not None:
            everybody = torch.cat([everybody, queue_QD.to(everybody)])
        return everybody, rank() * keys.shape[0]

    return gathered
