"""Algorithm 1: clusters in training, the bank, and what a listener is told."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from siammm.learn.filling import fill_bank
from siammm.learn.loop import Training
from siammm.learn.observers import Silent
from tests.learn.small_runs import STEPS, check_same_bits, prepared, run_through, small_config, small_images

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("merge", "floor", "centroids"),
    [("paper", 2, "consistent"), ("auto", 4, "consistent"), ("paper", 5, "reinitialised")],
)
def test_clusters_never_become_more_nor_fewer_than_the_floor(merge: str, floor: int, centroids: str) -> None:
    config = small_config(
        epochs=5, merge=merge, merge_floor=floor, merge_share=0.4, n_components=10, centroids=centroids
    )
    training = run_through(prepared(config))
    counts = [10, *(row["n_clusters"] for row in training.metrics)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] >= floor
    assert counts[-1] < 10
    assert training.metrics[-1]["occupied"] <= counts[-1]


def test_the_tree_of_merges_holds_every_merge() -> None:
    training = prepared(small_config(epochs=4))
    trained = training.run()
    assert trained.mixture is not None
    merges = trained.mixture.merges_
    assert merges is not None
    assert merges.n_components[0] == 12
    assert merges.n_components[-1] == training.metrics[-1]["n_clusters"] == trained.mixture.n_components_
    assert merges.n_merges == 12 - merges.n_components[-1]
    assert merges.linkage.shape == (11, 4)


def test_by_default_there_is_a_cluster_for_every_twelfth_image() -> None:
    training = prepared(small_config(epochs=1, n_components=None), small_images(100))
    assert training.clustering.n_start == 8


def test_the_bank_holds_the_momentum_embeddings_of_both_views() -> None:
    training = run_through(prepared(small_config(epochs=1)))
    lengths = training.bank.view_2ND[:, :-1].norm(dim=2)
    torch.testing.assert_close(lengths, torch.ones_like(lengths))
    assert not torch.equal(*training.bank.view_2ND[:, :-1].unbind())


def test_filling_the_bank_leaves_no_trace_in_the_network() -> None:
    training = prepared(small_config())
    before = {name: value.clone() for name, value in training.network.state_dict().items()}
    fill_bank(training)
    check_same_bits(before, training.network.state_dict())


def test_a_loss_that_falls() -> None:
    """Six epochs of four plain colours: the views of an image come together."""
    training = run_through(prepared(small_config(epochs=6)))
    losses = [row["instance_loss"] for row in training.metrics]
    assert losses[-1] < 0.9 * losses[0]


def test_the_listener_is_told_what_happens() -> None:
    told: list[tuple[Any, ...]] = []

    class Ear(Silent):
        def reading(self, done: int, total: int) -> None:
            told.append(("read", done, total))

        def began(self, training: Training) -> None:
            told.append(("began", training.epoch))

        def stepped(self, epoch: int, step: int, steps: int) -> None:
            told.append(("step", epoch, step, steps))

        def finished_epoch(self, row: dict[str, Any]) -> None:
            told.append(("epoch", row["epoch"]))

    run_through(prepared(small_config(), listener=Ear()))
    steps = [("step", epoch, step, STEPS) for epoch in (0, 1) for step in range(1, STEPS + 1)]
    assert told == [("began", 0), *steps[:STEPS], ("epoch", 1), *steps[STEPS:], ("epoch", 2)]


def test_settings_are_not_changed_by_a_run() -> None:
    config = small_config(epochs=1)
    before = dataclasses.asdict(config)
    run_through(prepared(config))
    assert dataclasses.asdict(config) == before
