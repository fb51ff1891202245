"""``siammm bench``: how fast this machine trains and clusters, beside machines that are known."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

import siammm
from siammm.bench import references
from siammm.bench.machine import Machine, described, help_seconds
from siammm.bench.measure import Figures, measure
from siammm.bench.references import Reference, number, rate, references_for, share
from siammm.core import processes
from siammm.core.checks import check_at_least, check_number
from siammm.core.errors import InputError
from siammm.core.precision import network_precision
from siammm.runs.folder import write_whole
from siammm.settings.config import BenchConfig, PresetName, TrainConfig
from siammm.settings.presets import PRESETS, with_settings

# Of the time, what goes into the machine's peak.
_PEAK_SHARE = 0.03


def bench(config: BenchConfig) -> None:
    """Run the command. Whatever can be refused is refused before the clock starts."""
    check_number("--seconds", config.seconds, lambda value: 1 <= value <= 3600, "it is from 1 to 3600")
    if config.batch_size is not None:
        check_at_least("--batch-size", config.batch_size, 2)
    if config.output is not None:
        _check_output(config.output, overwrite=config.overwrite)
    console = Console(highlight=False)
    with processes.setup(config.device) as context:
        if context.world_size > 1:
            raise InputError(f"bench runs in one process, but there are {context.world_size}; start it by itself.")
        device = context.device
        presets = _presets(config, device)
        help_took = help_seconds()
        machine = described(device, network_precision(device), seconds=_PEAK_SHARE * config.seconds)
        console.print(
            f"{escape(machine.device)}; {escape(machine.software)}; a large {machine.precision} product runs at "
            f"{number(machine.peak_flops / 1e12)} TFLOP/s; siammm --help takes {help_took:.2f} s."
        )
        found: list[Figures] = []
        for name in presets:
            found.append(_measured(config, name, machine, device, config.seconds * (1 - _PEAK_SHARE) / len(presets)))
            console.print(table(found[-1]))
            for remark in remarks(found[-1]):
                console.print(remark, style="dim")
    if config.output is not None:
        _write(config.output, as_json(machine, found, help_took))
        console.print(f"Written to [bold]{escape(str(config.output))}[/].")


def _presets(config: BenchConfig, device: torch.device) -> list[PresetName]:
    if config.preset is not None:
        return [config.preset]
    return ["cifar", "imagenet-200"] if device.type == "cuda" else ["cifar"]


def _measured(config: BenchConfig, name: PresetName, machine: Machine, device: torch.device, seconds: float) -> Figures:
    train: TrainConfig = with_settings(PRESETS[name], compile=config.compile, random_state=config.random_state)
    with _Progress(name) as progress, warnings.catch_warnings():
        # torch's compiler gives advice, and imports what torch itself calls outdated.
        warnings.simplefilter("ignore")
        try:
            return measure(
                train, machine, device, batch_size=config.batch_size, seconds=seconds, on_part=progress.on_part
            )
        except torch.OutOfMemoryError as error:
            raise InputError(
                f"The clustering of {name} does not fit into the memory of {device}; use a smaller --preset, or "
                "--device cpu."
            ) from error


class _Progress:
    """What is being measured, on standard error, where a person is watching."""

    def __init__(self, preset: str) -> None:
        self._preset = preset
        console = Console(stderr=True, highlight=False)
        self._status: Status | None = None
        if sys.stderr.isatty():
            self._status = console.status(f"{preset}: the first step; a GPU compiles it for a minute or two")

    def __enter__(self) -> _Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._status is not None:
            self._status.stop()

    def on_part(self, part: str) -> None:
        """Say which part is measured now."""
        if self._status is not None:
            self._status.update(f"{self._preset}: the {part}")


def table(figures: Figures) -> Table:
    """The figures of one preset beside those of known machines."""
    known = references_for(figures.preset)
    shown = Table(
        title=(
            f"{figures.preset}: {figures.backbone} at {figures.view_size} pixels, {figures.n_images:,} images, "
            f"{figures.n_components:,} clusters, {figures.epochs} epochs; {figures.precision}, "
            f"{'compiled' if figures.compiled else 'not compiled'}"
        ),
        title_justify="left",
    )
    shown.add_column("figure")
    shown.add_column("here", justify="right", style="bold")
    for reference in known:
        shown.add_column(escape(reference.machine), justify="right", overflow="fold")
    for name, here, field in _rows(figures):
        shown.add_row(name, here, *(_known(reference, field) for reference in known))
    return shown


def _rows(figures: Figures) -> list[tuple[str, str, str]]:
    """The name of each figure, its value here, and the field of a known machine it is compared with."""
    rows = [
        ("images of a step", str(figures.batch_size), "batch_size"),
        ("images a second, full step", rate(figures.images_per_second), "images_per_second"),
        ("  without the cluster loss", rate(figures.images_per_second_alone), "images_per_second_alone"),
        ("share of the device's peak", share(figures.share_of_peak), "share_of_peak"),
        ("peak memory, GB", number(figures.peak_memory / 1e9), "memory_gigabytes"),
        ("search for nearest clusters, TFLOP/s", number(figures.search_flops / 1e12), "search_teraflops"),
    ]
    if figures.clustering is not None:
        rows += [
            ("clustering an epoch, seconds", number(figures.clustering_seconds), ""),
            ("  its share of the epoch", share(figures.clustering_share), "clustering_share"),
        ]
    if figures.loader_images_per_second is not None:
        rows.append((f"loader, {figures.workers} workers, images/s", rate(figures.loader_images_per_second), ""))
    return [
        *rows,
        ("first step, seconds", number(figures.first_step_seconds), ""),
        ("until the step has its pace, seconds", number(figures.ready_seconds), ""),
        (f"all {figures.epochs} epochs, hours", number(figures.hours), "hours"),
    ]


def _known(reference: Reference, field: str) -> str:
    if not field:
        return ""
    value: Any = getattr(reference, field)
    if field == "batch_size":
        return str(value)
    if field.startswith("images_per_second"):
        return rate(value)
    return share(value) if "share" in field else number(value)


def remarks(figures: Figures) -> list[str]:
    """What a reader must know to read the figures rightly."""
    found = []
    if figures.batch_size != figures.preset_batch_size:
        found.append(
            f"A step has {figures.batch_size} images here, where the preset has {figures.preset_batch_size}: its rate "
            "is taken for that of the preset's."
        )
    if figures.clustering is not None and figures.clustering.scale > 1:
        found.append(
            f"Clustering was measured on a sample and multiplied by {number(figures.clustering.scale)}: its time grows "
            "with images times clusters."
        )
    if figures.loader_images_per_second is not None and figures.loader_images_per_second < figures.images_per_second:
        found.append("The loader is slower than the step, so the hours are the loader's.")
    found.append(
        "Hours are epochs times (updates + clustering), without probes and checkpoints; the number of clusters is the "
        "one at the start, which merging lowers."
    )
    return found


def as_json(machine: Machine, found: list[Figures], help_took: float) -> dict[str, Any]:
    """Everything that was measured, with the units that the names of ``Figures`` have."""
    derived = ("epoch_images_per_second", "clustering_seconds", "epoch_seconds", "clustering_share", "hours")
    return {
        "siammm": siammm.__version__,
        "machine": dataclasses.asdict(machine),
        "help_seconds": help_took,
        "presets": [
            dataclasses.asdict(figures) | {name: getattr(figures, name) for name in derived} for figures in found
        ],
        "references": [dataclasses.asdict(reference) for reference in references.REFERENCES],
    }


def _check_output(path: Path, *, overwrite: bool) -> None:
    """Refuse now what could not be written in two minutes."""
    if path.exists() and not (path.is_file() and overwrite):
        raise InputError(f"The output {path} exists; choose another --output, or add --overwrite.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error
    if not os.access(path.parent, os.W_OK):
        raise _unwritable(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def _write(path: Path, contents: dict[str, Any]) -> None:
    try:
        write_whole(path, json.dumps(contents, indent=1) + "\n")
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> InputError:
    reason = error.strerror or str(error)
    return InputError(f"The output {path} cannot be written ({reason}); choose another --output.")
