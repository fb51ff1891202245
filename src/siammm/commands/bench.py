"""``siammm bench``: how fast this machine trains and clusters, how long the usual runs would take, what batch fits."""

from __future__ import annotations

import dataclasses
import json
import platform
import warnings
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from siammm.bench.clock import peak_flops
from siammm.bench.measure import Figures, measure
from siammm.commands.next_steps import next_steps
from siammm.commands.process import one_process
from siammm.core.checks import check_at_least, check_number
from siammm.core.device import network_precision
from siammm.core.errors import InputError
from siammm.core.files import check_new_file, new_file
from siammm.core.version import __version__
from siammm.settings.commands import BenchConfig
from siammm.settings.fields import with_settings
from siammm.settings.presets import PRESETS
from siammm.settings.training import PresetName

# The share of the time that measures the device's peak.
_PEAK_SHARE = 0.03
# A machine to compare with, from docs/speed.md.
REFERENCE: dict[str, Any] = {
    "machine": "NVIDIA H200", "preset": "cifar", "batch_size": 256, "images_per_second": 32_516,
    "images_per_second_alone": 32_726, "share_of_peak": 0.38, "memory_gigabytes": 2.31,
    "clustering_seconds": 0.0524, "clustering_share": 0.033, "hours": 0.0883,
    "source": "benchmarks/results/2026-11-16-bench-h200.md",
}  # fmt: skip


def bench(config: BenchConfig) -> None:
    """Run the command. Settings that cannot work are refused before anything is measured."""
    check_number("--seconds", config.seconds, lambda value: 1 <= value <= 3600, "it must be from 1 to 3600")
    if config.batch_size is not None:
        check_at_least("--batch-size", config.batch_size, 2)
    if config.output is not None:
        check_new_file(config.output, overwrite=config.overwrite)
    console = Console(highlight=False)
    with one_process("bench", config.device) as device:
        presets: list[PresetName] = ["cifar", "imagenet-200"] if device.type == "cuda" else ["cifar"]
        if config.preset is not None:
            presets = [config.preset]
        precision = network_precision(device)
        machine = {
            "device": device_name(device),
            "precision": precision,
            "peak_flops": peak_flops(device, precision, seconds=_PEAK_SHARE * config.seconds),
            "software": f"Python {platform.python_version()}, torch {torch.__version__}",
        }
        console.print(
            f"{escape(machine['device'])}; {escape(machine['software'])}; a large {precision} matrix product runs at "
            f"{number(machine['peak_flops'] / 1e12)} TFLOP/s."
        )
        found: list[Figures] = []
        for name in presets:
            seconds = config.seconds * (1 - _PEAK_SHARE) / len(presets)
            found.append(_measured(config, name, device, peak=machine["peak_flops"], seconds=seconds))
            console.print(table(found[-1]))
            for remark in remarks(found[-1]):
                console.print(remark, style="dim")
    if config.output is not None:
        with new_file(config.output, overwrite=config.overwrite) as (scratch, _):
            scratch.write_text(json.dumps(as_json(machine, found), indent=1) + "\n", encoding="utf-8")
        console.print(f"Written to [bold]{escape(str(config.output))}[/].")
    next_steps(console, ("train", "photos/", "--preset", presets[0]))


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the CPU with the threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.processor() or platform.machine() or 'CPU'}, {threads} thread{'s' if threads > 1 else ''}"


def _measured(config: BenchConfig, name: PresetName, device: torch.device, *, peak: float, seconds: float) -> Figures:
    train = with_settings(PRESETS[name], compile=config.compile, random_state=config.random_state)
    text = f"{name}: the first step; a GPU compiles for a minute or two"
    with Console(stderr=True, highlight=False).status(text) as status, warnings.catch_warnings():
        # torch's compiler gives advice, and imports what torch itself has deprecated.
        warnings.simplefilter("ignore")
        try:
            return measure(
                train,
                device,
                peak_flops=peak,
                seconds=seconds,
                batch_size=config.batch_size,
                on_part=lambda part: status.update(f"{name}: the {part}"),
            )
        except torch.OutOfMemoryError as error:
            what = f"The clustering of {name} does not fit into the memory of {device}"
            raise InputError(f"{what}; use a smaller --preset, or --device cpu.") from error


def table(figures: Figures) -> Table:
    """The figures of one preset, beside the reference where it is of the same preset."""
    known = REFERENCE if REFERENCE["preset"] == figures.preset else {}
    title = (
        f"{figures.preset}: {figures.backbone} at {figures.view_size} pixels, {figures.n_images:,} images, "
        f"{figures.n_components:,} clusters, {figures.epochs} epochs; {figures.precision}, "
        f"{'compiled' if figures.compiled else 'not compiled'}"
    )
    shown = Table(title=title, title_justify="left")
    shown.add_column("figure")
    shown.add_column("here", justify="right", style="bold")
    if known:
        shown.add_column(known["machine"], justify="right")
    for name, field, value, text in rows(figures):
        there = [text(known[field]) if field in known else ""] if known else []
        shown.add_row(name, text(value), *there)
    return shown


def rows(figures: Figures) -> list[tuple[str, str, Any, Any]]:
    """The name of each figure, its key in the reference, its value here, and the function that formats both."""
    found = [
        ("images per step", "batch_size", figures.batch_size, str),
        ("images per second, full step", "images_per_second", figures.images_per_second, number),
        ("  without the cluster loss", "images_per_second_alone", figures.images_per_second_alone, number),
        ("share of the device's peak", "share_of_peak", figures.share_of_peak, share),
        ("peak memory, GB", "memory_gigabytes", figures.peak_memory / 1e9, number),
    ]
    if figures.clustering_seconds:
        found += [
            ("clustering per epoch, seconds", "clustering_seconds", figures.clustering_seconds, number),
            ("  its share of the epoch", "clustering_share", figures.clustering_share, share),
        ]
    if figures.loader_images_per_second is not None:
        name = f"loader, {figures.workers} workers, images per second"
        found.append((name, "", figures.loader_images_per_second, number))
    return [
        *found,
        ("until the step runs at full speed, seconds", "", figures.ready_seconds, number),
        (f"all {figures.epochs} epochs, hours", "hours", figures.hours, number),
    ]


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def share(value: float) -> str:
    """A share in percent."""
    return f"{100 * value:.2g} %" if value < 0.1 else f"{100 * value:.0f} %"


def remarks(figures: Figures) -> list[str]:
    """What a reader must know about these figures."""
    found = []
    if figures.batch_size != figures.preset_batch_size:
        found.append(
            f"A step has {figures.batch_size} images here, where the preset has {figures.preset_batch_size}; the hours "
            "assume the same images per second."
        )
    if figures.clustering_scale > 1:
        found.append(
            f"Clustering was measured on a sample and multiplied by {number(figures.clustering_scale)}: its time grows "
            "with images times clusters."
        )
    if figures.loader_images_per_second is not None and figures.loader_images_per_second < figures.images_per_second:
        found.append("The loader is slower than the step and determines the hours.")
    found.append(
        "Hours are epochs times (updates + clustering), without probes and checkpoints, at the initial number of "
        "clusters, which merging lowers."
    )
    return found


def as_json(machine: dict[str, Any], found: list[Figures]) -> dict[str, Any]:
    """Everything that was measured, in the units of ``Figures``."""
    derived = ("epoch_seconds", "clustering_share", "hours")
    presets = [dataclasses.asdict(figures) | {name: getattr(figures, name) for name in derived} for figures in found]
    return {"siammm": __version__, "machine": machine, "presets": presets, "reference": REFERENCE}
