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
from siammm.bench.machine import Machine
from siammm.bench.mixture import ClusteringTime
from siammm.bench.workload import N_IMAGES, Workload, image_size
from siammm.core.errors import InputError
from siammm.data.loader import SMALL
from siammm.settings.config import TrainConfig, initial_clusters, uses_mixture
from siammm.settings.presets import with_settings

Part = Literal["step without clusters", "step", "search", "clustering", "loader"]
# How the time is shared out; the loader only where images are streamed.
_SHARES: dict[Part, float] = {
    "step without clusters": 0.2, "step": 0.35, "search": 0.05, "clustering": 0.25, "loader": 0.15,
}  # fmt: skip

# A step of both views of a large image takes about this many bytes.
_BYTES_PER_LARGE_IMAGE = 200e6
_MEMORY_SHARE = 0.85
# A step on a CPU has as many images as this many operations suffice for: the preset's might take minutes.
_CPU_FLOPS = 3e11
_JPEGS = 512
# Rows that BatchNorm needs.
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
    images_per_second: float
    """Full steps, with the cluster loss: the median of the windows."""
    windows: list[float]
    """The same in each window."""
    images_per_second_alone: float
    """Steps without the cluster loss."""
    flops_per_image: float
    share_of_peak: float
    setup_seconds: float
    """Until the first step can be taken."""
    first_step_seconds: float
    """Of the first step, with compiling."""
    ready_seconds: float
    """Of the first steps until the step runs at its pace: compiled, and captured on a GPU."""
    peak_memory: int
    """Bytes, of the step."""
    search_flops: float
    clustering: ClusteringTime | None
    loader_images_per_second: float | None
    """Where images are streamed: what the loader brings from JPEG files."""
    workers: int | None

    @property
    def epoch_images_per_second(self) -> float:
        """What an epoch's updates run at: the step, or the loader where that is slower."""
        return min(self.images_per_second, self.loader_images_per_second or float("inf"))

    @property
    def clustering_seconds(self) -> float:
        """Of one epoch."""
        return 0.0 if self.clustering is None else self.clustering.total

    @property
    def epoch_seconds(self) -> float:
        """Updates and clustering of one epoch; probes and checkpoints come on top."""
        return self.n_images / self.epoch_images_per_second + self.clustering_seconds

    @property
    def clustering_share(self) -> float:
        """Of an epoch."""
        return self.clustering_seconds / self.epoch_seconds

    @property
    def hours(self) -> float:
        """For all of the preset's epochs, on this machine alone."""
        return self.epochs * self.epoch_seconds / 3600


def measure(
    config: TrainConfig,
    machine: Machine,
    device: torch.device,
    *,
    batch_size: int | None = None,
    seconds: float,
    n_images: int | None = None,
    on_part: Callable[[Part], None] = lambda part: None,
) -> Figures:
    """Time the step, the search, the clustering and, for large images, the loader, in about ``seconds`` in all.

    ``n_images`` is the size of the set, by default that of the set which the preset is for.
    """
    n_images = n_images or N_IMAGES[config.preset]
    large = image_size(config) > SMALL
    total = sum(share for part, share in _SHARES.items() if large or part != "loader")

    def budget(part: Part) -> float:
        on_part(part)
        return seconds * _SHARES[part] / total

    wanted = config.clustering.n_components or initial_clusters(n_images)
    clustered = uses_mixture(config.objective)
    steps = _measured_steps(config, device, batch_size, n_images, wanted, budget)
    gc.collect()
    clock.reset_peak_memory(device)

    objective = config.objective
    search = mixture.search_flops(
        n_images, wanted, config.network.embedding_dim, objective.n_neighbours, device, seconds=budget("search")
    )
    clustering = None
    if clustered:
        clustering = mixture.clustering_time(
            config, n_images=n_images, n_components=wanted, device=device, seconds=budget("clustering"), flops=search
        )
    loader, workers = None, None
    if large:
        with tempfile.TemporaryDirectory(prefix="siammm-bench-") as folder:
            images.write_jpegs(Path(folder) / "jpegs", _JPEGS, config.run.random_state)
            loader, workers = workload.loader_rate(
                config, Path(folder) / "jpegs", device, workers=None, seconds=budget("loader")
            )
    flops = workload.flops_per_image(config)
    rate = statistics.median(steps.rates)
    return Figures(
        preset=config.preset,
        backbone=config.network.backbone,
        image_size=image_size(config),
        view_size=config.views.view_size or image_size(config),
        n_images=n_images,
        n_components=wanted,
        epochs=config.optimisation.epochs,
        batch_size=steps.batch_size,
        preset_batch_size=config.optimisation.batch_size,
        precision=machine.precision,
        compiled=steps.compiled,
        images_per_second=rate,
        windows=steps.rates,
        images_per_second_alone=statistics.median(steps.rates_alone),
        flops_per_image=flops,
        share_of_peak=rate * flops / machine.peak_flops,
        setup_seconds=steps.setup_seconds,
        first_step_seconds=steps.ready[0],
        ready_seconds=steps.ready[1],
        peak_memory=steps.peak_memory,
        search_flops=search,
        clustering=clustering,
        loader_images_per_second=loader,
        workers=workers,
    )


@dataclass(frozen=True, kw_only=True)
class _Steps:
    batch_size: int
    compiled: bool
    setup_seconds: float
    ready: tuple[float, float]
    rates_alone: list[float]
    rates: list[float]
    peak_memory: int


def _measured_steps(
    config: TrainConfig,
    device: torch.device,
    batch_size: int | None,
    n_images: int,
    n_components: int,
    budget: Callable[[Part], float],
) -> _Steps:
    """The step without and with clusters; what it holds on the device is free again afterwards."""
    load, ready = _fitting(config, device, batch_size, n_images, n_components)
    clustered = uses_mixture(config.objective)
    alone = clock.windows(lambda n: load.advance(n, clustered=False), device, seconds=budget("step without clusters"))
    left = budget("step")
    load.prepare(clustered=clustered)
    full = clock.windows(lambda n: load.advance(n, clustered=clustered), device, seconds=left)
    load.check()
    found = _Steps(
        batch_size=load.batch_size,
        compiled=load.compiled,
        setup_seconds=load.setup_seconds,
        ready=ready,
        rates_alone=[load.batch_size / seconds for seconds in alone],
        rates=[load.batch_size / seconds for seconds in full],
        peak_memory=clock.peak_memory(device),
    )
    load.close()
    return found


def default_batch_size(config: TrainConfig, device: torch.device) -> int:
    """The preset's; for large images on a GPU what is likely to fit, on a CPU what takes seconds."""
    preset, large = config.optimisation.batch_size, image_size(config) > SMALL
    if device.type != "cuda":
        affordable = int(_CPU_FLOPS / workload.flops_per_image(config))
        return min(preset, 1 << max(2, affordable.bit_length() - 1))
    if not large:
        return preset
    fits = int(_MEMORY_SHARE * torch.cuda.mem_get_info(device)[0] / _BYTES_PER_LARGE_IMAGE)
    return min(preset, 1 << max(3, fits.bit_length() - 1))


def _fitting(
    config: TrainConfig, device: torch.device, batch_size: int | None, n_images: int, n_components: int
) -> tuple[Workload, tuple[float, float]]:
    """A run whose step fits into memory, ready without clusters; the batch is halved until it does, unless given."""
    size = batch_size or default_batch_size(config, device)
    while True:
        clock.reset_peak_memory(device)
        settings = {"batch_size": size, "accumulate": 1, "n_components": n_components}
        try:
            load = Workload(with_settings(config, **settings), device, n_images=n_images)
            return load, load.prepare(clustered=False)
        except torch.OutOfMemoryError as error:
            if batch_size is not None or size <= _LEAST_BATCH:
                raise InputError(
                    f"A step of {size} images does not fit into the memory of {device}; use a smaller --batch-size."
                ) from error
        # Outside of the except: its traceback holds the tensors of the step that did not fit.
        size //= 2
        gc.collect()
