"""SiamMM's peers as settings of the one trainer: each trains, goes on where it was stopped, and says what it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from siammm.cli import parse
from siammm.config import MethodName, TrainConfig
from siammm.errors import InputError
from siammm.evaluate.knn import knn_accuracy
from siammm.learn.encode import encode
from siammm.methods import METHODS, with_method
from siammm.presets import PRESETS, as_plain, check_settings, differing_settings, from_plain, with_settings
from tests.learn.small_runs import (
    SMALL,
    STEPS,
    check_same_bits,
    everything,
    measured,
    prepared,
    resumed,
    run_through,
    stopped,
)

# What the presets leave open, or is too much for a few images.
SIZES: dict[str, dict[str, Any]] = {
    "swav": {"n_prototypes": 10, "queue_size": 12},
    "deepcluster-v2": {"n_components": 6, "more_components": (8,)},
    "pcl": {"n_components": 6, "more_components": (8,), "queue_size": 12, "cluster_after": 0.4},
    "propos": {"n_components": 4},
}
PEERS = [name for name in METHODS if name != "siammm"]


def small_method(name: MethodName, **settings: Any) -> TrainConfig:
    """The objective alone, on the small runs' network and optimiser."""
    left = {key: value for key, value in SMALL.items() if key not in {"n_components", *METHODS[name].objective}}
    config = with_method(with_settings(TrainConfig(), **left), name, recipe=False)
    return with_settings(config, **({"embedding_dim": 16, "hidden_dim": 32} | SIZES.get(name, {}) | settings))


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_trains_and_goes_on_bit_for_bit(name: MethodName, tmp_path: Path) -> None:
    config = small_method(name, epochs=3)
    whole = run_through(prepared(config, folder=tmp_path / "whole"))
    assert all(np.isfinite(row["loss"]) for row in whole.metrics)
    stopped(prepared(config, folder=tmp_path / "parts"), 2 * STEPS + 1)
    rest = run_through(resumed(config, tmp_path / "parts"))
    check_same_bits(everything(rest), everything(whole))
    assert measured(rest) == measured(whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_learns_the_digits(name: MethodName) -> None:
    """Without collapse: its features tell digits apart, and spread over many directions."""
    from sklearn.datasets import load_digits

    from siammm.data.sources import open_source
    from siammm.learn.loop import Training

    sizes: dict[str, dict[str, Any]] = {
        "swav": {"n_prototypes": 100, "queue_size": 512},
        "deepcluster-v2": {"n_components": 100, "more_components": (100,)},
        "pcl": {"n_components": 40, "more_components": (80,), "queue_size": 256},
        "propos": {"n_components": 10},
    }
    after = {} if name in ("pcl", "propos") else {"cluster_after": 0.0}
    config = with_method(PRESETS["demo"], name, recipe=False)
    config = with_settings(config, data="digits", epochs=6, **after, **sizes.get(name, {}))
    check_settings(config)
    source = open_source("digits")
    source.labels = None
    training = Training(config, source, torch.device("cpu"))
    trained = training.run()
    features = encode(trained.network, training.loader, "features")
    digits = torch.from_numpy(np.asarray(load_digits(return_X_y=True)[1]))
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    held, rest = order[:300], order[300:]
    assert knn_accuracy(features[held], digits[held], features[rest], digits[rest], k=5, temperature=0.07) > 0.94
    assert training.metrics[-1]["effective_rank"] > 4


def test_prototypes_stand_still_for_an_epoch() -> None:
    training = prepared(small_method("swav", epochs=2, weight_decay=0.0))
    assert training.network.prototypes is not None
    start = training.network.prototypes.weight.detach().clone()
    seen: list[bool] = []
    training.listener.finished_epoch = lambda row: seen.append(  # type: ignore[method-assign]
        torch.equal(training.network.prototypes.weight, start)  # pyright: ignore[reportOptionalMemberAccess]
    )
    training.run()
    assert seen == [True, False]


def test_further_clusterings_train_but_the_first_is_what_a_run_leaves() -> None:
    training = prepared(small_method("deepcluster-v2", epochs=1))
    trained = training.run()
    assert [c.n_start for c in training.clusterings] == [6, 8]
    assert trained.mixture is not None
    assert trained.mixture.n_components_ <= 6
    assert not torch.equal(training.clusterings[0].mu_KD[0], training.clusterings[1].mu_KD[0])


def test_a_mixture_is_kept_only_where_it_is_trained_with() -> None:
    assert prepared(small_method("swav", epochs=1)).run().mixture is None
    assert prepared(small_method("byol", epochs=1)).run().mixture is None


def test_noise_depends_on_seed_epoch_and_image_alone() -> None:
    training = prepared(small_method("propos", predictor_noise=0.5, epochs=1))
    position = torch.arange(8)
    noise = training.step._noise(position)
    again = training.step._noise(position.flip(0))
    assert noise is not None
    assert again is not None
    assert torch.equal(noise[0], again[0].flip(0))
    assert not torch.equal(noise[0], noise[1])
    assert abs(float(torch.cat(noise).std()) - 0.5) < 0.1


# -- settings


@pytest.mark.parametrize("preset", ["cifar", "imagenet-200"])
@pytest.mark.parametrize("name", PEERS)
def test_a_method_survives_being_stored_and_differs_from_its_preset_in_nothing(name: MethodName, preset: Any) -> None:
    config = with_method(PRESETS[preset], name)
    assert from_plain(as_plain(config), Path("config.json")) == config
    assert differing_settings(config) == {}
    if name != "propos":
        check_settings(config)


def test_the_recipe_is_the_papers_only_where_it_is_asked_for() -> None:
    small, large = PRESETS["cifar"], PRESETS["imagenet-200"]
    assert with_method(small, "simsiam", recipe=False).optimisation == small.optimisation
    assert with_method(small, "simsiam").optimisation.learning_rate == 0.03
    assert with_method(large, "simsiam").optimisation.learning_rate == 0.05
    assert with_method(small, "swav").optimisation == small.optimisation
    assert with_method(large, "swav").optimisation.learning_rate == 0.6


def test_the_command_starts_from_the_method_and_flags_win() -> None:
    config = parse(["train", "images", "--method", "swav", "--queue-size", "7"])
    assert isinstance(config, TrainConfig)
    assert (config.method, config.objective.cluster_loss, config.network.predictor_layers) == ("swav", "swapped", 0)
    assert config.objective.queue_size == 7


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("propos", {}, "must be told the number of clusters; give it with --n-components"),
        ("propos", {"n_components": 4, "merge": "auto"}, "--merge is auto; use none"),
        ("swav", {"predictor_layers": 2}, "--predictor-layers is 2; use 0, or --method swav"),
        ("pcl", {"queue_size": -1}, "--queue-size is -1, but it must be at least 0"),
    ],
)
def test_what_a_method_cannot_have_is_refused(name: MethodName, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_settings(with_settings(with_method(PRESETS["cifar"], name), **settings))


def test_more_components_than_images_are_refused() -> None:
    with pytest.raises(InputError, match="--more-components is 99, but it must be from 1 to the number of images, 32"):
        prepared(small_method("deepcluster-v2", more_components=(99,)))
