"""The kernels of LARS, Muon and the momentum encoder's step compile. What they compute: ``interpreted_updates.py``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from siammm.learn.cuda import addresses, muon_kernels, triton_support, update_kernels
from tests.learn.cuda.compiled_kernels import assembly, needs_a_compiler, registers

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


def test_they_are_for_a_gpu() -> None:
    some = [torch.ones(4)]
    assert not addresses.supports(some, some) or triton_support.interpreted()
    assert not addresses.supports([], [])
