"""The measuring: times and memory are sensible, the work is the trainer's own, sizes scale as they are said to."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from siammm.bench import clock, images, mixture, workload
from siammm.bench.measure import Figures, default_batch_size, measure
from siammm.bench.mixture import ClusteringLoad
from siammm.bench.workload import Workload, flops_per_image
from siammm.core.errors import InputError
from siammm.learn.loop import Training
from siammm.settings.fields import with_settings
from siammm.settings.presets import PRESETS
from siammm.settings.training import TrainConfig

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_thread")


def small(**settings: Any) -> TrainConfig:
    return with_settings(
        PRESETS["demo"], **({"hidden_dim": 16, "embedding_dim": 16, "batch_size": 8, "n_components": 12} | settings)
    )


# -- the clock


def test_windows_count_only_what_they_time() -> None:
    done: list[int] = []

    def advance(steps: int) -> None:
        done.append(steps)
        time.sleep(0.002 * steps)

    found = clock.windows(advance, CPU, seconds=0.3)
    assert len(found) == clock.WINDOWS
    assert min(found) >= 0.002
    assert min(found) < 0.02  # of one step, not of a window; a busy machine may sleep longer now and then
    assert len(set(done[-clock.WINDOWS :])) == 1, "windows have as many steps as each other"
    assert done[-1] > 8


def test_a_step_longer_than_the_time_is_timed_once() -> None:
    found = clock.windows(lambda steps: time.sleep(0.05 * steps), CPU, seconds=0.01)
    assert len(found) == 1
    assert found[0] >= 0.05


def test_the_peak_memory_of_a_process_is_that_of_its_largest_moment() -> None:
    before = clock.peak_memory(CPU)
    held = torch.ones(64 * 2**20 // 4)
    assert clock.peak_memory(CPU) >= before > 2**20
    del held


def test_the_peak_of_a_product_is_its_operations_over_its_time() -> None:
    assert 1e8 < clock.peak_flops(CPU, "fp32", seconds=0.05, side=128) < 1e14


# -- the step


def test_the_work_is_the_trainers_own_and_its_steps_learn() -> None:
    load = Workload(small(learning_rate=0.5, warmup_epochs=0), CPU, n_images=64)
    assert isinstance(load.training, Training)
    assert load.resident
    weight = next(load.training.network.encoder.parameters())
    before = weight.detach().clone()
    load.prepare(clustered=True)
    load.advance(10, clustered=True)  # more than an epoch of 64 images in batches of 8
    load.check()
    assert not torch.equal(before, weight)
    means = load.training.tally.means()
    assert means["cluster_loss"] != 0
    assert load.training.tally.totals[-1] == 11
    load.close()


def test_without_clusters_there_is_no_cluster_loss() -> None:
    load = Workload(small(), CPU, n_images=64)
    load.advance(2, clustered=False)
    assert load.training.tally.means()["cluster_loss"] == 0
    load.close()


def test_large_images_wait_on_the_device() -> None:
    load = Workload(small(image_size=112, augmentation="224", batch_size=2), CPU, n_images=1_000_000)
    assert not load.resident
    load.advance(3, clustered=True)
    load.check()
    load.close()


def test_operations_are_those_of_the_layers() -> None:
    config = small(backbone="resnet18", image_size=32, hidden_dim=8, embedding_dim=4, projector_layers=1)
    heads = 8 * 2 * (512 * 4) + 6 * 2 * (4 * 8 + 8 * 4)  # four forward and twice two backward; the predictor, six
    # Of this stem, 0.5554 G multiplications and additions; the images have no gradient.
    stem = 2 * 2 * 3 * 64 * 9 * 32 * 32
    assert flops_per_image(config) == pytest.approx(8 * 2 * 0.5554e9 + heads - stem, rel=2e-3)
    smaller = flops_per_image(with_settings(config, view_size=24))
    assert smaller == pytest.approx((8 * 2 * 0.5554e9 - stem) * (24 / 32) ** 2 + heads, rel=2e-3)


def test_the_loader_brings_images_from_files(tmp_path: Path) -> None:
    images.write_jpegs(tmp_path / "jpegs", 16, 0, shape=(60, 80))
    assert len(list((tmp_path / "jpegs").iterdir())) == 16
    with Image.open(tmp_path / "jpegs" / "000000.jpg") as picture:
        assert picture.size == (80, 60)
    config = small(image_size=32, augmentation="224")
    rate, workers = workload.loader_rate(config, tmp_path / "jpegs", CPU, workers=0, seconds=0.2)
    assert rate > 1
    assert workers == 0


# -- the clustering


def test_an_epochs_clustering_is_that_of_training() -> None:
    load = ClusteringLoad(small(merge="paper"), n_images=400, n_components=20, device=CPU)
    assert all(seconds > 0 for seconds in load.epoch_seconds(repeats=1, warm=False))
    weights = load.clustering.weight_NH.sum(dim=1)
    torch.testing.assert_close(weights, torch.ones_like(weights))
    assert load.clustering.n_components <= 20
    load.restart()
    assert load.clustering.n_components == 20


def test_made_up_banks_hold_unit_rows_whose_views_are_near() -> None:
    load = ClusteringLoad(small(embedding_dim=32), n_images=300, n_components=5, device=CPU)
    first, second = load.bank.view_2ND[:, :-1]
    torch.testing.assert_close(first.norm(dim=1), torch.ones(300))
    assert (first * second).sum(dim=1).mean() > 0.8
    assert (first[:-1] * second[1:]).sum(dim=1).abs().mean() < 0.5


def test_what_takes_too_long_is_measured_on_a_sample_and_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    def noted(self: ClusteringLoad, **settings: Any) -> tuple[float, float, float]:
        seen.append((self.bank.n_rows, self.clustering.n_start))
        return 1.0, 2.0, 3.0

    monkeypatch.setattr(ClusteringLoad, "epoch_seconds", noted)
    sizes: dict[str, Any] = {"n_images": 20_000, "n_components": 2000, "device": CPU}
    found, scale = mixture.clustering_time(small(merge="none"), **sizes, seconds=1.0, peak_flops=5e8)
    (n, k) = seen.pop()
    assert 128 <= k < 2000
    assert n / 20_000 == pytest.approx(k / 2000, rel=0.01), "images and clusters shrink alike"
    assert scale == pytest.approx((20_000 / n) * (2000 / k))
    assert found == pytest.approx(20_000 / n + (2 + 3) * scale)
    assert mixture.clustering_time(small(merge="none"), **sizes, seconds=1e6, peak_flops=5e8) == (6, 1)
    assert seen == [(20_000, 2000)]
    mixture.clustering_time(small(merge="none"), **sizes, seconds=0.01, peak_flops=1.0)
    assert seen[1] == (1280, 128), "no smaller sample is taken"


# -- all of it


def test_figures_follow_from_each_other() -> None:
    parts: list[str] = []
    found = measure(small(), CPU, peak_flops=1e11, seconds=1.0, n_images=200, on_part=parts.append)
    assert parts == ["step without clusters", "step", "clustering"]
    assert found.batch_size == 8
    assert found.n_components == 12
    assert found.images_per_second > 0
    assert found.share_of_peak == pytest.approx(found.images_per_second * found.flops_per_image / 1e11)
    assert found.epoch_seconds == pytest.approx(200 / found.images_per_second + found.clustering_seconds)
    assert found.hours == pytest.approx(found.epochs * found.epoch_seconds / 3600)
    assert 0 < found.clustering_share < 1
    assert not found.compiled


def test_a_slow_loader_sets_the_pace() -> None:
    figures = Figures(
        preset="imagenet-200", backbone="resnet50", image_size=224, view_size=224, n_images=1000, n_components=10,
        epochs=36, batch_size=4, preset_batch_size=4, precision="bf16", compiled=True, images_per_second=50.0,
        images_per_second_alone=50.0, flops_per_image=1e9, share_of_peak=0.5, ready_seconds=1, peak_memory=1,
        clustering_seconds=10.0, clustering_scale=1.0, loader_images_per_second=10.0, workers=3,
    )  # fmt: skip
    assert figures.epoch_seconds == 110
    assert figures.clustering_share == pytest.approx(1 / 11)
    assert figures.hours == pytest.approx(1.1)
    assert replace(figures, loader_images_per_second=None).epoch_seconds == 30


def test_a_step_on_a_cpu_has_as_many_images_as_take_seconds() -> None:
    assert default_batch_size(PRESETS["demo"], CPU) == PRESETS["demo"].optimisation.batch_size
    assert default_batch_size(PRESETS["cifar"], CPU) == 32


def test_a_batch_that_does_not_fit_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def full(self: Workload, *, clustered: bool) -> float:
        tried.append(self.batch_size)
        if self.batch_size > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return 1.0

    monkeypatch.setattr(Workload, "prepare", full)
    found = measure(small(batch_size=16), CPU, peak_flops=1e11, seconds=0.5, n_images=100)
    assert found.batch_size == 4
    assert tried[:3] == [16, 8, 4]
    with pytest.raises(InputError, match=r"A step of 16 images does not fit into the memory of cpu; use a smaller"):
        measure(small(), CPU, peak_flops=1e11, batch_size=16, seconds=0.5, n_images=100)


def test_every_preset_has_a_set_of_images() -> None:
    assert workload.N_IMAGES.keys() == PRESETS.keys()
