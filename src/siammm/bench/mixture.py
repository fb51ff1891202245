"""The trainer's own clustering on random embeddings, for timing.

    load = ClusteringLoad(config, n_images=1_281_167, n_components=100_000, device=device)
    samples, expectation_and_maximisation, merging = load.epoch_seconds()

One epoch's clustering: the bank as samples, E and M steps from the last centroids, the tables for the loss, and a
round of merging. Seeding, done once per run, is not part of it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as functional
from torch import Tensor

from siammm.bench.clock import WINDOWS, seconds_of
from siammm.learn.bank import Bank
from siammm.learn.clustering import Clustering
from siammm.mixture.components import VonMisesFisherComponents
from siammm.mixture.merge_tree import MergeHistory
from siammm.mixture.samples import Samples
from siammm.settings.training import TrainConfig

# Passes over all pairs of images and clusters in an epoch with merging, and how fast they run on a GPU relative to a
# large matrix product: an estimate of the time, which decides on the size of the sample.
_PASSES = 7
_GPU_SHARE_OF_PEAK = 0.2
# With fewer clusters, fixed costs would dominate and be scaled up with the rest.
_LEAST_CLUSTERS = 128
_LEAST_SECONDS = 1.0
_ROWS_AT_ONCE = 2**17


class ClusteringLoad:
    """A bank and a clustering as in training, with random embeddings."""

    def __init__(
        self, config: TrainConfig, *, n_images: int, n_components: int, device: torch.device, seed: int = 0
    ) -> None:
        dim = config.network.embedding_dim
        self.device = device
        self.bank = Bank(n_images, dim, device)
        _fill_bank(self.bank, n_directions=max(2, min(20_000, n_images // 50)), seed=seed)
        self.clustering = Clustering(
            n_components, n_images, dim, device, objective=config.objective, settings=config.clustering, seed=seed
        )
        samples = self.samples()
        generator = torch.Generator().manual_seed(seed)
        centre_KD = samples.draw(n_components, generator).to(samples.parameter_device, torch.float64)
        self.clustering.components = VonMisesFisherComponents.started(
            centre_KD, self.clustering._concentration_settings(samples)
        )
        # One epoch's steps, so that the components have a spread, as in all but the first epoch.
        self.clustering.expectation_and_maximisation(samples)
        self._start = self.clustering.components

    def samples(self) -> Samples:
        """What is clustered, as the loop makes it."""
        self.bank.check()
        samples = Samples(self.bank.embeddings(), device=self.device, unit=True, name="the bank")
        samples.join_ranks()
        return samples

    def restart(self) -> None:
        """Undo what an epoch changed."""
        self.clustering.components = self._start
        self.clustering.history = MergeHistory(self.clustering.n_start)

    def epoch_seconds(self, *, repeats: int = WINDOWS, warm: bool = True) -> tuple[float, float, float]:
        """Seconds of normalising the bank, of E and M steps with the tables for the loss, and of merging.

        The median of a few epochs' clustering; with ``warm``, after one that is not counted.
        """
        found: list[tuple[float, float, float]] = []
        for _ in range(repeats + warm):
            self.restart()
            made: list[Samples] = []
            first = seconds_of(lambda: made.append(self.samples()), self.device)  # noqa: B023 - called at once
            samples = made[0]
            second = seconds_of(lambda: self.clustering.expectation_and_maximisation(samples), self.device)  # noqa: B023
            third = seconds_of(lambda: self.clustering.merge(samples), self.device)  # noqa: B023
            found.append((first, second, third))
        counted = sorted(found[int(warm) :], key=sum)
        return counted[(len(counted) - 1) // 2]


def _fill_bank(bank: Bank, *, n_directions: int, seed: int) -> None:
    """Embeddings around random directions, as a trained encoder's are: the two views of an image near each other."""
    device, dim = bank.view_2ND.device, bank.view_2ND.shape[2]
    generator = torch.Generator(device="cpu" if device.type == "mps" else device).manual_seed(seed)

    def normals(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=generator.device)

    direction_CD = functional.normalize(normals(n_directions, dim), dim=1)
    noise = 1 / math.sqrt(dim)
    for start in range(0, bank.n_rows, _ROWS_AT_ONCE):
        rows = min(_ROWS_AT_ONCE, bank.n_rows - start)
        chosen = torch.randint(n_directions, (rows,), generator=generator, device=generator.device)
        image_ND = direction_CD[chosen] + 0.8 * noise * normals(rows, dim)
        for view in bank.view_2ND:
            view[start : start + rows] = functional.normalize(image_ND + 0.3 * noise * normals(rows, dim), dim=1)


def clustering_time(
    config: TrainConfig, n_images: int, n_components: int, device: torch.device, *, seconds: float, peak_flops: float
) -> tuple[float, float]:
    """Seconds of one epoch's clustering, measured within about ``seconds``, and the factor they were scaled by.

    What would take longer, by the device's ``peak_flops``, is measured with fewer images and clusters, both by the same
    factor, and scaled: the work grows with N K and with K squared.
    """
    flops = peak_flops * (_GPU_SHARE_OF_PEAK if device.type == "cuda" else 1.0)
    expected = _PASSES * 2.0 * n_images * n_components * config.network.embedding_dim / flops
    shrink = min(1.0, math.sqrt(max(0.6 * seconds, _LEAST_SECONDS) / max(expected, 1e-9)))
    if n_components * shrink < _LEAST_CLUSTERS:
        shrink = min(1.0, _LEAST_CLUSTERS / n_components)
    n, k = max(2, round(n_images * shrink)), max(2, round(n_components * shrink))
    load = ClusteringLoad(config, n_images=n, n_components=k, device=device, seed=config.run.random_state)
    enough = expected * shrink**2 < seconds / (WINDOWS + 2)
    samples, steps, merging = load.epoch_seconds(repeats=WINDOWS if enough else 1, warm=enough or device.type == "cuda")
    scale = (n_images / n) * (n_components / k)
    return samples * n_images / n + (steps + merging) * scale, scale
