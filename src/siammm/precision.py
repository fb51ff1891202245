"""Which number format a device is fast in."""

from __future__ import annotations

import torch


def has_bf16(device: torch.device) -> bool:
    """Whether a GPU computes in bf16 by itself; older ones only imitate it, which is slower than float32."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
