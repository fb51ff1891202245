"""What a machine is, how fast it multiplies at best, and how long the program takes to start."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from siammm.bench.clock import median_seconds


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What figures depend on besides the settings."""

    device: str
    """The GPU's name, or the CPU's with its threads."""
    precision: str
    """The number format of the networks: bf16 or fp32."""
    peak_flops: float
    """Floating-point operations a second of a large matrix product in that format, measured."""
    software: str
    """Versions of Python and torch."""


def described(device: torch.device, precision: str, *, seconds: float) -> Machine:
    """This machine, its peak measured within about ``seconds``."""
    return Machine(
        device=device_name(device),
        precision=precision,
        peak_flops=peak_flops(device, precision, seconds=seconds),
        software=f"Python {platform.python_version()}, torch {torch.__version__}",
    )


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's with the threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"


def cpu_name() -> str:
    """The CPU as the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine() or "CPU"


def peak_flops(device: torch.device, precision: str, *, seconds: float = 1.0, side: int | None = None) -> float:
    """Operations a second of a square matrix product: what is possible in practice, not what a data sheet says."""
    side = side or (8192 if device.type == "cuda" else 2048)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(side, side, generator=generator).to(device, dtype)
    out = torch.empty_like(a)
    calls = 10 if device.type == "cuda" else 1

    def products() -> None:
        for _ in range(calls):
            torch.mm(a, a, out=out)

    products()
    return calls * 2.0 * side**3 / median_seconds(products, device, seconds=seconds, repeats=5)


def help_seconds() -> float:
    """How long ``siammm --help`` takes, in a process of its own."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "siammm", "--help"], check=True, capture_output=True, timeout=120)
    return time.perf_counter() - started
