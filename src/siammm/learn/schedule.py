"""What changes from update to update: learning rate, momentum of the momentum encoder, temperature."""

from __future__ import annotations

import math

import torch

from siammm.core.device import widest_float
from siammm.settings.training import TrainConfig


class Schedule:
    """The present values as 0-d tensors on the device, filled in place: a captured update reads them anew."""

    def __init__(self, config: TrainConfig, steps_per_epoch: int, batch_size: int, device: torch.device) -> None:
        self._config, self._batch_size, self._steps_per_epoch = config, batch_size, steps_per_epoch
        self.total_steps = steps_per_epoch * config.optimisation.epochs
        self.epoch = torch.zeros((), dtype=torch.int64, device=device)
        self.learning_rate = torch.zeros((), device=device)
        self.momentum = torch.zeros((), dtype=widest_float(device), device=device)
        self.temperature: torch.Tensor | None = None
        """Temperature of the contrastive loss, where it changes."""
        if config.objective.contrastive_temperature_end is not None:
            self.temperature = torch.zeros((), device=device)

    def set(self, number: int) -> None:
        """Set the values of an update, counted from the first of the run."""
        optimisation, objective, total = self._config.optimisation, self._config.objective, self.total_steps
        warmup = round(min(optimisation.warmup_epochs, optimisation.epochs / 2) * self._steps_per_epoch)
        self.epoch.fill_(number // self._steps_per_epoch)
        self.learning_rate.fill_(learning_rate(number, total, warmup, optimisation.learning_rate, self._batch_size))
        self.momentum.fill_(half_cosine(number, total, optimisation.encoder_momentum, 1.0))
        start, end = objective.contrastive_temperature, objective.contrastive_temperature_end
        if self.temperature is not None and end is not None:
            self.temperature.fill_(half_cosine(number, total, start, end))


def learning_rate(step: int, total_steps: int, warmup_steps: int, base: float, batch_size: int) -> float:
    """Learning rate at a step: linear warm-up from 0 to base * batch_size / 256, then a half cosine down to 0."""
    peak = base * batch_size / 256
    if step < warmup_steps:
        return peak * step / warmup_steps
    done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def half_cosine(step: int, total_steps: int, start: float, end: float) -> float:
    """A value that goes from ``start`` to ``end`` along a half cosine, at a step."""
    done = min(1.0, step / max(1, total_steps))
    return end - (end - start) * 0.5 * (1 + math.cos(math.pi * done))
