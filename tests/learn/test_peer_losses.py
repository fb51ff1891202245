"""The peers' losses: invariants, closed forms, gradients, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from siammm.core.errors import InputError
from siammm.learn import losses
from siammm.learn.peer_losses import (
    balanced_codes,
    prototype_scattering_loss,
    proximity_concentrations,
    swapped_prediction_loss,
)
from siammm.learn.queue import Queue

B, K, D = 12, 4, 5


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=1, keepdim=True)


# -- SwAV


def test_every_sample_has_one_code_and_every_prototype_its_share() -> None:
    code = balanced_codes(drawn(B, K).clamp(-1, 1).float(), epsilon=0.5, iterations=50)
    torch.testing.assert_close(code.sum(dim=1), torch.ones(B))
    torch.testing.assert_close(code.sum(dim=0), torch.full((K,), B / K), rtol=1e-3, atol=1e-3)


def test_codes_keep_the_form_of_an_optimal_plan() -> None:
    """exp(score / epsilon), scaled by a number for each row and one for each column."""
    score = drawn(B, K).clamp(-1, 1).float()
    log = balanced_codes(score, epsilon=0.5).log() - score / 0.5
    mixed = log - log.mean(dim=0) - log.mean(dim=1, keepdim=True) + log.mean()
    torch.testing.assert_close(mixed, torch.zeros(B, K), atol=1e-4, rtol=0)


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    score = torch.tensor([[1.0, -1.0], [1.0, -1.0], [-1.0, -1.0]])
    code = balanced_codes(score, epsilon=0.025)
    assert bool(code.isfinite().all())
    torch.testing.assert_close(code.sum(dim=1), torch.ones(3))


def test_a_sample_without_weight_changes_no_code_and_one_of_weight_two_counts_twice() -> None:
    score = drawn(B, K).clamp(-1, 1).float()
    more = torch.cat([score, drawn(3, K, seed=1).clamp(-1, 1).float()])
    weight = torch.cat([torch.ones(B), torch.zeros(3)])
    codes = balanced_codes(more, weight_B=weight)
    torch.testing.assert_close(codes[:B], balanced_codes(score))
    assert float(codes[B:].abs().max()) == 0
    double = torch.ones(B)
    double[0] = 2.0
    twice = balanced_codes(torch.cat([score, score[:1]]))
    torch.testing.assert_close(balanced_codes(score, weight_B=double), twice[:B])


def test_two_ranks_balance_together() -> None:
    """Each sees half of the samples and the sums of both."""
    score = drawn(B, K).clamp(-1, 1).float()
    halves = [score[: B // 2], score[B // 2 :]]
    whole = balanced_codes(score, iterations=2)
    # Play the two ranks one after the other: the other's sum of a round is known from the whole.
    totals: list[Tensor] = []
    share = ((score - 1) / 0.05).exp()
    for _ in range(2):
        totals.append(share.sum(dim=0))
        share = share / totals[-1]
        share = share / share.sum(dim=1, keepdim=True)
    for half, expected in zip(halves, whole.split(B // 2), strict=True):
        rounds = iter(totals)
        torch.testing.assert_close(
            balanced_codes(half, iterations=2, sum_over_ranks=lambda _, r=rounds: next(r)), expected
        )


def test_swapped_prediction_is_the_cross_entropy_with_the_other_views_code() -> None:
    score_1, score_2 = drawn(B, K).requires_grad_(), drawn(B, K, seed=1).requires_grad_()
    target = torch.arange(B) % K
    code = torch.nn.functional.one_hot(target, K).double()
    loss = swapped_prediction_loss(score_1, score_2, code, code, temperature=0.5)
    entropy = torch.nn.functional.cross_entropy
    torch.testing.assert_close(loss.double(), 0.5 * (entropy(score_1 / 0.5, target) + entropy(score_2 / 0.5, target)))
    loss.backward()
    assert score_1.grad is not None
    expected = 0.5 * ((score_1 / 0.5).softmax(dim=1) - code) / 0.5 / B
    torch.testing.assert_close(score_1.grad, expected, rtol=1e-5, atol=1e-7)


# -- ProPos


def by_hand(v: Tensor, v_m: Tensor, cluster: Tensor, tau: float) -> Tensor:
    present = sorted(set(cluster.tolist()))
    mu = {k: unit(unit(v)[cluster == k].sum(dim=0, keepdim=True))[0] for k in present}
    mu_m = {k: unit(unit(v_m)[cluster == k].sum(dim=0, keepdim=True))[0] for k in present}
    parts: list[Tensor] = []
    for k in present:
        positive = torch.exp(mu[k] @ mu_m[k] / tau)
        negative = sum((torch.exp(mu[k] @ mu[j] / tau) for j in present if j != k), start=torch.zeros(()).double())
        parts.append(-torch.log(positive / (positive + negative)))
    return torch.stack(parts).mean()


def test_scattering_is_its_definition_over_the_clusters_of_the_batch() -> None:
    v, v_m = drawn(B, D).requires_grad_(), drawn(B, D, seed=1)
    cluster = torch.arange(B) % 3  # of five clusters, two are not in the batch
    loss = prototype_scattering_loss(v, v_m, cluster, 5, 0.5)
    torch.testing.assert_close(loss, by_hand(v, v_m, cluster, 0.5))
    torch.autograd.gradcheck(lambda x: prototype_scattering_loss(x, v_m, cluster, 5, 0.5), (v,))


def test_one_cluster_has_nothing_to_be_scattered_from() -> None:
    v = drawn(B, D).requires_grad_()
    loss = prototype_scattering_loss(v, drawn(B, D, seed=1), torch.zeros(B, dtype=torch.int64), 1)
    loss.backward()
    assert float(loss.detach()) == 0
    assert v.grad is not None
    assert float(v.grad.abs().max()) == 0


# -- PCL


def test_tight_and_large_clusters_are_the_concentrated_ones() -> None:
    distance = torch.tensor([0.2, 0.4, 0.8, 0.4, 0.4])
    count = torch.tensor([10.0, 10.0, 10.0, 1000.0, 10.0])
    kappa = proximity_concentrations(distance, count)
    assert kappa[0] > kappa[1] > kappa[2]
    assert kappa[3] > kappa[1] == kappa[4]
    torch.testing.assert_close((1 / kappa).mean(), torch.tensor(0.1))


def test_concentrations_follow_the_formula_where_nothing_is_clipped() -> None:
    distance, count = torch.full((6,), 0.3).double(), torch.tensor([4.0, 4, 8, 8, 8, 4]).double()
    phi = distance / (count + 10).log()
    torch.testing.assert_close(proximity_concentrations(distance, count, temperature=0.2), phi.mean() / phi / 0.2)


def test_a_lone_image_is_no_tight_cluster() -> None:
    kappa = proximity_concentrations(torch.tensor([0.0, 0.3, 0.5]), torch.tensor([1.0, 20.0, 20.0]))
    assert bool(kappa.isfinite().all())
    assert kappa[0] == kappa[2] < kappa[1]
    lonely = proximity_concentrations(torch.zeros(3), torch.ones(3), temperature=0.1)
    torch.testing.assert_close(lonely, torch.full((3,), 10.0))


def test_deepcluster_is_the_papers_contrast_with_equal_concentrations() -> None:
    """Eq. 14 with every kappa 10 is the cross entropy at a temperature of .1."""
    v, mu, target = drawn(B, D), unit(drawn(K, D, seed=1)), torch.arange(B) % K
    loss = losses.negative_centroids_loss(v, mu, torch.full((K,), 10.0).double(), target)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(unit(v) @ mu.T / 0.1, target))


# -- the queue


def test_a_queue_keeps_the_newest_and_forgets_the_oldest() -> None:
    queue = Queue(6, D, torch.device("cpu"), seed=0)
    address = queue.view_2QD.data_ptr()
    torch.testing.assert_close(queue.view_2QD.norm(dim=2), torch.ones(2, 6))
    first, second = drawn(4, D).float(), drawn(4, D, seed=1).float()
    queue.push(first, 2 * first)
    queue.push(second, 3 * second)
    torch.testing.assert_close(queue.view_2QD[0], torch.cat([unit(second), unit(first[:2])]))
    torch.testing.assert_close(queue.view_2QD[0], queue.view_2QD[1])
    assert queue.view_2QD.data_ptr() == address
    queue.push(drawn(9, D).float(), drawn(9, D).float())  # more than it holds
    assert queue.view_2QD.shape == (2, 6, D)


def test_a_queue_without_a_seed_is_empty_until_it_is_full() -> None:
    queue = Queue(6, D, torch.device("cpu"))
    full: list[bool] = []
    for _ in range(2):
        full.append(bool(queue.is_full))
        queue.push(drawn(4, D), drawn(4, D, seed=1))
    assert [*full, bool(queue.is_full)] == [False, False, True]


def test_a_queue_starts_the_same_from_the_same_seed() -> None:
    device = torch.device("cpu")
    assert torch.equal(Queue(4, 3, device, seed=1).view_2QD, Queue(4, 3, device, seed=1).view_2QD)
    assert not torch.equal(Queue(4, 3, device, seed=1).view_2QD, Queue(4, 3, device, seed=2).view_2QD)


# -- refused


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: balanced_codes(torch.zeros(3)), r"score_BK has the shape \(3,\)"),
        (
            lambda: balanced_codes(torch.zeros(3, 2), epsilon=0.0),
            "epsilon is 0.0, but it must be",
        ),
        (
            lambda: swapped_prediction_loss(torch.zeros(3, 2), torch.zeros(3, 3), torch.zeros(3, 2), torch.zeros(3, 2)),
            r"score_2_BK has the shape \(3, 3\)",
        ),
        (
            lambda: prototype_scattering_loss(torch.ones(2, 3), torch.ones(2, 3), torch.zeros(2).long(), 0),
            "n_clusters is 0",
        ),
        (
            lambda: prototype_scattering_loss(torch.ones(2, 3), torch.ones(2, 3), torch.zeros(2), 2),
            "must hold int64",
        ),
        (lambda: proximity_concentrations(torch.ones(2), torch.ones(3)), r"count_K has the shape \(3,\)"),
        (lambda: proximity_concentrations(torch.ones(2), torch.ones(2), temperature=math.nan), "temperature is nan"),
    ],
)
def test_what_makes_no_sense_is_refused(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(InputError, match=message):
        call()
