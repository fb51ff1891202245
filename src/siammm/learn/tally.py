"""Sums of the losses, kept on the device so that no update waits for the host."""

from __future__ import annotations

import torch
from torch import Tensor

from siammm.core.device import widest_float

_NAMES = ("loss", "instance_loss", "cluster_loss", "gradient_norm", "steps")


class Tally:
    """Losses of an epoch so far, and whether any loss or gradient was not finite.

    Once ``failed`` is 1, every update leaves the weights as they are, until the host looks (``failed_update``).
    """

    def __init__(self, device: torch.device) -> None:
        self.totals = torch.zeros(len(_NAMES), dtype=widest_float(device), device=device)
        self.failed = torch.zeros((), device=device)
        self._failed_at = torch.zeros_like(self.totals[-1])

    def note(self, failed: Tensor) -> None:
        """``failed`` is 1 if this update's loss or gradient is not finite; the first such update is remembered."""
        is_first = (failed > 0) & (self.failed == 0)
        self._failed_at.copy_(torch.where(is_first, self.totals[-1] + 1, self._failed_at))
        torch.maximum(self.failed, failed, out=self.failed)

    def add(self, losses: Tensor, gradient_norm: Tensor) -> None:
        """Count one update: its loss, instance loss and cluster loss."""
        self.totals += torch.cat([losses, gradient_norm.to(losses)[None], torch.ones_like(losses[:1])])

    def failed_update(self) -> int | None:
        """The first update of the epoch, from 1, whose loss or gradient was not finite. Waits for the device."""
        return int(self._failed_at) if float(self.failed) > 0 else None

    def means(self) -> dict[str, float]:
        """Means since the last ``reset``. Waits for the device."""
        *totals, steps = self.totals.tolist()
        return {name: total / max(1.0, steps) for name, total in zip(_NAMES, totals, strict=False)}

    def reset(self) -> None:
        """Begin a new epoch."""
        self.totals.zero_()
