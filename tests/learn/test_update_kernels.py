"""LARS, Muon and the momentum encoder's step by kernels are those by torch: interpreted, compiled, and on a GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from siammm.learn.cuda import addresses, muon_kernels, triton_support, update_kernels
from siammm.learn.optim import build_optimiser
from tests.learn.compiled_kernels import assembly, interpreted, needs_a_compiler, registers

ROOT = Path(__file__).parents[2]
TABLES = dict.fromkeys(["p_table", "g_table", "b_table", "q_table", "table", "fours"], "*i64")
TYPES = {
    **TABLES, **dict.fromkeys(["tensors", "numbers"], "*i32"), "momentum": "fp32", "eighths": "*i64", "work": "*bf16",
}  # fmt: skip
KERNELS = [
    update_kernels._squares, update_kernels._lars, update_kernels._follow,
    muon_kernels._lengths, muon_kernels._gather, muon_kernels._products, muon_kernels._turn,
]  # fmt: skip
BLOCK: dict[str, object] = {"BLOCK": addresses.AT_ONCE}
SMALL = [
    (update_kernels._ratios, BLOCK),
    (addresses._note, {}),
    (muon_kernels._scales, BLOCK),
    (muon_kernels._turns, BLOCK),
]


@pytest.mark.skipif(triton_support.triton is None, reason="Triton is not installed")
def test_kernels_under_the_interpreter() -> None:
    assert interpreted("interpreted_updates.py") > 30


@needs_a_compiler
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_it_compiles_without_spilling(kernel: Any, tmp_path: Path) -> None:
    ptx = assembly(kernel, TYPES, {"PART": addresses.PART_SIZE}, addresses.WARPS)
    assert "ld.global.v4" in ptx, "weights are read by the 16 bytes"
    assert "work" not in kernel.arg_names or re.search(r"(ld|st)\.global\.(v4\.b16|v2\.b32|v4\.b32)", ptx)
    assert registers(ptx, tmp_path) * 32 * addresses.WARPS <= 2**16 // 4


@needs_a_compiler
@pytest.mark.parametrize(("kernel", "fixed"), SMALL, ids=str)
def test_small_ones_compile_too(kernel: Any, fixed: dict[str, object], tmp_path: Path) -> None:
    types = {**TYPES, "firsts": "*i32", "scaled": "*i32", "trust": "fp32", "reach": "fp32", "start": "i32"}
    assert registers(assembly(kernel, types, fixed, addresses.WARPS), tmp_path) < 64


def test_training_needs_no_triton() -> None:
    """It comes with torch on Linux alone."""
    code = "import sys; sys.modules['triton'] = None; import siammm.learn.loop as loop; assert loop.Training"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_they_are_for_a_gpu() -> None:
    some = [torch.ones(4)]
    assert not addresses.supports(some, some) or triton_support.interpreted()
    assert not addresses.supports([], [])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["lars", "muon"])
def test_on_a_gpu(name: str) -> None:
    import timm

    torch.manual_seed(0)
    one = timm.create_model("resnet18", num_classes=300).cuda().to(memory_format=torch.channels_last)
    other = timm.create_model("resnet18", num_classes=300).cuda().to(memory_format=torch.channels_last)
    other.load_state_dict(one.state_dict())
    start = [p.detach().clone() for p in one.parameters()]
    rate = torch.tensor(0.3, device="cuda")
    optimisers: list[Any] = [build_optimiser(name, model, lr=rate, weight_decay=1e-4) for model in (one, other)]
    optimisers[1]._move_by_kernels = optimisers[1]._turn_by_kernels = lambda *given: False
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
