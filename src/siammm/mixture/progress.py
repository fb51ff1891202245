"""The progress of a fit: a Rich bar on standard error, or nothing at all."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class FitProgress:
    """Shows rounds of merging and EM steps while a fit runs, if enabled."""

    def __init__(self, *, enabled: bool) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not enabled)
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def start_run(self, restart: int, restarts: int) -> None:
        """A start of ``n_init`` begins."""
        self._show(f"start {restart + 1} of {restarts}" if restarts > 1 else "starting", 0, None)

    def merged(self, rounds: int, n_components: int) -> None:
        """A round of merging is over. How many follow is not known."""
        self._show(f"merging: {n_components:,} components after {rounds} rounds", 0, None)

    def stepped(self, step: int, max_iter: int, log_likelihood: float) -> None:
        """An EM step is over."""
        self._show(f"EM step {step}: log likelihood {log_likelihood:.4f}", step, max_iter)

    def _show(self, text: str, completed: int, total: int | None) -> None:
        self._bar.update(self._task, description=text, completed=completed, total=total)
