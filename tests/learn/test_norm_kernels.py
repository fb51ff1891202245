"""The BatchNorm kernels compile for a large GPU, also where there is none: without spilling, and with wide loads.

What they compute is checked by ``interpreted_norms.py`` and on a GPU by ``test_fused.py``.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from siammm.learn import norm_kernels

triton = pytest.importorskip("triton")
# Triton brings one or two, of which the newer reads all that it writes.
ASSEMBLERS = sorted((Path(triton.__file__).parent / "backends" / "nvidia" / "bin").glob("ptxas*"))
pytestmark = [
    pytest.mark.skipif(norm_kernels.interpreted(), reason="the interpreter compiles nothing"),
    pytest.mark.skipif(not ASSEMBLERS, reason="Triton came without NVIDIA's assembler"),
]

SIZES = {"rows": "i32", "channels": "i32", "programs": "i32"}
TILE = {"BLOCK_R": 32, "BLOCK_C": 128}
FEW = {"BLOCK_C": norm_kernels._FEW, "BLOCK_P": norm_kernels._ROWS_AT_ONCE}
ALL = {"AFFINE": True, "RELU": True}
# Kernel, warps, and what is fixed when it is compiled.
KERNELS: list[tuple[str, int, dict[str, Any]]] = [
    ("_sums", norm_kernels._SUM_WARPS, TILE),
    ("_sums", norm_kernels._SUM_WARPS, {**TILE, "programs": 1}),
    ("_moments", norm_kernels._WARPS, {**FEW, "GROUPS": 2, "TRACKED": True}),
    ("_moments", norm_kernels._WARPS, {**FEW, "GROUPS": 2, "TRACKED": True, "programs": 1}),
    ("_moments", norm_kernels._WARPS, {**FEW, "GROUPS": 1, "TRACKED": False}),
    ("_apply", norm_kernels._WARPS, {**TILE, **ALL, "RESIDUAL": True}),
    ("_gradient_sums", norm_kernels._SUM_WARPS, {**TILE, **ALL, "LOOK": True}),
    ("_gradient_sums", norm_kernels._SUM_WARPS, {**TILE, **ALL, "LOOK": False}),
    ("_gradient_totals", norm_kernels._WARPS, {**FEW, "GROUPS": 2}),
    ("_gradient", norm_kernels._WARPS, {**TILE, **ALL, "LOOK": True, "RESIDUAL": True}),
]


@pytest.mark.parametrize(("name", "warps", "fixed"), KERNELS, ids=[name for name, *_ in KERNELS])
def test_it_compiles_without_spilling(name: str, warps: int, fixed: dict[str, Any], tmp_path: Path) -> None:
    ptx = compiled(name, warps, fixed)
    assert "ld.global.v4" in ptx, "activations are read by the 16 bytes"
    source = tmp_path / "kernel.ptx"
    source.write_text(ptx)
    arguments = ["-v", "-arch=sm_90a", str(source), "-o", str(tmp_path / "kernel.cubin")]
    tried = [subprocess.run([tool, *arguments], capture_output=True, text=True, check=False) for tool in ASSEMBLERS]
    said = next((found.stderr for found in tried if not found.returncode), "")
    assert " 0 bytes spill stores" in said, [found.stderr for found in tried]
    used = re.search(r"Used (\d+) registers", said)
    assert used is not None
    # At least two programs on a multiprocessor at once.
    assert int(used.group(1)) * 32 * warps <= 2**16 // 2


def compiled(name: str, warps: int, fixed: dict[str, Any]) -> str:
    """The kernel for an H100 or H200, all sizes a multiple of 16, as assembly."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel: Any = getattr(norm_kernels, name)
    types = {"batches": "*i64", "momentum": "fp32", "eps": "fp32", **SIZES}
    types |= dict.fromkeys(["x", "y", "dy", "dx", "seen", "residual"], "*bf16")
    signature = {arg: "constexpr" if arg in fixed else types.get(arg, "*fp32") for arg in kernel.arg_names}
    source: Any = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(arg),): value for arg, value in fixed.items()},
        attrs={
            (number,): [["tt.divisibility", 16]]
            for number, arg in enumerate(kernel.arg_names)
            if signature[arg].startswith(("*", "i32"))
        },
    )
    return triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "enable_fp_fusion": True}
    ).asm["ptx"]
