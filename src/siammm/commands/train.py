"""``siammm train``: images in; an encoder, a mixture, the clusters of the images and their number out."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape

import siammm
from siammm.commands.cluster import cluster_table, in_groups, score_table
from siammm.core import processes
from siammm.core.errors import InputError, Stopped
from siammm.core.memory import is_out_of_memory
from siammm.core.processes import Context
from siammm.core.signals import StopSignals
from siammm.core.text import shown
from siammm.data.decode import BadImage
from siammm.data.loader import ReaderError
from siammm.data.sources import Source, from_anywhere
from siammm.learn.fitting import fitting_batch_size
from siammm.learn.loop import Interrupted, Trained, Training
from siammm.learn.networks import CONV_SMALL
from siammm.learn.progress import TrainingProgress, metrics_line
from siammm.metrics.clustering import clustering_scores
from siammm.runs import files
from siammm.runs.images import open_images
from siammm.runs.run import Run
from siammm.runs.writer import RunWriter
from siammm.settings.checks import check_settings
from siammm.settings.fields import with_settings
from siammm.settings.stored import resumed
from siammm.settings.training import TrainConfig

# With fewer updates in an epoch than this, the epochs of a preset are too few to learn much.
_FEW_UPDATES = 10
# Images whose size is looked at, and how many times the side of a view theirs must have for copies to pay.
_LOOKED_AT, _MANY_TIMES = 9, 3


def train(config: TrainConfig) -> None:
    """Run the command."""
    if config.resume is None and config.data is None:
        raise InputError("There is nothing to train on; give a folder of images, or run siammm demo for a first look.")
    with processes.setup(config.run.device) as context:
        (_start if config.resume is None else _resume)(config, context, Console(highlight=False))


def _start(config: TrainConfig, context: Context, console: Console) -> None:
    check_settings(config)
    data, cache = str(config.data), config.run.image_cache
    if config.run.probe is not None:
        config = with_settings(config, probe=from_anywhere(config.run.probe))
    if cache is not None:
        copies = os.path.abspath(os.path.expanduser(cache))
        if Path(copies).is_relative_to(from_anywhere(data)):
            raise InputError(
                f"--image-cache {cache} lies within {data}, where its copies would be taken for images; choose another."
            )
        config = with_settings(config, image_cache=copies)
    source = open_images(data, config.reading)
    name = re.sub(r"[^\w.-]+", "-", Path(source.name.replace("::", "-")).stem).strip("-.")
    output = config.output or Path(f"{name or source.kind}-run")
    facts: dict[str, Any] = {
        "data_path": from_anywhere(data),
        "fingerprint": source.fingerprint(),
        "n_images": len(source),
        "kind": source.kind,
        "versions": {"siammm": siammm.__version__, "torch": str(torch.__version__), "numpy": np.__version__},
    }
    folder = RunWriter.planned(output, config, facts) if context.rank == 0 else None
    _run(config, source, folder, context, console)


def _resume(config: TrainConfig, context: Context, console: Console) -> None:
    assert config.resume is not None
    run = Run.unfinished(config.resume)
    where, settings = config.data or str(run.data), resumed(config, run.config)
    source = open_images(where, settings.reading)
    if source.fingerprint() != run.fingerprint:
        raise InputError(
            f"{where} does not hold the images that {config.resume} was trained on; give these, or start a new run."
        )
    begun = run.checkpoint()
    folder = RunWriter(run.path, tensorboard=settings.run.tensorboard) if context.rank == 0 else None
    _run(settings, source, folder, context, console, begun)


def _run(
    config: TrainConfig,
    source: Source,
    folder: RunWriter | None,
    context: Context,
    console: Console,
    begun: tuple[dict[str, torch.Tensor], dict[str, Any]] | None = None,
) -> None:
    """Train, and write what the run leaves: the first process alone has a folder."""
    if context.rank == 0:
        announce(config, source, context, console)
    stop = StopSignals()
    with contextlib.ExitStack() as stack:
        if folder is not None:
            stack.callback(folder.close)
        bars, device = stack.enter_context(TrainingProgress()) if context.rank == 0 else None, context.device
        training: Training | None = None
        try:
            training = Training(
                config, source, device, recorder=folder, listener=bars, stop_requested=stop.requested, resume_from=begun
            )
            stack.callback(training.close)
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
            saved = folder is not None and (folder.path / files.CHECKPOINTS).is_dir()
            raise InputError(f"{error} {_how_to_continue(folder)}." if saved and folder else str(error)) from error
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


def announce(config: TrainConfig, source: Source, context: Context, console: Console) -> None:
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
    notes = [] if source.note is None else [source.note]
    if config.run.image_cache is None and _are_large(source, config.views.image_size or 224):
        notes.append(
            "The images are much larger than the views in training; --image-cache FOLDER makes every epoch after the "
            "first faster."
        )
    batch = config.optimisation.batch_size
    if len(source) < _FEW_UPDATES * batch:
        notes.append(
            f"With --batch-size {batch} an epoch is less than {_FEW_UPDATES} updates; use a smaller batch size."
        )
    if context.device.type == "cpu" and config.network.backbone != CONV_SMALL:
        notes.append(
            f"There is no GPU here, and {config.network.backbone} may take days; --preset laptop is a first look in "
            "minutes."
        )
    for note in notes:
        console.print(escape(note), style="yellow")


def _are_large(source: Source, view_size: int) -> bool:
    """Whether most images have several times the pixels of a view, by a look at a few."""
    sides: list[int] = []
    for i in source.spread(_LOOKED_AT).tolist():
        with contextlib.suppress(BadImage):
            sides.append(min(source.size(i)))
    return bool(sides) and sorted(sides)[len(sides) // 2] >= _MANY_TIMES * view_size


def show(training: Training, trained: Trained, output: Path, console: Console) -> None:
    """Print what was found."""
    aside = len(training.loader.set_aside)
    if aside:
        console.print(f"{aside:,} images could not be read: {escape(str(output / files.SET_ASIDE))}", style="yellow")
    console.print(f"Trained in {_duration(training.seconds)}. {metrics_line(trained.metrics[-1])}")
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
            coarse = None if groups is None or not groups.is_coarser else groups.label_K[trained.clusters]
            of_groups = None if coarse is None else clustering_scores(labels, coarse)
            console.print(score_table(clustering_scores(labels, trained.clusters), of_groups))
    seen = "" if trained.mixture is None else f" See it: [bold cyan]siammm report {escape(shlex.quote(str(output)))}[/]"
    console.print(f"Everything is in [bold]{escape(str(output))}[/].{seen}", soft_wrap=True)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
