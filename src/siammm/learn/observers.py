"""Who watches a training: a ``Listener`` is told how it goes, a ``Recorder`` keeps what it leaves on the way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from siammm.data.set_aside import SetAside

if TYPE_CHECKING:
    from siammm.learn.loop import Training


class Listener(Protocol):
    """Is told how training goes; see ``progress.py``."""

    def reading(self, done: int, total: int) -> None:
        """So many images were read."""

    def began(self, training: Training) -> None:
        """Training starts or continues."""

    def embedded(self, done: int, total: int) -> None:
        """So many batches were embedded before the first update."""

    def stepped(self, epoch: int, step: int, steps: int) -> None:
        """One update is done."""

    def finished_epoch(self, row: dict[str, Any]) -> None:
        """An epoch is over, with these metrics."""


class Silent(Listener):
    """A listener that tells nobody."""


class Recorder(Protocol):
    """Keeps the metrics and checkpoints of a run. Only the process that writes has one."""

    def begin(self, set_aside: SetAside) -> None:
        """All settings and images have been checked: make room for the run, and list the images left out of it."""

    def add_metrics(self, row: dict[str, Any]) -> None:
        """Keep the metrics of an epoch."""

    def truncate_metrics(self, epochs: int) -> list[dict[str, Any]]:
        """Forget the metrics after so many epochs, and return those that are left."""
        ...

    def save_checkpoint(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Keep what the run can be resumed from."""
