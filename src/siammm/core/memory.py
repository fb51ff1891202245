"""How much memory this process can still have, and how a lack of it is recognised."""

from __future__ import annotations

import os
from pathlib import Path

# Where a system does not say.
_UNKNOWN = 4 * 2**30
# How torch says it of the CPU, as a plain RuntimeError.
_SIGNS = (
    "DefaultCPUAllocator", "can't allocate memory", "Cannot allocate memory", "std::bad_alloc", "out of memory",
    "could not create a primitive", "could not create a memory object",
)  # fmt: skip


def free_memory() -> int:
    """Bytes of memory that this process may still use: of the machine, of its container and of its own limit."""
    return min([_of_machine(), *_of_container(), *_of_process()])  # the last two often say nothing


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the memory of the machine or of the device is used up."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, without importing it
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _SIGNS)


def _of_machine() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        # With the caches that the system gives up when asked.
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not every system says
        return _UNKNOWN


def _of_container() -> list[int]:
    """What the limit of a container leaves, in both layouts that Linux has had; its caches are given up when asked."""
    for folder, limit, used, cache in (
        ("", "memory.max", "memory.current", "file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
    ):
        root = Path("/sys/fs/cgroup") / folder
        try:
            facts = dict(line.split() for line in (root / "memory.stat").read_text(encoding="ascii").splitlines())
            taken = int((root / used).read_text(encoding="ascii")) - int(facts[cache])
            return [max(0, int((root / limit).read_text(encoding="ascii")) - taken)]
        except (OSError, ValueError, KeyError):  # no such file, or "max"
            continue
    return []


def _of_process() -> list[int]:
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            return []
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        return [max(0, limit - pages * os.sysconf("SC_PAGE_SIZE"))]
    except (ImportError, OSError, ValueError):
        return []
