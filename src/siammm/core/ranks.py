"""The few collectives the mixture needs. Without an initialised process group each is the identity.

Only sufficient statistics, counts and a small draw of rows ever travel; embeddings stay on their rank.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from siammm.core.errors import InputError

# torch.distributed is only partly typed.
_dist = cast(Any, dist)


def active() -> bool:
    """Whether this process is one of several."""
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def rank() -> int:
    """This process's number, 0 when it is alone."""
    return int(dist.get_rank()) if active() else 0


@contextmanager
def refused_together(device: torch.device) -> Generator[None]:
    """What one rank refuses in here, every rank refuses: none goes on to wait for the others forever.

    Every rank must enter and leave; nothing inside may be a collective.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    refused = all_gather_counts(int(problem is not None), device)
    if problem is not None:
        raise problem
    if any(refused):
        raise InputError(
            f"Rank {refused.index(1)} cannot use what it was given, so that no rank goes on; its own message says why."
        )


def all_reduce_sum(*tensors: Tensor) -> None:
    """Replace each tensor, in place, by its sum over the ranks."""
    if active():
        for tensor in tensors:
            _dist.all_reduce(tensor)


def agreed(number: int, device: torch.device) -> int:
    """Rank 0's number, on every rank."""
    shared = torch.tensor([number if rank() == 0 else 0], dtype=torch.int64, device=_transport(device))
    all_reduce_sum(shared)
    return int(shared)


def all_gather_counts(count: int, device: torch.device) -> list[int]:
    """Every rank's count, in the order of ranks."""
    if not active():
        return [count]
    mine = torch.tensor([count], dtype=torch.int64, device=_transport(device))
    every = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    _dist.all_gather(every, mine)
    return [int(one) for one in every]


def all_gather_rows(rows: Tensor, device: torch.device) -> Tensor:
    """Every rank's rows, one under the other in the order of ranks; ranks may hold different numbers of them."""
    if not active():
        return rows
    counts = all_gather_counts(rows.shape[0], device)
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    every = [torch.zeros_like(padded) for _ in counts]
    _dist.all_gather(every, padded.contiguous())
    return torch.cat([one[:count] for one, count in zip(every, counts, strict=True)])


def _transport(device: torch.device) -> torch.device:
    """Where small integers must live to travel: NCCL wants them on the GPU, gloo anywhere."""
    return device if device.type == "cuda" else torch.device("cpu")
