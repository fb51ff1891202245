"""The few places that know about ranks: how a process joins the others, and what it says to them.

Under ``torchrun`` every process calls ``setup`` first. Without it, and in a world of one, each function below is the
identity or does nothing, so that the training loop reads the same for one process and for many.
"""

from __future__ import annotations

import gc
import json
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from siammm.core import ranks
from siammm.core.errors import InputError

# A rank that reads its images from a slower disk may come minutes later than the others; one that died never comes.
DEFAULT_TIMEOUT = timedelta(minutes=30)

GRACE_SECONDS = 0.1

_made_here = False


@dataclass(frozen=True)
class Context:
    """This process among the others. As a context manager, it leaves the group at the end."""

    rank: int
    """This process's number, from 0, over all machines."""
    world_size: int
    """How many processes there are."""
    local_rank: int
    """This process's number on its own machine."""
    device: torch.device
    """Where this process computes."""

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        cleanup()


def setup(device: str = "auto", *, timeout: timedelta = DEFAULT_TIMEOUT) -> Context:
    """Join the other processes that ``torchrun`` started, if it did, and choose this one's device.

    ``device`` is "auto" (the GPU with the number LOCAL_RANK if there are any, else the CPU), "cpu", "cuda", or one GPU
    such as "cuda:1" in a world of one. NCCL joins GPUs, gloo CPUs. A group that was set up before is used as it is.
    """
    global _made_here
    world = _from_environment("WORLD_SIZE", 1, least=1)
    local = _from_environment("LOCAL_RANK", 0, least=0)
    number = _from_environment("RANK", 0, least=0)
    joined = dist.is_available() and dist.is_initialized()
    if joined:
        world, number = dist.get_world_size(), dist.get_rank()
    if number >= world:
        raise InputError(f"RANK is {number}, but WORLD_SIZE is {world}; start the processes with torchrun.")
    chosen = _device(device, local, world)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if world > 1 and not joined:
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise InputError(
                f"WORLD_SIZE is {world}, but without {' and '.join(missing)}; start the processes with torchrun."
            )
        on_gpu = chosen.type == "cuda"
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout, device_id=chosen if on_gpu else None)
        _made_here = True
    return Context(number, world, local, chosen)


def cleanup() -> None:
    """Leave the group that ``setup`` joined; one that somebody else set up is left alone.

    The group's threads end with its last reference, and a training that stopped halfway is in a cycle that holds one.
    A thread that still lets go of a tensor while Python shuts down aborts the process (pytorch's issue 190489).
    """
    global _made_here
    if _made_here and dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
        # The frames of an error on its way up may hold the group all the same: then its threads have this long to
        # let go of their last piece of work.
        time.sleep(GRACE_SECONDS)
    _made_here = False


def world_size() -> int:
    """How many processes there are, 1 when this one is alone."""
    return int(dist.get_world_size()) if ranks.active() else 1


def rank() -> int:
    """This process's number, 0 when it is alone."""
    return ranks.rank()


def is_writer() -> bool:
    """Whether this process is the one that writes files and talks to the user."""
    return ranks.rank() == 0


def all_gather_batch(batch: Tensor) -> Tensor:
    """Every rank's batch, one under the other in the order of ranks, without gradients.

    All ranks must pass the same shape and type: then nothing has to be asked first, and it can be captured in a CUDA
    graph. ``ranks.all_gather_rows`` is for batches of different sizes.
    """
    batch = batch.detach()
    if not ranks.active():
        return batch
    every = batch.new_empty(world_size(), *batch.shape)
    dist.all_gather(list(every.unbind()), batch.contiguous())
    return every.flatten(0, 1) if batch.ndim else every


def sum_over_ranks(x: Tensor) -> Tensor:
    """The sum of every rank's tensor; its gradient is that of all ranks' losses together."""
    return x if world_size() == 1 else _SumOverRanks.apply(x)  # pyright: ignore[reportReturnType]


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def broadcast_json(value: Any, device: torch.device | None = None) -> Any:
    """Rank 0's value on every rank; it must be something small that JSON can write. Others may pass anything.

    ``device`` is the process's own; it is needed under NCCL, which only carries what is on a GPU.
    """
    if not ranks.active():
        return value
    where = device if device is not None and device.type == "cuda" else torch.device("cpu")
    text, problem = b"", None
    if ranks.rank() == 0:
        try:
            text = json.dumps(value).encode()
        except (TypeError, ValueError) as error:
            problem = error
    # The length goes first; -1 is how the others learn that there is nothing to wait for.
    length = ranks.agreed(-1 if problem else len(text), where)
    if length < 0:
        raise InputError(
            "Rank 0's value for all ranks cannot be written as JSON; pass numbers, texts, lists and dicts."
        )
    letters = torch.zeros(length, dtype=torch.uint8, device=where)
    if ranks.rank() == 0:
        letters.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    dist.broadcast(letters, 0)
    return json.loads(bytes(letters.cpu().tolist()))


def barrier() -> None:
    """Wait until every rank is here."""
    if ranks.active():
        dist.barrier()


def _device(device: str, local: int, world: int) -> torch.device:
    """The device of the process with this number on its machine."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
        usable = chosen.type in ("cpu", "cuda", "mps")
    except RuntimeError:
        usable, chosen = False, torch.device("cpu")
    if not usable or (chosen.type == "cuda" and not torch.cuda.is_available()):
        raise InputError(f"device={device!r} cannot be used here; use 'auto' or 'cpu'.")
    if chosen.type == "mps" and (world > 1 or not torch.backends.mps.is_available()):
        raise InputError(f"device={device!r} cannot be used here by {world} processes; use 'auto' or 'cpu'.")
    if chosen.type != "cuda":
        return chosen
    if world > 1 and chosen.index is not None:
        raise InputError(
            f"device={device!r} is one GPU, but there are {world} processes; use 'cuda', and each takes its own."
        )
    index = local if chosen.index is None else chosen.index
    if index >= torch.cuda.device_count():
        raise InputError(
            f"GPU {index} was asked for, but this machine has {torch.cuda.device_count()}; start at most as many "
            f"processes (torchrun --nproc-per-node), or use device='cpu'."
        )
    return torch.device("cuda", index)


def _from_environment(name: str, default: int, *, least: int) -> int:
    """A whole number that torchrun sets."""
    text = os.environ.get(name, str(default))
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise InputError(f"{name} is {text!r}, but it must be a whole number of at least {least}; torchrun sets it.")
    return number
