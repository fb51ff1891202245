"""A small problem for every loss, and its gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from siammm.learn import losses
from siammm.mixture import vmf

N, D, H, K, M = 6, 5, 3, 8, 7
TAU = 0.3


class Problem:
    """A batch and a mixture, in float64: v_1, v_2 ... with gradients, everything else without."""

    def __init__(self, seed: int = 0, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)

        self.v_1, self.v_2 = normal(N, D).requires_grad_(), normal(N, D).requires_grad_()
        self.v_1m, self.v_2m = normal(N, D), normal(N, D)
        self.mu_KD = normalize(normal(K, D), dim=1)
        self.kappa_K = 0.5 + 3 * normal(K).abs()
        self.index_NH = torch.stack([torch.randperm(K, generator=generator)[:H] for _ in range(N)]).to(device)
        self.weight_NH = normal(N, H).softmax(dim=1)
        self.log_normaliser_NH = vmf.log_normaliser(self.kappa_K, D)[self.index_NH]
        # Clusters in pairs, so that samples share one.
        self.cluster_N = (torch.arange(N) // 2).to(device)
        self.negative_index = torch.tensor([0, 2, 4, 4, 7, 1, 5]).to(device)
        self.negatives_MD = normal(M, D)
        self.negative_cluster_M = torch.tensor([0, 0, 1, 2, 3, 1, 9]).to(device)

    @property
    def mu_NHD(self) -> Tensor:
        return self.mu_KD[self.index_NH]

    @property
    def kappa_NH(self) -> Tensor:
        return self.kappa_K[self.index_NH]

    @property
    def mu_ND(self) -> Tensor:
        return self.mu_KD[self.cluster_N]

    @property
    def kappa_N(self) -> Tensor:
        return self.kappa_K[self.cluster_N]


# Every loss as a function of v_1, the rest of the problem fixed.
LOSSES: dict[str, Callable[[Tensor, Problem], Tensor]] = {
    "distance": lambda v, p: losses.instance_distance(v, p.v_2m),
    "instance": lambda v, p: losses.instance_loss(v, p.v_2, p.v_1m, p.v_2m),
    "contrastive": lambda v, p: losses.contrastive_instance_loss(v, p.v_2, p.v_1m, p.v_2m, TAU),
    "hard": lambda v, p: losses.soft_assignment_loss(
        v, p.mu_NHD[:, :1], p.kappa_NH[:, :1], torch.ones_like(p.weight_NH[:, :1])
    ),
    "soft": lambda v, p: losses.soft_assignment_loss(v, p.mu_NHD, p.kappa_NH, p.weight_NH),
    "normalised": lambda v, p: losses.soft_assignment_loss(
        v, p.mu_NHD, p.kappa_NH, p.weight_NH, log_normaliser_NH=p.log_normaliser_NH
    ),
    "centroids": lambda v, p: losses.negative_centroids_loss(v, p.mu_KD, p.kappa_K, p.cluster_N),
    "some-centroids": lambda v, p: losses.negative_centroids_loss(v, p.mu_KD, p.kappa_K, p.cluster_N, p.negative_index),
    "groups": lambda v, p: losses.group_loss(v, p.mu_KD, p.cluster_N, torch.ones_like(p.kappa_N)),
    "samples": lambda v, p: losses.negative_samples_loss(
        v, p.cluster_N, p.mu_ND, p.kappa_N, p.negatives_MD, p.negative_cluster_M
    ),
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def gradient(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs)


def through_length(v_ND: Tensor, slope_ND: Tensor) -> Tensor:
    """The gradient at v of a mean over the batch whose derivative by v / |v| is the slope: its part across v."""
    length_N1 = v_ND.norm(dim=1, keepdim=True)
    u_ND = v_ND / length_N1
    return ((slope_ND - (slope_ND * u_ND).sum(dim=1, keepdim=True) * u_ND) / length_N1 / v_ND.shape[0]).detach()
