"""Groups in training: found once, settled every epoch, drawn apart by the images that are sure of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from siammm.core.errors import InputError
from siammm.learn.grouping import CONFIDENT, Grouping
from siammm.learn.loop import Training
from siammm.metrics import clustering_scores
from siammm.mixture.samples import Samples
from siammm.settings.checks import check_settings
from siammm.settings.fields import with_settings
from siammm.settings.training import TrainConfig
from tests.learn.small_runs import (
    STEPS,
    check_same_bits,
    check_same_run,
    measured,
    prepared,
    resumed,
    run_through,
    small_config,
    small_images,
    stopped,
)

CPU = torch.device("cpu")
N_IMAGES, KINDS = 128, 4


def config(**settings: Any) -> TrainConfig:
    """Groups from the middle on, of 128 images of four colours; fewer are too few to look for groups in."""
    return small_config(**({"epochs": 4, "batch_size": N_IMAGES // STEPS, "group_after": 0.5} | settings))


def grouped(**settings: Any) -> Training:
    return prepared(config(**settings), small_images(N_IMAGES))


def kinds(n: int = 600, d: int = 16, noise: float = 0.15) -> tuple[Tensor, np.ndarray]:
    """Directions of four kinds, and the kind of each."""
    torch.manual_seed(0)
    kind_N = torch.arange(n) % KINDS
    centre_GD = torch.nn.functional.normalize(torch.randn(KINDS, d), dim=1)
    return torch.nn.functional.normalize(centre_GD[kind_N] + noise * torch.randn(n, d), dim=1), kind_N.numpy()


def samples(x_ND: Tensor) -> Samples:
    return Samples(x_ND, device=CPU, unit=True, name="the embeddings")


@pytest.fixture(scope="module")
def found() -> tuple[Grouping, Tensor, np.ndarray]:
    x_ND, kind_N = kinds()
    grouping = Grouping.found(x_ND, CPU, seed=0)
    assert grouping is not None
    return grouping, x_ND, kind_N


def test_the_number_is_found_and_every_image_is_with_its_kind(found: tuple[Grouping, Tensor, np.ndarray]) -> None:
    grouping, x_ND, kind_N = found
    grouping.expectation_and_maximisation(samples(x_ND), progress=0.0)
    assert grouping.n_groups == KINDS
    assert clustering_scores(kind_N, grouping.group_N.numpy()).ami > 0.95
    torch.testing.assert_close(grouping.mu_GD.norm(dim=1), torch.ones(KINDS))


@pytest.mark.parametrize(("progress", "share"), [(0.0, CONFIDENT[0]), (1.0, CONFIDENT[1])])
def test_a_share_of_each_group_is_sure(
    progress: float, share: float, found: tuple[Grouping, Tensor, np.ndarray]
) -> None:
    """Those that are nearest to their own direction, beside the next."""
    grouping, x_ND, _ = found
    grouping.expectation_and_maximisation(samples(x_ND), progress=progress)
    best_N2 = (x_ND @ grouping.mu_GD.T).topk(2, dim=1).values
    margin_N = best_N2[:, 0] - best_N2[:, 1]
    for group in range(KINDS):
        inside = grouping.group_N == group
        sure = inside & (grouping.weight_N > 0)
        assert int(sure.sum()) == round(share * int(inside.sum()))
        assert margin_N[sure].min() >= margin_N[inside & ~sure].max()


def test_a_direction_is_the_mean_of_the_sure_and_stays_where_nobody_is() -> None:
    x_ND, _ = kinds()
    grouping = Grouping(KINDS + 1, len(x_ND), x_ND.shape[1], CPU)
    alone = torch.nn.functional.normalize(-x_ND.mean(dim=0), dim=0)
    grouping.mu_GD.copy_(torch.cat([x_ND[:KINDS], alone[None]]))  # one image of each kind
    grouping.expectation_and_maximisation(samples(x_ND), progress=1.0)
    assert grouping.n_groups == KINDS
    assert torch.equal(grouping.mu_GD[KINDS], alone)
    sure = (grouping.group_N == 0) & (grouping.weight_N > 0)
    assert float(torch.nn.functional.cosine_similarity(grouping.mu_GD[0], x_ND[sure].mean(dim=0), dim=0)) > 0.999


def test_a_single_cloud_has_no_groups() -> None:
    torch.manual_seed(0)
    cloud = torch.nn.functional.normalize(torch.randn(600, 16), dim=1)
    assert Grouping.found(cloud, CPU, seed=0) is None


def test_what_training_leaves_is_a_rule_for_new_samples(found: tuple[Grouping, Tensor, np.ndarray]) -> None:
    grouping, x_ND, kind_N = found
    groups = grouping.finish(samples(x_ND))
    assert groups.n_groups == KINDS
    assert groups.ratio == grouping.ratio < 0.65
    group_N = groups.predict(3 * x_ND, None)  # of any length
    np.testing.assert_array_equal(group_N, grouping.group_N.numpy())
    assert clustering_scores(kind_N, group_N).ami > 0.95
    assert groups.predict_proba(x_ND).max(axis=1).mean() > 0.9


@pytest.mark.parametrize("levels", ["groups", "both"])
def test_a_run_finds_its_groups(levels: str) -> None:
    training = grouped(group_levels=levels)
    trained = training.run()
    assert [row.get("n_groups") for row in training.metrics] == [None, None, KINDS, KINDS]
    assert trained.groups is not None
    assert trained.groups.n_groups == KINDS
    assert trained.mixture is not None
    assert trained.mixture.n_components_ >= KINDS
    assert set(trained.groups.label_K.tolist()) == set(range(KINDS))  # each group has a cluster
    assert trained.group_labels is not None
    assert set(trained.group_labels.tolist()) == set(range(KINDS))


def test_the_loss_is_that_of_the_levels_that_count() -> None:
    """Until groups begin, all runs are the same; then the cluster loss is left out or kept, and groups are weighed."""
    settings = [{"group_after": 1.0}, {}, {"group_levels": "both"}, {"group_weight": 0.0}]
    runs = [run_through(grouped(**({"epochs": 3, "group_after": 0.7} | given))) for given in settings]
    before = [[row["loss"] for row in run.metrics[:2]] for run in runs]
    assert before == [before[0]] * len(runs)
    last = [run.metrics[2]["loss"] for run in runs]
    assert len(set(last)) == len(runs)
    row = runs[3].metrics[2]
    assert row["loss"] == pytest.approx(row["instance_loss"])


def test_without_groups_training_goes_on_with_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Grouping, "found", classmethod(lambda cls, *args, **more: None))
    training, plain = grouped(epochs=2), grouped(epochs=2, group_after=1.0)
    assert measured(run_through(training)) == measured(run_through(plain))


@pytest.mark.parametrize("after", [2 * STEPS, 2 * STEPS + 1, 3 * STEPS + 2])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(after: int, tmp_path: Path) -> None:
    images = small_images(N_IMAGES)
    whole = run_through(grouped())
    stopped(prepared(config(), images, folder=tmp_path / "parts"), after)
    rest = run_through(resumed(config(), tmp_path / "parts", images))
    check_same_run(rest, whole)
    assert rest.grouping is not None
    assert whole.grouping is not None
    check_same_bits(rest.grouping.as_tensors(), whole.grouping.as_tensors())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"group_after": 0.1, "cluster_after": 0.25},
            "--group-after is 0.1, but clusters begin at --cluster-after 0.25",
        ),
        ({"group_after": 0.5, "cluster_loss": "none"}, "--group-after is 0.5, but --cluster-loss none fits no mixture"),
        ({"group_after": 1.5}, "--group-after is 1.5"),
        ({"group_after": 0.5, "group_weight": -1.0}, "--group-weight is -1.0"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        check_settings(with_settings(TrainConfig(), **settings))
