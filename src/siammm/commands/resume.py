"""Resuming a training: its settings and images as they were, or as they may have changed, and its checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from siammm.commands.prepared import PreparedTraining, facts_of_images, output_folder
from siammm.core import ranks
from siammm.core.errors import InputError, StoredFileError
from siammm.core.processes import Context
from siammm.data.inventory import Differences, Inventory
from siammm.data.sources import Source
from siammm.learn.build import initial_clusters
from siammm.learn.checkpoint import Loaded
from siammm.runs.images import open_images
from siammm.runs.run import Run
from siammm.runs.writer import RunWriter, run_lock
from siammm.settings.checks import check_settings
from siammm.settings.fields import with_settings
from siammm.settings.stored import resumed
from siammm.settings.training import TrainConfig

_NEW, _WITHOUT_CHECKPOINT, RESUMABLE, FINISHED = range(4)


def resume(config: TrainConfig, context: Context, stack: contextlib.ExitStack) -> PreparedTraining:
    """Prepare to go on with the run ``config.resume``."""
    assert config.resume is not None
    folder, lock, differences = None, None, None
    with ranks.refused_together(context.device):
        if context.rank == 0:
            path = Run.unfinished(config.resume).path
            lock = run_lock(path, remedy="stop it and resume then", patience=config.resume_if_exists)
            stack.enter_context(lock)
    # Only now: another process may have changed the run while this one waited for the lock.
    run = Run.unfinished(config.resume)
    settings, course = resumed(config, run.config, was_changed=bool(run.facts.get("changes")))
    check_settings(settings)
    where = config.data or str(run.data)
    with ranks.refused_together(context.device):
        source = open_images(where, settings.reading)
        begun = run.checkpoint()
        epoch, step = _reached(begun, settings)
        inventory = Inventory.of(source) if context.rank == 0 else None
        if context.rank == 0:
            differences = _differences(run, source, inventory)
    carry_over = bool(ranks.broadcast_int(int(differences is not None), context.device))
    with ranks.refused_together(context.device):
        if carry_over:
            settings = _with_other_images(config, settings, where, begun, differences)
    if context.rank == 0:
        facts = run.facts | (facts_of_images(source, where) if carry_over or config.data is not None else {})
        change: dict[str, Any] = {name: list(values) for name, values in course.items()}
        change |= {"images": differences.counts()} if differences is not None else {}
        if change:
            before = facts.get("changes")
            before = before if isinstance(before, list) else []
            facts["changes"] = [*before, {"epoch": epoch, "update": step, **change}]
        kept = inventory if run.inventory is not None else None
        folder = RunWriter.continued(run.path, settings, facts, lock=lock, inventory=kept)
    notes = _notes(begun, course, differences, context)
    return PreparedTraining(
        config=settings, source=source, folder=folder, checkpoint=begun[:2], carry_over=carry_over, notes=notes
    )


def _reached(begun: Loaded, settings: TrainConfig) -> tuple[int, int]:
    """The epochs and updates that are done; refuses to stop before that."""
    try:
        epoch, step = int(begun.facts["epoch"]), int(begun.facts["step_in_epoch"])
    except (KeyError, TypeError, ValueError) as error:
        raise StoredFileError(f"{begun.path} does not say how far the run had got; start a new run.") from error
    least = epoch + (step > 0)
    if settings.optimisation.epochs < least:
        raise InputError(
            f"--epochs is {settings.optimisation.epochs}, but the run is already in epoch {least}; use at least "
            f"{least}."
        )
    return epoch, step


def _differences(run: Run, source: Source, inventory: Inventory | None) -> Differences | None:
    """What has changed of the images since the run began, if anything."""
    stored = run.inventory
    if stored is None or inventory is None or run.facts.get("kind") != source.kind:
        return None if source.fingerprint() == run.fingerprint else Differences()
    found = stored.compared(inventory, source)
    return found if found.any() or source.fingerprint() != run.fingerprint else None


def _with_other_images(
    config: TrainConfig, settings: TrainConfig, where: str, begun: Loaded, differences: Differences | None
) -> TrainConfig:
    """The settings for going on with images that have changed; refused unless that was asked for."""
    if not config.allow_data_change:
        raise InputError(_not_the_images(where, config.resume, differences))
    if "ids" not in begun.tensors:
        raise InputError(
            f"{config.resume} was started by an earlier version of siammm, which did not store the names of its "
            "images, so it cannot continue with changed ones; give the original images, or start a new run."
        )
    if settings.clustering.n_components is not None:
        return settings
    # A number that follows from the images must not change with them.
    return with_settings(settings, n_components=initial_clusters(int(begun.tensors["bank/1"].shape[0])))


def _not_the_images(where: str, run: Path | None, differences: Differences | None) -> str:
    what = f": {differences}" if differences is not None and differences.any() else ""
    return (
        f"{where} does not contain the images that {run} was trained on{what}; restore them, add --allow-data-change "
        "to continue with the images that are there, or start a new run."
    )


def _notes(
    begun: Loaded, course: dict[str, tuple[Any, Any]], differences: Differences | None, context: Context
) -> list[str]:
    """What somebody should know who resumes a run."""
    notes: list[str] = []
    epoch, step = int(begun.facts["epoch"]), int(begun.facts["step_in_epoch"])
    if begun.skipped is not None:
        notes.append(
            f"{begun.skipped} It is skipped: the run continues from {begun.path.name}, after {step:,} updates of epoch "
            f"{epoch + 1}."
        )
    changed = [f"--{name.replace('_', '-')} from {old} to {new}" for name, (old, new) in course.items()]
    if changed:
        notes.append(
            f"Changed: {', '.join(changed)}. Learning rate and momentum follow the new schedule from here on, so the "
            "result differs from that of a run that was started with these settings."
        )
    if differences is not None:
        notes.append(
            f"The images have changed ({differences if differences.any() else 'others than before'}): clusters and "
            f"embeddings are carried over by name, and epoch {epoch + 1} starts again."
        )
    processes_then = begun.facts.get("world_size", context.world_size)
    if processes_then != context.world_size:
        notes.append(
            f"The checkpoint was written by {processes_then} processes and is resumed with {context.world_size}: sums "
            "are added in another order, so the result is equal up to rounding, not bit for bit."
        )
    return notes


def resume_if_begun(config: TrainConfig, context: Context) -> TrainConfig | None:
    """The settings to start or to resume with, by what the output folder holds; None if nothing is left to do."""
    output, state = output_folder(config), 0
    with ranks.refused_together(context.device):
        if context.rank == 0:  # before any rank changes the folder
            state = state_of(output, config.optimisation.epochs)
    state = ranks.broadcast_int(state, context.device)
    if state == FINISHED:
        return None
    if state == RESUMABLE:
        return dataclasses.replace(config, output=output, resume=output)
    # Without a checkpoint nothing is lost by a new start, and the rules for what may be replaced hold.
    return dataclasses.replace(config, output=output, overwrite=state == _WITHOUT_CHECKPOINT)


def state_of(output: Path, epochs: int) -> int:
    """Whether the output folder holds a run, and one that is finished or can be resumed."""
    try:
        run = Run.unfinished(output)
    except InputError:
        return _NEW
    if run.is_finished and epochs <= run.trained_epochs:
        return FINISHED
    if run.has_checkpoint:
        return RESUMABLE
    return _NEW if run.is_finished else _WITHOUT_CHECKPOINT
