"""Run the kernels of LARS and of the momentum encoder under Triton's interpreter and compare them with torch's.

A program of its own, because the interpreter must be switched on before Triton is imported. Prints one line a check and
exits with 1 if any fails; ``tests/test_interpreted_kernels.py`` runs it.
"""

from __future__ import annotations

import copy
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor, nn

from siammm.learn.cuda import addresses, muon_kernels
from siammm.learn.cuda.optimisers import FusedLARS, FusedMuon
from siammm.learn.cuda.update_kernels import FollowKernel
from siammm.learn.lars import LARS
from siammm.learn.muon import Muon
from siammm.learn.networks import Encoder, SiameseNetwork, projector
from siammm.learn.optim import build_optimiser

torch.set_num_threads(1)
failures: list[str] = []
# Tensors of several parts, and partial sums that are added up in several goes, without large tensors.
addresses.PART_SIZE, addresses.AT_ONCE = 64, 4


def check(name: str, holds: bool) -> None:
    sys.stdout.write(f"{'ok  ' if holds else 'FAIL'} {name}\n")
    if not holds:
        failures.append(name)


def close(one: Tensor, other: Tensor) -> bool:
    one, other = one.detach(), other.detach()
    return float((one - other).abs().max()) <= 1e-6 * max(1e-3, float(other.abs().max()))


def made_by(optimiser: Any) -> dict[Any, Any]:
    return optimiser.__dict__.get("_kernels", {})


def network(seed: int) -> SiameseNetwork:
    torch.manual_seed(seed)
    body = nn.Sequential(
        nn.Conv2d(4, 12, 3), nn.BatchNorm2d(12), nn.Conv2d(12, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    body.num_features = 8  # pyright: ignore
    encoder = Encoder(body, projector(8, hidden=12, out=8))
    made = SiameseNetwork(encoder)
    with torch.no_grad():
        encoder.projector[0].weight[:, 0] = 0  # pyright: ignore
    return made.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def filled(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.requires_grad:
            # New tensors, as backward leaves them: in the order of the parameter.
            p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))


by_kernels, by_torch = network(0), network(0)
optimisers: list[Any] = []
for model in (by_kernels, by_torch):
    made = build_optimiser("lars", model, lr=torch.tensor(0.3), weight_decay=0.01, fused=model is by_kernels)
    for group in made.param_groups:
        group["lr"] = made.param_groups[0]["lr"]
    optimisers.append(made)
one, other = optimisers

start = [p.detach().clone() for p in by_kernels.parameters()]
for step in range(4):
    failed = torch.tensor(1.0 if step == 2 else 0.0)
    before = [p.detach().clone() for p in by_kernels.parameters()]
    for model, optimiser in ((by_kernels, one), (by_torch, other)):
        filled(model, step)
        if step == 2:
            next(model.parameters()).grad.fill_(float("nan"))  # pyright: ignore
        optimiser.found_inf = failed
        optimiser.param_groups[0]["lr"].fill_(0.3 / (1 + step))
        optimiser.step()
    check(f"step {step} used the kernels", bool(made_by(one)) and not made_by(other))
    pairs = list(zip(by_kernels.named_parameters(), by_torch.parameters(), strict=True))
    check(f"step {step}: weights", all(close(p, q) for (_, p), q in pairs))
    momenta = [
        (one.state[p]["momentum_buffer"], other.state[q]["momentum_buffer"]) for (_, p), q in pairs if p.requires_grad
    ]
    check(f"step {step}: momenta", all(close(b, c) for b, c in momenta))
    same = all(torch.equal(p, q) for p, q in zip(by_kernels.parameters(), before, strict=True))
    check(f"step {step} is {'called off' if step == 2 else 'taken'}", same == (step == 2))
moved = [not torch.equal(p, q) for p, q in zip(by_kernels.encoder.parameters(), start, strict=False)]
check("weights moved", all(moved))

# Muon: convolutions in either layout, matrices that are tall, two of one shape, heads by LARS.
for layout in (torch.channels_last, torch.contiguous_format):
    by_kernels, by_torch = (network(0).to(memory_format=layout) for _ in range(2))  # pyright: ignore
    optimisers = []
    for model in (by_kernels, by_torch):
        for turned in (None, model.encoder.backbone):
            optimisers.append(
                build_optimiser(
                    "muon",
                    model,
                    lr=torch.tensor(0.3),
                    weight_decay=0.01,
                    trust_coefficient=0.05,
                    turned=turned,
                    fused=model is by_kernels,
                )
            )
            for group in optimisers[-1].param_groups:
                group["lr"] = optimisers[-1].param_groups[0]["lr"]
    for whole in (0, 1) if layout == torch.channels_last else (0,):
        one, other = optimisers[whole], optimisers[whole + 2]
        for step in range(3):
            before = [p.detach().clone() for p in by_kernels.parameters()]
            for model, optimiser in ((by_kernels, one), (by_torch, other)):
                filled(model, step)
                if step == 1:
                    next(model.parameters()).grad.fill_(float("nan"))  # pyright: ignore
                optimiser.found_inf = torch.tensor(1.0 if step == 1 else 0.0)
                optimiser.param_groups[0]["lr"].fill_(0.3 / (1 + step))
                optimiser.step()
            what = f"Muon, {layout}, {('all', 'backbone')[whole]}, step {step}"
            check(f"{what} used the kernels", bool(one._turn_kernels) and not hasattr(other, "_turn_kernels"))
            pairs = list(zip(by_kernels.parameters(), by_torch.parameters(), strict=True))
            check(f"{what}: weights", all(close(p, q) for p, q in pairs))
            momenta = [[o.state[p]["momentum_buffer"] for p in m.parameters() if p.requires_grad]
                       for o, m in ((one, by_kernels), (other, by_torch))]  # fmt: skip
            check(f"{what}: momenta", all(close(b, c) for b, c in zip(*momenta, strict=True)))
            same = all(torch.equal(p, q) for p, q in zip(by_kernels.parameters(), before, strict=True))
            check(f"{what} is {'called off' if step == 1 else 'taken'}", same == (step == 1))
alike = [nn.Parameter(torch.randn(8, 12)), nn.Parameter(torch.randn(12, 8)), nn.Parameter(torch.randn(8, 12))]
alike += [nn.Parameter(torch.zeros(8, 12)), nn.Parameter(torch.randn(4, 6))]
expected = copy.deepcopy(alike)
for params in (expected, alike):
    kind = Muon if params is expected else FusedMuon
    optimiser = kind([{"params": params, "turned": True}], 0.3, trust_coefficient=0.05)
    for number, p in enumerate(params):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(number)) * (number != 2)
    optimiser.step()
    check("Muon used the kernels", ("_turn_kernels" in optimiser.__dict__) == (params is alike))
check("matrices of one shape, one without gradient, one of zeros", all(map(close, alike, expected)))
check("what is 0 stays 0", not alike[3].any())
check(
    "those of one shape are one stack",
    [x.shape for x, _ in next(iter(optimiser._turn_kernels.values())).stacks] == [(1, 4, 6), (3, 8, 12), (1, 12, 8)],  # pyright: ignore
)
# As many values in another shape are another set of kernels.
pair = [nn.Parameter(torch.randn(8, 12)), nn.Parameter(torch.randn(12, 8))]
expected = copy.deepcopy(pair)
for params in (pair, expected):
    kind = Muon if params is expected else FusedMuon
    optimiser = kind([{"params": params, "turned": True}], 0.3, trust_coefficient=0.05)
    for number_of_step, turn in enumerate((0, 1, 0)):
        for number, p in enumerate(params):
            grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(number + 2 * number_of_step))
            p.grad = grad if number == turn else None
        optimiser.step()
check("gradients in turn", all(map(close, pair, expected)))
odd = nn.Parameter(torch.randn(6, 6))
odd.grad = torch.randn(6, 6)
FusedMuon([{"params": [odd], "turned": True}], 0.3).step()
check("sizes that are no whole eights are refused", not muon_kernels.supports([odd]))
check("and columns that come first in memory", not muon_kernels.supports([torch.ones(8, 16).T]))

# A weight of zeros and a gradient of zeros: SGD, whatever the norm of the other.
for zero in ("weight", "gradient"):
    results = []
    for kernels in (True, False):
        torch.manual_seed(1)
        p = nn.Parameter(torch.zeros(8, 9) if zero == "weight" else torch.randn(8, 9))
        optimiser = (FusedLARS if kernels else LARS)([p], 0.1, weight_decay=0.0)
        p.grad = torch.zeros(8, 9) if zero == "gradient" else torch.randn(8, 9)
        optimiser.step()
        check(f"a {zero} of zeros by {'kernels' if kernels else 'torch'}", bool(made_by(optimiser)) == kernels)
        results.append(p.detach().clone())
    check(f"a {zero} of zeros", close(*results) and bool(results[0].isfinite().all()))

# Only some have gradients, later others; gradients that lie otherwise in memory go torch's way.
plain = nn.ParameterList([nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(4, 40))])
optimiser = FusedLARS(plain.parameters(), 0.1)
plain[0].grad = torch.ones(8)
optimiser.step()
check("what has no gradient stays", torch.equal(plain[1], torch.ones(4, 40)))
check("what has one moves", not torch.equal(plain[0], torch.ones(8)))
plain[1].grad = torch.randn(4, 40)
expected = copy.deepcopy(plain)
for p, q in zip(expected, plain, strict=True):
    p.grad = q.grad.clone()  # pyright: ignore
theirs = LARS(expected.parameters(), 0.1)
theirs.load_state_dict(copy.deepcopy(optimiser.state_dict()))
optimiser.step()
theirs.step()
check("then all move", all(close(p, q) for p, q in zip(plain, expected, strict=True)))
plain[1].grad = torch.randn(40, 4).T
check("another order in memory is refused", not addresses.supports(list(plain), [p.grad for p in plain]))  # pyright: ignore
optimiser.step()
check("and sizes that are no whole fours", not addresses.supports([torch.ones(5)]))

# The momentum encoder.
followed, reference = copy.deepcopy(by_kernels), copy.deepcopy(by_torch)
followed.follow = FollowKernel()
for value in (0.99, 0.5, 1.0):
    momentum = torch.tensor(value, dtype=torch.float64)
    followed.update_momentum(momentum)
    reference.update_momentum(float(momentum))
    check(f"momentum {value} used the kernel", followed.follow._made is not None)
    check(
        f"the momentum encoder follows, {value}",
        all(close(p, q) for p, q in zip(followed.parameters(), reference.parameters(), strict=True)),
    )
check("a copy makes a kernel of its own", copy.deepcopy(followed).follow is None)

sys.exit(1 if failures else 0)
