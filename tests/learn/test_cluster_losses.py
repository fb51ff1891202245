"""The losses of the clusters, written out: assignment weights, likelihood, negative centroids and samples, groups."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize, one_hot

from siammm.learn import losses
from siammm.mixture import em, vmf
from siammm.mixture.components import ConcentrationSettings, VonMisesFisherComponents
from tests.learn.loss_problems import LOSSES, TAU, D, H, K, M, N, Problem, gradient, through_length


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
