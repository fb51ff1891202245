"""The progress of a fit: a Rich bar on standard error, or nothing at all."""

from __future__ import annotations

from siammm.core.progress import Bar


class FitProgress(Bar):
    """Shows rounds of merging and EM steps while a fit runs, if enabled."""

    def __init__(self, *, enabled: bool) -> None:
        super().__init__(enabled=enabled, elapsed=True, left=False)  # EM ends when it has converged

    def start_run(self, restart: int, restarts: int) -> None:
        """A start of ``n_init`` begins."""
        self.show(f"start {restart + 1} of {restarts}" if restarts > 1 else "starting")

    def merged(self, rounds: int, n_components: int) -> None:
        """A round of merging is over. How many follow is not known."""
        self.show(f"merging: {n_components:,} components after {rounds} rounds")

    def stepped(self, step: int, max_iter: int, log_likelihood: float) -> None:
        """An EM step is over."""
        self.show(f"EM step {step}: log likelihood {log_likelihood:.4f}", step, max_iter)
