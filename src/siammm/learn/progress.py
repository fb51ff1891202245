"""How training is shown: live bars on a terminal, one line per epoch elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich import progress
from rich.console import Console
from rich.progress import TaskID, TextColumn

if TYPE_CHECKING:
    from siammm.learn.loop import Training

# What of an epoch's measurements is shown, in this order, and how.
_SHOWN = {
    "loss": "loss {:.3f}",
    "instance_loss": "instance {:.3f}",
    "cluster_loss": "clusters {:.3f}",
    "n_clusters": "K {:,}",
    "knn": "kNN {:.1%}",
    "linear": "linear {:.1%}",
    "ami": "AMI {:.3f}",
    "images_per_second": "{:,.0f} images/s",
}
# Where there is no terminal, a line is printed this often, and for every epoch that was measured with labels.
_SECONDS_BETWEEN_LINES = 30.0


class TrainingProgress(progress.Progress):
    """Bars for the run and the epoch, and what the last epoch measured; on standard error."""

    def __init__(self, *, console: Console | None = None) -> None:
        console = console or Console(stderr=True, highlight=False)
        task = (progress.SpinnerColumn(), TextColumn("{task.description}"), progress.BarColumn(bar_width=24))
        done = (progress.MofNCompleteColumn(), progress.TimeElapsedColumn())
        left = (TextColumn("left"), progress.TimeRemainingColumn(), TextColumn("{task.fields[found]}"))
        super().__init__(*task, *done, *left, console=console, disable=not console.is_terminal)
        self._reading: TaskID | None = None
        self._run: TaskID | None = None
        self._epoch: TaskID | None = None
        self._epochs = 0
        self._printed = time.monotonic()
        self._known: dict[str, Any] = {}

    def reading(self, done: int, total: int) -> None:
        """So many images were read."""
        if self._reading is None:
            self._reading = self.add_task("reading images", total=total, found="")
        self.update(self._reading, completed=done, total=total)

    def began(self, training: Training) -> None:
        """Training starts or continues."""
        if self._reading is not None:
            self.update(self._reading, visible=False)
        self._epochs = training.config.optimisation.epochs
        self._run = self.add_task("epochs", total=self._epochs, completed=training.epoch, found="")
        self._epoch = self.add_task("this epoch", total=training.steps_per_epoch, found="")

    def stepped(self, epoch: int, step: int, steps: int) -> None:
        """One update is done."""
        if not self.disable and self._epoch is not None:
            self.update(self._epoch, completed=step, total=steps)

    def finished_epoch(self, row: dict[str, Any]) -> None:
        """An epoch is over, and this was measured."""
        self._known |= row  # a measurement with labels stays in sight until the next
        found = metrics_line(self._known)
        if self._run is not None and self._epoch is not None:
            self.update(self._run, completed=row["epoch"], found=found)
            self.reset(self._epoch)
        now = time.monotonic()
        last = row["epoch"] == self._epochs
        if self.disable and ("knn" in row or last or now - self._printed > _SECONDS_BETWEEN_LINES):
            self._printed = now
            self.console.print(f"epoch {row['epoch']} of {self._epochs}: {metrics_line(row)}", soft_wrap=True)


def metrics_line(row: dict[str, Any]) -> str:
    """What was measured in an epoch, in a line."""
    return "  ".join(text.format(row[name]) for name, text in _SHOWN.items() if name in row)
