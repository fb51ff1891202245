"""Filling the bank before the first update, so that there is something to cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from siammm.core import ranks
from siammm.data import randomness
from siammm.learn.bookkeeping import Interrupted

if TYPE_CHECKING:
    from siammm.learn.loop import Training


@torch.no_grad()
def fill_bank(training: Training) -> None:
    """Embed two views of every image before the first update.

    By the statistics of each batch: the running ones of a new network mean nothing yet.
    """
    never = training.config.optimisation.epochs  # order and views of an epoch that is never trained
    # Shuffled, because a folder comes class by class; the last batch is filled up with images from the start.
    every = randomness.permutation(training.config.run.random_state, never, training.loader.n_images)
    every = torch.cat([every, every[: -len(every) % training.batch_size]])
    randomness.seed_torch(training.config.run.random_state, -1, ranks.rank(), training.device)  # before update 0
    encoder = training.network.momentum_encoder or training.network.encoder
    with _frozen_statistics(training.network):
        batches = training.split(every)
        for done, batch in enumerate(training.loader.batches(never, batches), 1):
            for part in batch.parts(training.config.optimisation.accumulate):
                x_1, x_2 = training.loader.views(part, training.config.run.random_state, never)
                with torch.autocast(training.device.type, torch.bfloat16, enabled=training.autocast):
                    # Not by calling it: this is done once, which does not pay for compiling.
                    v_1m, v_2m = encoder.forward(x_1), encoder.forward(x_2)
                training.store_in_bank(part.position_B, v_1m, v_2m)
            training.listener.embedded(done, len(batches))
            if ranks.any_rank(training.stop_requested(), training.device):
                raise Interrupted(began=False)


@contextlib.contextmanager
def _frozen_statistics(network: nn.Module) -> Iterator[None]:
    """Normalise by each batch, and leave no trace of it in the running statistics."""
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    try:
        yield
    finally:
        for name, buffer in network.named_buffers():
            buffer.copy_(buffers[name])
