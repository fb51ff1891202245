"""Run the BatchNorm kernels under Triton's interpreter and compare them with torch.

A program of its own, because the interpreter must be switched on before Triton is imported. Prints one line a check and
exits with 1 if any fails; ``tests/test_interpreted_kernels.py`` runs it.
"""

from __future__ import annotations

import copy
import math
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor, nn
from torch.nn import functional

from siammm.learn.backbones import build_backbone
from siammm.learn.cuda import norm_kernels
from siammm.learn.cuda.fused import fused, normalised

torch.set_num_threads(1)
failures: list[str] = []


def check(name: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    found, expected = found.detach().double(), expected.detach().double()
    error = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12))
    sys.stdout.write(f"{'ok  ' if error <= tolerance else 'FAIL'} {name}: {error:.1e}\n")
    if not error <= tolerance:
        failures.append(name)


# Channels that fill no tile, fill one, need several; groups of one row tile and of many; a mean far above the spread.
# Partial sums are added up a few at a time, so that there are several times.
norm_kernels._ROWS_AT_ONCE = 4
cases = [
    ((8, 24, 3, 3), 2, torch.float32),
    ((12, 130), 3, torch.float32),
    ((4, 16, 5, 5), 1, torch.float32),
    ((8, 64, 12, 12), 2, torch.float32),
    ((16, 64, 8, 8), 2, torch.bfloat16),
]
uses = [(True, True, True), (False, False, False), (True, False, True), (True, True, False)]
for shape, groups, dtype in cases:
    # All of them where that takes a moment; of large ones the first two, which have every part and none.
    for affine, with_residual, relu in uses if math.prod(shape) < 2000 and shape[1] < 128 else uses[:2]:
        generator = torch.Generator().manual_seed(sum(shape))
        channels = shape[1]
        centre = 50 * torch.randn(channels, generator=generator)
        x = torch.randn(shape, generator=generator) + centre.view(1, -1, *[1] * (len(shape) - 2))
        x = x.to(dtype)
        if x.ndim == 4:
            x = x.to(memory_format=torch.channels_last)
        residual = torch.randn(shape, generator=generator).to(dtype) if with_residual else None
        dy = torch.randn(shape, generator=generator).to(dtype)
        layer = (nn.BatchNorm2d if x.ndim == 4 else nn.BatchNorm1d)(channels, affine=affine)
        if affine:
            nn.init.uniform_(layer.weight, 0.5, 1.5, generator=generator)
            nn.init.normal_(layer.bias, generator=generator)
        plain = copy.deepcopy(layer)

        given = [
            x.requires_grad_(),
            *([residual.requires_grad_()] if residual is not None else []),
            *layer.parameters(),
        ]
        y = normalised(x, layer, groups, residual, relu=relu)[0]
        found = torch.autograd.grad(y, given, dy)

        wide = x.detach().double().requires_grad_()
        wide_residual = None if residual is None else residual.detach().double().requires_grad_()
        plain = plain.double()
        expected_y = torch.cat([plain(part) for part in wide.chunk(groups)])
        if wide_residual is not None:
            expected_y = expected_y + wide_residual
        expected_y = functional.relu(expected_y) if relu else expected_y
        wanted = [wide, *([wide_residual] if wide_residual is not None else []), *plain.parameters()]
        expected = torch.autograd.grad(expected_y, wanted, dy.double())

        label = f"{tuple(shape)} x {groups}, {dtype}, affine {affine}, residual {with_residual}, relu {relu}"
        # A mean of 50 costs float32 two digits; bfloat16 has two and a half in all.
        tolerance = 1e-4 if dtype == torch.float32 else 2e-2
        check(f"output, {label}", y, expected_y, tolerance)
        for name, one, other in zip(("x", "second", "third", "fourth"), found, expected, strict=False):
            check(f"gradient of {name}, {label}", one, other, tolerance)
        assert layer.running_mean is not None
        assert plain.running_mean is not None
        assert layer.running_var is not None
        assert plain.running_var is not None
        check(f"running mean, {label}", layer.running_mean, plain.running_mean, 1e-5)
        check(f"running variance, {label}", layer.running_var, plain.running_var, 1e-4)
        assert layer.num_batches_tracked is not None
        check(f"batches, {label}", layer.num_batches_tracked, torch.tensor(groups), 0.0)

# Two readers: their gradients are added up on the way, also where there is no residual or no ReLU, or only the second.
for with_residual, relu in ((True, True), (True, False), (False, True), (False, False)):
    for readers in ((1.0, 2.0), (0.0, 2.0)):
        torch.manual_seed(1)
        x, residual, one, two = (t.to(memory_format=torch.channels_last) for t in torch.randn(4, 12, 24, 3, 3))
        results: list[list[Tensor]] = []
        for kept_apart in (True, False):
            given = [x.clone().requires_grad_(), residual.clone().requires_grad_()]
            layer = nn.BatchNorm2d(24)
            first, second = normalised(given[0], layer, 2, given[1] if with_residual else None, relu=relu)
            if not kept_apart:
                second = first
            loss = (second * two * readers[1]).sum()
            if readers[0]:
                loss = loss + (first * one * readers[0]).sum()
            loss.backward()
            results.append([t.grad for t in (*given, *layer.parameters()) if t.grad is not None])
        label = f"two readers {readers}, residual {with_residual}, relu {relu}"
        assert len(results[0]) == len(results[1])
        for number, (found, expected) in enumerate(zip(*results, strict=True)):
            check(f"gradient {number}, {label}", found, expected, 1e-5)

# What is not a number is not hidden by the ReLU; the other group knows nothing of it.
for value in (float("nan"), float("inf")):
    x = torch.randn(8, 16)
    x[1, 3] = value
    y = normalised(x, nn.BatchNorm1d(16), 2, relu=True)[0]
    check(f"where {value} goes", y.isnan().any(dim=0), torch.arange(16) == 3, 0.0)
    check(f"where {value} does not go", y[4:].isfinite().all(), torch.tensor(True), 0.0)

# A ReLU that would write over what is kept for the way back.
piece = fused(nn.Sequential(nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16)), nn.ReLU(inplace=True)))
assert piece is not None
piece(torch.randn(8, 4), 2).sum().backward()

# A network, by the kernels and by torch: two stages of a ResNet, with shortcuts of both kinds.
norm_kernels._ROWS_AT_ONCE, norm_kernels._FEW = 64, 128  # the interpreter is quicker with few programs
torch.manual_seed(0)
network: Any = build_backbone("resnet18", image_size=8, zero_init_residual=False)
network.layer3 = network.layer4 = nn.Sequential()
twin = copy.deepcopy(network)
piece = fused(network)
assert piece is not None
images = torch.randn(8, 3, 8, 8)
by_kernels = piece(images.to(memory_format=torch.channels_last), 2)
by_torch = torch.cat([twin(part) for part in images.chunk(2)])
check("a ResNet's features", by_kernels, by_torch, 1e-3)
by_kernels.square().sum().backward()
by_torch.square().sum().backward()
for (name, one), other in zip(network.named_parameters(), twin.parameters(), strict=True):
    assert one.grad is not None
    assert other.grad is not None
    check(f"a ResNet's gradient, {name}", one.grad, other.grad, 2e-2)
sys.exit(1 if failures else 0)
