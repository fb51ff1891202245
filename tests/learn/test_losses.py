"""The losses: their equations written out, their gradients in closed form, and what must hold of all of them."""

from __future__ import annotations

import inspect
import math
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import siammm.losses
from siammm.core.errors import InputError
from siammm.learn import losses
from tests.learn.loss_problems import LOSSES, TAU, N, Problem, every_loss, gradient, through_length


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
