"""How far long work is: a function that is told, and lines on standard error that fit terminals of 60 columns."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable

from rich import progress
from rich.cells import cell_len
from rich.console import Console
from rich.progress import ProgressColumn, Task, TextColumn
from rich.table import Column, Table
from rich.text import Text

Progress = Callable[[str, int, int], None]
"""Is told what is being done, how much of it is done, and how much there is (0 if that is not known)."""

_WIDEST_BAR, _NARROWEST_BAR = 24, 6
_UNKNOWN = "-:--:--"


def silent(what: str, done: int, total: int) -> None:
    """Tells nobody."""


def clock_time(seconds: float | None) -> str:
    """A duration as it stands beside a bar, in at most ten characters."""
    if seconds is None or not math.isfinite(seconds):
        return _UNKNOWN
    if seconds >= 100 * 3600:
        return f"{seconds / 86400:,.1f} days" if seconds < 1000 * 86400 else "years"
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _rounded_up(seconds: float | None) -> float | None:
    """Whole seconds: what is not over yet has time left."""
    return None if seconds is None else math.ceil(seconds)


class Pace:
    """How long the rest of some work takes, if it goes on as it did since one of the last marks."""

    def __init__(self, marks: int = 1) -> None:
        self._marks: deque[tuple[float, float]] = deque(maxlen=marks)
        self._last: tuple[float, float] | None = None

    def restart(self, done: float) -> None:
        """Measure from here: so much is done."""
        self._marks.clear()
        self.mark(done)

    def mark(self, done: float) -> None:
        """So much is done. The pace is measured from the first mark, or from the earliest of those that are kept."""
        self._marks.append((time.monotonic(), done))
        self._last = self._marks[-1]

    def reached(self, done: float) -> None:
        """So much is done."""
        self._last = (time.monotonic(), done)

    def left(self, total: float) -> float | None:
        """The seconds until ``total`` is done; None while nothing was measured."""
        if self._last is None or self._last[1] <= self._marks[0][1]:
            return None
        (start, before), (last, done) = self._marks[0], self._last
        seconds = (last - start) / (done - before) * (total - done)
        return max(0.0, seconds - (time.monotonic() - last))


class FittedProgress(progress.Progress):
    """Lines of a description, a bar, a count and times, of which only the first two give way to a narrow terminal."""

    def __init__(
        self, *, console: Console, disable: bool, transient: bool, elapsed: bool = True, left: bool = True
    ) -> None:
        self._what = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))
        self._bar = progress.BarColumn(bar_width=_WIDEST_BAR)
        self._times = [*([_Elapsed()] if elapsed else []), *([_TimeLeft()] if left else [])]
        self._terminal = console  # the base class draws before it keeps it
        columns = (progress.SpinnerColumn(), self._what, self._bar, _Count(), *self._times)
        super().__init__(*columns, console=console, disable=disable, transient=transient)

    def make_tasks_table(self, tasks: Iterable[Task]) -> Table:
        """The lines, with a description and a bar that leave room for all that must be read."""
        shown = [task for task in tasks if task.visible]
        kept = [column for column in self.columns if isinstance(column, _Kept)]
        widths = [max((cell_len(column.words(task)) for task in shown), default=0) for column in kept]
        # The spinner, and a space after each column but the last.
        room = self._terminal.width - 1 - sum(widths) - (len(self.columns) - 1)
        words = max((cell_len(task.description) for task in shown), default=0)
        self._bar.bar_width = min(_WIDEST_BAR, max(_NARROWEST_BAR, room - words))
        self._what.get_table_column().max_width = max(1, room - self._bar.bar_width)
        return super().make_tasks_table(shown)


class _Kept(ProgressColumn):
    """A column that is never cut."""

    style = "none"

    def words(self, task: Task) -> str:
        """What it says of a task."""
        raise NotImplementedError

    def render(self, task: Task) -> Text:
        return Text(self.words(task), style=self.style, no_wrap=True)

    def get_table_column(self) -> Column:
        return Column(no_wrap=True, justify="right")


class _Count(_Kept):
    """How many of how many; nothing where that is not known."""

    style = "progress.download"

    def words(self, task: Task) -> str:
        return "" if task.total is None else f"{task.completed:,.0f}/{task.total:,.0f}"


class _Elapsed(_Kept):
    """The time since a task began."""

    style = "progress.elapsed"

    def words(self, task: Task) -> str:
        return clock_time(task.finished_time if task.finished else task.elapsed)


class _TimeLeft(_Kept):
    """The time left, by a task's field ``left``, a function; nothing for a task without an end."""

    style = "progress.remaining"

    def words(self, task: Task) -> str:
        left = task.fields.get("left")
        return "" if left is None or task.total is None else f"{clock_time(_rounded_up(left()))} left"


class Bar(FittedProgress):
    """One line on standard error that says what is being done, by default only on a terminal; a context manager."""

    def __init__(self, *, enabled: bool | None = None, elapsed: bool = False, left: bool = True) -> None:
        shown = sys.stderr.isatty() if enabled is None else enabled
        super().__init__(console=Console(stderr=True), disable=not shown, transient=True, elapsed=elapsed, left=left)
        self._line = self.add_task("starting", total=None)
        self._work, self._pace = ("starting", 0), Pace()

    def show(self, what: str, done: int = 0, total: int = 0) -> None:
        """Show how far it is."""
        if (what, total) != self._work:
            self._work, self._pace = (what, total), Pace()
            self._pace.restart(done)
            # A task keeps its total, and that it was finished once, so what is new gets one of its own.
            self.remove_task(self._line)
            self._line = self.add_task(what, total=total or None, left=functools.partial(self._pace.left, total))
        self._pace.reached(done)
        self.update(self._line, completed=done)
