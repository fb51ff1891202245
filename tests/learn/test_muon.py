"""Muon beside a plain loop and an exact decomposition; what turns, what does not, and that nothing grows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from siammm.core.errors import InputError
from siammm.learn.lars import LARS
from siammm.learn.muon import Muon, matrices, nearest_orthogonal
from siammm.learn.optim import build_optimiser


def network(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Two convolutions of one shape, one that is tall, one that is depthwise; then a head."""
    torch.manual_seed(seed)
    body = nn.Sequential(
        nn.Conv2d(3, 32, 3, bias=False),
        nn.BatchNorm2d(32),
        nn.Conv2d(32, 8, 1),
        nn.Conv2d(8, 8, 3, bias=False),
        nn.Conv2d(8, 8, 3, bias=False),
        nn.Conv2d(8, 8, 3, groups=8, bias=False),
        nn.Flatten(),
    )
    return nn.Sequential(body, nn.Linear(32, 5)).to(dtype)


def with_gradients(model: nn.Module, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.empty_like(p).copy_(scale * torch.randn(p.shape, generator=generator))


def as_matrix(p: Tensor) -> Tensor:
    return p.detach().permute(0, *range(2, p.ndim), 1).reshape(p.shape[0], -1)


def exactly_orthogonal(x: Tensor) -> Tensor:
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    return u @ v


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (16, 144), (64, 27), (2, 500), (130, 128)])
def test_all_directions_become_alike(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x_MRC = torch.randn(3, rows, columns, generator=generator)
    found_MRC = nearest_orthogonal(x_MRC * torch.tensor([1.0, 1e-6, 1e6])[:, None, None])
    for x, found in zip(x_MRC, found_MRC, strict=True):
        values = torch.linalg.svdvals(found)
        # A square matrix of random numbers has a value or two near 0, which are not there yet.
        assert float(values.quantile(0.1)) > 0.6
        assert float(values.max()) < 1.25
        assert float(nn.functional.cosine_similarity(found.flatten(), exactly_orthogonal(x).flatten(), dim=0)) > 0.97


def test_one_large_direction_does_not_decide() -> None:
    """Of an update nearly all in one direction, the others come out as large; its own length says nothing."""
    generator = torch.Generator().manual_seed(0)
    u, v = (exactly_orthogonal(torch.randn(20, 20, generator=generator)) for _ in range(2))
    sizes = torch.full((20,), 0.003)
    sizes[0] = 1
    values = torch.linalg.svdvals(nearest_orthogonal((u @ torch.diag(sizes) @ v)[None])[0])
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.25


def test_nothing_comes_of_nothing() -> None:
    assert not nearest_orthogonal(torch.zeros(1, 4, 6)).any()
    weight = nn.Parameter(torch.ones(4, 6))
    weight.grad = torch.zeros(4, 6)
    Muon([{"params": [weight], "turned": True}], lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(weight.detach(), torch.ones(4, 6))


def test_what_has_no_gradient_stays_and_types_may_be_mixed() -> None:
    """Each by itself, whatever else is in the group."""
    shapes: list[tuple[int, ...]] = [(8, 6), (8, 6), (4, 3, 3, 3)]
    weights = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
    group = [weights[0], nn.Parameter(weights[1].detach().float()), weights[2]]
    for p in group[:2]:
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(p.dtype)
    before = [p.detach().clone() for p in group]
    optimiser: Any = Muon([{"params": group, "turned": True}], lr=1.0, trust_coefficient=0.1)
    optimiser.found_inf = torch.zeros(())
    optimiser.step()
    assert torch.equal(group[2], before[2])
    alone = nn.Parameter(before[0].clone())
    alone.grad = group[0].grad
    Muon([{"params": [alone], "turned": True}], lr=1.0, trust_coefficient=0.1).step()
    torch.testing.assert_close(group[0], alone)
    assert not torch.equal(group[1], before[1])


def test_half_precision_keeps_the_size_too() -> None:
    weight = nn.Parameter(torch.randn(16, 24, generator=torch.Generator().manual_seed(0)).bfloat16())
    size = float(weight.detach().float().norm())
    optimiser = Muon([{"params": [weight], "turned": True}], lr=1.0, trust_coefficient=0.01)
    for step in range(300):
        weight.grad = torch.randn(16, 24, generator=torch.Generator().manual_seed(step)).bfloat16()
        optimiser.step()
    assert float(weight.detach().float().norm()) == pytest.approx(size, rel=0.01)


class PlainMuon:
    """The same, one parameter and one line at a time, for matrices alone."""

    def __init__(self, matrices: list[Tensor], momentum: float, trust: float) -> None:
        self.matrices, self.momentum, self.trust = matrices, momentum, trust
        self.velocity = [torch.zeros_like(p) for p in matrices]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for p, velocity in zip(self.matrices, self.velocity, strict=True):
            assert p.grad is not None
            velocity.copy_(self.momentum * velocity + p.grad)
            update = as_matrix(p.grad + self.momentum * velocity)
            move = nearest_orthogonal(update[None])[0]
            weight = as_matrix(p)
            size = weight.norm()
            step = lr * self.trust / math.sqrt(1 - self.momentum**2)
            new = weight - step * size * move / move.norm()
            new *= size / new.norm()
            p.copy_(new.reshape(p.shape[0], *p.shape[2:], p.shape[1]).movedim(-1, 1))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("called_off", ["never", "flag at 0"])
def test_it_is_the_plain_loop_and_lars_for_the_rest(memory_format: torch.memory_format, called_off: str) -> None:
    ours, matrices, rest = (network().to(memory_format=memory_format) for _ in range(3))  # pyright: ignore[reportCallIssue]
    body: Any = ours[0]
    optimiser: Any = build_optimiser(
        "muon", ours, lr=0.4, weight_decay=1e-2, momentum=0.8, trust_coefficient=0.05, turned=body
    )
    if called_off == "flag at 0":
        optimiser.found_inf = torch.zeros(())
    names = {"0.0.weight", "0.2.weight", "0.3.weight", "0.4.weight"}
    plain = PlainMuon([p for name, p in matrices.named_parameters() if name in names], 0.8, 0.05)
    for name, p in rest.named_parameters():
        p.requires_grad_(name not in names)
    lars = build_optimiser("lars", rest, lr=0.4, weight_decay=1e-2, momentum=0.8, trust_coefficient=0.05)
    for step in range(5):
        for model in (ours, matrices, rest):
            with_gradients(model, step)
        for one in (optimiser, lars):
            for group in one.param_groups:
                group["lr"] = 0.4 - 0.05 * step
            one.step()
        plain.step(0.4 - 0.05 * step)
    for (name, p), matrix, other in zip(ours.named_parameters(), matrices.parameters(), rest.parameters(), strict=True):
        torch.testing.assert_close(p, matrix if name in names else other, rtol=1e-9, atol=1e-11, msg=name)


def test_a_step_is_as_long_as_one_of_lars_with_gradients_that_have_nothing_in_common() -> None:
    lengths: dict[str, list[float]] = {}
    for name in ("lars", "muon"):
        weight = nn.Parameter(torch.randn(40, 60, generator=torch.Generator().manual_seed(0)))
        kind = {"lars": LARS, "muon": Muon}[name]
        group = {"params": [weight], **({"turned": True} if name == "muon" else {})}
        optimiser = kind([group], lr=1.0, momentum=0.9, trust_coefficient=0.001)
        lengths[name] = []
        for step in range(60):
            before = weight.detach().clone()
            weight.grad = torch.randn(40, 60, generator=torch.Generator().manual_seed(step + 1))
            optimiser.step()
            lengths[name].append(float((weight.detach() - before).norm() / before.norm()))
    assert lengths["muon"][-1] == pytest.approx(0.001 / math.sqrt(1 - 0.81), rel=1e-2)
    assert sum(lengths["muon"][30:]) == pytest.approx(sum(lengths["lars"][30:]), rel=0.05)


def test_matrices_keep_their_size_however_long_and_far_they_go() -> None:
    model = network(dtype=torch.float32)
    optimiser = build_optimiser("muon", model, lr=5.0, weight_decay=0.1, trust_coefficient=0.05)
    sizes = [float(p.detach().norm()) for p in optimiser.param_groups[0]["params"]]
    before = [p.detach().clone() for p in optimiser.param_groups[0]["params"]]
    for step in range(100):
        with_gradients(model, step % 3)  # much the same: momentum adds up
        optimiser.step()
    after = [p.detach() for p in optimiser.param_groups[0]["params"]]
    assert [float(p.norm()) for p in after] == pytest.approx(sizes, rel=1e-4)
    assert all(float((p - q).norm() / q.norm()) > 0.5 for p, q in zip(after, before, strict=True))


def test_what_turns() -> None:
    model = network()
    body: Any = model[0]
    turned, weights, others = build_optimiser("muon", model, lr=0.1, weight_decay=0.1, turned=body).param_groups
    assert [p.shape for p in turned["params"]] == [(32, 3, 3, 3), (8, 32, 1, 1), (8, 8, 3, 3), (8, 8, 3, 3)]
    assert [p.shape for p in weights["params"]] == [(8, 1, 3, 3), (5, 32)], "depthwise, and the head"
    assert all(p.ndim == 1 for p in others["params"])
    assert [group["weight_decay"] for group in (turned, weights, others)] == [0, 0.1, 0]
    assert any(p.shape == (5, 32) for p in build_optimiser("muon", model, lr=0.1).param_groups[0]["params"])


def test_what_does_not_turn() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(13, 4))
            self.groups = nn.Conv2d(8, 8, 3, groups=2)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.zeros = nn.Linear(4, 4)
            nn.init.zeros_(self.zeros.weight)

    odd = Odd()
    assert matrices(odd) == [], "a table, a convolution in groups, what is frozen, and what is 0 and would stay so"
    with pytest.raises(InputError, match="no matrix that Muon could turn; use another"):
        build_optimiser("muon", odd, lr=0.1)
    with pytest.raises(InputError, match="no matrix"):
        build_optimiser("muon", network(), lr=0.1, turned=odd)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4), (2, 2, 2, 2, 2)])
def test_only_matrices_are_taken(shape: tuple[int, ...]) -> None:
    p = nn.Parameter(torch.ones(shape))
    with pytest.raises(InputError, match="cannot turn; turned=True is for matrices"):
        Muon([{"params": [p], "turned": True}], lr=0.1)


def test_a_group_has_no_momentum_of_one() -> None:
    optimiser = Muon([{"params": [nn.Parameter(torch.ones(2, 3))], "turned": True}], lr=0.1)
    with pytest.raises(InputError, match=r"momentum is 1\.0, but it must be below 1"):
        optimiser.add_param_group({"params": [nn.Parameter(torch.ones(2, 3))], "turned": True, "momentum": 1.0})
    assert len(optimiser.param_groups) == 1
