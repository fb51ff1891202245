"""Every variant of the paper, and every switch of a training, trains."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from siammm.core.errors import InputError
from siammm.learn.loop import Trained, Training
from siammm.learn.muon import matrices
from siammm.learn.observers import Silent
from siammm.settings.checks import check_settings
from tests.learn.small_runs import N_IMAGES, STEPS, losses_of, prepared, run_through, small_config

pytestmark = pytest.mark.usefixtures("one_thread")


def test_muon_turns_the_backbone_and_leaves_the_heads_to_lars() -> None:
    training = prepared(small_config(optimiser="muon"))
    turned, weights, _ = training.optimiser.param_groups
    network = training.network
    assert {id(p) for p in turned["params"]} == {id(p) for p in matrices(network.encoder.backbone)}
    assert network.predictor is not None
    heads = [p for head in (network.encoder.projector, network.predictor) for p in head.parameters() if p.ndim > 1]
    assert len(heads) == 5
    assert {id(p) for p in heads} <= {id(p) for p in weights["params"]}


INSTANCE = ("none", "cosine", "simsiam", "contrastive")
CLUSTER = ("none", "mle", "nce-centroids", "nce-samples")


def check_measured(training: Training) -> None:
    assert all(math.isfinite(value) for row in training.metrics for value in row.values())
    clustered = training.config.objective.cluster_loss != "none"
    first = training.first_clustered
    for row in training.metrics:
        assert ("cluster_loss" in row) == ("n_clusters" in row) == (clustered and row["epoch"] > first)


def check_found(training: Training, trained: Trained) -> None:
    assert trained.embeddings.shape == (training.loader.n_images, training.config.network.embedding_dim)
    np.testing.assert_allclose(np.linalg.norm(trained.embeddings, axis=1), 1, atol=1e-5)
    if training.clustering.components is None:
        assert trained.mixture is trained.clusters is trained.probability is trained.outlier_score is None
        return
    assert trained.mixture is not None
    assert trained.clusters is not None
    assert trained.probability is not None
    assert trained.outlier_score is not None
    k = trained.mixture.n_components_
    assert 1 <= k <= training.clustering.n_start
    assert (trained.clusters.min(), trained.clusters.max()) >= (0, 0)
    assert trained.clusters.max() < k
    assert ((trained.probability > 0) & (trained.probability <= 1 + 1e-6)).all()
    assert ((trained.outlier_score >= 0) & (trained.outlier_score <= 1)).all()


@pytest.mark.parametrize("instance", INSTANCE)
@pytest.mark.parametrize("cluster", CLUSTER)
def test_every_pair_of_losses_trains(instance: str, cluster: str) -> None:
    config = small_config(epochs=1, instance_loss=instance, cluster_loss=cluster)
    if instance == cluster == "none":
        with pytest.raises(InputError, match="nothing to learn"):
            check_settings(config)
        return
    check_settings(config)
    training = prepared(config)
    before = [p.detach().clone() for p in training.network.encoder.parameters()]
    check_measured(run_through(training))
    assert (training.network.momentum_encoder is None) == (instance == "simsiam")
    assert (training.metrics[0]["instance_loss"] == 0) == (instance == "none")
    moved = [not torch.equal(a, b) for a, b in zip(before, training.network.encoder.parameters(), strict=True)]
    assert all(moved)


SWITCHES: dict[str, dict[str, Any]] = {
    "hard assignment": {"n_neighbours": 1},
    "many neighbours": {"n_neighbours": 12},
    "sharp": {"temperature": 0.001},
    "sizes": {"size_weighting": True},
    "literal concentrations": {"concentration_scale": "literal"},
    "large concentrations": {"concentration_scale": 20.0},
    "normaliser": {"normaliser": True},
    "literal with normaliser": {"normaliser": True, "concentration_scale": "literal"},
    "constant concentration": {"concentration": "constant"},
    "closed form": {"concentration": "closed-form"},
    "principal directions": {"concentration_dims": 4},
    "more directions than dimensions": {"concentration_dims": 150},
    "cluster weight": {"cluster_weight": 0.1},
    "few negatives": {"cluster_loss": "nce-centroids", "n_negatives": 3},
    "reinitialised": {"centroids": "reinitialised"},
    "reinitialised twice": {"centroids": "reinitialised", "n_init": 2},
    "several steps": {"em_steps": 3},
    "merge paper": {"merge": "paper", "merge_threshold": -1.2},
    "merge auto": {"merge": "auto"},
    "merge none": {"merge": "none"},
    "one cluster": {"n_components": 1},
    "a cluster an image": {"n_components": N_IMAGES},
    "clean embeddings": {"embeddings": "clean"},
    "clusters later": {"cluster_after": 0.5},
    "predictor with a norm": {"predictor_norm": "plain"},
    "one layer": {"projector_layers": 1, "predictor_layers": 1},
    "bf16": {"precision": "bf16"},
    "colours": {"augmentation": "32"},
    "blur": {"augmentation": "64"},
}
# Those that the end of a run depends on; the others are only taken through one epoch.
TO_THE_END = [
    "hard assignment", "principal directions", "reinitialised twice", "merge paper", "merge auto", "merge none",
    "one cluster", "a cluster an image", "clean embeddings", "clusters later", "clusters never",
]  # fmt: skip


@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_trains(name: str) -> None:
    config = small_config(epochs=1 + (name in TO_THE_END), **SWITCHES[name])
    check_settings(config)
    training = prepared(config)
    if name in TO_THE_END:
        check_found(training, training.run())
    else:
        run_through(training)
    check_measured(training)
    if name == "merge none":
        assert [row["n_clusters"] for row in training.metrics] == [12, 12]
        assert training.clustering.n_components == 12


def test_a_literal_constant_concentration_is_the_mean_of_all() -> None:
    config = small_config(epochs=1, concentration="constant", concentration_scale="literal", merge="none")
    training = run_through(prepared(config))
    table = training.clustering.kappa_K
    assert float(table.min()) == float(table.max()) > 2


def test_the_weight_of_the_clusters_is_in_the_loss() -> None:
    training = run_through(prepared(small_config(epochs=1, cluster_weight=0.25)))
    row = training.metrics[0]
    assert row["loss"] == pytest.approx(row["instance_loss"] + 0.25 * row["cluster_loss"], abs=1e-6)


def test_the_temperature_goes_to_its_end_along_a_cosine() -> None:
    settings = {"instance_loss": "contrastive", "contrastive_temperature": 0.2, "epochs": 2}
    seen: list[float] = []

    class Watch(Silent):
        def stepped(self, epoch: int, step: int, steps: int) -> None:
            seen.append(float(rising.schedule.temperature))  # pyright: ignore[reportArgumentType]

    rising = prepared(small_config(**settings, contrastive_temperature_end=1.0), listener=Watch())
    run_through(rising)
    assert seen == pytest.approx([0.6 - 0.4 * math.cos(math.pi * step / 8) for step in range(8)])
    # It is what the loss is computed with: one that stays trains as without.
    fixed, stays = (
        run_through(prepared(small_config(**settings, **more))) for more in ({}, {"contrastive_temperature_end": 0.2})
    )
    losses = [[row["instance_loss"] for row in training.metrics] for training in (fixed, stays, rising)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] != pytest.approx(losses[0], rel=1e-2)


def test_accumulation_makes_one_update_of_several_parts() -> None:
    training = run_through(prepared(small_config(epochs=1, accumulate=2, cluster_loss="none")))
    whole = run_through(prepared(small_config(epochs=1, cluster_loss="none")))
    assert training.steps_per_epoch == STEPS
    assert float(training.tally.totals[-1]) == STEPS
    # Equal but for BatchNorm, which sees a part at a time.
    assert losses_of(training) == pytest.approx(losses_of(whole), rel=0.1)
