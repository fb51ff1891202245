"""How training is shown: live bars on a terminal, one line per epoch elsewhere."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.progress import TaskID
from rich.text import Text

from siammm.core.progress import FittedProgress, Pace
from siammm.core.text import rough_duration

if TYPE_CHECKING:
    from siammm.learn.loop import Training

# What of an epoch's measurements is shown, in this order, and how.
_SHOWN = {
    "loss": "loss {:.3f}",
    "instance_loss": "instance {:.3f}",
    "cluster_loss": "clusters {:.3f}",
    "n_clusters": "K {:,}",
    "n_groups": "groups {:,}",
    "knn": "kNN {:.1%}",
    "linear": "linear {:.1%}",
    "ami": "AMI {:.3f}",
    "images_per_second": "{:,.0f} images/s",
}
# What a narrow terminal goes without, the first of these first.
_DISPENSABLE = (
    "instance_loss",
    "cluster_loss",
    "linear",
    "images_per_second",
    "ami",
    "knn",
    "n_groups",
    "n_clusters",
    "loss",
)
# Where there is no terminal, a line is printed this often, and for every epoch that was measured with labels.
_SECONDS_BETWEEN_LINES = 30.0
# The pace is that of so many epochs: with clusters they take longer, and longest while there are many.
_EPOCHS_OF_PACE = 3
# An update, in batches that are embedded: those go forward through one encoder; an update through two, and backward.
_BATCHES_OF_AN_UPDATE = 4
# Batches or updates that are timed before it is said how long training takes, fewer if they take so many seconds; and
# the seconds of training from which it is said.
_TIMED, _TIMED_SECONDS, _LONG = 3, 10.0, 3600.0


class TrainingProgress(FittedProgress):
    """Bars for the run and the epoch, and below them what the last epoch measured; on standard error.

    ``advice`` is printed, after an estimate of the time, if training takes more than an hour.
    """

    def __init__(self, *, console: Console | None = None, advice: str = "") -> None:
        console = console or Console(stderr=True, highlight=False)
        self._known: dict[str, Any] = {}
        super().__init__(console=console, disable=not console.is_terminal, transient=False)
        self._reading: TaskID | None = None
        self._run: TaskID | None = None
        self._epoch: TaskID | None = None
        self._epochs, self._steps, self._n_stepped = 0, 1, 0
        self._read, self._embedding, self._pace = Pace(), Pace(), Pace(_EPOCHS_OF_PACE + 1)
        self._advice, self._compiles = advice, False
        self._began = self._printed = time.monotonic()

    def reading(self, done: int, total: int) -> None:
        """So many images were read."""
        if self._reading is None:
            self._read.restart(0)
            left = functools.partial(self._read.left, total)
            self._reading = self.add_task("reading images", total=total, left=left)
        self._read.reached(done)
        self.update(self._reading, completed=done, total=total)

    def began(self, training: Training) -> None:
        """Training starts or continues."""
        if self._reading is not None:
            self.update(self._reading, visible=False)
        self._epochs, self._steps = training.config.optimisation.epochs, training.steps_per_epoch
        self._began = time.monotonic()
        self._embedding.restart(0)
        self._pace.restart(training.epoch * self._steps + training.step_in_epoch)
        self._run = self.add_task("epochs", total=self._epochs, completed=training.epoch, left=self._left(self._epochs))
        step, left = training.step_in_epoch, self._left(training.epoch + 1)
        self._epoch = self.add_task("this epoch", total=self._steps, completed=step, left=left)
        self._compiles = training.accelerated is not None and training.accelerated.compiled
        if self._compiles:
            self._say("The first update is compiled for this machine, which may take a minute or more.")

    def embedded(self, done: int, total: int) -> None:
        """So many batches were embedded before the first update."""
        if self._epoch is None:
            return
        self._embedding.reached(done)
        self._pace.restart(0)  # what is done once is no part of the pace
        left = functools.partial(self._embedding.left, total)
        self.update(self._epoch, description="embedding", completed=done, total=total, left=left)
        if done >= min(_TIMED, total) or time.monotonic() - self._began > _TIMED_SECONDS:
            self._advise(self._embedding.left(total + _BATCHES_OF_AN_UPDATE * self._epochs * self._steps))

    def stepped(self, epoch: int, step: int, steps: int) -> None:
        """One update is done."""
        self._n_stepped += 1
        if self._n_stepped == 1 and self._compiles:
            self._pace.restart(epoch * steps + step)
        self._pace.reached(epoch * steps + step)
        if self._n_stepped == _TIMED:
            self._advise(self._pace.left(self._epochs * steps))
        if not self.disable and self._epoch is not None:
            left = self._left(epoch + 1)
            self.update(self._epoch, description="this epoch", completed=step, total=steps, left=left)

    def finished_epoch(self, row: dict[str, Any]) -> None:
        """An epoch is over, and this was measured."""
        self._known |= row  # a measurement with labels stays in sight until the next
        self._pace.mark(row["epoch"] * self._steps)
        last = row["epoch"] == self._epochs
        if self._run is not None and self._epoch is not None:
            self.update(self._run, completed=row["epoch"])
            if last:
                self.remove_task(self._epoch)
                self._epoch = self.add_task("the last clusters", total=None)
            else:
                self.reset(self._epoch, left=self._left(row["epoch"] + 1))
        now = time.monotonic()
        if self.disable and ("knn" in row or last or now - self._printed > _SECONDS_BETWEEN_LINES):
            self._printed = now
            seconds = None if last else self._pace.left(self._epochs * self._steps)
            left = "" if seconds is None else f"  about {rough_duration(seconds)} left"
            self._say(f"epoch {row['epoch']} of {self._epochs}: {metrics_line(row)}{left}")

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bars, and a line of measurements as long as the terminal is wide."""
        yield from super().get_renderables()
        if line := metrics_line(self._known, width=self._terminal.width - 2):
            yield Text(f"  {line}", no_wrap=True, overflow="crop")

    def _left(self, epochs: int) -> Callable[[], float | None]:
        """The seconds until so many epochs are done."""
        return functools.partial(self._pace.left, epochs * self._steps)

    def _say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False)

    def _advise(self, seconds: float | None) -> None:
        """Say once what there is to know of a training that takes long."""
        if self._advice and seconds is not None and seconds > _LONG:
            self._say(f"At this pace the training takes about {rough_duration(seconds)}. {self._advice}")
            self._advice = ""


def metrics_line(row: dict[str, Any], width: int | None = None) -> str:
    """What was measured in an epoch, in a line; with ``width``, without what does not fit and matters least."""
    parts = {name: text.format(row[name]) for name, text in _SHOWN.items() if name in row}
    for name in _DISPENSABLE:
        if width is None or len("  ".join(parts.values())) <= width:
            break
        parts.pop(name, None)
    return "  ".join(parts.values())
