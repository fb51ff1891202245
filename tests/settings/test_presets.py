"""Presets and settings: the paper's numbers, settings that survive being stored, and words that are refused."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from siammm.cli import parse
from siammm.core.errors import InputError, StoredFileError
from siammm.data.view_settings import preset_for, views
from siammm.learn.build import initial_clusters
from siammm.settings.checks import check_settings
from siammm.settings.fields import setting_homes, with_settings
from siammm.settings.presets import PRESETS
from siammm.settings.stored import as_plain, from_plain
from siammm.settings.training import TrainConfig

PAPER = Path(__file__).parents[3] / "shared" / "paper" / "siammm.tex"
RUNS = Path(__file__).parents[2] / "benchmarks" / "results" / "runs"


# -- the paper


@pytest.mark.parametrize(("name", "epochs", "rate"), [("imagenet-200", 200, 0.5), ("imagenet-100", 100, 0.6)])
def test_the_papers_numbers(name: Any, epochs: int, rate: float) -> None:
    """Section "Implementation details", in its order."""
    config = PRESETS[name]
    network, objective = config.network, config.objective
    clustering, optimisation = config.clustering, config.optimisation
    assert network.backbone == "resnet50"
    assert (network.projector_layers, network.predictor_layers) == (3, 2)
    assert (network.hidden_dim, network.embedding_dim) == (4096, 256)
    assert clustering.centroids == "consistent"
    assert clustering.n_components == 100_000
    assert (clustering.merge, clustering.merge_threshold) == ("paper", -1.2)
    assert objective.size_weighting is False  # alpha = 1
    assert (objective.temperature, objective.n_neighbours) == (0.02, 5)
    assert (objective.concentration, objective.concentration_dims) == ("closed-form", 150)
    assert (objective.instance_loss, objective.cluster_loss, objective.cluster_weight) == ("cosine", "mle", 1.0)
    assert objective.normaliser is False
    assert objective.n_negatives == 16_000
    assert (optimisation.optimiser, optimisation.weight_decay, optimisation.momentum) == ("lars", 1e-6, 0.9)
    assert (optimisation.batch_size, optimisation.epochs, optimisation.learning_rate) == (4096, epochs, rate)
    # MoCo v3's, which the paper follows.
    assert (optimisation.warmup_epochs, optimisation.encoder_momentum) == (10, 0.99)
    assert optimisation.trust_coefficient == 0.001
    assert network.zero_init_residual is True


def test_the_papers_views_are_those_of_moco_v3() -> None:
    config = PRESETS["imagenet-200"]
    assert config.views.image_size == 224
    first, second = views(224, config.views.augmentation)
    assert first == views(224, "224")[0]
    assert (first.scale, first.flip, first.jitter_probability, first.grey) == ((0.2, 1.0), 0.5, 0.8, 0.2)
    assert (first.brightness, first.contrast, first.saturation, first.hue) == (0.4, 0.4, 0.2, 0.1)
    assert (first.blur, first.solarise, second.blur, second.solarise) == (1.0, 0.0, 0.1, 0.2)


@pytest.mark.skipif(not PAPER.is_file(), reason="the paper is not beside this checkout")
def test_the_numbers_above_are_in_the_paper() -> None:
    text = PAPER.read_text("utf-8")
    start = text.index(r"\subsection{Implementation details}")
    section = " ".join(text[start : text.index(r"\subsection", start + 10)].split())
    for words in (
        "standard ResNet-50", "a 3-layer MLP", "a 2-layer MLP", "4096 dimensional hidden", "256 dimensional",
        "$K=100k$", r"\zeta=-1.2", r"\alpha=1", r"\tau=0.02", "$H=5$", "weight decay of 1e-6", "momentum of 0.9",
        "batch size 4096", "lr_{base}=0.6$ and $0.5$ for 100-epoch and 200-epoch",
    ):  # fmt: skip
        assert words in re.sub(r"~\\cite\{[^}]*\}", "", section), words


# -- presets


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_knows_its_name_and_is_allowed(name: Any) -> None:
    assert PRESETS[name].preset == name
    check_settings(PRESETS[name])


def test_the_default_settings_are_their_own_preset() -> None:
    assert TrainConfig() == PRESETS[TrainConfig().preset] == next(iter(PRESETS.values()))
    assert dataclasses.replace(parse(["train", "x"]), data=None) == TrainConfig()


@pytest.mark.parametrize("name", ["cifar", "tiny"])
def test_small_images_begin_with_contrast(name: Any) -> None:
    config = PRESETS[name]
    assert (config.objective.instance_loss, config.objective.contrastive_temperature) == ("contrastive", 0.2)
    assert config.clustering.cluster_after == 0.25
    # The paper's own presets are as the paper has it.
    paper = PRESETS["imagenet-200"]
    assert (paper.objective.instance_loss, paper.clustering.cluster_after) == ("cosine", 0.0)


def test_the_fast_preset_is_the_run_that_was_measured() -> None:
    run = json.loads((RUNS / "siammm-screened-645-0.json").read_text("utf-8"))
    measured, fast = with_settings(PRESETS["cifar"], **run["settings"]), PRESETS["cifar-fast"]
    # Its images had 32 pixels, from which both follow.
    views = dataclasses.replace(measured.views, image_size=32, augmentation=preset_for(32))
    assert dataclasses.replace(measured, preset="cifar-fast", views=views) == fast


@pytest.mark.parametrize(("n_images", "found"), [(2, 2), (10, 2), (100, 8), (1797, 144), (50_000, 4000)])
def test_the_number_of_clusters_at_the_start(n_images: int, found: int) -> None:
    assert initial_clusters(n_images) == found
    assert initial_clusters(n_images) <= n_images


def test_the_papers_start_is_the_default_for_its_images() -> None:
    assert initial_clusters(1_281_167) == pytest.approx(100_000, rel=0.03)


# -- settings by their words


def test_every_setting_has_one_home() -> None:
    homes = setting_homes()
    names: list[str] = []
    for field in dataclasses.fields(TrainConfig):
        value = getattr(TrainConfig(), field.name)
        names += (
            [inner.name for inner in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else [field.name]
        )
    assert sorted(names) == sorted(homes), "two groups have a setting of the same name"


def test_settings_are_changed_by_their_words() -> None:
    config = with_settings(TrainConfig(), epochs=3, temperature=0.5, data="x", optimiser="sgd")
    assert (config.optimisation.epochs, config.objective.temperature, config.data) == (3, 0.5, "x")
    assert config.optimisation.optimiser == "sgd"
    assert TrainConfig().optimisation.epochs != 3
    assert with_settings(config) == config


@pytest.mark.parametrize("word", ["epoch", "lr", "reading", "optimisation"])
def test_an_unknown_setting_is_refused(word: str) -> None:
    with pytest.raises(InputError, match=f"'{word}' is not a setting of training; the settings are data, output"):
        with_settings(TrainConfig(), **{word: 1})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"epochs": 0}, "--epochs is 0, but it must be at least 1"),
        ({"batch_size": 1}, "--batch-size is 1, but it must be at least 2"),
        ({"learning_rate": float("inf")}, "--learning-rate is inf"),
        ({"temperature": 0.0}, "--temperature is 0"),
        ({"concentration_scale": 0.0}, "--concentration-scale is 0"),
        ({"concentration_dims": 1}, "--concentration-dims is 1"),
        ({"merge_share": 1.5}, "--merge-share is 1.5, but it must be from 1e-06 to 1"),
        ({"momentum": 1.0}, "--momentum is 1.0"),
        ({"crop_scale": float("nan")}, "--crop-scale is nan"),
        ({"merge_threshold": float("nan")}, "--merge-threshold is nan"),
        ({"random_state": 2**31}, "--random-state is 2147483648"),
        ({"instance_loss": "none", "cluster_loss": "none"}, "nothing to learn"),
        ({"instance_loss": "none", "cluster_after": 0.5}, "--cluster-after is 0.5"),
        ({"cluster_after": 1.0}, "--cluster-after is 1.0"),
    ],
)
def test_settings_that_no_run_can_have_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        check_settings(with_settings(TrainConfig(), **settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"concentration_scale": "literal"},
        {"save_every": 0.0},
        {"learning_rate": 0.0},
        {"merge_share": 1.0},
        {"instance_loss": "none", "cluster_after": 0.0},
        {"workers": 0},
        {"image_size": None},
    ],
    ids=str,
)
def test_settings_at_the_edge_are_allowed(settings: dict[str, Any]) -> None:
    check_settings(with_settings(TrainConfig(), **settings))


# -- stored settings


@pytest.mark.parametrize("name", PRESETS)
def test_settings_survive_being_stored_as_json(name: Any) -> None:
    config = with_settings(
        PRESETS[name], data="photos", output=Path("a/b"), resume=Path("c"), concentration_scale="literal", compile=True
    )
    stored = json.loads(json.dumps(as_plain(config)))
    assert from_plain(stored, Path("config.json")) == dataclasses.replace(config, resume=None), (
        "how it was started is not stored"
    )
    assert from_plain(as_plain(PRESETS[name]), Path("config.json")) == PRESETS[name]


@pytest.mark.parametrize("value", [None, True, False])
def test_settings_with_an_automatic_default_are_stored_as_before(value: bool | None) -> None:
    """Runs of all versions have null, true or false for them."""
    stored = as_plain(TrainConfig())
    stored["optimisation"] |= {"compile": value, "fused": value}
    assert from_plain(stored, Path("config.json")) == with_settings(TrainConfig(), compile=value, fused=value)


def test_a_setting_that_is_not_stored_is_the_default() -> None:
    """A run of an older version lacks the settings that came later."""
    stored = as_plain(TrainConfig())
    del stored["objective"]["normaliser"]
    assert from_plain(stored, Path("config.json")) == TrainConfig()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda stored: stored.update(unheard_of=1),
        lambda stored: stored["objective"].update(unheard_of=1),
        lambda stored: stored.update(objective=None),
        lambda stored: stored.update(objective=[1]),
    ],
)
def test_stored_settings_of_something_else_are_refused(spoil: Any) -> None:
    stored = as_plain(TrainConfig())
    spoil(stored)
    with pytest.raises(StoredFileError, match=r"^run/config\.json does not contain the settings of a run"):
        from_plain(stored, Path("run/config.json"))
