"""Which number format networks compute in."""

from __future__ import annotations

from typing import Literal

import torch


def network_precision(device: torch.device, asked: Literal["auto", "bf16", "fp32"] = "auto") -> Literal["bf16", "fp32"]:
    """What is asked for; for auto, bf16 on a GPU that has it and fp32 elsewhere."""
    if asked != "auto":
        return asked
    return "bf16" if has_bf16(device) else "fp32"


def has_bf16(device: torch.device) -> bool:
    """Whether a GPU computes in bf16 by itself; older ones only imitate it, which is slower than float32."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
