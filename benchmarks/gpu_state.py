"""What state a GPU was in while something was timed: at its power limit it lowers its clock, and figures with it."""

from __future__ import annotations

import shutil
import statistics
import subprocess
from collections.abc import Callable
from typing import TypeVar

_QUERY = "clocks.sm,power.draw,temperature.gpu"
T = TypeVar("T")


def watched(work: Callable[[], T], *, every: int = 100) -> tuple[T, dict[str, float]]:
    """What ``work`` returns, and the median clock, power and temperature meanwhile; none where that is not known."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return work(), {}
    command = [tool, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", f"--loop-ms={every}", "--id=0"]
    watcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        found = work()
    finally:
        watcher.terminate()
        written, _ = watcher.communicate()
    return found, medians(written)


def medians(written: str) -> dict[str, float]:
    """The medians of complete lines: the last may be cut off."""
    rows: list[list[float]] = []
    for line in written.splitlines():
        try:
            row = [float(value) for value in line.split(",")]
        except ValueError:  # the last may be cut off, and some GPUs do not know their power
            continue
        if len(row) == 3:
            rows.append(row)
    if not rows:
        return {}
    clock, power, temperature = (statistics.median(column) for column in zip(*rows, strict=True))
    return {"clock_mhz": clock, "watts": power, "celsius": temperature}
