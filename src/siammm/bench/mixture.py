"""The trainer's own clustering on made-up embeddings, for timing.

    load = ClusteringLoad(config, n_images=1_281_167, n_components=100_000, device=device)
    parts = load.epoch_seconds()

An epoch's clustering is: the bank as samples, E and M steps from the last centroids, the tables for the loss, and a
round of merging. Seeding, which happens once in a run, is not part of it.

Legend:  N images, K clusters, D dimensions, H neighbours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from siammm.bench.clock import WINDOWS, median_seconds, seconds_of
from siammm.learn.bank import Bank
from siammm.learn.clustering import Clustering
from siammm.mixture import neighbours
from siammm.mixture.components import VonMisesFisherComponents
from siammm.mixture.merge import MergeHistory
from siammm.mixture.samples import Samples
from siammm.settings.config import TrainConfig

# Passes over all pairs of images and clusters in an epoch with merging: what a time is foretold by.
_PASSES = 7
# Rows that the search is first tried with, on a CPU and elsewhere.
_CPU_ROWS, _GPU_ROWS = 4096, 2**20
# No smaller sample says anything about a larger one: what every pass costs besides would be multiplied too.
_LEAST_CLUSTERS = 128
_LEAST_SECONDS = 1.0
_ROWS_AT_ONCE = 2**17


@dataclass(frozen=True, kw_only=True)
class ClusteringTime:
    """Seconds of an epoch's clustering, by part, at the size asked for."""

    samples: float
    """The bank made into unit rows."""
    expectation_and_maximisation: float
    """E and M steps, concentrations, and the tables that the loss reads."""
    merging: float
    """Two more steps and the round of merging."""
    scale: float
    """1 where all of it was measured; else what the seconds of a smaller sample were multiplied with."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.samples + self.expectation_and_maximisation + self.merging


class ClusteringLoad:
    """A bank and a clustering as training holds them, with made-up embeddings."""

    def __init__(
        self, config: TrainConfig, *, n_images: int, n_components: int, device: torch.device, seed: int = 0
    ) -> None:
        dim = config.network.embedding_dim
        self.device = device
        self.bank = Bank(n_images, dim, device)
        fill_bank(self.bank, n_directions=max(2, min(20_000, n_images // 50)), seed=seed)
        self.clustering = Clustering(
            n_components, n_images, dim, device, objective=config.objective, settings=config.clustering, seed=seed
        )
        samples = self.samples()
        generator = torch.Generator().manual_seed(seed)
        centre_KD = samples.draw(n_components, generator).to(samples.parameter_device, torch.float64)
        self.clustering.components = VonMisesFisherComponents.started(
            centre_KD, self.clustering._concentration_settings(samples)
        )
        # One epoch's steps: components that have a spread, as all but the first epoch's have.
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

    def epoch_seconds(self, *, repeats: int = WINDOWS, warm: bool = True) -> ClusteringTime:
        """The median of a few epochs' clustering, part by part."""
        found: list[tuple[float, float, float]] = []
        for _ in range(repeats + warm):
            self.restart()
            made: list[Samples] = []
            first = seconds_of(lambda: made.append(self.samples()), self.device)  # noqa: B023 - called at once
            samples = made[0]
            second = seconds_of(lambda: self.clustering.expectation_and_maximisation(samples), self.device)  # noqa: B023
            third = seconds_of(lambda: self.clustering.merge(samples), self.device)  # noqa: B023
            found.append((first, second, third))
        times = torch.tensor(found[int(warm) :], dtype=torch.float64)
        middle = times[times.sum(dim=1).argsort()[(len(times) - 1) // 2]].tolist()
        return ClusteringTime(samples=middle[0], expectation_and_maximisation=middle[1], merging=middle[2], scale=1.0)


def fill_bank(bank: Bank, *, n_directions: int, seed: int) -> None:
    """Embeddings around random directions, as a trained encoder's are: the two views of an image near each other."""
    device, dim = bank.view_2ND.device, bank.view_2ND.shape[2]
    generator = _generator(device, seed)

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


def _generator(device: torch.device, seed: int) -> torch.Generator:
    """Random numbers where they are needed: a GPU makes a million rows at once."""
    return torch.Generator(device="cpu" if device.type == "mps" else device).manual_seed(seed)


def clustering_time(
    config: TrainConfig, *, n_images: int, n_components: int, device: torch.device, seconds: float, flops: float
) -> ClusteringTime:
    """An epoch's clustering at this size, within about ``seconds``.

    ``flops`` is the rate of the search for nearest components, which most of the time goes into. What would take too
    long is measured with fewer images and clusters, both by the same factor: every part of the work grows with N K or
    with K squared, and is scaled so.
    """
    dim = config.network.embedding_dim
    expected = _PASSES * 2.0 * n_images * n_components * dim / flops
    shrink = min(1.0, math.sqrt(max(0.6 * seconds, _LEAST_SECONDS) / max(expected, 1e-9)))
    if n_components * shrink < _LEAST_CLUSTERS:
        shrink = min(1.0, _LEAST_CLUSTERS / n_components)
    n, k = max(2, round(n_images * shrink)), max(2, round(n_components * shrink))
    load = ClusteringLoad(config, n_images=n, n_components=k, device=device, seed=config.run.random_state)
    enough = expected * shrink**2 < seconds / (WINDOWS + 2)
    found = load.epoch_seconds(repeats=WINDOWS if enough else 1, warm=enough or device.type == "cuda")
    scale = (n_images / n) * (n_components / k)
    return ClusteringTime(
        samples=found.samples * n_images / n,
        expectation_and_maximisation=found.expectation_and_maximisation * scale,
        merging=found.merging * scale,
        scale=scale,
    )


def search_flops(
    n_images: int,
    n_components: int,
    dim: int,
    n_neighbours: int,
    device: torch.device,
    *,
    seconds: float,
    seed: int = 0,
) -> float:
    """Operations a second of the search for the H nearest of K components: 2 N K D over the time it takes an E step.

    On a CPU with fewer rows than there are images, since its time is in proportion to them.
    """
    rows = min(n_images, _CPU_ROWS if device.type == "cpu" else _GPU_ROWS)
    generator = _generator(device, seed)
    x_ND, w_KD = (
        functional.normalize(torch.randn(count, dim, generator=generator, device=generator.device), dim=1).to(device)
        for count in (rows, n_components)
    )
    h = min(n_neighbours, n_components)
    backend = neighbours.choose_backend("auto", device, x_ND.dtype, d=dim, k=n_components, n_neighbours=h)
    took = median_seconds(lambda: neighbours.nearest(x_ND, w_KD, None, h, backend=backend), device, seconds=seconds)
    return 2.0 * rows * n_components * dim / took
