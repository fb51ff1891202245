"""What ``siammm train`` prints before it begins, and about what it has found."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape

from siammm.commands.cluster_tables import score_table, size_table
from siammm.commands.next_steps import next_steps
from siammm.core.processes import Context
from siammm.core.text import counted, printable, shown
from siammm.data.decode import BadImage
from siammm.data.folder_source import FolderSource
from siammm.data.sources import Source
from siammm.learn.backbones import CONV_SMALL
from siammm.learn.loop import Trained, Training
from siammm.learn.progress import metrics_line
from siammm.metrics.clustering import clustering_scores
from siammm.runs import files
from siammm.settings.presets import PRESETS
from siammm.settings.training import TrainConfig

# With fewer updates in an epoch than this, the epochs of a preset are too few to learn much.
_FEW_UPDATES = 10
# Images whose size is looked at; for copies to pay, their sides must be so many times that of a view, and so long.
_LOOKED_AT, _MANY_TIMES, _LEAST_SIDE = 9, 3, 256


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
    if quicker := what_is_quicker(config, context.device):
        notes.append(f"There is no GPU here. {quicker}")
    for note in notes:
        console.print(escape(note), style="yellow")


def what_is_quicker(config: TrainConfig, device: torch.device) -> str:
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
        console.print(
            f"{counted(aside, 'image')} could not be read: {escape(str(output / files.SET_ASIDE))}", style="yellow"
        )
    measured = metrics_line(trained.metrics[-1]) if trained.metrics else ""
    console.print(f"Trained in {_duration(training.seconds)}. {measured}")
    if trained.mixture is not None and trained.clusters is not None:
        k, n, n_start = int(trained.mixture.n_components_), len(trained.ids), training.clustering.n_start
        labels = None if trained.label_values is None else np.array(trained.label_values, dtype=object)
        clusters = counted(k, "cluster")
        of_groups = trained.group_labels if trained.groups is not None and trained.groups.is_found else None
        if of_groups is not None and trained.groups is not None:
            console.print(f"[bold green]{counted(trained.groups.n_groups, 'group')}[/] of {n:,} images\n")
            group_sizes = np.bincount(of_groups, minlength=trained.groups.n_groups)
            console.print(size_table("group", group_sizes, of_groups, labels))
            console.print(f"\nThere are also [bold]{clusters}[/], from {n_start:,} at the start:\n")
        else:
            console.print(f"[bold green]{clusters}[/] of {n:,} images, from {n_start:,} at the start.\n")
        sizes = np.bincount(trained.clusters, minlength=k)
        concentration = torch.as_tensor(trained.mixture.concentrations_).double().cpu().numpy()
        spread = ("concentration", concentration)
        console.print(size_table("cluster", sizes, trained.clusters, labels, spread=spread))
        if labels is not None:
            group_scores = None if of_groups is None else clustering_scores(labels, of_groups)
            console.print(score_table(clustering_scores(labels, trained.clusters), group_scores))
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
