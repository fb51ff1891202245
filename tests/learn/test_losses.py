"""The losses: their equations written out, their gradients in closed form, and what must hold of all of them."""

from __future__ import annotations

import inspect
import math
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

import siammm.losses
from siammm.core.errors import InputError
from siammm.learn import losses
from siammm.mixture import em, vmf
from siammm.mixture.components import ConcentrationSettings, VonMisesFisherComponents

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


# What must hold of all.


@every_loss
def test_autograd_agrees_with_finite_differences(loss: Callable[[Tensor, Problem], Tensor]) -> None:
    problem = Problem()
    assert torch.autograd.gradcheck(lambda v: loss(v, problem), problem.v_1)
    assert torch.autograd.gradgradcheck(lambda v: loss(v, problem), problem.v_1)


@every_loss
def test_length_does_not_matter_and_the_gradient_is_across_the_embedding(
    loss: Callable[[Tensor, Problem], Tensor],
) -> None:
    problem = Problem()
    value = loss(problem.v_1, problem)
    scale = torch.tensor([1e-6, 0.3, 1.0, 7.0, 1e3, 1e6], dtype=torch.float64)[:, None]
    torch.testing.assert_close(loss(problem.v_1 * scale, problem), value)
    (slope,) = gradient(value, problem.v_1)
    torch.testing.assert_close((slope * problem.v_1).sum(dim=1), torch.zeros(N, dtype=torch.float64))


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"contrastive"}))
def test_a_batch_is_the_mean_of_its_samples(name: str) -> None:
    """Hence their order does not matter. In MoCo v3's loss the samples of a batch are each other's negatives."""
    loss, problem = LOSSES[name], Problem()
    alone = []
    for i in range(N):
        one = Problem()
        for name in ("v_1", "v_2", "v_1m", "v_2m", "index_NH", "weight_NH", "log_normaliser_NH", "cluster_N"):
            setattr(one, name, getattr(problem, name)[i : i + 1])
        alone.append(loss(one.v_1, one))
    torch.testing.assert_close(loss(problem.v_1, problem), torch.stack(alone).mean())


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_any_floating_type_and_autocast(loss: Callable[[Tensor, Problem], Tensor], dtype: torch.dtype) -> None:
    """16-bit embeddings give the loss of their values in float32, in or out of an autocast region."""
    problem = Problem()
    v = problem.v_1.detach().to(dtype)
    # Both views, and the negatives, as a network in this type would give them.
    for name in ("v_2", "v_1m", "v_2m", "negatives_MD"):
        setattr(problem, name, getattr(problem, name).detach().to(dtype))
    expected = loss(v.double(), problem)
    v.requires_grad_()
    plain = loss(v, problem)
    with torch.autocast("cpu", torch.bfloat16):
        inside = loss(v, problem)
    assert plain.dtype == inside.dtype == torch.float32
    assert torch.equal(plain, inside)
    torch.testing.assert_close(plain.double(), expected.double(), rtol=1e-5, atol=1e-5)
    (slope,) = gradient(inside, v)
    assert slope.dtype == dtype
    assert slope.isfinite().all()


@every_loss
def test_a_row_of_zeros_has_no_gradient_and_a_nan_stays_one(loss: Callable[[Tensor, Problem], Tensor]) -> None:
    problem = Problem()
    v = problem.v_1.detach().clone()
    v[2] = 0
    v.requires_grad_()
    value = loss(v, problem)
    (slope,) = gradient(value, v)
    assert value.isfinite()
    assert (slope[2] == 0).all()
    assert slope.isfinite().all()
    v = v.detach().clone()
    v[3, 1] = math.nan
    assert loss(v, problem).isnan()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # what torch 2.11's compiler imports
@every_loss
def test_compiles_in_one_graph(loss: Callable[[Tensor, Problem], Tensor]) -> None:
    torch.compiler.reset()
    problem = Problem()
    compiled = torch.compile(lambda v: loss(v, problem), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(problem.v_1), loss(problem.v_1, problem))


# Eq. 1, 12, 13 and MoCo v3's.


def test_instance_distance_is_one_minus_the_cosine() -> None:
    """Eq. 1: value and gradient; the second argument stays fixed."""
    p = Problem()
    p.v_2m.requires_grad_()
    u, t = normalize(p.v_1, dim=1), normalize(p.v_2m.detach(), dim=1)
    loss = losses.instance_distance(p.v_1, p.v_2m)
    torch.testing.assert_close(loss, (1 - torch.cosine_similarity(p.v_1, p.v_2m)).mean())
    torch.testing.assert_close(loss, 0.5 * (u - t).square().sum(dim=1).mean())
    loss.backward()
    torch.testing.assert_close(p.v_1.grad, through_length(p.v_1, -t))
    assert p.v_2m.grad is None
    assert losses.instance_distance(p.v_1, 3 * p.v_1).item() == pytest.approx(0)
    assert losses.instance_distance(p.v_1, -p.v_1).item() == pytest.approx(2)


def test_instance_loss_crosses_the_views_and_is_symmetric() -> None:
    """Eq. 12."""
    p = Problem()
    loss = losses.instance_loss(p.v_1, p.v_2, p.v_1m, p.v_2m)
    expected = losses.instance_distance(p.v_1, p.v_2m) + losses.instance_distance(p.v_2, p.v_1m)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(loss, losses.instance_loss(p.v_2, p.v_1, p.v_2m, p.v_1m))
    slope_1, slope_2 = gradient(loss, p.v_1, p.v_2)
    torch.testing.assert_close(slope_1, through_length(p.v_1, -normalize(p.v_2m, dim=1)))
    torch.testing.assert_close(slope_2, through_length(p.v_2, -normalize(p.v_1m, dim=1)))


@pytest.mark.parametrize("temperature", [0.2, 1.0])
def test_contrastive_loss_written_out(temperature: float) -> None:
    p = Problem()
    loss = losses.contrastive_instance_loss(p.v_1, p.v_2, p.v_1m, p.v_2m, temperature)
    expected = torch.tensor(0.0, dtype=torch.float64)
    for v, key in ((p.v_1, p.v_2m), (p.v_2, p.v_1m)):
        score = normalize(v, dim=1) @ normalize(key, dim=1).T / temperature
        expected = expected - 2 * temperature * (score.diagonal() - score.exp().sum(dim=1).log()).mean()
    torch.testing.assert_close(loss, expected)
    changing = torch.tensor(temperature, dtype=torch.float64)
    torch.testing.assert_close(losses.contrastive_instance_loss(p.v_1, p.v_2, p.v_1m, p.v_2m, changing), expected)
    key = normalize(p.v_2m, dim=1)
    chance = (normalize(p.v_1, dim=1) @ key.T / temperature).softmax(dim=1)
    slope = 2 * (chance - torch.eye(N, dtype=torch.float64)) @ key
    torch.testing.assert_close(gradient(loss, p.v_1)[0], through_length(p.v_1, slope))


def test_contrastive_loss_of_two_ranks_is_that_of_the_joined_batch() -> None:
    """Uneven parts too: the batch's mean is the parts' mean, weighted by their sizes."""
    p = Problem()
    whole = losses.contrastive_instance_loss(p.v_1, p.v_2, p.v_1m, p.v_2m, TAU)
    parts = torch.tensor(0.0, dtype=torch.float64)
    for rows in (slice(0, 2), slice(2, N)):
        # What the other ranks hold, in the order in which it is asked for.
        everyone = iter([normalize(p.v_2m, dim=1), normalize(p.v_1m, dim=1)])

        def all_gather(part: Tensor, rows: slice = rows, everyone: Iterator[Tensor] = everyone) -> tuple[Tensor, int]:
            gathered = next(everyone)
            assert not part.requires_grad
            torch.testing.assert_close(part, gathered[rows])
            return gathered, rows.start

        v_1, v_2, v_1m, v_2m = (v[rows] for v in (p.v_1, p.v_2, p.v_1m, p.v_2m))
        parts = parts + losses.contrastive_instance_loss(v_1, v_2, v_1m, v_2m, TAU, all_gather) * len(v_1) / N
        assert next(everyone, None) is None
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(gradient(parts, p.v_1, p.v_2), gradient(whole, p.v_1, p.v_2))
    with pytest.raises(InputError, match="returned 6 keys, but this rank's 6 begin at row 1"):
        losses.contrastive_instance_loss(p.v_1, p.v_2, p.v_1m, p.v_2m, TAU, lambda key: (key, 1))


def test_final_loss_is_the_sum() -> None:
    """Eq. 13, by default with both parts alike."""
    p = Problem()
    cluster, instance = LOSSES["soft"](p.v_1, p), LOSSES["instance"](p.v_1, p)
    torch.testing.assert_close(losses.final_loss(cluster, instance), cluster + instance)
    slope = gradient(losses.final_loss(cluster, instance, 0.25), p.v_1)[0]
    cluster, instance = LOSSES["soft"](p.v_1, p), LOSSES["instance"](p.v_1, p)
    torch.testing.assert_close(slope, 0.25 * gradient(cluster, p.v_1)[0] + gradient(instance, p.v_1)[0])
    ramp = torch.tensor(0.0, dtype=torch.float64)
    assert torch.equal(losses.final_loss(cluster, instance, ramp), instance)


# Eq. 8, 9, 10.


def test_assignment_weights_written_out() -> None:
    """Eq. 10, with and without sizes, and its Jacobian."""
    p = Problem()
    similarity = (p.mu_NHD * normalize(p.v_1.detach(), dim=1)[:, None]).sum(dim=2).requires_grad_()
    size = torch.rand(N, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1
    for alpha in (torch.ones_like(size), size):
        weight = losses.assignment_weights(similarity, TAU, None if (alpha == 1).all() else alpha.log())
        expected = alpha * (similarity / TAU).exp()
        torch.testing.assert_close(weight, expected / expected.sum(dim=1, keepdim=True))
    weight = losses.assignment_weights(similarity, TAU, size.log())
    (slope,) = gradient(weight[:, 1].sum(), similarity)
    torch.testing.assert_close(slope, weight[:, 1:2] * (one_hot(torch.tensor(1), H) - weight) / TAU)
    assert torch.autograd.gradcheck(lambda s: losses.assignment_weights(s, TAU, size.log()), similarity)


@pytest.mark.parametrize("h", [1, 2, 9])
@pytest.mark.parametrize("temperature", [1e-3, 0.02, 1.0, 1e3])
def test_assignment_weights_are_weights(temperature: float, h: int) -> None:
    cosine = torch.rand(100, h, generator=torch.Generator().manual_seed(h)) * 2 - 1
    weight = losses.assignment_weights(cosine, temperature)
    assert (weight >= 0).all()
    torch.testing.assert_close(weight.sum(dim=1), torch.ones(100))
    order = cosine.argsort(dim=1)
    assert (weight.gather(1, order).diff(dim=1) >= 0).all()
    if h == 1:
        assert (weight == 1).all()


def test_assignment_weights_go_from_hard_to_even() -> None:
    cosine = torch.tensor([[0.9, 0.8, -0.5]])
    torch.testing.assert_close(losses.assignment_weights(cosine, 1e-3), torch.tensor([[1.0, 0.0, 0.0]]))
    torch.testing.assert_close(losses.assignment_weights(cosine, 1e6), torch.full((1, 3), 1 / 3))
    # The paper's temperature, by hand: exp(0.1 / 0.02) = exp(5).
    assert losses.assignment_weights(cosine, 0.02)[0, 1].item() == pytest.approx(1 / (1 + math.exp(5)), rel=1e-4)


def test_assignment_weights_without_any_size_are_zero() -> None:
    size = torch.tensor([[0.0, 2.0, 2.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    cosine = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    weight = losses.assignment_weights(cosine, TAU, size.log())
    assert weight.tolist() == [[0.0, 0.5, 0.5], [0.0, 0.0, 0.0]]
    assert gradient(weight[:, 1].sum(), cosine)[0].isfinite().all()


def test_assignment_weights_are_the_mixtures(small: Any) -> None:
    """The weights the loss uses are those the E step uses."""
    mu = torch.from_numpy(small.mean_directions)
    components = VonMisesFisherComponents.started(mu, ConcentrationSettings())
    x = torch.from_numpy(small.X)
    index, weight, _ = em.weigh(components, em.Assignment(n_neighbours=4, temperature=0.1), x)
    cosine = (components.mu_KD[index] * x[:, None]).sum(dim=2)
    torch.testing.assert_close(losses.assignment_weights(cosine, 0.1), weight)


def test_soft_assignment_loss_written_out() -> None:
    """Eq. 9: the equation with its sums, and the pull towards every component by its responsibility."""
    p = Problem()
    total = 0.0
    for n in range(N):
        u = (p.v_1[n] / p.v_1[n].norm()).detach()
        terms = [float(p.weight_NH[n, h]) * math.exp(float(p.kappa_NH[n, h] * (p.mu_NHD[n, h] @ u))) for h in range(H)]
        total -= math.log(sum(terms)) / N
    loss = LOSSES["soft"](p.v_1, p)
    assert loss.item() == pytest.approx(total, rel=1e-12)
    u_ND = normalize(p.v_1, dim=1)
    term_NH = p.weight_NH * (p.kappa_NH * (p.mu_NHD @ u_ND[:, :, None])[:, :, 0]).exp()
    share_NH = term_NH / term_NH.sum(dim=1, keepdim=True)
    slope_ND = -((share_NH * p.kappa_NH)[:, :, None] * p.mu_NHD).sum(dim=1)
    torch.testing.assert_close(gradient(loss, p.v_1)[0], through_length(p.v_1, slope_ND))


def test_one_component_is_the_hard_assignment() -> None:
    """Eq. 8 in Eq. 9: minus kappa times the cosine; a normaliser shifts the value and leaves the gradient."""
    p = Problem()
    mu, kappa = p.mu_NHD[:, 0], p.kappa_NH[:, 0]
    loss = LOSSES["hard"](p.v_1, p)
    torch.testing.assert_close(loss, -(kappa * (mu * normalize(p.v_1, dim=1)).sum(dim=1)).mean())
    slope = gradient(loss, p.v_1)[0]
    torch.testing.assert_close(slope, through_length(p.v_1, -kappa[:, None] * mu))
    one = torch.ones(N, 1, dtype=torch.float64)
    log_c = vmf.log_normaliser(kappa, D)[:, None]
    normalised = losses.soft_assignment_loss(p.v_1, mu[:, None], kappa[:, None], one, log_c)
    torch.testing.assert_close(gradient(normalised, p.v_1)[0], slope)
    # All weight on one of several is the same.
    alone = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64).expand(N, H)
    torch.testing.assert_close(losses.soft_assignment_loss(p.v_1, p.mu_NHD, p.kappa_NH, alone), loss)


def test_soft_assignment_loss_with_normalisers_is_the_mixtures_likelihood(small: Any) -> None:
    """With all components, their weights and their normalisers: minus the mean log density of the mixture, Eq. 2."""
    components = VonMisesFisherComponents(
        mu_KD=torch.from_numpy(small.mean_directions),
        kappa_K=torch.from_numpy(small.concentrations),
        weight_K=torch.from_numpy(small.weights),
        settings=ConcentrationSettings(),
    )
    x = torch.from_numpy(small.X)
    n, k = len(x), len(small.weights)
    loss = losses.soft_assignment_loss(
        5 * x,
        components.mu_KD.expand(n, -1, -1),
        components.kappa_K.expand(n, k),
        components.weight_K.expand(n, k),
        vmf.log_normaliser(components.kappa_K, x.shape[1]).expand(n, k),
    )
    torch.testing.assert_close(loss, -components.log_joint(x).logsumexp(dim=1).mean())


def test_soft_assignment_loss_is_lower_nearer_the_components() -> None:
    p = Problem()
    far, near = -p.mu_NHD.mean(dim=1), p.mu_NHD.mean(dim=1)
    assert LOSSES["soft"](near, p) < LOSSES["soft"](far, p)


def test_parameters_of_the_mixture_get_no_gradient() -> None:
    p = Problem()
    given = [x.clone().requires_grad_() for x in (p.mu_NHD, p.kappa_NH, p.weight_NH, p.log_normaliser_NH)]
    losses.soft_assignment_loss(p.v_1, *given).backward()
    mu_KD, kappa_K = p.mu_KD.clone().requires_grad_(), p.kappa_K.clone().requires_grad_()
    losses.negative_centroids_loss(p.v_1, mu_KD, kappa_K, p.cluster_N).backward()
    losses.negative_centroids_loss(p.v_1, mu_KD, kappa_K, p.cluster_N, p.negative_index).backward()
    mu_ND, kappa_N = p.mu_ND.clone().requires_grad_(), p.kappa_N.clone().requires_grad_()
    losses.negative_samples_loss(p.v_1, p.cluster_N, mu_ND, kappa_N, p.negatives_MD, p.negative_cluster_M).backward()
    assert all(x.grad is None for x in (*given, mu_KD, kappa_K, mu_ND, kappa_N))


def test_weights_of_zero_take_no_part() -> None:
    """One in a row leaves the others; a row of them is a sample without a cluster, which the loss leaves alone."""
    p = Problem()
    weight = p.weight_NH.clone()
    weight[:, 1] = 0
    without = losses.soft_assignment_loss(p.v_1, p.mu_NHD[:, [0, 2]], p.kappa_NH[:, [0, 2]], p.weight_NH[:, [0, 2]])
    torch.testing.assert_close(losses.soft_assignment_loss(p.v_1, p.mu_NHD, p.kappa_NH, weight), without)
    weight = p.weight_NH.clone()
    weight[2] = 0
    some = losses.soft_assignment_loss(p.v_1, p.mu_NHD, p.kappa_NH, weight)
    rest = [0, 1, 3, 4, 5]
    others = losses.soft_assignment_loss(p.v_1[rest], p.mu_NHD[rest], p.kappa_NH[rest], p.weight_NH[rest])
    torch.testing.assert_close(some, others * 5 / 6)
    (slope,) = gradient(some, p.v_1)
    assert (slope[2] == 0).all()
    torch.testing.assert_close(slope[rest], gradient(others * 5 / 6, p.v_1)[0][rest])


def test_concentrations_in_the_thousands_do_not_overflow() -> None:
    """The literal kappa of Eq. 7, up to the mixture's cap, in float32."""
    p = Problem()
    v = p.v_1.detach().float().requires_grad_()
    for kappa in (1e3, vmf.MAX_CONCENTRATION):
        kappa_K = torch.full((K,), kappa)
        for loss in (
            losses.soft_assignment_loss(v, p.mu_NHD, kappa_K[p.index_NH], p.weight_NH),
            losses.negative_centroids_loss(v, p.mu_KD, kappa_K, p.cluster_N),
            losses.negative_centroids_loss(v, p.mu_KD, kappa_K, p.cluster_N, p.negative_index),
            losses.negative_samples_loss(
                v, p.cluster_N, p.mu_ND, kappa_K[p.cluster_N], p.negatives_MD, p.negative_cluster_M
            ),
        ):
            assert loss.isfinite()
            assert gradient(loss, v)[0].isfinite().all()


# Eq. 14 and 15.


@pytest.mark.parametrize("some", [False, True])
def test_negative_centroids_loss_written_out(some: bool) -> None:
    """Eq. 14: own component against the others, or against those drawn that are not its own."""
    p = Problem()
    drawn = p.negative_index.tolist() if some else list(range(K))
    u_ND = normalize(p.v_1, dim=1).detach()
    score_NK = p.kappa_K * (u_ND @ p.mu_KD.T)
    total, slope_ND = 0.0, torch.zeros_like(u_ND)
    for n in range(N):
        own = int(p.cluster_N[n])
        among = [own] + [k for k in drawn if k != own]
        share = score_NK[n, among].softmax(dim=0)
        total -= math.log(float(share[0])) / N
        slope_ND[n] = ((share * p.kappa_K[among])[:, None] * p.mu_KD[among]).sum(dim=0) - p.kappa_K[own] * p.mu_KD[own]
    loss = LOSSES["some-centroids" if some else "centroids"](p.v_1, p)
    assert loss.item() == pytest.approx(total, rel=1e-12)
    torch.testing.assert_close(gradient(loss, p.v_1)[0], through_length(p.v_1, slope_ND))


def test_all_centroids_drawn_is_the_same_as_none_named() -> None:
    p = Problem()
    drawn = torch.randperm(K, generator=torch.Generator().manual_seed(0))
    loss = losses.negative_centroids_loss(p.v_1, p.mu_KD, p.kappa_K, p.cluster_N, drawn)
    torch.testing.assert_close(loss, LOSSES["centroids"](p.v_1, p))


@pytest.mark.parametrize("drawn", [[], [0], [0, 0, 0]])
def test_without_negative_centroids_there_is_no_loss(drawn: list[int]) -> None:
    p = Problem()
    positive = torch.zeros(N, dtype=torch.int64)
    loss = losses.negative_centroids_loss(p.v_1, p.mu_KD, p.kappa_K, positive, torch.tensor(drawn, dtype=torch.int64))
    assert loss.item() == 0
    torch.testing.assert_close(gradient(loss, p.v_1)[0], torch.zeros_like(p.v_1))


def test_negative_samples_loss_written_out() -> None:
    """Eq. 15: the sample against embeddings of other clusters, all seen from its own component."""
    p = Problem()
    p.negatives_MD.requires_grad_()
    u_ND, w_MD = normalize(p.v_1, dim=1).detach(), normalize(p.negatives_MD, dim=1).detach()
    total, slope_ND, slope_MD = 0.0, torch.zeros_like(u_ND), torch.zeros_like(w_MD)
    for n in range(N):
        pull = p.kappa_N[n] * p.mu_ND[n]
        outside = [m for m in range(M) if p.negative_cluster_M[m] != p.cluster_N[n]]
        share = torch.cat([(u_ND[n] @ pull)[None], w_MD[outside] @ pull]).softmax(dim=0)
        total -= math.log(float(share[0])) / N
        slope_ND[n] = (share[0] - 1) * pull
        slope_MD[outside] += share[1:, None] * pull
    loss = LOSSES["samples"](p.v_1, p)
    assert loss.item() == pytest.approx(total, rel=1e-12)
    by_v, by_negatives = gradient(loss, p.v_1, p.negatives_MD)
    torch.testing.assert_close(by_v, through_length(p.v_1, slope_ND))
    torch.testing.assert_close(by_negatives, through_length(p.negatives_MD, slope_MD * M / N))
    assert torch.autograd.gradcheck(
        lambda negatives: losses.negative_samples_loss(
            p.v_1, p.cluster_N, p.mu_ND, p.kappa_N, negatives, p.negative_cluster_M
        ),
        p.negatives_MD,
    )


@pytest.mark.parametrize("m", [0, 3])
def test_a_sample_without_negatives_has_no_loss(m: int) -> None:
    p = Problem()
    zeros = torch.zeros(N, dtype=torch.int64)
    loss = losses.negative_samples_loss(p.v_1, zeros, p.mu_ND, p.kappa_N, p.negatives_MD[:m], zeros[:m])
    assert loss.item() == 0
    torch.testing.assert_close(gradient(loss, p.v_1)[0], torch.zeros_like(p.v_1))


def test_negatives_of_another_type_are_taken() -> None:
    """A bank is often kept in 16 bits."""
    p = Problem()
    p.negatives_MD = p.negatives_MD.bfloat16()
    loss = LOSSES["samples"](p.v_1, p)
    p.negatives_MD = p.negatives_MD.double()
    torch.testing.assert_close(loss, LOSSES["samples"](p.v_1, p), rtol=1e-6, atol=1e-6)


# Concentrations.


@pytest.mark.parametrize("k", [1, 2, 5, 40, 1000])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 16.0])
@pytest.mark.parametrize("quantiles", [(0.1, 0.9), (0.0, 1.0), (0.25, 0.5)])
def test_relative_concentrations_have_the_mean_and_the_order(
    k: int, scale: float, quantiles: tuple[float, float]
) -> None:
    """Whatever the spread: concentrations from 0.01 to the mixture's cap."""
    kappa = 10 ** np.random.default_rng(k).uniform(-2, 6, k)
    given_K = torch.from_numpy(kappa)
    relative_K = losses.relative_concentrations(given_K, scale=scale, quantiles=quantiles)
    assert relative_K.mean().item() == pytest.approx(scale)
    assert (relative_K > 0).all()
    assert (relative_K[given_K.argsort()].diff() >= -1e-12 * scale).all()
    low, high = np.quantile(kappa, quantiles)
    np.testing.assert_allclose(
        (relative_K / relative_K.max()).numpy(), np.clip(kappa, low, high) / min(high, max(kappa))
    )
    # Only relative concentration counts.
    torch.testing.assert_close(
        losses.relative_concentrations(7 * given_K, scale=scale, quantiles=quantiles), relative_K, rtol=1e-9, atol=0
    )


def test_relative_concentrations_with_weights_have_the_samples_mean() -> None:
    kappa = torch.tensor([10.0, 20.0, 40.0, 1e9])
    weight = torch.tensor([0.5, 0.3, 0.2, 0.0])
    relative = losses.relative_concentrations(kappa, weight, scale=2.0, quantiles=(0.0, 1.0))
    assert (relative * weight).sum().item() == pytest.approx(2)
    # A component without samples counts neither for the mean nor for the quantiles: 1e9 became 40.
    np.testing.assert_allclose(relative.numpy(), np.array([10, 20, 40, 40]) * 2 / 19, rtol=1e-6)
    for empty in (math.inf, math.nan):
        kappa[3] = empty
        assert losses.relative_concentrations(kappa, weight).isfinite().all()


def test_equal_or_absent_concentrations_become_the_constant_of_the_ablation() -> None:
    for kappa in (0.0, 3.0, 1e6):
        relative = losses.relative_concentrations(torch.full((5,), kappa, dtype=torch.float64), scale=0.7)
        torch.testing.assert_close(relative, torch.full((5,), 0.7, dtype=torch.float64))


def test_relative_concentrations_keep_the_type_and_cut_the_gradient() -> None:
    relative = losses.relative_concentrations(torch.rand(9, requires_grad=True))
    assert relative.dtype == torch.float32
    assert not relative.requires_grad


# Refusals and the public face.


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda p: losses.instance_distance(p.v_1, p.v_2[:2]), r"v_1 has the shape \(6, 5\), but v_2 \(2, 5\)"),
        (lambda p: losses.instance_distance(p.v_1[:0], p.v_2[:0]), r"\(0, 5\), but every length must be at least 1"),
        (
            lambda p: losses.instance_distance(p.v_1[0], p.v_2[0]),
            r"v_1 has the shape \(5,\), but it must be \(any, any",
        ),
        (
            lambda p: losses.instance_distance(p.cluster_N[:, None], p.v_2),
            "int64, but it must hold floating",
        ),
        (lambda p: losses.contrastive_instance_loss(p.v_1, p.v_2, p.v_1m, p.v_2m, 0.0), "temperature is 0.0"),
        (
            lambda p: losses.contrastive_instance_loss(p.v_1, p.v_2, p.v_1m, p.v_2m, torch.ones(3)),
            "temperature has the shape .3,., but it is one number",
        ),
        (
            lambda p: losses.assignment_weights(p.weight_NH, -1.0),
            "temperature is -1.0, but it must be a number above 0",
        ),
        (lambda p: losses.assignment_weights(p.weight_NH, math.nan), "temperature is nan"),
        (lambda p: losses.assignment_weights(p.weight_NH, TAU, p.weight_NH[:1]), r"log_size_NH .* must be \(6, 3\)"),
        (
            lambda p: losses.soft_assignment_loss(p.v_1, p.mu_KD, p.kappa_NH, p.weight_NH),
            r"mu_NHD has the shape \(8, 5\), but it must be \(6, 3, 5\)",
        ),
        (
            lambda p: losses.soft_assignment_loss(p.v_1, p.mu_NHD, p.kappa_NH, p.weight_NH, p.kappa_N),
            r"log_normaliser_NH has the shape \(6,\)",
        ),
        (
            lambda p: losses.negative_centroids_loss(p.v_1, p.mu_KD, p.kappa_K, p.cluster_N.int()),
            "positive_N holds torch.int32, but it must hold int64",
        ),
        (
            lambda p: losses.negative_centroids_loss(p.v_1, p.mu_KD, p.kappa_K, p.cluster_N, p.index_NH),
            r"negative_index has the shape \(6, 3\), but it must be \(any\)",
        ),
        (
            lambda p: losses.negative_samples_loss(
                p.v_1, p.cluster_N, p.mu_ND, p.kappa_N, p.negatives_MD, p.negative_cluster_M[1:]
            ),
            r"negative_cluster_M has the shape \(6,\), but it must be \(7\)",
        ),
        (lambda p: losses.relative_concentrations(p.kappa_K, scale=0), "scale is 0"),
        (lambda p: losses.relative_concentrations(p.kappa_K, quantiles=(0.9, 0.1)), r"quantiles is \(0.9, 0.1\)"),
        (lambda p: losses.relative_concentrations(p.kappa_K / 0), "8 of the 8 concentrations are not finite"),
        (lambda p: losses.relative_concentrations(p.kappa_K, p.kappa_K * 0), "weight_K goes from"),
        (lambda p: losses.relative_concentrations(p.kappa_K, -p.kappa_K), "weight_K goes from"),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(call: Callable[[Problem], Tensor], says: str) -> None:
    with pytest.raises(InputError, match=says) as refused:
        call(Problem())
    assert re.fullmatch(r"[^\n]+\.", str(refused.value))


def test_group_loss_written_out() -> None:
    """Of the samples that are sure; the others have no gradient, and without any the loss is 0."""
    p, sure_N = Problem(), torch.tensor([1.0, 0, 1, 1, 0, 1])
    score_NK = 10.0 * normalize(p.v_1, dim=1) @ p.mu_KD.T
    loss_N = score_NK.logsumexp(dim=1) - score_NK[torch.arange(N), p.cluster_N]
    found = losses.group_loss(p.v_1, p.mu_KD, p.cluster_N, sure_N)
    torch.testing.assert_close(found, loss_N[sure_N > 0].mean() / 10)
    (slope,) = gradient(found, p.v_1)
    assert torch.equal(slope.abs().sum(dim=1) > 0, sure_N > 0)
    nothing = losses.group_loss(p.v_1, p.mu_KD, p.cluster_N, torch.zeros(N))
    assert float(nothing.detach()) == 0
    assert torch.equal(gradient(nothing, p.v_1)[0], torch.zeros(N, D, dtype=torch.float64))


def test_every_loss_is_public_and_says_its_equation() -> None:
    functions = {name: value for name, value in vars(losses).items() if inspect.isfunction(value)}
    own = {name for name, value in functions.items() if value.__module__ == losses.__name__ and name[0] != "_"}
    assert own == {name for name in vars(siammm.losses) if name[0] != "_"}
    for name in own:
        assert getattr(siammm.losses, name) is getattr(losses, name)
        assert re.search(r"Eq\. \d+", inspect.getdoc(getattr(losses, name)) or ""), name


def test_the_example_in_the_public_module_runs() -> None:
    p = Problem()
    example = textwrap.dedent(str(siammm.losses.__doc__).partition("::\n")[2])
    scope: dict[str, Any] = {"torch": torch, **vars(siammm.losses)}
    scope |= {"v_1": p.v_1, "v_2": p.v_2, "v_1m": p.v_1m, "v_2m": p.v_2m}
    scope |= {"mu": p.mu_KD, "kappa": p.kappa_K, "index": p.index_NH}
    exec(example, scope)
    assert scope["loss"].isfinite()
    assert all(slope.abs().sum() > 0 for slope in gradient(scope["loss"], p.v_1, p.v_2))
