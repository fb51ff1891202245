"""Sums of the losses, kept on the device so that no update waits for the host."""

from __future__ import annotations

import torch
from torch import Tensor

from siammm.core.device import widest_float
from siammm.learn.guard import CollapseError

_NAMES = ("loss", "instance_loss", "cluster_loss", "gradient_norm", "steps")


class Tally:
    """Losses of an epoch so far, and whether any loss or gradient was not finite.

    Once ``failed`` is 1, every update leaves the weights as they are, until the host looks (``check``).
    """

    def __init__(self, device: torch.device) -> None:
        self.totals = torch.zeros(len(_NAMES), dtype=widest_float(device), device=device)
        self.failed = torch.zeros((), device=device)

    def add(self, losses: Tensor, gradient_norm: Tensor) -> None:
        """Count one update: its loss, instance loss and cluster loss."""
        self.totals += torch.cat([losses, gradient_norm.to(losses)[None], torch.ones_like(losses[:1])])

    def check(self) -> None:
        """Stop if a loss or gradient was not finite: no weight has changed since. Waits for the device."""
        if float(self.failed) > 0:
            raise CollapseError(
                "The loss or its gradient is no longer finite, so training stopped before the weights changed; start "
                "again with a lower --learning-rate, or with --precision fp32."
            )

    def means(self) -> dict[str, float]:
        """Means since the last ``reset``. Waits for the device."""
        *totals, steps = self.totals.tolist()
        return {name: total / max(1.0, steps) for name, total in zip(_NAMES, totals, strict=False)}

    def reset(self) -> None:
        """Begin a new epoch."""
        self.totals.zero_()
