"""What a checkpoint holds of a training: networks, optimiser, clusters, bank, queue, and where in the run it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from siammm.core import ranks
from siammm.core.errors import InputError
from siammm.learn import checkpoint
from siammm.learn.guard import CollapseError

if TYPE_CHECKING:
    from siammm.learn.loop import Training


def save(training: Training) -> None:
    """Give the recorder everything that is needed to resume. Weights that are not finite never replace good ones."""
    if not bool(torch.stack([p.isfinite().all() for p in training.network.parameters()]).all()):
        raise CollapseError(
            "The weights are no longer finite, so they were not saved; start again with a lower --learning-rate, "
            "or with --precision fp32."
        )
    # Every rank takes part: the bank is in shards.
    views = [ranks.all_gather_rows(view[:-1], training.device) for view in training.bank.view_2ND]
    if training.recorder is None or not ranks.is_writer():
        return
    tensors = {
        **checkpoint.with_prefix("network", training.network.state_dict()),
        **checkpoint.with_prefix("optimiser", checkpoint.optimiser_tensors(training.optimiser)),
        **clustering_tensors(training),
        **({} if training.queue is None else {"queue": training.queue.view_2QD}),
        "bank/1": views[0],
        "bank/2": views[1],
        "totals": training.tally.totals,
        "random": torch.get_rng_state(),
    }
    facts = {
        "epoch": training.epoch,
        "step_in_epoch": training.step_in_epoch,
        "seconds": training.seconds,
        "log_likelihood": training.log_likelihood,
        "set_aside": training.loader.set_aside.reasons,
    }
    training.recorder.save_checkpoint(tensors, facts)


def restore(training: Training, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Put back what ``save`` wrote."""
    changed = sorted(facts["set_aside"].keys() ^ training.loader.set_aside.reasons.keys())
    if changed:
        raise InputError(
            f"{len(changed):,} images that could be read no longer can, or the other way round, the first being "
            f"{changed[0]}; a run continues with the images it began with: put them back, or start a new run."
        )
    checkpoint.restore_module(training.network, checkpoint.grouped(tensors, "network"))
    checkpoint.restore_optimiser(training.optimiser, checkpoint.grouped(tensors, "optimiser"))
    for name, clustering in zip(_clustering_names(training), training.clusterings, strict=True):
        clustering.restore(checkpoint.grouped(tensors, name))
    if training.queue is not None:
        training.queue.view_2QD.copy_(tensors["queue"])
    for view, stored in zip(training.bank.view_2ND, (tensors["bank/1"], tensors["bank/2"]), strict=True):
        view[:-1].copy_(stored[training.bank.first : training.bank.last])
    training.tally.totals.copy_(tensors["totals"])
    torch.set_rng_state(tensors["random"])
    training.epoch, training.step_in_epoch = int(facts["epoch"]), int(facts["step_in_epoch"])
    training.seconds, training.log_likelihood = float(facts["seconds"]), float(facts["log_likelihood"])
    if training.recorder is not None and ranks.is_writer():
        training.metrics = training.recorder.truncate_metrics(training.epoch)


def clustering_tensors(training: Training) -> dict[str, Tensor]:
    """The state of all clusterings, each under its name."""
    tensors: dict[str, Tensor] = {}
    for name, clustering in zip(_clustering_names(training), training.clusterings, strict=True):
        tensors |= checkpoint.with_prefix(name, clustering.as_tensors())
    return tensors


def _clustering_names(training: Training) -> list[str]:
    return ["clustering", *(f"clustering {number}" for number in range(2, len(training.clusterings) + 1))]
