"""Time and memory of work on a device.

A device works on after Python has moved on: nothing here looks at the clock before the device is done, and nothing
makes it wait in the middle of what is timed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

WINDOWS = 3
"""Windows that a rate is the median of."""


def synchronise(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """How long one call takes, until its last result is there."""
    synchronise(device)
    started = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - started


def median_seconds(work: Callable[[], Any], device: torch.device, *, seconds: float, repeats: int = WINDOWS) -> float:
    """The median of a few calls after one that does not count, of as many as fit into about ``seconds``.

    Where one call takes as long as that, it is the one that counts: a CPU has little to warm up.
    """
    first = seconds_of(work, device)
    if first >= seconds:
        return first
    return statistics.median(
        seconds_of(work, device) for _ in range(max(1, min(repeats, int(seconds / max(first, 1e-9)))))
    )


def windows(
    advance: Callable[[int], Any], device: torch.device, *, seconds: float, count: int = WINDOWS, most: int = 10_000
) -> list[float]:
    """Seconds of one step, in each of ``count`` windows of many steps that take about ``seconds`` in all.

    ``advance(n)`` does n steps. It must have done some already: what happens once is not part of a rate. Where even
    single steps would take longer than that, there are fewer windows, at least one.
    """
    trial = seconds_of(lambda: advance(1), device)
    if trial < 0.02:  # a single step is then mostly the wait for it
        trial = seconds_of(lambda: advance(8), device) / 8
    steps = max(1, min(most, round(seconds / count / max(trial, 1e-9))))
    count = max(1, min(count, round(seconds / max(trial * steps, 1e-9))))
    return [seconds_of(lambda: advance(steps), device) / steps for _ in range(count)]


def reset_peak_memory(device: torch.device) -> None:
    """Begin a new peak, on devices that keep one."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """The most bytes in use: of the device since the last reset, elsewhere of this process since it began."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    return _peak_of_process()


def _peak_of_process() -> int:
    try:
        import resource
    except ImportError:  # Windows has no such count
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
