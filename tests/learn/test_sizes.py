"""Sizes of batches and of views."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from siammm.core.errors import InputError
from siammm.data.loader import ResidentLoader
from siammm.data.sources import open_source
from siammm.data.view_settings import views
from siammm.learn.loop import Training
from siammm.runs.run import Run
from siammm.runs.writer import RunWriter
from tests.learn.small_runs import CPU, prepared, run_through, small_config, small_images

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("n_images", "batch_size", "accumulate", "found"),
    [(64, 16, 1, 16), (10, 512, 1, 10), (11, 512, 2, 10), (64, 15, 4, 12), (2, 2, 1, 2), (5, 2, 1, 2)],
)
def test_the_size_of_a_batch(n_images: int, batch_size: int, accumulate: int, found: int) -> None:
    config = small_config(batch_size=batch_size, accumulate=accumulate, n_components=None)
    assert prepared(config, small_images(n_images)).batch_size == found


@pytest.mark.parametrize(("n_images", "batch_size", "accumulate"), [(64, 2, 2), (3, 512, 2), (64, 7, 4)])
def test_a_batch_too_small_for_its_parts_is_refused(n_images: int, batch_size: int, accumulate: int) -> None:
    config = small_config(batch_size=batch_size, accumulate=accumulate, n_components=None)
    with pytest.raises(InputError, match="fewer than 2 images a part"):
        prepared(config, small_images(n_images))


def test_the_size_of_a_view() -> None:
    assert prepared(small_config()).views[0].size == 8
    assert prepared(small_config(image_size=12)).views[0].size == 12
    crop = prepared(small_config(crop_scale=0.3)).views
    assert [view.scale for view in crop] == [(0.3, 1.0)] * 2
    wide = np.zeros((4, 20, 30, 3), np.uint8)
    assert Training(small_config(n_components=2), open_source(wide), CPU).views[0].size == 20


@pytest.mark.parametrize("loader", ["resident", "streaming"])
def test_views_smaller_than_images(loader: str) -> None:
    training = prepared(small_config(view_size=6, loader=loader, workers=0))
    assert [view.size for view in training.views] == [6, 6]
    assert training.clean_view.size == 8
    batch = next(iter(training.loader.batches(0, [torch.arange(4)])))
    assert [tuple(view.shape) for view in training.loader.views(batch, 0, 0)] == [(4, 3, 6, 6)] * 2
    _, clean = next(training.loader.clean(0, 4))
    assert clean.shape == (4, 3, 8, 8)
    run_through(training)
    assert np.isfinite(training.metrics[-1]["loss"])


def test_what_is_kept_of_views_smaller_than_images_is_for_images(tmp_path: Path) -> None:
    probe = tmp_path / "probe.npz"
    np.savez(probe, images=small_images(), labels=np.arange(len(small_images())) % 4)
    training = prepared(small_config(view_size=6, probe=str(probe)), folder=tmp_path / "run")
    assert isinstance(training.recorder, RunWriter)
    training.recorder.write_results(training.run())
    assert Run.open(tmp_path / "run").view.size == 8
    own_set = training.probes._own_set
    assert own_set is not None
    assert next(own_set.clean(0, 4))[1].shape == (4, 3, 8, 8)
    training.close()


def test_resident_images_of_many_sizes_are_kept_large_enough_for_both(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number, (height, width) in enumerate([(20, 30), (25, 18), (16, 16), (40, 22)] * 16):
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(tmp_path / f"{number}.png")
    for settings, side in (({"image_size": 12, "view_size": 8}, 12), ({"image_size": 12, "view_size": 16}, 16)):
        training = Training(small_config(loader="resident", **settings), open_source(str(tmp_path)), CPU)
        assert isinstance(training.loader, ResidentLoader)
        assert training.loader.image_N3HW.shape[2:] == (side, side)
        assert next(training.loader.clean(0, 4))[1].shape == (4, 3, 12, 12)


@pytest.mark.parametrize("size", [6.5, "6", 3])
def test_the_size_of_a_view_is_a_whole_number(size: Any) -> None:
    with pytest.raises(InputError, match="view_size is"):
        prepared(small_config(view_size=size))
    with pytest.raises(InputError, match="image_size is 3"):
        prepared(small_config(image_size=3))


def test_the_augmentation_is_that_of_the_image_not_of_the_smaller_view() -> None:
    config = small_config(image_size=32, view_size=16, augmentation="auto")
    assert prepared(config).views == views(16, "32")


def test_a_network_for_one_size_refuses_other_views() -> None:
    with pytest.raises(InputError, match="--view-size is 24, but vit_tiny_patch16_224 for images of 32 pixels"):
        prepared(small_config(backbone="vit_tiny_patch16_224", image_size=32, view_size=24))
