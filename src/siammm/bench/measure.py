"""All figures of one preset on one machine, within a given time: what ``siammm bench`` prints."""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from siammm.bench import clock, images, mixture, workload
from siammm.bench.workload import N_IMAGES, Workload, image_size
from siammm.core.device import network_precision
from siammm.core.errors import InputError
from siammm.core.threads import few_threads
from siammm.data.loader import SMALL
from siammm.learn.build import initial_clusters
from siammm.settings.fields import with_settings
from siammm.settings.training import TrainConfig

Part = Literal["step without clusters", "step", "clustering", "loader"]
# The share of the time for each; the loader only where images are streamed.
_SHARES: dict[Part, float] = {"step without clusters": 0.2, "step": 0.35, "clustering": 0.25, "loader": 0.15}

# What a step needs for both views of a large image, and the share of the memory it may take.
_BYTES_PER_LARGE_IMAGE = 200e6
_MEMORY_SHARE = 0.85
# Operations of a step on a CPU: with the preset's batch it might take minutes.
_CPU_FLOPS = 3e11
_JPEGS = 512
# BatchNorm needs two rows.
_LEAST_BATCH = 2


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured of one preset, and what follows from it."""

    preset: str
    backbone: str
    image_size: int
    view_size: int
    n_images: int
    n_components: int
    epochs: int
    batch_size: int
    preset_batch_size: int
    precision: str
    compiled: bool
    images_per_second: float  # full steps, with the cluster loss; the median of the windows
    images_per_second_alone: float  # without the cluster loss
    flops_per_image: float
    share_of_peak: float
    ready_seconds: float  # of the first steps, until the step is compiled and on a GPU captured
    peak_memory: int  # bytes, of the step
    clustering_seconds: float  # per epoch
    clustering_scale: float  # the factor by which the seconds of a smaller sample were multiplied; else 1
    loader_images_per_second: float | None  # from JPEG files, where images are streamed
    workers: int | None

    @property
    def epoch_seconds(self) -> float:
        """Updates, at the pace of the step or of a slower loader, and clustering; without probes and checkpoints."""
        rate = min(self.images_per_second, self.loader_images_per_second or float("inf"))
        return self.n_images / rate + self.clustering_seconds

    @property
    def clustering_share(self) -> float:
        """Clustering, as a share of the epoch."""
        return self.clustering_seconds / self.epoch_seconds

    @property
    def hours(self) -> float:
        """All of the preset's epochs."""
        return self.epochs * self.epoch_seconds / 3600


def measure(
    config: TrainConfig,
    device: torch.device,
    *,
    peak_flops: float,
    seconds: float,
    batch_size: int | None = None,
    n_images: int | None = None,
    on_part: Callable[[Part], None] = lambda part: None,
) -> Figures:
    """Time the step, the clustering and, for large images, the loader, in about ``seconds`` altogether.

    ``n_images`` is by default the size of the data set that the preset is for.
    """
    n_images = n_images or N_IMAGES[config.preset]
    large = image_size(config) > SMALL
    total = sum(share for part, share in _SHARES.items() if large or part != "loader")

    def budget(part: Part) -> float:
        on_part(part)
        return seconds * _SHARES[part] / total

    n_components = config.clustering.n_components or initial_clusters(n_images)
    clustered = config.objective.uses_mixture
    load, ready = _fitting(config, device, batch_size, n_images, n_components)
    used, compiled = load.batch_size, bool(load.training.accelerated and load.training.accelerated.compiled)
    with few_threads(device):  # as a training does
        seconds_alone = budget("step without clusters")
        alone = clock.windows(lambda n: load.advance(n, clustered=False), device, seconds=seconds_alone)
        left = budget("step")
        load.prepare(clustered=clustered)
        full = clock.windows(lambda n: load.advance(n, clustered=clustered), device, seconds=left)
        load.check()
    peak_memory = clock.peak_memory(device)
    load.close()
    gc.collect()
    clock.reset_peak_memory(device)
    clustering, scale, loader, workers = 0.0, 1.0, None, None
    if clustered:
        clustering, scale = mixture.clustering_time(
            config, n_images, n_components, device, seconds=budget("clustering"), peak_flops=peak_flops
        )
    if large:
        with tempfile.TemporaryDirectory(prefix="siammm-bench-") as folder:
            jpegs = Path(folder) / "jpegs"
            images.write_jpegs(jpegs, _JPEGS, config.run.random_state)
            loader, workers = workload.loader_rate(config, jpegs, device, workers=None, seconds=budget("loader"))
    rate, flops = used / statistics.median(full), workload.flops_per_image(config)
    return Figures(
        preset=config.preset,
        backbone=config.network.backbone,
        image_size=image_size(config),
        view_size=config.views.view_size or image_size(config),
        n_images=n_images,
        n_components=n_components,
        epochs=config.optimisation.epochs,
        batch_size=used,
        preset_batch_size=config.optimisation.batch_size,
        precision=network_precision(device),
        compiled=compiled,
        images_per_second=rate,
        images_per_second_alone=used / statistics.median(alone),
        flops_per_image=flops,
        share_of_peak=rate * flops / peak_flops,
        ready_seconds=ready,
        peak_memory=peak_memory,
        clustering_seconds=clustering,
        clustering_scale=scale,
        loader_images_per_second=loader,
        workers=workers,
    )


def default_batch_size(config: TrainConfig, device: torch.device) -> int:
    """The preset's batch; for large images on a GPU what is likely to fit, on a CPU what takes seconds."""
    preset = config.optimisation.batch_size
    if device.type != "cuda":
        affordable = int(_CPU_FLOPS / workload.flops_per_image(config))
        return min(preset, 1 << max(2, affordable.bit_length() - 1))
    if image_size(config) <= SMALL:
        return preset
    fits = int(_MEMORY_SHARE * torch.cuda.mem_get_info(device)[0] / _BYTES_PER_LARGE_IMAGE)
    return min(preset, 1 << max(3, fits.bit_length() - 1))


def _fitting(
    config: TrainConfig, device: torch.device, batch_size: int | None, n_images: int, n_components: int
) -> tuple[Workload, float]:
    """A run whose step fits into memory, and the seconds until it was ready; unless given, the batch is halved."""
    size = batch_size or default_batch_size(config, device)
    while True:
        clock.reset_peak_memory(device)
        settings = {"batch_size": size, "accumulate": 1, "n_components": n_components}
        try:
            load = Workload(with_settings(config, **settings), device, n_images=n_images)
            return load, load.prepare(clustered=False)
        except torch.OutOfMemoryError as error:
            if batch_size is not None or size <= _LEAST_BATCH:
                what = f"A step of {size} images does not fit into the memory of {device}"
                raise InputError(f"{what}; use a smaller --batch-size.") from error
        # Outside of the except block: its traceback holds the tensors of the step that did not fit.
        size //= 2
        gc.collect()
