"""The device of commands that run in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from siammm.core import processes
from siammm.core.errors import InputError


@contextmanager
def one_process(command: str, device: str, *, remedy: str = "use --device cpu") -> Iterator[torch.device]:
    """Refuse to run under ``torchrun``, and report a GPU that runs out of memory in one sentence."""
    with processes.setup(device) as context:
        if context.world_size > 1:
            raise InputError(
                f"{command} runs in one process, but {context.world_size} were started; run it without torchrun."
            )
        try:
            yield context.device
        except torch.OutOfMemoryError as error:
            raise InputError(f"The GPU does not have enough memory; {remedy}.") from error
