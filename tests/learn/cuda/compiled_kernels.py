"""Triton kernels where there is no GPU: compiled for one, to see whether registers suffice."""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from siammm.learn.cuda import triton_support

# Triton brings one assembler or two, of which the newer reads all that it writes.
_ASSEMBLERS: list[Path] = []
if triton_support.triton is not None:
    _ASSEMBLERS = sorted((Path(triton_support.triton.__file__).parent / "backends" / "nvidia" / "bin").glob("ptxas*"))

needs_a_compiler = pytest.mark.skipif(
    not _ASSEMBLERS or triton_support.interpreted(), reason="there is no Triton here that compiles for NVIDIA's GPUs"
)


def compiled(kernel: Any, types: dict[str, str], fixed: dict[str, Any], *, capability: int = 90, **options: Any) -> Any:
    """The kernel for a GPU (by default an H100 or H200), sizes and addresses multiples of 16; float32 unless told."""
    compiler, target = (importlib.import_module(f"triton.{name}") for name in ("compiler", "backends.compiler"))
    signature = {arg: "constexpr" if arg in fixed else types.get(arg, "*fp32") for arg in kernel.arg_names}
    source = compiler.ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(arg),): value for arg, value in fixed.items()},
        attrs={
            (number,): [["tt.divisibility", 16]]
            for number, arg in enumerate(kernel.arg_names)
            if signature[arg].startswith(("*", "i32"))
        },
    )
    options = {"enable_fp_fusion": True, **options}
    return compiler.compile(source, target=target.GPUTarget("cuda", capability, 32), options=options)


def assembly(kernel: Any, types: dict[str, str], fixed: dict[str, Any], warps: int) -> str:
    """Its text for an assembler."""
    return compiled(kernel, types, fixed, num_warps=warps).asm["ptx"]


def registers(ptx: str, folder: Path) -> int:
    """Registers of a thread; fails where some do not fit and go through memory."""
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    arguments = ["-v", "-arch=sm_90a", str(source), "-o", str(folder / "kernel.cubin")]
    tried = [subprocess.run([tool, *arguments], capture_output=True, text=True, check=False) for tool in _ASSEMBLERS]
    said = next((found.stderr for found in tried if not found.returncode), "")
    assert " 0 bytes spill stores" in said, [found.stderr for found in tried]
    used = re.search(r"Used (\d+) registers", said)
    assert used is not None
    return int(used.group(1))
