"""The BatchNorm kernels compile for a large GPU, also where there is none: without spilling, and with wide loads.

What they compute is checked by ``interpreted_norms.py`` and on a GPU by ``test_fused.py``.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from siammm.learn.cuda import norm_kernels
from tests.learn.cuda.compiled_kernels import assembly, needs_a_compiler, registers

pytestmark = needs_a_compiler

SIZES = {"rows": "i32", "channels": "i32", "programs": "i32", "world": "i32"}
TILE = {"BLOCK_R": 32, "BLOCK_C": 128}
SUM_TILE = {**TILE, "STAGES": norm_kernels._MOST_STAGES}
FEW = {"BLOCK_C": norm_kernels._FEW, "BLOCK_P": norm_kernels._ROWS_AT_ONCE}
ALL = {"AFFINE": True, "RELU": True}
# Kernel, and what is fixed when it is compiled.
KERNELS: list[tuple[str, dict[str, Any]]] = [
    ("_sums", SUM_TILE),
    ("_sums", {**SUM_TILE, "programs": 1}),
    ("_sums", {**SUM_TILE, "STAGES": 1}),
    ("_moments", {**FEW, "GROUPS": 2, "TRACKED": True, "OWN": False}),
    ("_moments", {**FEW, "GROUPS": 2, "TRACKED": True, "OWN": False, "programs": 1}),
    ("_moments", {**FEW, "GROUPS": 1, "TRACKED": False, "OWN": False}),
    ("_moments", {**FEW, "GROUPS": 2, "TRACKED": True, "OWN": True}),
    ("_joint_moments", {"BLOCK_C": norm_kernels._FEW, "GROUPS": 2, "TRACKED": True}),
    ("_apply", {**TILE, "BLOCK_R": 16, **ALL, "RESIDUAL": True}),
    ("_gradient_sums", {**SUM_TILE, **ALL, "LOOK": True, "SECOND": True, "KEEP": True}),
    ("_gradient_sums", {**SUM_TILE, **ALL, "LOOK": True, "SECOND": False, "KEEP": True}),
    ("_gradient_sums", {**SUM_TILE, **ALL, "LOOK": False, "SECOND": False, "KEEP": False}),
    ("_gradient_totals", {**FEW, "GROUPS": 2}),
    ("_gradient", {**TILE, **ALL}),
    ("_gradient", {**TILE, "AFFINE": True, "RELU": False}),
]


@pytest.mark.parametrize(
    ("kilobytes", "size", "operands", "stages"),
    [(227, 2, 1, 4), (227, 2, 4, 4), (227, 4, 4, 2), (99, 2, 1, 4), (99, 2, 4, 2), (99, 4, 4, 1), (None, 2, 1, 1)],
)
def test_tiles_on_their_way_leave_room_for_another_program(
    kilobytes: int | None, size: int, operands: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = SimpleNamespace() if kilobytes is None else SimpleNamespace(shared_memory_per_block_optin=kilobytes * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: told)
    x = SimpleNamespace(is_cuda=True, device="cuda", element_size=lambda: size)
    assert norm_kernels._stages(x, operands) == stages  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("name", "fixed"), KERNELS, ids=[name for name, _ in KERNELS])
def test_it_compiles_without_spilling(name: str, fixed: dict[str, Any], tmp_path: Path) -> None:
    warps = norm_kernels._USUAL["num_warps"]
    types = {"batches": "*i64", "momentum": "fp32", "eps": "fp32", **SIZES}
    types |= dict.fromkeys(["x", "y", "dy", "dx", "second", "seen", "kept", "residual"], "*bf16")
    ptx = assembly(getattr(norm_kernels, name), types, fixed, warps)
    # Tiles on their way go past the registers.
    wide = "cp.async.cg.shared.global" if fixed.get("STAGES", 1) > 1 else "ld.global.v4"
    if name != "_joint_moments":  # which reads none
        assert wide in ptx, "activations are read by the 16 bytes"
    # At least two programs on a multiprocessor at once.
    assert registers(ptx, tmp_path) * 32 * warps <= 2**16 // 2
