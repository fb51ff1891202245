"""The losses of SwAV, PCL and ProPos, for comparisons in which everything else is alike.

The instance losses of BYOL, SimSiam and MoCo v3 are in ``losses.py``; the cross entropy of DeepCluster v2 and PCL over
prototypes is Eq. 14 with other concentrations. The conventions are those of ``losses.py``.

Legend:  B samples of the batch, D dimensions, K prototypes or clusters, tau temperature.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor

from siammm.core.checks import check_at_least, check_positive
from siammm.core.errors import InputError
from siammm.learn.loss_inputs import check_numbers, check_pair, check_shape, unit, without_autocast

# The sum of a tensor over the ranks.
SumOverRanks = Callable[[Tensor], Tensor]

# Below this a share counts as none: a sample without weight has no code to be scaled.
_LEAST = 1e-37
# exp(-2 / epsilon), the share of a cosine of -1 beside one of 1, is a float32 down to here.
_LEAST_EPSILON = 0.025


@torch.no_grad()
@without_autocast
def balanced_codes(
    score_BK: Tensor,
    epsilon: float = 0.05,
    iterations: int = 3,
    *,
    weight_B: Tensor | None = None,
    sum_over_ranks: SumOverRanks | None = None,
) -> Tensor:
    """How samples would share the prototypes if every prototype had to take the same number of them: SwAV's codes.

    Sinkhorn and Knopp's iterations on exp(score / epsilon): prototypes are scaled to equal shares, then samples to one
    each. Shapes: score_BK cosines; returns (B, K), rows that sum to 1. With ``weight_B`` a sample counts for that much;
    one of weight 0 weighs on no prototype, and its code is 0. ``sum_over_ranks`` makes the shares equal over the
    samples of all ranks.
    """
    b, _ = check_shape("score_BK", score_BK, (None, None))
    if not _LEAST_EPSILON <= epsilon < math.inf:
        raise InputError(f"epsilon is {epsilon!r}, but it must be a number of at least {_LEAST_EPSILON}.")
    # Less the largest cosine that there can be, so that nothing overflows; the same for all, or a few iterations would
    # end elsewhere.
    share_BK = ((score_BK.float() - 1) / epsilon).exp()
    if weight_B is None:
        weight_B = torch.ones_like(share_BK[:, 0])
    check_shape("weight_B", weight_B, (b,))
    weight_B1 = weight_B.float()[:, None]
    share_BK = share_BK * weight_B1
    for _ in range(iterations):
        total_K = share_BK.sum(dim=0)
        if sum_over_ranks is not None:
            total_K = sum_over_ranks(total_K)
        share_BK = share_BK / total_K.clamp_min(_LEAST)
        share_BK = share_BK / share_BK.sum(dim=1, keepdim=True).clamp_min(_LEAST) * weight_B1
    return share_BK / weight_B1.clamp_min(_LEAST)


@without_autocast
def swapped_prediction_loss(
    score_1_BK: Tensor, score_2_BK: Tensor, code_1_BK: Tensor, code_2_BK: Tensor, temperature: float = 0.1
) -> Tensor:
    """Each view's scores must predict the other view's code: SwAV's loss.

    Shapes: all (B, K), scores the cosines with the prototypes, codes rows that sum to 1; returns a scalar, the mean of
    the two cross entropies. No gradient reaches the codes; a code of 0 adds 0.
    """
    check_positive("temperature", temperature)
    shape = check_shape("score_1_BK", score_1_BK, (None, None))
    for name, other in (("score_2_BK", score_2_BK), ("code_1_BK", code_1_BK), ("code_2_BK", code_2_BK)):
        check_shape(name, other, shape)
    log_1_BK, log_2_BK = ((score.float() / temperature).log_softmax(dim=1) for score in (score_1_BK, score_2_BK))
    cross = (code_2_BK.detach() * log_1_BK).sum(dim=1) + (code_1_BK.detach() * log_2_BK).sum(dim=1)
    return -0.5 * cross.mean()


@without_autocast
def prototype_scattering_loss(
    z_BD: Tensor,
    v_m_BD: Tensor,
    cluster_B: Tensor,
    n_clusters: int,
    temperature: float = 0.5,
    *,
    sum_over_ranks: SumOverRanks | None = None,
) -> Tensor:
    """Hold each cluster's two prototypes together and push different clusters' apart: ProPos's loss.

    A prototype is the direction of the mean of the batch's samples of a cluster: of the projections z, and of the
    momentum embeddings v_m of the other view, which is the positive. The negatives are the other clusters' prototypes
    of the projections. Shapes: z_BD and v_m_BD (B, D), cluster_B int64 from 0 to ``n_clusters`` - 1; returns a scalar,
    the mean over the clusters that are in the batch; 0 where fewer than two are. No gradient reaches v_m.
    ``sum_over_ranks``, which must pass gradients on, makes the prototypes those of all ranks' batches.
    """
    check_positive("temperature", temperature)
    check_pair("z_BD", z_BD, "v_m_BD", v_m_BD)
    check_numbers("cluster_B", cluster_B, (z_BD.shape[0],))
    check_at_least("n_clusters", n_clusters, 1)
    z_BD = unit(z_BD)
    v_m_BD = unit(v_m_BD.detach()).to(z_BD.dtype)
    member_BK = functional.one_hot(cluster_B, n_clusters).to(z_BD.dtype)
    sums = (member_BK.sum(dim=0), member_BK.T @ z_BD, member_BK.T @ v_m_BD)
    count_K, sum_KD, sum_m_KD = sums if sum_over_ranks is None else (sum_over_ranks(part) for part in sums)
    present_K, mu_KD, mu_m_KD = count_K > 0, unit(sum_KD), unit(sum_m_KD)
    positive_K = (mu_KD * mu_m_KD).sum(dim=1) / temperature
    absent_KK = ~present_K[None, :] | torch.eye(n_clusters, dtype=torch.bool, device=z_BD.device)
    score_KK = ((mu_KD @ mu_KD.T) / temperature).masked_fill(absent_KK, -math.inf)
    loss_K = torch.cat([positive_K[:, None], score_KK], dim=1).logsumexp(dim=1) - positive_K
    return (loss_K * present_K).sum() / present_K.sum().clamp_min(1)


def proximity_concentrations(
    distance_K: Tensor, count_K: Tensor, *, temperature: float = 0.1, smoothing: float = 10.0
) -> Tensor:
    """PCL's concentrations, as the kappa of Eq. 14: 1 / phi with phi = sum of distances / (Z log(Z + alpha)).

    Shapes: distance_K the mean distance of a cluster's Z = count_K members from its centroid; returns (K,). A cluster
    of fewer than two members has the loosest phi of the others; phi is clipped to its 10th and 90th percentile and
    brought to a mean of ``temperature``, as the authors' code does; the paper says "normalise".
    """
    check_positive("temperature", temperature)
    k = check_shape("distance_K", distance_K, (None,))[0]
    check_shape("count_K", count_K, (k,))
    distance, count = distance_K.detach().double().cpu(), count_K.detach().double().cpu()
    phi = distance / (count + smoothing).log()
    known = (count >= 2) & (phi > 0)
    if not bool(known.any()):
        return torch.full_like(distance_K, 1.0 / temperature)
    phi = torch.where(known, phi, phi[known].max())
    low, high = torch.quantile(phi, torch.tensor([0.1, 0.9], dtype=torch.float64))
    phi = phi.clamp(low, high)
    return (phi.mean() / phi / temperature).to(distance_K)
