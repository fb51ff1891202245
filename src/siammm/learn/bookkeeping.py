"""Beside Algorithm 1: checkpoints, requests to stop, losses that are not finite, the metrics of an epoch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from siammm.core import ranks
from siammm.core.threads import all_threads
from siammm.data import randomness
from siammm.data.loader import Batch
from siammm.data.reader_processes import ReaderError
from siammm.learn import guard
from siammm.learn.guard import CollapseError, Health

if TYPE_CHECKING:
    from siammm.learn.loop import Training

# On a GPU the host looks at the losses this often; on a CPU, after every update.
_STEPS_BETWEEN_CHECKS = 50
# Images of a batch that a message names.
_NAMED = 3


class Interrupted(Exception):  # noqa: N818 - a request, not an error
    """The user or the system asked to stop; everything is saved, if there was anything to save."""

    def __init__(self, *, began: bool = True) -> None:
        super().__init__()
        self.began = began


def readable_batches(training: Training, positions: Sequence[Tensor], started: float) -> Iterator[Batch]:
    """The batches of an epoch; if they cannot be read any longer, what was learned is saved."""
    try:
        yield from training.loader.batches(training.epoch, positions)
    except ReaderError:
        # All ranks save together, and the others know nothing of this.
        if training.epoch + training.step_in_epoch and not ranks.active():
            _save_within_epoch(training, started)
        raise


def _save_within_epoch(training: Training, started: float) -> None:
    seconds, training.seconds = training.seconds, training.seconds + time.monotonic() - started
    training.save()
    training.seconds = seconds


def between_updates(training: Training, started: float) -> None:
    """Is the loss still finite, is it time to save, does anybody want us to stop?"""
    if training.device.type == "cuda" and training.step_in_epoch % _STEPS_BETWEEN_CHECKS:
        return
    check_losses(training)
    stop, due = (
        ranks.any_rank(training.stop_requested(), training.device),
        ranks.any_rank(_save_is_due(training), training.device),
    )
    if (stop or due) and training.step_in_epoch < training.steps_per_epoch:
        _save_within_epoch(training, started)
        if stop:
            raise Interrupted


def check_losses(training: Training) -> None:
    """Stop if a loss or gradient was not finite: no weight has changed since."""
    update = training.tally.failed_update()
    if update is None:
        return
    order = randomness.permutation(training.config.run.random_state, training.epoch, training.loader.n_images)
    batch = order[(update - 1) * training.batch_size : update * training.batch_size]
    names = [training.loader.source.identifier(int(training.loader.sample_N[i])) for i in batch[:_NAMED].tolist()]
    raise CollapseError(
        f"The loss or its gradient is no longer finite in update {update:,} of epoch {training.epoch + 1} "
        f"({len(batch)} images: {', '.join(names)} ...), so training stopped before the weights changed; start "
        "again with a lower --learning-rate, or with --precision fp32."
    )


def end_of_epoch(training: Training, seconds: float, n_updates: int) -> None:
    """Measure, save, go on to the next epoch; or stop, if the encoder has collapsed."""
    means = training.tally.means()
    if not training.clustering_active and training.config.objective.cluster_loss != "swapped":
        del means["cluster_loss"]
    health = Health.of(training.samples(), training.clustering.components)
    training.seconds += seconds
    training.epoch, training.step_in_epoch = training.epoch + 1, 0
    rate = n_updates * training.batch_size / max(seconds, 1e-9)
    row = {"epoch": training.epoch, **means, **health.as_metrics(), "seconds": seconds, "images_per_second": rate}
    if training.clustering.components is not None:
        row |= {"n_clusters": training.clustering.n_components, "log_likelihood": training.log_likelihood}
    if training.grouping is not None:
        row |= {"n_groups": training.grouping.n_groups}
    if training.probes.is_due(training.epoch):
        with all_threads():
            row |= training.probes.measured(
                training.network, training.clustering, training.samples, autocast=training.autocast
            )
    training.metrics.append(row)
    if training.recorder is not None:
        training.recorder.add_metrics(row)
    training.listener.finished_epoch(row)
    problem = guard.diagnose(health, training.loader.n_images)
    if problem is not None:
        raise CollapseError(problem)
    stop, over = (
        ranks.any_rank(training.stop_requested(), training.device),
        training.epoch == training.config.optimisation.epochs,
    )
    if stop or ranks.any_rank(_save_is_due(training), training.device) or over:
        training.save()
    if stop and not over:
        raise Interrupted


def _save_is_due(training: Training) -> bool:
    return training.recorder is not None and time.monotonic() - training.saved_at > 60 * training.config.run.save_every
