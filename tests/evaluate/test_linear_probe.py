"""The paper's linear protocol: it learns, it leaves the backbone alone, and it comes out where the quick probe does."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from siammm.core.errors import InputError
from siammm.data.array_source import ArraySource, DigitsSource
from siammm.data.loader import open_loader
from siammm.data.sources import open_source
from siammm.data.subset import SourceSubset
from siammm.data.view_settings import ViewSettings
from siammm.evaluate.linear_probe import LINEAR, PLACES205, LinearSettings, linear_probe
from siammm.evaluate.training import LabelledImages, Schedule, Setup, crop_view, labelled, linear_head
from siammm.learn.backbones import build_backbone
from siammm.metrics.linear import ProbeResult, linear_scores
from siammm.settings.training import DataConfig
from tests.data.image_sets import example_images

CPU = torch.device("cpu")
HALF = ViewSettings(size=8, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
ONE_PROCESS = DataConfig(workers=0)
QUICK = LinearSettings(epochs=2, batch_size=16, learning_rate=1.0)


class Means(nn.Module):
    """The mean of each channel, after a BatchNorm layer with statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        with torch.no_grad():
            assert self.norm.running_mean is not None
            self.norm.running_mean.fill_(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).mean(dim=(2, 3))


def coloured(n: int = 48, n_classes: int = 4, seed: int = 0) -> ArraySource:
    given = example_images(n, size=(8, 8), n_classes=n_classes, seed=seed)
    return ArraySource(given.images, name="colours", labels=given.labels)


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def probed(source: ArraySource, settings: LinearSettings = QUICK, **more: Any) -> ProbeResult:
    backbone = more.pop("backbone", None) or Means()
    images = (source, source.labels)
    return linear_probe(backbone, images, images, settings, Setup(view=ViewSettings(size=8), device="cpu", **more))


# -- the recipe


def test_the_papers_recipe() -> None:
    assert (LINEAR.learning_rate, LINEAR.momentum, LINEAR.weight_decay) == (0.1, 0.9, 0.0)
    assert (LINEAR.batch_size, LINEAR.epochs, LINEAR.milestones) == (1024, 90, ())
    assert (LINEAR.crop_scale, LINEAR.flip) == ((0.08, 1.0), 0.5)
    schedule = Schedule(1024 * 50, LINEAR)
    assert schedule.total == 50 * 90
    rates = [LINEAR.learning_rate * schedule.scale(step) for step in range(schedule.total)]
    expected = [0.1 * 4 * 0.5 * (1 + math.cos(math.pi * step / schedule.total)) for step in range(schedule.total)]
    assert rates == pytest.approx(expected)


def test_the_recipe_for_places_falls_in_steps() -> None:
    schedule = Schedule(256 * 3, PLACES205)
    rates = [PLACES205.learning_rate * schedule.scale(3 * epoch) for epoch in range(14)]
    assert rates == pytest.approx([0.01] * 4 + [0.001] * 4 + [0.0001] * 4 + [0.00001] * 2)


def test_updates_are_of_equal_size_and_their_rate_goes_with_it() -> None:
    def schedule_of(n: int, epochs: int, batch_size: int, min_updates: int = 1) -> Schedule:
        return Schedule(n, LinearSettings(epochs=epochs, batch_size=batch_size), min_updates)

    schedule = schedule_of(1030, 1, 1024)
    assert schedule.total == 2
    assert schedule.scale(0) == pytest.approx(515 / 256)
    assert schedule_of(3, 1, 2).total == 1  # and not of two images and one
    assert schedule_of(10, 3, 1024, min_updates=50).epochs == 50
    assert schedule_of(10_000, 3, 10, min_updates=50).epochs == 3


# -- the images


def test_images_that_cannot_be_read_leave_with_their_labels(tmp_path: Any) -> None:
    from tests.data.image_sets import write_folder

    root = write_folder(tmp_path, example_images(300, size=(8, 8), n_classes=3))
    (root / "class000" / "00001.png").write_bytes(b"no image")
    source = open_source(root)
    view = crop_view(HALF, (0.2, 1.0), 0.5)
    images = (source, source.labels)
    with labelled(images, images, view, CPU, 0, ONE_PROCESS) as (train, *_):
        assert train.n == 299
        assert torch.bincount(train.labels_N).tolist() == [99, 100, 100]


# -- the probe


def test_a_straight_cut_is_found_and_the_backbone_is_left_alone() -> None:
    """In whatever mode it comes, with weights, statistics and flags as they were."""
    source, backbone = coloured(), Means()
    backbone.train()
    backbone.norm.eval()
    before = state(backbone)
    settings = LinearSettings(epochs=30, batch_size=16, learning_rate=2.0)
    result = probed(source, settings, backbone=backbone)
    assert result.top1 > 0.9
    assert result.top5 is None
    assert (result.n_classes, result.n_train, result.n_test) == (4, 48, 48)
    assert all(torch.equal(before[name], value) for name, value in backbone.state_dict().items())
    assert backbone.training
    assert not backbone.norm.training
    assert all(p.requires_grad and p.grad is None for p in backbone.parameters())
    assert result.recipe["epochs"] == 30
    assert result.recipe["updates"] == 90
    assert result.recipe["image_size"] == 8


def test_the_mode_and_batch_of_the_backbone_make_no_difference() -> None:
    """Its BatchNorm layers use the statistics they have, also where it was left in training mode."""
    source = coloured()
    one, other = Means().train(), Means().eval()
    assert probed(source, backbone=one) == probed(source, backbone=other)


def test_the_same_seed_gives_the_same_and_the_process_s_generator_is_not_moved() -> None:
    source = coloured()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    one = probed(source, seed=5)
    assert torch.equal(torch.rand(3), expected)
    assert probed(source, seed=5) == one
    assert probed(source, seed=5, reading=DataConfig(loader="streaming", workers=0)).recipe == one.recipe


def test_the_first_layer() -> None:
    head = linear_head(400, 50, seed=0)
    assert float(head.weight.detach().std()) == pytest.approx(0.01, rel=0.05)
    assert not head.bias.detach().any()
    assert torch.equal(head.weight, linear_head(400, 50, seed=0).weight)


def test_progress_counts_updates() -> None:
    seen: list[tuple[int, int]] = []
    probed(coloured(), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(step, 6) for step in range(1, 7)]


def test_labels_may_be_names_and_sources_may_differ() -> None:
    train, test = coloured(48), coloured(20, seed=0)
    names = ["red", "green", "blue", "grey"]
    assert train.labels is not None
    assert test.labels is not None
    result = linear_probe(
        Means(),
        (train, [names[label] for label in train.labels]),
        (test, [names[label] for label in test.labels]),
        QUICK,
        Setup(view=HALF, device=CPU),
    )
    assert (result.n_train, result.n_test, result.n_classes) == (48, 20, 4)


@pytest.mark.slow
def test_comes_out_where_the_quick_probe_does() -> None:
    """Digits, an untrained network of convolutions: both see the same in its features, within a point.

    At the paper's rate, with small updates, since the set is small, and with standardised features, since those of an
    untrained network are tiny. Not nearer: 600 images in 256 dimensions can be told apart without error, so that SGD
    has no end to come to, and where it is stopped differs from a penalty by up to a point, as the split will have it.
    """
    digits = DigitsSource()
    order = np.random.default_rng(0).permutation(len(digits))
    train, test = SourceSubset(digits, order[:600]), SourceSubset(digits, order[600:1400])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        backbone = build_backbone("conv-small", image_size=8)
    settings = LinearSettings(epochs=40, batch_size=64, batch_norm=True, crop_scale=(1.0, 1.0), flip=0)
    slow = linear_probe(backbone, (train, train.labels), (test, test.labels), settings, Setup(view=HALF, device=CPU))
    rows: list[Tensor] = []
    for source in (train, test):
        view = crop_view(HALF, (1.0, 1.0), 0.0)
        loader = open_loader(source, (view, view), CPU, seed=0)
        with torch.no_grad():
            rows.append(torch.cat([backbone.eval()(x) for _, x in loader.clean(0, loader.n_images)]))
    quick = linear_scores(rows[0], train.labels, rows[1], test.labels, penalties=(3e-4, 1e-3, 1e-2))
    assert slow.top1 == pytest.approx(quick.top1, abs=0.01)
    assert slow.top1 > 0.93
    assert slow.top5 is not None
    assert slow.top5 > 0.99


@pytest.mark.parametrize("batch_norm", [False, True])
def test_comes_out_where_scikit_learn_does(batch_norm: bool) -> None:
    """The paper's recipe to the letter, but for the crops, on classes that overlap: there is one least loss.

    4,000 images judge, so that half a point is 20 of them; the images' pixels are the features.
    """
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 6, 8000)
    pixels = 128 + 12 * rng.normal(size=(6, 4, 4, 3))[labels] + 40 * rng.normal(size=(8000, 4, 4, 3))
    images = np.clip(pixels.round(), 0, 255).astype(np.uint8)
    train, test = (ArraySource(images[at], name="overlap", labels=labels[at]) for at in np.split(np.arange(8000), 2))
    settings = dataclasses.replace(LINEAR, batch_norm=batch_norm, crop_scale=(1.0, 1.0), flip=0.0)
    slow = linear_probe(
        nn.Flatten(),
        (train, train.labels),
        (test, test.labels),
        settings,
        Setup(view=dataclasses.replace(HALF, size=4), device=CPU),
    )
    rows, judged = np.split(images.reshape(8000, -1) / 127.5 - 1, 2)
    reference = LogisticRegression(C=np.inf, tol=1e-8, max_iter=10_000).fit(rows, train.labels)
    assert reference.n_iter_.max() < 10_000
    quick = linear_scores(rows, train.labels, judged, test.labels)
    assert slow.n_test == 4000
    assert slow.top1 == pytest.approx(float(reference.score(judged, test.labels)), abs=0.005)
    assert slow.top1 == pytest.approx(quick.top1, abs=0.005)
    assert 0.7 < slow.top1 < 0.8


# -- what is refused


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (None, [0] * 48, "The training images have no labels"),
        ([0, 1] * 24, None, "The test images have no labels"),
        ([0] * 48, [0] * 48, "All 48 training images are of one class"),
        ([0, 1, None] * 16, [0, 1] * 24, "16 of the 48 training images have no label"),
        ([0, 1, -1] * 16, [0, 1] * 24, "16 of the 48 training images have no label"),
        (list(range(48)), list(range(1, 49)), "48 training images for 49 classes"),
        ([0, 1], [0, 1] * 24, "2 labels for 48 training images"),
    ],
)
def test_labels_that_will_not_do(train: Any, test: Any, message: str) -> None:
    source = coloured()
    with pytest.raises(InputError, match=message) as caught:
        linear_probe(Means(), (source, train), (source, test), QUICK, Setup(view=HALF, device=CPU))
    assert "\n" not in str(caught.value)


def test_a_backbone_that_gives_no_rows() -> None:
    with pytest.raises(InputError, match=r"turns \(1, 3, 8, 8\) into \(1, 3, 8, 8\), but one row of features"):
        probed(coloured(), backbone=nn.Identity())


def test_a_loss_that_is_not_finite_is_said() -> None:
    backbone = Means()
    broken = copy.deepcopy(backbone)
    with torch.no_grad():
        cast(Tensor, broken.norm.weight).fill_(math.nan)
    with pytest.raises(InputError, match="no longer finite in epoch 1; lower the learning rate"):
        probed(coloured(), backbone=broken)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epochs": 0}, "epochs is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"learning_rate": -1.0}, "learning_rate is -1.0"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"weight_decay": math.inf}, "weight_decay is inf"),
        ({"milestones": (0.8, 0.6)}, "ascending shares"),
        ({"milestones": (1.5,)}, "ascending shares"),
        ({"decay": 0.0}, "decay is 0.0"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov needs momentum"),
        ({"batch_norm": True, "batch_size": 1}, "batch_norm needs updates of 2 images"),
    ],
)
def test_settings_that_will_not_do(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LinearSettings(**given)


def test_labelled_images_are_on_the_device() -> None:
    source = coloured()
    view = crop_view(HALF, (0.2, 1.0), 0.5)
    assert source.labels is not None
    images = LabelledImages(open_loader(source, (view, view), CPU, seed=0), source.labels)
    assert images.labels_N.device == CPU
