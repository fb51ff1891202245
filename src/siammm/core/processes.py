"""Joining the other processes that ``torchrun`` started, and leaving them at the end; ``core.ranks`` talks to them."""

from __future__ import annotations

import gc
import os
import secrets
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from siammm.core.device import choose_device
from siammm.core.errors import InputError

# Ranks with slower disks may be minutes late.
DEFAULT_TIMEOUT = timedelta(minutes=30)

GRACE_SECONDS = 0.1
_PAUSE_SECONDS = 0.02

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
    store: Any = field(default=None, compare=False)
    """Words that all processes of this start share; None for one alone, and in a group that somebody else set up."""

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        cleanup()


def started_together() -> int:
    """How many processes ``torchrun`` started, 1 where it did not."""
    return _from_environment("WORLD_SIZE", 1, least=1)


def setup(device: str = "auto", *, timeout: timedelta = DEFAULT_TIMEOUT) -> Context:
    """Join the other processes that ``torchrun`` started, if it did, and choose this one's device.

    ``device`` is "auto" (the GPU with the number LOCAL_RANK if there are any, else the CPU), "cpu", "cuda", or one GPU
    such as "cuda:1" in a world of one. NCCL joins GPUs, gloo CPUs. A group that was set up before is used as it is.
    """
    global _made_here
    world = started_together()
    local = _from_environment("LOCAL_RANK", 0, least=0)
    number = _from_environment("RANK", 0, least=0)
    shared = None
    joined = dist.is_available() and dist.is_initialized()
    if joined:
        world, number = dist.get_world_size(), dist.get_rank()
    if number >= world:
        raise InputError(f"RANK is {number}, but WORLD_SIZE is {world}; start the processes with torchrun.")
    chosen = choose_device(device, local, world)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if world > 1 and not joined:
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise InputError(
                f"WORLD_SIZE is {world}, so {' and '.join(missing)} must be set; start the processes with torchrun."
            )
        on_gpu = chosen.type == "cuda"
        store, _, _ = next(rendezvous("env://", number, world, timeout=timeout))
        word = _word_of_this_start(store, number, world, timeout)
        shared = dist.PrefixStore(word, store)  # pyright: ignore[reportPrivateImportUsage] - torch's pages name it
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=shared,
            rank=number,
            world_size=world,
            timeout=timeout,
            device_id=chosen if on_gpu else None,
        )
        _made_here = True
    return Context(number, world, local, chosen, shared)


def _word_of_this_start(store: Any, rank: int, world: int, timeout: timedelta) -> str:
    """A word that all ranks of this start share, and those of no earlier one.

    ``torchrun --max-restarts`` keeps its store: without a word of its own, a start would find the addresses of the
    processes of the one before, wait for them in vain, and fail. How often it has started is no such word, because the
    machines of a run may count differently. So rank 0 makes one up, and answers a question of each other rank with it.
    """
    if rank > 0:
        question = secrets.token_hex(8)
        store.set(f"siammm/asked/{rank}", question)
        word = store.get(f"siammm/answer/{question}").decode()
        store.set(f"{word}/heard/{rank}", "")
        return word
    word, waits_for = f"siammm/{secrets.token_hex(8)}", set(range(1, world))
    until = time.monotonic() + timeout.total_seconds()
    while waits_for:
        # A question that is there may be of the start before; it is answered too, and the next one as well.
        for other in [other for other in sorted(waits_for) if store.check([f"siammm/asked/{other}"])]:
            store.set(f"siammm/answer/{store.get(f'siammm/asked/{other}').decode()}", word)
        waits_for = {other for other in waits_for if not store.check([f"{word}/heard/{other}"])}
        if waits_for and time.monotonic() > until:
            raise InputError(f"{len(waits_for)} of {world} processes did not respond; check that all were started.")
        time.sleep(_PAUSE_SECONDS)
    return word


def cleanup() -> None:
    """Leave the group that ``setup`` joined; one that somebody else set up is left alone.

    A thread of the group that frees a tensor while Python shuts down aborts the process (pytorch's issue 190489). The
    threads end with the last reference to the group: a cycle may hold one, which is collected here, or the frames of an
    error, for which the threads get a short time to finish.
    """
    global _made_here
    if _made_here and dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
        time.sleep(GRACE_SECONDS)
    _made_here = False


def _from_environment(name: str, default: int, *, least: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise InputError(f"{name} is {text!r}, but it must be a whole number of at least {least}; torchrun sets it.")
    return number
