"""The BatchNorm kernels compile for a large GPU, also where there is none: without spilling, and with wide loads.

What they compute is checked by ``interpreted_norms.py`` and on a GPU by ``test_fused.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from siammm.learn import norm_kernels
from tests.learn.compiled_kernels import assembly, needs_a_compiler, registers

pytestmark = needs_a_compiler

SIZES = {"rows": "i32", "channels": "i32", "programs": "i32"}
TILE = {"BLOCK_R": 32, "BLOCK_C": 128}
SUM_TILE = {**TILE, "STAGES": norm_kernels._SUMMING["STAGES"]}
FEW = {"BLOCK_C": norm_kernels._FEW, "BLOCK_P": norm_kernels._ROWS_AT_ONCE}
ALL = {"AFFINE": True, "RELU": True}
# Kernel, warps, and what is fixed when it is compiled.
KERNELS: list[tuple[str, int, dict[str, Any]]] = [
    ("_sums", norm_kernels._SUM_WARPS, SUM_TILE),
    ("_sums", norm_kernels._SUM_WARPS, {**SUM_TILE, "programs": 1}),
    ("_moments", norm_kernels._WARPS, {**FEW, "GROUPS": 2, "TRACKED": True}),
    ("_moments", norm_kernels._WARPS, {**FEW, "GROUPS": 2, "TRACKED": True, "programs": 1}),
    ("_moments", norm_kernels._WARPS, {**FEW, "GROUPS": 1, "TRACKED": False}),
    ("_apply", norm_kernels._WARPS, {**TILE, **ALL, "RESIDUAL": True}),
    ("_gradient_sums", norm_kernels._SUM_WARPS, {**SUM_TILE, **ALL, "LOOK": True, "SECOND": True, "KEEP": True}),
    ("_gradient_sums", norm_kernels._SUM_WARPS, {**SUM_TILE, **ALL, "LOOK": True, "SECOND": False, "KEEP": False}),
    ("_gradient_sums", norm_kernels._SUM_WARPS, {**SUM_TILE, **ALL, "LOOK": False, "SECOND": False, "KEEP": False}),
    ("_gradient_totals", norm_kernels._WARPS, {**FEW, "GROUPS": 2}),
    ("_gradient", norm_kernels._WARPS, {**TILE, **ALL, "LOOK": True, "RESIDUAL": True}),
    ("_gradient", norm_kernels._WARPS, {**TILE, "AFFINE": True, "RELU": False, "LOOK": True, "RESIDUAL": False}),
]


@pytest.mark.parametrize(("name", "warps", "fixed"), KERNELS, ids=[name for name, *_ in KERNELS])
def test_it_compiles_without_spilling(name: str, warps: int, fixed: dict[str, Any], tmp_path: Path) -> None:
    types = {"batches": "*i64", "momentum": "fp32", "eps": "fp32", **SIZES}
    types |= dict.fromkeys(["x", "y", "dy", "dx", "second", "seen", "kept", "residual"], "*bf16")
    ptx = assembly(getattr(norm_kernels, name), types, fixed, warps)
    assert "ld.global.v4" in ptx, "activations are read by the 16 bytes"
    # At least two programs on a multiprocessor at once.
    assert registers(ptx, tmp_path) * 32 * warps <= 2**16 // 2
