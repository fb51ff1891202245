"""SiamMM's peers as settings of the one trainer: each trains, goes on where it was stopped, and says what it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from siammm.cli import parse
from siammm.core.errors import InputError
from siammm.learn.encode import encode
from siammm.learn.filling import fill_bank
from siammm.learn.objective import batch_loss
from siammm.metrics.knn import knn_accuracy
from siammm.settings.checks import check_settings
from siammm.settings.fields import with_settings
from siammm.settings.methods import METHODS, differing_settings, with_method
from siammm.settings.presets import PRESETS
from siammm.settings.stored import as_plain, from_plain
from siammm.settings.training import MethodName, TrainConfig
from tests.learn.small_runs import STEPS, check_same_run, prepared, resumed, run_through, stopped
from tests.settings.small_methods import PEERS, small_method


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_trains_and_goes_on_bit_for_bit(name: MethodName, tmp_path: Path) -> None:
    config = small_method(name, epochs=3)
    whole = run_through(prepared(config, folder=tmp_path / "whole"))
    assert all(np.isfinite(row["loss"]) for row in whole.metrics)
    stopped(prepared(config, folder=tmp_path / "parts"), 2 * STEPS + 1)
    rest = run_through(resumed(config, tmp_path / "parts"))
    check_same_run(rest, whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_does_not_collapse_on_the_digits(name: MethodName) -> None:
    """Its features still tell digits apart, and spread over many directions.

    This shows no learning: an untrained network has a kNN accuracy of .967 here, and a peer may lose a little of that.
    """
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
    assert training.metrics[-1]["effective_rank"] > 3  # six epochs are few; a collapsed encoder has 1


@pytest.mark.parametrize("optimiser", ["sgd", "lars"])
def test_prototypes_stand_still_for_an_epoch(optimiser: str) -> None:
    """Under decay too, which LARS rescales to full steps where there is no gradient beside it."""
    config = small_method("swav", epochs=2, weight_decay=0.1, optimiser=optimiser, warmup_epochs=0, learning_rate=20.0)
    training = prepared(config)
    prototypes = training.network.prototypes
    assert prototypes is not None
    start = prototypes.weight.detach().clone()
    seen: list[float] = []
    training.listener.finished_epoch = lambda row: seen.append(  # type: ignore[method-assign]
        float((prototypes.weight.detach() - start).abs().max())
    )
    run_through(training)
    assert seen[0] < 1e-5 < 1e-4 < seen[1]
    torch.testing.assert_close(prototypes.weight.detach().norm(dim=1), torch.ones(10))


def test_codes_are_balanced_with_a_queue_only_once_it_is_full_and_due() -> None:
    training = prepared(small_method("swav", epochs=4, queue_after=0.5, queue_size=12))
    queue, epoch = training.queue, torch.zeros((), dtype=torch.int64)
    assert queue is not None

    def counts() -> float:
        counts = queue.read(training.network, epoch).counts
        assert counts is not None
        return float(counts)

    epoch.fill_(2)
    assert counts() == 0
    rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    queue.push(rows, rows)
    assert counts() == 0
    queue.push(rows, rows)
    assert counts() == 1
    epoch.fill_(1)
    assert counts() == 0


def test_scattering_is_of_the_projections_and_leaves_the_predictor_alone() -> None:
    training = prepared(small_method("propos", epochs=1, cluster_after=0.0))
    fill_bank(training)
    training.clustering.expectation_and_maximisation(training.samples())
    x_1, x_2 = (torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    network, objective = training.network, training.config.objective
    predictions = network(x_1, x_2)
    targets = network.targets(x_1, x_2, predictions.z_1, predictions.z_2)
    loss = batch_loss(objective, predictions, targets, torch.arange(8), training.clusterings, clustered=True)
    loss.cluster.backward()
    assert network.predictor is not None
    assert all(p.grad is None for p in network.predictor.parameters())
    assert any(float(p.grad.abs().max()) > 0 for p in network.encoder.parameters() if p.grad is not None)


def test_losses_are_in_the_ratio_of_their_papers() -> None:
    """PCL adds the two as they are, where ours of the instances is 2 tau times that; ProPos adds a tenth of means."""
    pcl, propos = (with_method(PRESETS["cifar"], name).objective for name in ("pcl", "propos"))
    assert pcl.cluster_weight == 2 * pcl.contrastive_temperature
    assert propos.cluster_weight == 0.1 / 2


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
    noise = training._noise(position)
    again = training._noise(position.flip(0))
    assert noise is not None
    assert again is not None
    assert torch.equal(noise[0], again[0].flip(0))
    assert not torch.equal(noise[0], noise[1])
    assert abs(float(torch.cat(noise).std()) - 0.5) < 0.1


# -- settings


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", PEERS)
def test_a_method_survives_being_stored_and_differs_from_its_preset_in_nothing(name: MethodName, preset: Any) -> None:
    config = with_method(PRESETS[preset], name)
    assert from_plain(as_plain(config), Path("config.json")) == config
    assert differing_settings(config) == {}
    check_settings(with_settings(config, n_components=10) if name == "propos" else config)


@pytest.mark.parametrize("preset", PRESETS.values(), ids=list(PRESETS))
def test_siammm_is_the_preset_itself(preset: TrainConfig) -> None:
    assert with_method(preset, "siammm") == preset


def test_heads_and_losses_are_the_papers_under_every_preset() -> None:
    for preset in PRESETS.values():
        losses = {name: with_method(preset, name).objective.instance_loss for name in PEERS}
        assert losses == {
            "byol": "cosine", "simsiam": "simsiam", "moco-v3": "contrastive", "swav": "none", "deepcluster-v2": "none",
            "pcl": "contrastive", "propos": "cosine",
        }  # fmt: skip
        simsiam = with_method(preset, "simsiam").network
        assert (simsiam.hidden_dim, simsiam.embedding_dim, simsiam.predictor_hidden_dim) == (2048, 2048, 512)
        norms = {name: with_method(preset, name).network.projector_norm for name in METHODS}
        assert [name for name, norm in norms.items() if norm == "plain"] == ["siammm", "simsiam", "moco-v3"]
        objectives = {name: with_method(preset, name).objective for name in PEERS}
        assert {objective.contrastive_temperature_end for objective in objectives.values()} == {None}
        weights = {name: objective.cluster_weight for name, objective in objectives.items()}
        assert weights == dict.fromkeys(PEERS, 1.0) | {"pcl": 0.4, "propos": 0.05}


def test_settings_stored_before_there_were_methods_are_those_of_siammm() -> None:
    config = with_settings(PRESETS["cifar"], data="images")
    stored = as_plain(config)
    del stored["method"]
    for group, names in {
        "network": ["projector_norm", "predictor_hidden_dim", "predictor_noise", "momentum_encoder"],
        "objective": ["n_prototypes", "prototype_temperature", "queue_size", "queue_after"],
        "clustering": ["more_components"],
    }.items():
        for name in names:
            del stored[group][name]
    assert from_plain(stored, Path("config.json")) == config


def test_the_recipe_is_the_papers_only_where_it_is_asked_for() -> None:
    small, large = PRESETS["cifar"], PRESETS["imagenet-200"]
    assert with_method(small, "simsiam", recipe=False).optimisation == small.optimisation
    # The paper's .03 and .05, for a loss of half the size.
    assert with_method(small, "simsiam").optimisation.learning_rate == 0.015
    assert with_method(large, "simsiam").optimisation.learning_rate == 0.025
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
        ("propos", {}, "needs the number of clusters; set it with --n-components"),
        ("propos", {"n_components": 4, "merge": "auto"}, "--merge is auto; use none"),
        ("propos", {"n_components": 1}, "--n-components is 1; use at least 2"),
        ("swav", {"predictor_layers": 2}, "--predictor-layers is 2; use 0, or --method swav"),
        ("swav", {"n_prototypes": 1}, "--n-prototypes is 1, but it must be at least 2"),
        ("swav", {"more_components": (9,)}, "--cluster-loss swapped fits no mixture; leave it out"),
        ("pcl", {"queue_size": -1}, "--queue-size is -1, but it must be at least 0"),
        ("pcl", {"more_components": (9, 0)}, "--more-components is 0, but it must be at least 1"),
        ("byol", {"queue_size": 9}, "--queue-size is 9, but only"),
        ("byol", {"contrastive_temperature_end": 1.0}, "--instance-loss cosine has no temperature; use None"),
        ("moco-v3", {"contrastive_temperature_end": 0.0}, "--contrastive-temperature-end is 0.0, but it must be"),
        ("byol", {"momentum_encoder": False, "predictor_layers": 0}, "the embeddings collapse to one point"),
        ("simsiam", {"predictor_layers": 0}, "the embeddings collapse to one point"),
        ("propos", {"n_components": 4, "predictor_layers": 0}, "--predictor-noise is 0.001, but --predictor-layers"),
        ("propos", {"n_components": 4, "instance_loss": "none", "cluster_after": 0.0}, "does not train the predictor"),
    ],
)
def test_what_a_method_cannot_have_is_refused(name: MethodName, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_settings(with_settings(with_method(PRESETS["cifar"], name), **settings))


def test_a_queue_as_long_as_the_data_is_refused_where_its_rows_are_negatives() -> None:
    with pytest.raises(InputError, match="--queue-size is 32, but there are 32 images"):
        prepared(small_method("pcl", queue_size=32))
    prepared(small_method("swav", queue_size=32)).close()


def test_more_components_than_images_are_refused() -> None:
    with pytest.raises(InputError, match="--more-components is 99, but it must be from 1 to the number of images, 32"):
        prepared(small_method("deepcluster-v2", more_components=(99,)))
