"""Where a process computes, and in which number format."""

from __future__ import annotations

from typing import Literal

import torch

from siammm.core.errors import InputError


def choose_device(device: str, local_rank: int = 0, world_size: int = 1) -> torch.device:
    """The device of a process: "auto" is the GPU with the number ``local_rank`` if there are any, else the CPU."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
        usable = chosen.type in ("cpu", "cuda", "mps")
    except RuntimeError:
        usable, chosen = False, torch.device("cpu")
    if not usable or (chosen.type == "cuda" and not torch.cuda.is_available()):
        raise InputError(f"The device {device!r} is not available here; use auto or cpu.")
    if chosen.type == "mps" and (world_size > 1 or not torch.backends.mps.is_available()):
        raise InputError(f"The device {device!r} is not available here for {world_size} processes; use auto or cpu.")
    if chosen.type != "cuda":
        return chosen
    if world_size > 1 and chosen.index is not None:
        raise InputError(
            f"The device {device!r} is one GPU, but there are {world_size} processes; use cuda, so that each has "
            "its own."
        )
    index = local_rank if chosen.index is None else chosen.index
    if index >= torch.cuda.device_count():
        raise InputError(
            f"GPU {index} was asked for, but this machine has {torch.cuda.device_count()}; start at most as many "
            f"processes (torchrun --nproc-per-node), or use the device cpu."
        )
    return torch.device("cuda", index)


def network_precision(device: torch.device, asked: Literal["auto", "bf16", "fp32"] = "auto") -> Literal["bf16", "fp32"]:
    """The number format of networks: for "auto", bf16 on a GPU that has it and fp32 elsewhere."""
    if asked != "auto":
        return asked
    return "bf16" if has_bf16(device) else "fp32"


def has_bf16(device: torch.device) -> bool:
    """Whether a GPU has bf16 instructions; older GPUs emulate them, which is slower than fp32."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def widest_float(device: torch.device) -> torch.dtype:
    """float64 where the device has it, else float32."""
    return torch.float32 if device.type == "mps" else torch.float64
