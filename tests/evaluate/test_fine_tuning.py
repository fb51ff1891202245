"""Fine-tuning with few labels: which they are, and what the copy of the backbone makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from siammm.core.errors import InputError
from siammm.data.array_source import ArraySource
from siammm.data.sources import open_source
from siammm.data.view_settings import ViewSettings
from siammm.evaluate.fine_tuning import (
    ONE_PERCENT,
    TEN_PERCENT,
    FineTuneSettings,
    fine_tune,
    labelled_subset,
    settings_for,
)
from siammm.evaluate.protocols import listed_images
from siammm.evaluate.task import LabelledSet
from siammm.evaluate.training import Setup
from siammm.learn.backbones import build_backbone
from siammm.metrics.linear import ProbeResult
from tests.data.image_sets import example_images, write_folder

QUICK = FineTuneSettings(epochs=2, min_updates=1, batch_size=8)


def coloured(n: int = 64, n_classes: int = 4, seed: int = 0) -> ArraySource:
    given = example_images(n, size=(8, 8), n_classes=n_classes, seed=seed)
    return ArraySource(given.images, name="colours", labels=given.labels)


def backbone(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_backbone("conv-small", image_size=8)


def tuned(source: ArraySource, settings: FineTuneSettings = QUICK, **more: Any) -> ProbeResult:
    network, subset = more.pop("network", None) or backbone(), more.pop("subset", None)
    images = (source, source.labels)
    return fine_tune(
        network, images, images, settings, Setup(view=ViewSettings(size=8), device="cpu", **more), subset=subset
    )


# -- which labels


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.37, 1.0])
def test_every_class_gives_the_same_share_and_at_least_one(fraction: float) -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(5), [1000, 500, 100, 30, 2]))
    chosen = labelled_subset(labels, fraction, seed=3)
    assert np.array_equal(chosen, np.unique(chosen))
    counts = np.bincount(labels[chosen], minlength=5)
    assert counts.tolist() == [max(1, round(fraction * n)) for n in (1000, 500, 100, 30, 2)]
    assert np.array_equal(chosen, labelled_subset(labels, fraction, seed=3))


def test_another_seed_chooses_others() -> None:
    labels = np.arange(1000) % 10
    assert not np.array_equal(labelled_subset(labels, 0.1, 0), labelled_subset(labels, 0.1, 1))


def test_simclrs_share_of_imagenet() -> None:
    """About 13 and 130 of each class's 1,300."""
    labels = np.repeat(np.arange(10), 1300)
    assert len(labelled_subset(labels, 0.01, 0)) == 130
    assert len(labelled_subset(labels, 0.1, 0)) == 1300


@pytest.mark.parametrize("fraction", [0.0, 1.5])
def test_a_fraction_is_above_0_and_at_most_1(fraction: float) -> None:
    with pytest.raises(InputError, match="above 0 and at most 1"):
        labelled_subset(np.array([0, 1, 1]), fraction, 0)


def test_a_list_such_as_simclrs(tmp_path: Path) -> None:
    """Base names, though the source knows images by their folders too."""
    source = open_source(write_folder(tmp_path, example_images(12)))
    listed = tmp_path / "1percent.txt"
    listed.write_text("00010.png\n00003.png\n")
    assert source.labels is not None
    train = LabelledSet("training", source.labels, source)
    assert listed_images(train, listed).tolist() == [3, 10]
    listed.write_text("x.png")
    with pytest.raises(InputError, match=r"'x\.png' in the list is no image of"):
        listed_images(train, listed)


# -- settings


def test_swavs_rates() -> None:
    assert (TEN_PERCENT.backbone_rate, TEN_PERCENT.head_rate) == (0.01, 0.2)
    assert (ONE_PERCENT.backbone_rate, ONE_PERCENT.head_rate) == (0.02, 5.0)
    assert (TEN_PERCENT.epochs, TEN_PERCENT.batch_size) == (20, 256)
    assert [share * 20 for share in TEN_PERCENT.milestones] == [12, 16]
    assert settings_for(0.01) is ONE_PERCENT
    assert settings_for(0.1) is settings_for(0.5) is TEN_PERCENT


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epochs": 0}, "epochs is 0"),
        ({"min_updates": 0}, "min_updates is 0"),
        ({"backbone_rate": -1.0}, "backbone_rate is -1.0"),
        ({"head_rate": float("nan")}, "head_rate is nan"),
    ],
)
def test_settings_that_will_not_do(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FineTuneSettings(**given)


# -- fine-tuning


def test_it_learns_and_the_given_backbone_comes_back_unchanged() -> None:
    source, network = coloured(), backbone()
    network.train().requires_grad_(False)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    assert source.labels is not None
    subset = labelled_subset(source.labels, 0.25, 0)
    settings = FineTuneSettings(epochs=20, min_updates=60, batch_size=8, backbone_rate=0.1, head_rate=2.0)
    result = tuned(source, settings, network=network, subset=subset)
    assert result.top1 > 0.9
    assert result.top5 is None
    assert (result.n_train, result.n_test, result.n_classes) == (16, 64, 4)
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert network.training
    assert not any(p.requires_grad for p in network.parameters())
    # Two updates an epoch: thirty epochs make the sixty that were asked for.
    assert (result.recipe["epochs"], result.recipe["updates"]) == (30, 60)


def test_both_rates_count() -> None:
    """With a rate of 0 a part stays as it was: a backbone that cannot move makes a linear probe."""

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.scale.detach().clone())
            trained.append(self.norm.training)
            return self.norm(self.scale * x.mean(dim=(2, 3)))

    for rate, frozen in ((0.0, True), (0.5, False)):
        seen: list[Tensor] = []
        trained: list[bool] = []
        settings = FineTuneSettings(
            epochs=3, min_updates=1, batch_size=16, backbone_rate=rate, head_rate=1.0, freeze_batch_norm=frozen
        )
        tuned(coloured(), settings, network=Watched())
        assert torch.equal(seen[-1], torch.ones(3)) == (rate == 0)
        # In training mode while it learns, unless frozen; in evaluation mode when it is judged.
        assert trained[1] is not frozen
        assert not trained[-1]


def test_the_same_seed_gives_the_same() -> None:
    source = coloured()
    assert tuned(source, seed=1) == tuned(source, seed=1)


def test_all_images_without_a_subset() -> None:
    assert tuned(coloured()).n_train == 64


def test_a_class_without_a_label_is_refused() -> None:
    source = coloured()
    assert source.labels is not None
    with pytest.raises(InputError, match="Class 3 has none of the 48 labelled images, but each of the 4 classes"):
        tuned(source, subset=np.flatnonzero(source.labels < 3))
    with pytest.raises(InputError, match="holds no images"):
        tuned(source, subset=[])


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (None, [0, 1] * 32, "The training images have no labels"),
        ([0] * 64, [0] * 64, "of one class"),
        ([0, None] * 32, [0, 1] * 32, "32 of the 64 training images have no label"),
    ],
)
def test_labels_that_will_not_do(train: Any, test: Any, message: str) -> None:
    source = coloured()
    with pytest.raises(InputError, match=message):
        fine_tune(backbone(), (source, train), (source, test), QUICK, Setup(view=ViewSettings(size=8), device="cpu"))
