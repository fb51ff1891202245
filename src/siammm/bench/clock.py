"""Time and memory of work on a device.

A device works asynchronously: the clock is read only once the device is idle, and nothing waits within what is timed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

WINDOWS = 3
"""A rate is the median of this many windows."""


def synchronise(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call, until the device is idle again."""
    synchronise(device)
    started = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - started


def windows(advance: Callable[[int], Any], device: torch.device, *, seconds: float) -> list[float]:
    """Seconds per step in each of ``WINDOWS`` windows of many steps, which take about ``seconds`` together.

    ``advance(n)`` does n steps; compile and warm up before. Where steps are too slow there are fewer windows.
    """
    trial = seconds_of(lambda: advance(1), device)
    if trial < 0.02:  # the time of a single short step is mostly that of the synchronisation
        trial = seconds_of(lambda: advance(8), device) / 8
    steps = max(1, min(10_000, round(seconds / WINDOWS / max(trial, 1e-9))))
    count = max(1, min(WINDOWS, round(seconds / max(trial * steps, 1e-9))))
    return [seconds_of(lambda: advance(steps), device) / steps for _ in range(count)]


def peak_flops(device: torch.device, precision: str, *, seconds: float = 1.0, side: int | None = None) -> float:
    """Floating-point operations per second of a large matrix product: what this device reaches in practice."""
    side = side or (8192 if device.type == "cuda" else 2048)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a = torch.randn(side, side, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    out = torch.empty_like(a)
    calls = 10 if device.type == "cuda" else 1

    def products() -> None:
        for _ in range(calls):
            torch.mm(a, a, out=out)

    products()
    took = seconds_of(products, device)
    if took < seconds:
        took = statistics.median(seconds_of(products, device) for _ in range(min(5, int(seconds / max(took, 1e-9)))))
    return calls * 2.0 * side**3 / took


def reset_peak_memory(device: torch.device) -> None:
    """Start a new peak, on devices that record one."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """Peak bytes: of a GPU since the last reset, on a CPU of this process since it started."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
