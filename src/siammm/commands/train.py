"""``siammm train``: images in; an encoder, a mixture, the clusters of the images and their number out."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape

import siammm
from siammm.commands.cluster import cluster_table, in_groups, score_table
from siammm.commands.next_steps import next_steps
from siammm.core import processes, ranks
from siammm.core.errors import InputError, Stopped, StoredFileError
from siammm.core.memory import is_out_of_memory
from siammm.core.processes import Context
from siammm.core.signals import StopSignals
from siammm.core.text import printable, shown
from siammm.data.decode import BadImage
from siammm.data.folder_source import FolderSource
from siammm.data.inventory import Differences, Inventory
from siammm.data.loader import ReaderError
from siammm.data.sources import Source, from_anywhere
from siammm.learn.build import initial_clusters
from siammm.learn.checkpoint import Loaded
from siammm.learn.fitting import fitting_batch_size
from siammm.learn.loop import Interrupted, Trained, Training
from siammm.learn.networks import CONV_SMALL
from siammm.learn.progress import TrainingProgress, metrics_line
from siammm.learn.start import NO_WEIGHTS, Start
from siammm.metrics.clustering import clustering_scores
from siammm.runs import files, starting_weights
from siammm.runs.images import open_images
from siammm.runs.run import Run
from siammm.runs.writer import RunWriter, check_run_folder, run_lock
from siammm.settings.checks import check_settings
from siammm.settings.fields import with_settings
from siammm.settings.presets import PRESETS
from siammm.settings.stored import resumed
from siammm.settings.training import TrainConfig

# With fewer updates in an epoch than this, the epochs of a preset are too few to learn much.
_FEW_UPDATES = 10
# Images whose size is looked at; for copies to pay, their sides must be so many times that of a view, and so long.
_LOOKED_AT, _MANY_TIMES, _LEAST_SIDE = 9, 3, 256


def train(config: TrainConfig) -> None:
    """Run the command."""
    if config.resume is None and config.data is None:
        raise InputError("There is nothing to train on; give a folder of images, or run siammm demo for a first look.")
    if config.resume_if_exists and (config.resume is not None or config.overwrite):
        other = "--overwrite" if config.overwrite else "--resume"
        raise InputError(f"--resume-if-exists and {other} contradict each other; leave one of them out.")
    with processes.setup(config.run.device) as context, contextlib.ExitStack() as stack:
        config = _from_any_folder(config)
        console = Console(highlight=False)
        if config.resume_if_exists:
            chosen = _resume_if_begun(config, context)
            if chosen is None:
                if context.rank == 0:
                    console.print("The run is finished; there is nothing left to do.")
                return
            config = chosen
        begun = (_start if config.resume is None else _resume)(config, context, stack)
        _run(begun, context, console)


@dataclass(frozen=True, kw_only=True)
class _Begun:
    """A training that can begin or go on: everything has been checked that can be before images are read."""

    config: TrainConfig
    source: Source
    folder: RunWriter | None
    """Where it is written; the first process alone has one."""
    start: Start | None = None
    """The weights that a new training starts from; one that goes on has those of its checkpoint."""
    checkpoint: tuple[dict[str, torch.Tensor], dict[str, Any]] | None = None
    carry_over: bool = False
    notes: list[str] = field(default_factory=list)


def _from_any_folder(config: TrainConfig) -> TrainConfig:
    """The settings with the paths that are kept in a run as they are found from any folder."""
    changed: dict[str, Any] = {}
    if config.run.probe is not None:
        changed["probe"] = from_anywhere(config.run.probe)
    if config.network.weights != NO_WEIGHTS:
        changed["weights"] = starting_weights.from_anywhere(config.network.weights)
    if config.run.image_cache is not None:
        changed["image_cache"] = os.path.abspath(os.path.expanduser(config.run.image_cache))
    return with_settings(config, **changed)


def _output(config: TrainConfig) -> Path:
    """The run folder, by default named after the data."""
    if config.output is not None:
        return config.output
    name = re.sub(r"[^\w.-]+", "-", Path(str(config.data).replace("::", "-")).stem).strip("-.")
    return Path(f"{name or 'images'}-run")


def _start(config: TrainConfig, context: Context, stack: contextlib.ExitStack) -> _Begun:
    check_settings(config)
    data, cache = str(config.data), config.run.image_cache
    if cache is not None and Path(cache).is_relative_to(from_anywhere(data)):
        raise InputError(
            f"--image-cache {cache} lies within {data}, where its copies would be taken for images; choose another."
        )
    output, folder = _output(config), None
    with ranks.refused_together(context.device):
        source = open_images(data, config.reading)
        start = starting_weights.open_start(config, source)
        if context.rank == 0:
            lock = run_lock(output, remedy="choose another --output", patience=config.resume_if_exists)
            lock.check_free()
            check_run_folder(output, overwrite=config.overwrite)
            stack.enter_context(lock)
            if config.resume_if_exists and _state_of(output, config.optimisation.epochs) in (_RESUMABLE, _FINISHED):
                raise InputError(f"{output} was written by another process meanwhile; start the same command again.")
            inventory = Inventory.of(source)
            facts = _facts_of(source, data) | {
                "versions": {"siammm": siammm.__version__, "torch": str(torch.__version__), "numpy": np.__version__}
            }
            folder = RunWriter.planned(output, config, facts, lock=lock, inventory=inventory)
    notes = [] if start is None else [start.sentence]
    return _Begun(config=config, source=source, folder=folder, start=start, notes=notes)


def _facts_of(source: Source, data: str) -> dict[str, Any]:
    """What a run keeps of its images."""
    facts = {"data_path": from_anywhere(data), "fingerprint": source.fingerprint()}
    return facts | {"n_images": len(source), "kind": source.kind}


def _resume(config: TrainConfig, context: Context, stack: contextlib.ExitStack) -> _Begun:
    assert config.resume is not None
    run, folder, lock, differences = Run.unfinished(config.resume), None, None, None
    settings, course = resumed(config, run.config, was_changed=bool(run.facts.get("changes")))
    check_settings(settings)
    with ranks.refused_together(context.device):
        if context.rank == 0:
            lock = run_lock(run.path, remedy="stop it and resume then", patience=config.resume_if_exists)
            stack.enter_context(lock)
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
        facts = run.facts | (_facts_of(source, where) if carry_over or config.data is not None else {})
        change: dict[str, Any] = {name: list(values) for name, values in course.items()}
        change |= {"images": differences.counts()} if differences is not None else {}
        if change:
            before = facts.get("changes")
            before = before if isinstance(before, list) else []
            facts["changes"] = [*before, {"epoch": epoch, "update": step, **change}]
        kept = inventory if run.inventory is not None else None
        folder = RunWriter.continued(run.path, settings, facts, lock=lock, inventory=kept)
    notes = _notes(begun, course, differences, context)
    return _Begun(
        config=settings, source=source, folder=folder, checkpoint=begun[:2], carry_over=carry_over, notes=notes
    )


def _reached(begun: Loaded, settings: TrainConfig) -> tuple[int, int]:
    """The epochs and updates that are done; refuses to stop before that."""
    try:
        epoch, step = int(begun.facts["epoch"]), int(begun.facts["step_in_epoch"])
    except (KeyError, TypeError, ValueError) as error:
        raise StoredFileError(f"{begun.path} does not say how far the run is; start a new run.") from error
    least = epoch + (step > 0)
    if settings.optimisation.epochs < least:
        raise InputError(
            f"--epochs is {settings.optimisation.epochs}, but the run is in epoch {least} already; give at least that."
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
            f"{config.resume} was begun by an earlier version of siammm, which did not keep the names of its images, "
            "so that nothing can be carried over to others; give these, or start a new run."
        )
    if settings.clustering.n_components is not None:
        return settings
    # A number that follows from the images must not change with them.
    return with_settings(settings, n_components=initial_clusters(int(begun.tensors["bank/1"].shape[0])))


def _not_the_images(where: str, run: Path | None, differences: Differences | None) -> str:
    what = f": {differences}" if differences is not None and differences.any() else ""
    return (
        f"{where} does not hold the images that {run} was trained on{what}; put these back, add --allow-data-change to "
        "go on with what is there, or start a new run."
    )


def _notes(
    begun: Loaded, course: dict[str, tuple[Any, Any]], differences: Differences | None, context: Context
) -> list[str]:
    """What somebody should know who resumes a run."""
    notes: list[str] = []
    epoch, step = int(begun.facts["epoch"]), int(begun.facts["step_in_epoch"])
    if begun.skipped is not None:
        notes.append(
            f"{begun.skipped} It is skipped: the run goes on from {begun.path.name}, after {step:,} updates of epoch "
            f"{epoch + 1}."
        )
    changed = [f"--{name.replace('_', '-')} from {old} to {new}" for name, (old, new) in course.items()]
    if changed:
        notes.append(
            f"Changed: {', '.join(changed)}. Learning rate and momentum follow the new schedule from here on, so the "
            "result is not, bit for bit, that of a run that was begun with it."
        )
    if differences is not None:
        notes.append(
            f"The images have changed ({differences if differences.any() else 'others than before'}): clusters and "
            f"embeddings are carried over by name, and epoch {epoch + 1} starts again."
        )
    processes_then = begun.facts.get("world_size", context.world_size)
    if processes_then != context.world_size:
        notes.append(
            f"The checkpoint was written by a run of {processes_then} processes, and {context.world_size} go on with "
            "it: sums are added in another order, so the result is equal up to rounding, not bit for bit."
        )
    return notes


def _resume_if_begun(config: TrainConfig, context: Context) -> TrainConfig | None:
    """The settings for starting or resuming, whichever the output folder asks for; None if nothing is left to do."""
    output, state = _output(config), 0
    with ranks.refused_together(context.device):
        if context.rank == 0:  # before any rank changes the folder
            state = _state_of(output, config.optimisation.epochs)
    state = ranks.broadcast_int(state, context.device)
    if state == _FINISHED:
        return None
    if state == _RESUMABLE:
        return dataclasses.replace(config, output=output, resume=output)
    # Without a checkpoint nothing is lost by a new start, and the rules for what may be replaced hold.
    return dataclasses.replace(config, output=output, overwrite=state == _WITHOUT_CHECKPOINT)


_NEW, _WITHOUT_CHECKPOINT, _RESUMABLE, _FINISHED = range(4)


def _state_of(output: Path, epochs: int) -> int:
    try:
        run = Run.unfinished(output)
    except InputError:
        return _NEW
    if run.is_finished and epochs <= run.trained_epochs:
        return _FINISHED
    if run.has_checkpoint:
        return _RESUMABLE
    return _NEW if run.is_finished else _WITHOUT_CHECKPOINT


def _run(begun: _Begun, context: Context, console: Console) -> None:
    """Train, and write what the run leaves."""
    config, folder = begun.config, begun.folder
    if context.rank == 0:
        announce(config, begun.source, context, console, begun.notes)
    stop = StopSignals()
    with contextlib.ExitStack() as stack:
        if folder is not None:
            stack.callback(folder.close)
        device, bars = context.device, None
        if context.rank == 0:
            bars = stack.enter_context(TrainingProgress(advice=_quicker(config, device)))
        training: Training | None = None
        try:
            training = Training(
                config,
                begun.source,
                device,
                recorder=folder,
                listener=bars,
                stop_requested=stop.requested,
                start=begun.start,
                resume_from=begun.checkpoint,
                carry_over=begun.carry_over,
            )
            stack.callback(training.close)
            begun.source.digest_N = None  # every image has been read once
            stack.enter_context(stop)
            trained: Trained | None = training.run()
        except Interrupted as interrupted:
            if not interrupted.began:
                raise Stopped("stopped before the first update.", stop.number or signal.SIGTERM) from None
            assert training is not None
            message = ""  # one process speaks for all
            if folder is not None:
                done = f"stopped in epoch {training.epoch + 1} of {config.optimisation.epochs}, and saved"
                message = f"{done}; {_how_to_continue(folder)}"
            raise Stopped(message, stop.number or signal.SIGTERM) from None
        except ReaderError as error:
            if folder is not None and folder.has_checkpoint:
                raise InputError(f"{error} {_how_to_continue(folder)}.") from error
            raise InputError(str(error)) from error
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            trained = None
        if trained is None:  # here, where nothing holds on to what the update had computed
            raise _out_of_memory(config, training, device)
    if folder is not None:
        assert training is not None
        folder.write_results(trained)
        show(training, trained, folder.path, console)


def _how_to_continue(folder: RunWriter) -> str:
    return f"continue with: siammm train --resume {shlex.quote(str(folder.path))}"


def _out_of_memory(config: TrainConfig, training: Training | None, device: torch.device) -> InputError:
    where = "The GPU" if device.type == "cuda" else "This machine"
    fits = None if training is None else fitting_batch_size(training)
    if training is None or fits is None:
        remedy = "lower --batch-size, raise --accumulate, or use --loader streaming"
        return InputError(f"{where} does not have enough memory for this training; {remedy}.")
    given = f"--batch-size {training.batch_size}" + (
        f" with --accumulate {config.optimisation.accumulate}" if config.optimisation.accumulate > 1 else ""
    )
    parts = config.optimisation.accumulate * -(-training.batch_size // fits)
    return InputError(
        f"{where} does not have enough memory for {given}; --batch-size {fits} fits, or --accumulate {parts}, which "
        "computes the same batch in parts."
    )


def announce(config: TrainConfig, source: Source, context: Context, console: Console, more: Sequence[str] = ()) -> None:
    """Say what is about to happen, so that a wrong path or size is seen at once."""
    shape = source.uniform_shape()
    size = "of different sizes" if shape is None else f"of {shape[0]} x {shape[1]} pixels"
    labels = "with labels, used only for evaluation" if source.labels is not None else "without labels"
    many = f", {context.world_size} processes" if context.world_size > 1 else ""
    epochs = f"{config.optimisation.epochs} epoch{'' if config.optimisation.epochs == 1 else 's'}"
    console.print(
        f"[bold]siammm[/] trains {escape(config.network.backbone)} on {len(source):,} images {size} from "
        f"{escape(shown(source.name))}, {labels}: {epochs} on {context.device}{many}."
    )
    notes = [*more] if source.note is None else [*more, source.note]
    if config.run.image_cache is None and _are_large(source, config.views.image_size or 224):
        notes.append(
            "The images are much larger than the views in training; --image-cache FOLDER makes every epoch after the "
            "first faster."
        )
    batch = config.optimisation.batch_size
    # The batch size of a preset was chosen with its other settings; only one that was given is remarked on.
    if len(source) < _FEW_UPDATES * batch and batch != PRESETS[config.preset].optimisation.batch_size:
        notes.append(
            f"With --batch-size {batch} an epoch is less than {_FEW_UPDATES} updates; use a smaller batch size."
        )
    if quicker := _quicker(config, context.device):
        notes.append(f"There is no GPU here. {quicker}")
    for note in notes:
        console.print(escape(note), style="yellow")


def _quicker(config: TrainConfig, device: torch.device) -> str:
    """What takes minutes where this training may take days; nothing on a GPU, or where it is small already."""
    if device.type != "cpu" or config.network.backbone == CONV_SMALL or config.data is None:
        return ""
    data = shlex.quote(printable(config.data))
    return (
        f"`siammm cluster {data}` finds the groups in minutes, with a pretrained encoder; "
        f"`siammm train {data} --preset laptop` trains a small network."
    )


def _are_large(source: Source, view_size: int) -> bool:
    """Whether most images are photographs several times as large as a view, by a look at a few."""
    sides: list[int] = []
    for i in source.spread(_LOOKED_AT).tolist():
        with contextlib.suppress(BadImage):
            sides.append(min(source.size(i)))
    return bool(sides) and sorted(sides)[len(sides) // 2] >= max(_LEAST_SIDE, _MANY_TIMES * view_size)


def show(training: Training, trained: Trained, output: Path, console: Console) -> None:
    """Print what was found."""
    aside = len(training.loader.set_aside)
    if aside:
        console.print(f"{aside:,} images could not be read: {escape(str(output / files.SET_ASIDE))}", style="yellow")
    measured = metrics_line(trained.metrics[-1]) if trained.metrics else ""
    console.print(f"Trained in {_duration(training.seconds)}. {measured}")
    if trained.mixture is not None and trained.clusters is not None:
        sizes = np.bincount(trained.clusters, minlength=trained.mixture.n_components_)
        console.print(
            f"[bold green]{trained.mixture.n_components_:,} clusters[/]{in_groups(trained.groups)} of "
            f"{len(trained.ids):,} images, from {training.clustering.n_start:,} at the start.\n"
        )
        labels = None if trained.label_values is None else np.array(trained.label_values, dtype=object)
        concentration = torch.as_tensor(trained.mixture.concentrations_).double().cpu().numpy()
        console.print(cluster_table(sizes, concentration, "concentration", trained.clusters, labels))
        if labels is not None:
            groups = trained.groups
            coarse = None if groups is None or not groups.is_found else trained.group_labels
            of_groups = None if coarse is None else clustering_scores(labels, coarse)
            console.print(score_table(clustering_scores(labels, trained.clusters), of_groups))
    console.print(f"Everything is in [bold]{escape(str(output))}[/].", soft_wrap=True)
    if trained.mixture is None:
        next_steps(console, ("evaluate", output))
        return
    sort = [("sort", output, "--to", "FOLDER")] if isinstance(training.loader.source, FolderSource) else []
    next_steps(console, ("report", output), ("explore", output), *sort)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
