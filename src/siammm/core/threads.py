"""How many CPU threads to use beside a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from threadpoolctl import ThreadpoolController

MOST_THREADS = 2
"""Threads of each pool while a GPU computes, at most."""


@contextmanager
def few_threads(device: torch.device) -> Iterator[None]:
    """Use at most two CPU threads until the block ends, if ``device`` is a GPU.

    The CPU then mostly starts the GPU's work. OpenMP and BLAS have a pool with a thread for every core, and these wait
    for their next piece of work by spinning: one training would keep all cores busy with nothing, and several on one
    machine would slow each other down. Does nothing if the user has set OMP_NUM_THREADS.
    """
    if device.type != "cuda" or os.environ.get("OMP_NUM_THREADS"):
        yield
        return
    sizes = _PoolSizes.now()
    sizes.apply(MOST_THREADS)
    _limited.append(sizes)
    try:
        yield
    finally:
        _limited.pop()
        sizes.apply()


@contextmanager
def all_threads() -> Iterator[None]:
    """Use the usual number of threads until the block ends: for work of the CPU within ``few_threads``."""
    if not _limited:
        yield
        return
    sizes = _limited[-1]
    sizes.apply()
    try:
        yield
    finally:
        sizes.apply(MOST_THREADS)


@dataclass(frozen=True)
class _PoolSizes:
    """How many threads torch uses, and the pools of OpenMP and BLAS in this process."""

    torch: int
    pools: list[tuple[Any, int]]

    @classmethod
    def now(cls) -> _PoolSizes:
        pools = [(pool, pool.num_threads) for pool in ThreadpoolController().lib_controllers]
        return cls(torch.get_num_threads(), [(pool, n) for pool, n in pools if n is not None])

    def apply(self, most: int | None = None) -> None:
        """Set these numbers, or ``most`` where they are larger."""
        torch.set_num_threads(self.torch if most is None else min(most, self.torch))
        for pool, n in self.pools:
            pool.set_num_threads(n if most is None else min(most, n))


# The numbers that ``few_threads`` puts back, while it is in force.
_limited: list[_PoolSizes] = []
