"""What a checkpoint holds of a training: networks, optimiser, clusters, bank, queue, and where in the run it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from siammm.core import ranks
from siammm.core.errors import InputError
from siammm.data.view_settings import Channels, normalisation_from_plain
from siammm.learn import checkpoint
from siammm.learn.grouping import Grouping
from siammm.learn.guard import CollapseError
from siammm.learn.start import keep_statistics

if TYPE_CHECKING:
    from siammm.learn.loop import Training


def save(training: Training) -> None:
    """Give the recorder everything that is needed to resume. What is not finite never replaces what is."""
    # Every rank takes part: the bank is in shards.
    views = [ranks.all_gather_rows(view[:-1], training.device) for view in training.bank.view_2ND]
    tensors = {
        **checkpoint.with_prefix("network", training.network.state_dict()),
        **checkpoint.with_prefix("optimiser", checkpoint.optimiser_tensors(training.optimiser)),
        **({} if training.queue is None else {"queue": training.queue.view_2QD}),
        "bank/1": views[0],
        "bank/2": views[1],
    }
    _check_finite(tensors, training)
    if training.recorder is None or not ranks.is_writer():
        return
    tensors |= {
        **clustering_tensors(training),
        **({} if training.grouping is None else checkpoint.with_prefix("grouping", training.grouping.as_tensors())),
        "totals": training.tally.totals,
        "ids": _as_tensor(training.loader.identifiers()),
    }
    facts = {
        "epoch": training.epoch,
        "step_in_epoch": training.step_in_epoch,
        "steps_per_epoch": training.steps_per_epoch,
        "world_size": ranks.world_size(),
        "seconds": training.seconds,
        "log_likelihood": training.log_likelihood,
        "set_aside": training.loader.set_aside.reasons,
        "normalisation": training.clean_view.normalisation,
        "keeps_statistics": training.network.encoder.keeps_statistics,
    }
    training.recorder.save_checkpoint(tensors, facts)


def normalisation(resume_from: tuple[Any, Mapping[str, Any]] | None) -> tuple[Channels, Channels] | None:
    """Mean and deviation of the pixels in a checkpoint; None where those of the augmentation are meant."""
    stored = None if resume_from is None else resume_from[1].get("normalisation")
    return None if stored is None else normalisation_from_plain(stored)


def _check_finite(tensors: Mapping[str, Tensor], training: Training) -> None:
    """Refuse to save a run that could never go on; alike on every rank, which all have these tensors."""
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    if bool(torch.stack([tensor.isfinite().all().to(training.device) for tensor in floats.values()]).all()):
        return
    first = next(name for name, tensor in floats.items() if not bool(tensor.isfinite().all()))
    kinds = {"network": "weights", "optimiser": "state of the optimiser", "queue": "queue", "bank": "embeddings"}
    what = kinds[first.partition("/")[0]]
    raise CollapseError(
        f"NaN or infinity among the {what} after update {training.step_in_epoch:,} of epoch {training.epoch + 1}, so "
        "they were not saved, and the last good checkpoint is kept; start again with a lower --learning-rate, or with "
        "--precision fp32."
    )


def restore(training: Training, tensors: dict[str, Tensor], facts: dict[str, Any], *, carry_over: bool = False) -> None:
    """Put back what ``save`` wrote. With ``carry_over`` the images may be others: what was known goes by their names.

    An epoch that cannot go on where it was, because its updates are of other images, starts again.
    """
    ids = training.loader.identifiers()
    then = _as_list(tensors["ids"]) if "ids" in tensors else None
    new_rows: list[int] = []
    if then is not None and then != ids:
        _check_same(then, ids, carry_over=carry_over)
        tensors, new_rows = _carried(tensors, then, ids)
    elif then is None:  # by an earlier version
        _check_same(sorted(facts["set_aside"]), sorted(training.loader.set_aside.reasons), carry_over=False)
    checkpoint.restore_module(training.network, checkpoint.grouped(tensors, "network"))
    keep_statistics(training.network, keeps=bool(facts.get("keeps_statistics")))
    checkpoint.restore_optimiser(training.optimiser, checkpoint.grouped(tensors, "optimiser"))
    for name, clustering in zip(_clustering_names(training), training.clusterings, strict=True):
        clustering.restore(checkpoint.grouped(tensors, name))
    grouping = checkpoint.grouped(tensors, "grouping")
    training.grouping = Grouping.restored(grouping, training.device) if grouping else None
    if training.queue is not None:
        training.queue.view_2QD.copy_(tensors["queue"])
    first, last = training.bank.first, training.bank.last
    for view, stored in zip(training.bank.view_2ND, (tensors["bank/1"], tensors["bank/2"]), strict=True):
        view[:-1].copy_(stored[first:last])
    training.tally.totals.copy_(tensors["totals"])
    training.epoch, training.step_in_epoch = int(facts["epoch"]), int(facts["step_in_epoch"])
    training.seconds, training.log_likelihood = float(facts["seconds"]), float(facts["log_likelihood"])
    same_updates = facts.get("steps_per_epoch", training.steps_per_epoch) == training.steps_per_epoch
    if carry_over or not same_updates or (then is not None and then != ids):
        training.step_in_epoch = 0
    if new_rows:
        _embed_new(training, new_rows)
    if training.recorder is not None and ranks.is_writer():
        training.metrics = training.recorder.truncate_metrics(training.epoch)


def _check_same(then: list[str], now: list[str], *, carry_over: bool) -> None:
    """Refuse other images than the run began with, unless it may go on with them."""
    if carry_over:
        return
    changed = sorted(set(then) ^ set(now))
    if changed:
        raise InputError(
            f"{len(changed):,} images that could be read no longer can, or the other way round, the first being "
            f"{changed[0]}; put them back, add --allow-data-change, or start a new run."
        )
    if then != now:
        raise InputError("The images are in another order than when the run began; add --allow-data-change.")


def _carried(tensors: dict[str, Tensor], then: list[str], now: list[str]) -> tuple[dict[str, Tensor], list[int]]:
    """The tensors with a row for each image of ``now``, and the images that no row is known of."""
    known = {name: row for row, name in enumerate(then)}
    row_N = torch.tensor([known.get(name, -1) for name in now])
    is_known_N = row_N >= 0

    def moved(stored: Tensor) -> Tensor:
        rows = stored.new_zeros(len(now), *stored.shape[1:])
        rows[is_known_N] = stored[row_N[is_known_N]]
        return rows

    of_images = {name for name in tensors if name.startswith("bank/") or name.endswith(("/index", "/share"))}
    carried = {name: moved(stored) if name in of_images else stored for name, stored in tensors.items()}
    return carried, (~is_known_N).nonzero().flatten().tolist()


def _embed_new(training: Training, new_rows: list[int]) -> None:
    """Give images that the run has not seen a place in the bank: their embeddings without augmentation."""
    embedding_ND = training.clean_embeddings()  # of this rank's shard
    rows = [row - training.bank.first for row in new_rows if training.bank.first <= row < training.bank.last]
    training.bank.view_2ND[:, rows] = embedding_ND[rows].to(training.bank.view_2ND)


def _as_tensor(names: list[str]) -> Tensor:
    """Names as bytes, which a checkpoint can hold."""
    return torch.frombuffer(bytearray(json.dumps(names).encode()), dtype=torch.uint8)


def _as_list(stored: Tensor) -> list[str]:
    return [str(name) for name in json.loads(stored.numpy().tobytes())]


def clustering_tensors(training: Training) -> dict[str, Tensor]:
    """The state of all clusterings, each under its name."""
    tensors: dict[str, Tensor] = {}
    for name, clustering in zip(_clustering_names(training), training.clusterings, strict=True):
        tensors |= checkpoint.with_prefix(name, clustering.as_tensors())
    return tensors


def _clustering_names(training: Training) -> list[str]:
    return ["clustering", *(f"clustering {number}" for number in range(2, len(training.clusterings) + 1))]
