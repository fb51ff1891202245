"""``siammm train``: images in; an encoder, a mixture, the clusters of the images and their number out."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from siammm.commands.prepared import PreparedTraining, facts_of_images, output_folder
from siammm.commands.resume import FINISHED, RESUMABLE, resume, resume_if_begun, state_of
from siammm.commands.train_messages import announce, show, what_is_quicker
from siammm.core import lost_ranks, processes, ranks
from siammm.core.errors import InputError, Stopped
from siammm.core.memory import is_out_of_memory
from siammm.core.processes import Context
from siammm.core.signals import StopSignals
from siammm.core.version import __version__
from siammm.data.inventory import Inventory
from siammm.data.reader_processes import ReaderError
from siammm.data.sources import from_anywhere
from siammm.learn.bookkeeping import Interrupted
from siammm.learn.fitting import fitting_batch_size
from siammm.learn.loop import Trained, Training
from siammm.learn.progress import TrainingProgress
from siammm.learn.start import NO_WEIGHTS
from siammm.runs import starting_weights
from siammm.runs.images import open_images
from siammm.runs.writer import RunWriter, check_run_folder, run_lock
from siammm.settings.checks import check_settings
from siammm.settings.fields import with_settings
from siammm.settings.training import TrainConfig


def train(config: TrainConfig) -> None:
    """Run the command."""
    if config.resume is None and config.data is None:
        raise InputError("There is nothing to train on; give a folder of images, or run siammm demo for a first look.")
    if config.resume_if_exists and (config.resume is not None or config.overwrite):
        other = "--overwrite" if config.overwrite else "--resume"
        raise InputError(f"--resume-if-exists and {other} contradict each other; leave one of them out.")
    together = processes.setup(config.run.device)
    with together as context, lost_ranks.noticed(context), contextlib.ExitStack() as stack:
        config = _from_any_folder(config)
        console = Console(highlight=False)
        if config.resume_if_exists:
            chosen = resume_if_begun(config, context)
            if chosen is None:
                if context.rank == 0:
                    console.print("The run is finished; there is nothing left to do.")
                return
            config = chosen
        prepared = (_start if config.resume is None else resume)(config, context, stack)
        _run(prepared, context, console)


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


def _start(config: TrainConfig, context: Context, stack: contextlib.ExitStack) -> PreparedTraining:
    """Prepare a new run."""
    check_settings(config)
    data, cache = str(config.data), config.run.image_cache
    if cache is not None and Path(cache).is_relative_to(from_anywhere(data)):
        raise InputError(
            f"--image-cache {cache} is inside {data}, where its copies would be taken for images; choose another."
        )
    output, folder = output_folder(config), None
    with ranks.refused_together(context.device):
        source = open_images(data, config.reading)
        start = starting_weights.open_start(config, source)
        if context.rank == 0:
            lock = run_lock(output, remedy="choose another --output", patience=config.resume_if_exists)
            lock.check_free()
            check_run_folder(output, overwrite=config.overwrite)
            stack.enter_context(lock)
            if config.resume_if_exists and state_of(output, config.optimisation.epochs) in (RESUMABLE, FINISHED):
                raise InputError(f"{output} was written by another process meanwhile; start the same command again.")
            inventory = Inventory.of(source)
            facts = facts_of_images(source, data) | {
                "versions": {"siammm": __version__, "torch": str(torch.__version__), "numpy": np.__version__}
            }
            folder = RunWriter.planned(output, config, facts, lock=lock, inventory=inventory)
    notes = [] if start is None else [start.sentence]
    return PreparedTraining(config=config, source=source, folder=folder, start=start, notes=notes)


def _run(prepared: PreparedTraining, context: Context, console: Console) -> None:
    """Train, and write what the run leaves."""
    config, folder = prepared.config, prepared.folder
    if context.rank == 0:
        announce(config, prepared.source, context, console, prepared.notes)
    stop = StopSignals()
    with contextlib.ExitStack() as stack:
        if folder is not None:
            stack.callback(folder.close)
        device, bars = context.device, None
        if context.rank == 0:
            bars = stack.enter_context(TrainingProgress(advice=what_is_quicker(config, device)))
        training: Training | None = None
        try:
            training = Training(
                config,
                prepared.source,
                device,
                recorder=folder,
                listener=bars,
                stop_requested=stop.requested,
                start=prepared.start,
                resume_from=prepared.checkpoint,
                carry_over=prepared.carry_over,
            )
            stack.callback(training.close)
            prepared.source.digest_N = None  # every image has been read once
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
