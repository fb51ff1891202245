"""LARS beside a plain loop, a step that is called off, the groups, and the schedules."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from siammm.core.errors import InputError
from siammm.learn.lars import LARS
from siammm.learn.optim import build_optimiser
from siammm.learn.schedule import half_cosine, learning_rate

NAMES = ["lars", "muon", "sgd", "adamw"]


def small(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 4 * 4, 5)
    ).to(dtype)


def with_gradients(network: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in network.parameters():
        # In the parameter's own memory format, as backward leaves it: torch's fused steps on the CPU rely on it.
        p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))


def snapshot(network: nn.Module, optimiser: torch.optim.Optimizer) -> list[Tensor]:
    """Every parameter and every tensor of the state, as bytes: equal means equal bit for bit."""
    state = [value for p in network.parameters() for value in optimiser.state[p].values()]
    return [tensor.detach().clone().reshape(-1).view(torch.uint8) for tensor in (*network.parameters(), *state)]


def check_same(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right)
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


class PlainLARS:
    """The same, one parameter and one line at a time."""

    def __init__(self, network: nn.Module, lr: float, decay: float, momentum: float, trust: float = 0.001) -> None:
        self.parameters = list(network.parameters())
        self.lr, self.decay, self.momentum, self.trust = lr, decay, momentum, trust
        self.velocity = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        for p, velocity in zip(self.parameters, self.velocity, strict=True):
            assert p.grad is not None
            update = p.grad.clone()
            if p.ndim > 1:
                update += self.decay * p
                length, weight = float(update.norm()), float(p.norm())
                if length > 0 and weight > 0:
                    update *= self.trust * weight / length
            velocity.copy_(self.momentum * velocity + update)
            p -= self.lr * velocity


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("called_off", ["never", "flag at 0"])
def test_lars_is_the_plain_loop(tensor_lr: bool, called_off: str) -> None:
    ours, theirs = small(dtype=torch.float64), small(dtype=torch.float64)
    lr = torch.tensor(0.4, dtype=torch.float64) if tensor_lr else 0.4
    optimiser: Any = build_optimiser("lars", ours, lr=lr, weight_decay=1e-2, momentum=0.8)
    if called_off == "flag at 0":
        optimiser.found_inf = torch.zeros(())
    plain = PlainLARS(theirs, 0.4, 1e-2, 0.8)
    for step in range(5):
        for group in optimiser.param_groups:
            group["lr"] = 0.4 - 0.05 * step
        plain.lr = 0.4 - 0.05 * step
        for network in (ours, theirs):
            with_gradients(network, step)
        optimiser.step()
        plain.step()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_lars_moves_a_weight_by_the_trust_coefficient_whatever_its_gradients_scale() -> None:
    for scale in (1e-6, 1.0, 1e6):
        weight = nn.Parameter(torch.randn(20, 30, generator=torch.Generator().manual_seed(0)))
        before = weight.detach().clone()
        weight.grad = scale * torch.randn(20, 30, generator=torch.Generator().manual_seed(1))
        LARS([weight], 0.5, trust_coefficient=0.01).step()
        assert float((weight.detach() - before).norm() / before.norm()) == pytest.approx(0.005, rel=1e-4)


@pytest.mark.parametrize("zero", ["weight", "gradient"])
def test_lars_with_a_norm_of_zero_is_sgd(zero: str) -> None:
    weight = nn.Parameter(torch.zeros(2, 3) if zero == "weight" else torch.ones(2, 3))
    weight.grad = torch.zeros(2, 3) if zero == "gradient" else torch.full((2, 3), 2.0)
    before = weight.detach().clone()
    LARS([weight], 0.1).step()
    torch.testing.assert_close(weight.detach(), before - 0.1 * weight.grad)


def test_parameters_without_gradients_are_left_alone() -> None:
    network = small()
    optimiser = build_optimiser("lars", network, lr=0.1, weight_decay=0.1)
    with_gradients(network, 0)
    last: Any = network[4]
    last.weight.grad = None
    before = last.weight.detach().clone()
    optimiser.step()
    assert torch.equal(last.weight, before)
    assert not optimiser.state[last.weight]["momentum_buffer"].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("poison", [math.nan, math.inf, 3.0])
def test_a_step_that_is_called_off_changes_nothing(name: str, first: bool, poison: float) -> None:
    network = small()
    with torch.no_grad():
        network[1].bias[0] = -0.0  # pyright: ignore[reportIndexIssue]
    optimiser: Any = build_optimiser(name, network, lr=0.1, weight_decay=1e-2)
    optimiser.found_inf = torch.zeros(())
    if not first:
        with_gradients(network, 0)
        optimiser.step()
    before = snapshot(network, optimiser)
    with_gradients(network, 1)
    for p in network.parameters():
        assert p.grad is not None
        p.grad[0] = poison
    optimiser.found_inf.fill_(1)
    optimiser.step()
    check_same(snapshot(network, optimiser), before)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_after_a_step_that_was_called_off_training_goes_on_as_if_it_had_not_been(name: str, tensor_lr: bool) -> None:
    found = []
    for flags in ([0, 0, 0], [1, 0, 1, 0, 0]):
        network = small()
        lr = torch.tensor(0.1) if tensor_lr else 0.1
        optimiser: Any = build_optimiser(name, network, lr=lr, weight_decay=1e-2)
        optimiser.found_inf = torch.zeros(())
        done = 0
        for flag in flags:
            with_gradients(network, 99 if flag else done)
            optimiser.found_inf.fill_(flag)
            optimiser.step()
            done += not flag
        found.append(snapshot(network, optimiser))
    check_same(*found)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_state_made_ahead_is_what_torch_makes(name: str) -> None:
    """The first step of the optimiser as torch builds it is the same."""
    ours, theirs = small(), small()
    optimiser = build_optimiser(name, ours, lr=0.1, weight_decay=0.0)
    kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    settings = {"momentum": 0.9} if name == "sgd" else {"weight_decay": 0.0}
    plain = kinds[name](theirs.parameters(), 0.1, **settings)
    for step in range(3):
        for network, one in ((ours, optimiser), (theirs, plain)):
            with_gradients(network, step)
            one.step()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b)
    assert {key for p in ours.parameters() for key in optimiser.state[p]} == {
        key for p in theirs.parameters() for key in plain.state[p]
    }


@pytest.mark.parametrize("name", NAMES)
def test_state_can_be_saved_and_restored(name: str) -> None:
    networks = [small(), small(1)]
    optimisers = [build_optimiser(name, network, lr=0.1, weight_decay=1e-2) for network in networks]
    with_gradients(networks[0], 0)
    optimisers[0].step()
    networks[1].load_state_dict(networks[0].state_dict())
    optimisers[1].load_state_dict(copy.deepcopy(optimisers[0].state_dict()))
    for network, optimiser in zip(networks, optimisers, strict=True):
        with_gradients(network, 1)
        optimiser.step()
    check_same(*(snapshot(network, optimiser) for network, optimiser in zip(networks, optimisers, strict=True)))


@pytest.mark.parametrize("name", ["lars", "sgd", "adamw"])  # what Muon turns keeps its size: see test_muon.py
def test_only_weights_decay(name: str) -> None:
    network = small()
    for p in network[1].parameters():
        nn.init.constant_(p, 0.5)
    before = copy.deepcopy(network)
    optimiser = build_optimiser(name, network, lr=0.1, weight_decay=0.1)
    for p in network.parameters():
        p.grad = torch.zeros_like(p)
    optimiser.step()
    for (key, p), old in zip(network.named_parameters(), before.parameters(), strict=True):
        assert torch.equal(p, old) == (p.ndim == 1), key
        assert p.norm() <= old.norm()
    assert [group["weight_decay"] for group in optimiser.param_groups] == [0.1, 0.0]
    assert [len(group["params"]) for group in optimiser.param_groups] == [2, 3]


def test_what_is_trained_is_taken_once() -> None:
    network, head = small(), nn.Linear(3, 2)
    frozen = copy.deepcopy(network).requires_grad_(False)
    head.bias = nn.Parameter(torch.ones(2, 2))  # a bias of several dimensions is a bias
    groups = build_optimiser("lars", nn.ModuleList([network, head, network, frozen]), lr=0.1).param_groups
    taken = [id(p) for group in groups for p in group["params"]]
    assert sorted(taken) == sorted(id(p) for p in (*network.parameters(), *head.parameters()))
    assert any(head.bias is p for p in groups[1]["params"])


@pytest.mark.parametrize("name", ["lars", "muon"])
def test_a_grad_scaler_may_drive_it(name: str) -> None:
    """A step with infinite gradients is called off."""
    ours, theirs = small(), small()
    optimiser, plain = (build_optimiser(name, network, lr=0.1, weight_decay=1e-2) for network in (ours, theirs))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # pyright: ignore[reportPrivateImportUsage]
    x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    scaler.scale(ours(x).square().mean()).backward()
    scaler.step(optimiser)
    scaler.update()
    theirs(x).square().mean().backward()
    plain.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    before = snapshot(ours, optimiser)
    optimiser.zero_grad()
    scaler.scale(ours(x).square().mean() * math.inf).backward()
    scaler.step(optimiser)
    check_same(snapshot(ours, optimiser), before)


def test_a_closure_is_called_with_gradients() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    optimiser = LARS([weight], 0.1)

    def closure() -> Tensor:
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert float(optimiser.step(closure).detach()) == 4
    assert not torch.equal(weight.detach(), torch.ones(2, 2))


@pytest.mark.parametrize("name", NAMES)
def test_mixed_memory_formats(name: str) -> None:
    ours, theirs = small(), small().to(memory_format=torch.channels_last)
    for network in (ours, theirs):
        optimiser: Any = build_optimiser(name, network, lr=0.1, weight_decay=1e-2)
        optimiser.found_inf = torch.zeros(())
        for step in range(2):
            with_gradients(network, step)
            optimiser.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"name": "adam"}, "optimiser is 'adam', but it must be one of lars, muon, sgd, adamw"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": math.nan}, "lr is nan"),
        ({"lr": torch.ones(2)}, "shape"),
        ({"weight_decay": -1e-4}, "weight_decay is -0.0001"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"module": nn.ReLU()}, "no parameter to train"),
    ],
)
def test_refusals(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        build_optimiser(**{"name": "lars", "module": small(), "lr": 0.1} | settings)


def test_the_rate_warms_up_and_falls_to_nothing() -> None:
    rates = [learning_rate(step, 100, 10, 0.5, 512) for step in range(101)]
    assert rates[0] == 0
    assert rates[5] == pytest.approx(0.5)
    assert rates[10] == max(rates) == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[100] == pytest.approx(0, abs=1e-12)
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert learning_rate(0, 100, 0, 0.5, 256) == 0.5
    assert learning_rate(7, 10, 20, 1.0, 256) == pytest.approx(0.35)  # all warm-up
    assert learning_rate(200, 100, 10, 0.5, 512) == 0


def test_momentum_rises_to_one() -> None:
    values = [half_cosine(step, 100, 0.99, 1.0) for step in range(101)]
    assert values[0] == pytest.approx(0.99)
    assert values[50] == pytest.approx(0.995)
    assert values[100] == 1
    assert values == sorted(values)
    assert half_cosine(50, 100, 1.0, 1.0) == 1
    assert half_cosine(0, 0, 0.9, 1.0) == pytest.approx(0.9)
