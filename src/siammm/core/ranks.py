"""This process among the others, and the collectives that join them: all that siammm sends between processes.

Without a process group, and in a world of one, each function is the identity, so that the same code runs in one process
and in many. The mixture only sends sums, counts and a small draw of rows; embeddings stay on their rank.
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


def world_size() -> int:
    """How many processes there are, 1 when this one is alone."""
    return int(dist.get_world_size()) if active() else 1


def is_writer() -> bool:
    """Whether this process is the one that writes files and talks to the user."""
    return rank() == 0


def transport() -> torch.device:
    """Where tensors are sent from: NCCL needs them on this process's GPU."""
    on_gpu = active() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


@contextmanager
def refused_together(device: torch.device, what: str = "use its input") -> Generator[None]:
    """If one rank raises in here, every rank raises, so that none waits for the others forever.

    Every rank must enter and leave; nothing inside may be a collective. ``what`` the rank that raised cannot do.
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
        raise InputError(f"Rank {refused.index(1)} cannot {what}, so all ranks stop; its own message says why.")


def all_reduce_sum(*tensors: Tensor) -> None:
    """Replace each tensor, in place, by its sum over the ranks."""
    if active():
        for tensor in tensors:
            _dist.all_reduce(tensor)


def broadcast_int(number: int, device: torch.device) -> int:
    """Rank 0's number, on every rank."""
    shared = torch.tensor([number if rank() == 0 else 0], dtype=torch.int64, device=_transport(device))
    all_reduce_sum(shared)
    return int(shared)


def all_gather_counts(count: int, device: torch.device) -> list[int]:
    """Every rank's count, in the order of ranks."""
    if not active():
        return [count]
    mine = torch.tensor([count], dtype=torch.int64, device=_transport(device))
    every = [torch.zeros_like(mine) for _ in range(world_size())]
    _dist.all_gather(every, mine)
    return [int(one) for one in every]


def any_rank(wish: bool, device: torch.device) -> bool:
    """Whether any rank wishes it: all must do it together."""
    return any(all_gather_counts(int(wish), device))


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


def all_gather_bytes(data: bytes) -> list[bytes]:
    """Every rank's bytes, in the order of ranks."""
    return [broadcast_bytes(data, source) for source in range(world_size())]


def broadcast_bytes(data: bytes, source: int) -> bytes:
    """The bytes of one rank, on every rank; what the others pass does not matter."""
    if not active():
        return data
    device = transport()
    length = all_gather_counts(len(data), device)[source]
    if rank() == source:
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8) if length else torch.empty(0, dtype=torch.uint8)
    else:
        sent = torch.empty(length, dtype=torch.uint8)
    sent = sent.to(device)
    _dist.broadcast(sent, source)
    return sent.cpu().numpy().tobytes()


def all_gather_batch(batch: Tensor) -> Tensor:
    """Every rank's batch, concatenated in the order of ranks, without gradients.

    All ranks must pass the same shape and type, so that no sizes are exchanged and a CUDA graph can capture it.
    """
    batch = batch.detach()
    if not active():
        return batch
    every = batch.new_empty(world_size(), *batch.shape)
    _dist.all_gather(list(every.unbind()), batch.contiguous())
    return every.flatten(0, 1) if batch.ndim else every


def sum_over_ranks(x: Tensor) -> Tensor:
    """The sum of every rank's tensor; its gradient is that of all ranks' losses together."""
    return cast(Tensor, _SumOverRanks.apply(x)) if active() else x


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        total = x.clone()
        _dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _SumOverRanks.forward(ctx, gradient)


def _transport(device: torch.device) -> torch.device:
    """Where small integers are sent from: NCCL needs them on the GPU."""
    return device if device.type == "cuda" else torch.device("cpu")
