"""How far long work is: a function that is told, and one line on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich import progress
from rich.console import Console
from rich.progress import ProgressColumn, TextColumn

Progress = Callable[[str, int, int], None]
"""Is told what is being done, how much of it is done, and how much there is (0 if that is not known)."""


def silent(what: str, done: int, total: int) -> None:
    """Tells nobody."""


class Bar(progress.Progress):
    """One line on standard error that says what is being done, by default only on a terminal; a context manager."""

    def __init__(self, last: ProgressColumn | None = None, *, enabled: bool | None = None) -> None:
        task = (progress.SpinnerColumn(), TextColumn("{task.description}"), progress.BarColumn())
        last, shown = last or progress.MofNCompleteColumn(), sys.stderr.isatty() if enabled is None else enabled
        super().__init__(*task, last, console=Console(stderr=True), transient=True, disable=not shown)
        self._line = self.add_task("starting", total=None)

    def show(self, what: str, done: int = 0, total: int = 0) -> None:
        """Show how far it is."""
        self.update(self._line, description=what, completed=done, total=total or None)
