"""The trainer's own step on random images, for timing.

    load = Workload(config, device, n_images=50_000)
    load.prepare(clustered=True)
    seconds = clock.windows(lambda n: load.advance(n, clustered=True), device, seconds=20)
    load.close()

The networks, loader, optimiser, bank and captured graph are those of ``learn.loop.Training``. Small images are
resident, as in training. Large ones are cropped before the clock starts and wait on the device; ``loader_rate`` times
the reading.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from torch.utils.flop_counter import FlopCounterMode

from siammm.bench import images
from siammm.bench.clock import seconds_of, synchronise
from siammm.data import decode
from siammm.data.loader import SMALL, Batch, open_loader
from siammm.data.sources import open_source
from siammm.learn.bookkeeping import check_losses
from siammm.learn.build import build_network, training_views
from siammm.learn.loop import Training
from siammm.learn.objective import Stage
from siammm.learn.start import NO_WEIGHTS
from siammm.settings.fields import with_settings
from siammm.settings.training import TrainConfig

# The size of the data set that each preset is for.
N_IMAGES = {
    "cifar": 50_000, "cifar-fast": 50_000, "tiny": 100_000, "photos": 10_000, "laptop": 5_000, "demo": 1_797,
    "imagenet-100": 1_281_167, "imagenet-200": 1_281_167,
}  # fmt: skip
_SIZES = {"cifar": 32, "tiny": 64, "demo": 8}

# Random images take at most this much memory: more would not change the time of a step.
_MOST_BYTES = 256 * 2**20
# Batches of large images that wait on the device.
_WAITING_BATCHES = 2
# Images per second that no loader reaches.
_FASTEST_LOADER = 20_000
# Steps until everything is compiled and captured.
_STEPS_BEFORE_REPLAY = 4


def image_size(config: TrainConfig) -> int:
    """Pixels of an image's side."""
    return config.views.image_size or _SIZES.get(config.preset, 224)


class Workload:
    """A run set up as ``siammm train`` does it, whose steps can be taken one by one."""

    def __init__(self, config: TrainConfig, device: torch.device, *, n_images: int) -> None:
        self.device = device
        size, batch_size, seed = image_size(config), config.optimisation.batch_size, config.run.random_state
        self.resident = size <= SMALL
        if self.resident:
            n, side = max(batch_size, min(n_images, _MOST_BYTES // (3 * size * size))), size
        else:
            n, side = _WAITING_BATCHES * batch_size, size * 256 // 224
        kind, k = "resident" if self.resident else "streaming", min(n // 4, config.clustering.n_components or n)
        sizes: dict[str, Any] = {"image_size": size, "n_components": max(2, k)}
        # Weights do not change the time of a step, and their download might be measured.
        self.config = with_settings(config, loader=kind, workers=0, weights=NO_WEIGHTS, **sizes)
        self.training = Training(self.config, open_source(images.arrays(n, side, seed)), device)
        self._stream = self._batches()
        if not self.resident:
            next(self._stream)
        self._fill_tables(seed)
        self._number = 0

    @property
    def batch_size(self) -> int:
        """Images per step."""
        return self.training.batch_size

    def prepare(self, *, clustered: bool) -> float:
        """Take steps until the step is compiled and captured, and return the seconds they took."""
        steps = 1 + _STEPS_BEFORE_REPLAY if self.device.type == "cuda" else 1
        return seconds_of(lambda: self.advance(steps, clustered=clustered), self.device)

    def advance(self, steps: int, *, clustered: bool) -> None:
        """Take ``steps`` steps, without waiting for the device."""
        for batch in itertools.islice(self._stream, steps):
            self.training.step(batch, self._number, Stage.CLUSTERS if clustered else Stage.INSTANCES)
            self._number += 1

    def check(self) -> None:
        """Raise if the training collapsed."""
        check_losses(self.training)

    def close(self) -> None:
        """Free the memory of the run."""
        self._stream = iter(())
        self.training.close()
        del self.training

    def _batches(self) -> Iterator[Batch]:
        """Batches without end: indices of resident images, or crops that wait on the device."""
        loader = self.training.loader
        if self.resident:
            for epoch in itertools.count():
                yield from loader.batches(epoch, self.training.batches_of_rank(epoch))
        yield from itertools.cycle(list(loader.batches(0, self.training.batches_of_rank(0))))

    def _fill_tables(self, seed: int) -> None:
        """Fill in random clusters for the cluster loss: its time does not depend on which they are."""
        generator = torch.Generator().manual_seed(seed)
        for clustering in self.training.clusterings:
            k, d = clustering.mu_KD.shape
            index_NH = torch.randint(k, clustering.index_NH.shape, generator=generator)
            clustering.index_NH.copy_(index_NH)
            clustering.weight_NH.fill_(1 / index_NH.shape[1])
            clustering.mu_KD.copy_(functional.normalize(torch.randn(k, d, generator=generator), dim=1))
            clustering.kappa_K.fill_(1.0)


def flops_per_image(config: TrainConfig) -> float:
    """Floating-point operations of the networks per image and update; a multiplication and an addition are two.

    Both views forward and backward, and forward through the momentum encoder, as torch counts them on meta tensors.
    Augmentation, losses and the optimiser are small beside them and left out.
    """
    image = image_size(config)
    view = config.views.view_size or image
    with torch.random.fork_rng(devices=[]):
        network = build_network(config, image).to("meta")
    x = torch.empty(2, 3, view, view, device="meta")
    with FlopCounterMode(display=False) as counter:
        predictions = network(x, x)
        network.targets(x, x, predictions.z_1, predictions.z_2)
        (predictions.v_1.sum() + predictions.v_2.sum()).backward()
    return counter.get_total_flops() / x.shape[0]


def loader_rate(
    config: TrainConfig, folder: Path, device: torch.device, *, workers: int | None, seconds: float
) -> tuple[float, int]:
    """Images per second that the streaming loader brings onto the device from files, and its number of workers.

    Both views of every image are cropped, as in training. The first batches, while workers start and fill their queues,
    are not counted. Files are in the system's cache, so this is the time of decoding, not of a disk.
    """
    source = open_source(str(folder))
    if workers is None:
        workers = max(1, decode.default_threads() - 1)
    image = image_size(config)
    two = training_views(config, image)
    loader = open_loader(source, two, device, kind="streaming", seed=0, image_size=image, workers=workers, known_bad={})
    batch = max(1, min(config.optimisation.batch_size, 64, loader.n_images // 2))
    groups = torch.arange(loader.n_images // batch * batch).split(batch)
    uncounted = 4 * max(1, workers)  # what the workers' queues hold
    # One long epoch: between two epochs the queues run empty.
    most = uncounted + 1 + int(seconds * _FASTEST_LOADER / batch)
    counted, started = 0, time.perf_counter()
    try:
        for number, _ in enumerate(loader.batches(0, list(itertools.islice(itertools.cycle(groups), most)))):
            if number < uncounted:
                started = time.perf_counter()
                continue
            counted += batch
            if time.perf_counter() - started > seconds:
                break
        synchronise(device)
        return counted / (time.perf_counter() - started), workers
    finally:
        loader.close()
