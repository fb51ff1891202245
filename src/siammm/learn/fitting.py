"""What would fit into memory, where a training did not."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch

from siammm.core import ranks
from siammm.core.memory import is_out_of_memory
from siammm.data.loader import Batch, StreamingLoader
from siammm.learn.objective import Stage

if TYPE_CHECKING:
    from siammm.learn.loop import Training


def fitting_batch_size(training: Training) -> int | None:
    """The largest half, quarter and so on of the batch whose update fits into memory, by trying; None if none does.

    The training cannot go on afterwards. Several processes would have to try together, which they do not.
    """
    parts = training.config.optimisation.accumulate
    size = training.batch_size // 2
    if training.accelerated is not None:
        training.accelerated.graphs.clear()  # what was captured stays in memory
    training.accelerated = None
    while size >= 2 * parts and not ranks.active():
        size -= size % parts
        if _fits(training, size):
            return size
        size //= 2
    return None


def _fits(training: Training, size: int) -> bool:
    gc.collect()
    if training.device.type == "cuda":
        torch.cuda.empty_cache()
    try:
        crops = None
        if isinstance(training.loader, StreamingLoader):
            side = training.views[0].size
            blank = torch.zeros(size, 3, side, side, dtype=torch.uint8, device=training.device)
            crops = (blank, blank.clone())
        batch = Batch(torch.arange(size, device=training.device), crops)
        training.step(batch, 0, Stage.INSTANCES)
        if training.device.type == "cuda":
            torch.cuda.synchronize(training.device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True
