"""The training step's Triton kernels on a GPU: BatchNorm of both views, LARS, Muon and the momentum encoder."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from siammm.learn.cuda import norm_kernels
from siammm.learn.cuda.fused import fuse
from siammm.learn.optim import build_optimiser
from tests.learn.cuda.test_fused import network

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batchnorm_of_both_views(dtype: torch.dtype, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(norm_kernels, "_MOST_STAGES", stages)
    torch.manual_seed(0)
    plain = network("resnet18", size=32).cuda().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    models = plain, copy.deepcopy(plain), copy.deepcopy(plain)
    assert fuse(models[2])
    x_1, x_2 = (x.to(memory_format=torch.channels_last) for x in torch.randn(2, 64, 3, 32, 32, device="cuda").unbind())
    outputs, gradients = [], []
    # The first, in float32, is the truth for both ways in low precision, which are far from it, but alike.
    for model, precision in zip(models, (torch.float32, dtype, dtype), strict=True):
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == torch.bfloat16):
            found = model(x_1, x_2)
        (found.v_1.square().sum() + (found.v_2 * found.z_1).sum()).backward()
        outputs.append([part.detach() for part in found[:4]])
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    tolerance = 2e-3 if dtype == torch.float32 else 0.1
    for one, two in zip(*outputs[1:], strict=True):
        assert float((one - two).norm() / one.norm()) < tolerance
    for (name, one), (_, two) in zip(models[1].named_buffers(), models[2].named_buffers(), strict=True):
        assert float((one - two).abs().max()) <= tolerance * max(1.0, float(one.abs().max())), name
    one, two = (float(torch.nn.functional.cosine_similarity(gradients[0], g, dim=0)) for g in gradients[1:])
    assert two > (0.9999 if dtype == torch.float32 else one - 0.03)
    assert float(gradients[2].norm() / gradients[0].norm()) == pytest.approx(1, abs=1e-3 if one > 0.9999 else 0.1)


@pytest.mark.parametrize("name", ["lars", "muon"])
def test_updates(name: str) -> None:
    torch.manual_seed(0)
    one = timm.create_model("resnet18", num_classes=300).cuda().to(memory_format=torch.channels_last)
    other = timm.create_model("resnet18", num_classes=300).cuda().to(memory_format=torch.channels_last)
    other.load_state_dict(one.state_dict())
    start = [p.detach().clone() for p in one.parameters()]
    rate = torch.tensor(0.3, device="cuda")
    optimisers: list[Any] = [
        build_optimiser(name, model, lr=rate, weight_decay=1e-4, fused=model is one) for model in (one, other)
    ]
    # The last step is captured, and replayed with other gradients where it expects them.
    for step in range(4):
        torch.manual_seed(step)
        found = [torch.randn_like(p) for p in one.parameters()]
        for model in (one, other):
            for p, g in zip(model.parameters(), found, strict=True):
                p.grad = g.clone()
        for optimiser in optimisers:
            optimiser.found_inf = torch.tensor(float(step == 1), device="cuda")
            optimiser.step()
        assert optimisers[0]._kernels
        assert name == "lars" or optimisers[0]._turn_kernels
        _assert_close(one, other, start, name)
    graph = torch.cuda.CUDAGraph()
    optimisers[0].found_inf = torch.zeros((), device="cuda")
    optimisers[1].found_inf = optimisers[0].found_inf
    with torch.cuda.graph(graph):
        optimisers[0].step()
    for p in one.parameters():
        assert p.grad is not None
        p.grad.mul_(-2)
    graph.replay()
    for p in other.parameters():
        assert p.grad is not None
        p.grad.mul_(-2)
    optimisers[1].step()
    _assert_close(one, other, start, name)


def _assert_close(one: nn.Module, other: nn.Module, start: list[Tensor], optimiser: str) -> None:
    for (name, p), q, before in zip(one.named_parameters(), other.parameters(), start, strict=True):
        apart, way = (p - q).detach(), (q - before).detach()
        # Kernels make updates orthogonal in bf16, torch's operations in float32.
        assert float(apart.norm()) <= (5e-2 if optimiser == "muon" else 5e-3) * float(way.norm()), name
