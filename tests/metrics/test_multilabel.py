"""Average precision and one SVM a class: equal to scikit-learn's, and to VOC07's rule written out."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score
from sklearn.svm import LinearSVC

from siammm.core.errors import InputError
from siammm.metrics.multilabel import SvmSettings, average_precision, svm_map


def tasks(n: int, d: int = 12, c: int = 4, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features, and classes that a line cuts out with some errors: several to an image."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d))
    cut = np.random.default_rng(99).normal(size=(d, c))
    return x, (x @ cut + rng.normal(size=(n, c)) > 1.5).astype(np.int64)


def by_the_rule(scores: np.ndarray, targets: np.ndarray, points: int) -> float:
    """VOC07's average precision, a level of recall after the other; scores are all different."""
    order = np.argsort(-scores)
    found = np.cumsum(targets[order])
    precision, recall = found / np.arange(1, len(order) + 1), found / found[-1]
    levels = [level / (points - 1) for level in range(points)]
    return float(np.mean([precision[recall >= level - 1e-12].max() for level in levels]))


# -- average precision


@pytest.mark.parametrize("seed", range(5))
def test_average_precision_is_scikit_learns(seed: int) -> None:
    rng = np.random.default_rng(seed)
    targets = (rng.random(200) < 0.2).astype(int)
    for scores in (rng.normal(size=200) + targets, rng.integers(0, 5, 200), np.zeros(200)):
        expected = average_precision_score(targets, scores)
        assert average_precision(scores, targets) == pytest.approx(expected, abs=1e-12)
        assert average_precision(torch.from_numpy(scores), torch.from_numpy(targets)) == pytest.approx(expected)


@pytest.mark.parametrize("points", [2, 5, 11, 101])
def test_levels_of_recall_by_the_rule(points: int) -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        targets = (rng.random(60) < 0.3).astype(int)
        scores = rng.permutation(60) + 20.5 * targets
        expected = by_the_rule(scores, targets, points)
        assert average_precision(scores, targets, points=points) == pytest.approx(expected, abs=1e-12)


def test_known_values() -> None:
    perfect, reversed_ = np.array([4.0, 3, 2, 1]), np.array([1.0, 2, 3, 4])
    targets = np.array([1, 1, 0, 0])
    assert average_precision(perfect, targets) == average_precision(perfect, targets, points=11) == 1.0
    assert average_precision(reversed_, targets) == pytest.approx((1 / 3 + 2 / 4) / 2)
    # The best precision at or beyond any recall is that of the last place.
    assert average_precision(reversed_, targets, points=11) == pytest.approx(0.5)
    # Three of ten found first: exactly the level 0.3, which 0.1 * 3 is not in floating point.
    ten = np.array([1, 1, 1] + [0] * 20 + [1] * 7)
    expected = (4 * 1.0 + 7 * 10 / 30) / 11
    assert average_precision(-np.arange(30.0), ten, points=11) == pytest.approx(expected)


def test_difficult_images_count_neither_way() -> None:
    scores, targets = np.random.default_rng(0).normal(size=50), np.array([1, 0, -1, 0, 0] * 10)
    kept = targets >= 0
    for points in (None, 11):
        assert average_precision(scores, targets, points=points) == average_precision(
            scores[kept], targets[kept], points=points
        )


def test_what_has_no_average_precision() -> None:
    with pytest.raises(InputError, match="None of the 3 images has the class"):
        average_precision(np.arange(4.0), np.array([0, 0, -1, 0]))
    with pytest.raises(InputError, match="1 \\(there\\), 0 \\(not there\\) or -1"):
        average_precision(np.arange(2.0), np.array([0, 2]))
    with pytest.raises(InputError, match="3 scores for 2 targets"):
        average_precision(np.arange(3.0), np.array([0, 1]))
    with pytest.raises(InputError, match="NaN"):
        average_precision(np.array([0.0, np.nan]), np.array([0, 1]))


# -- SVMs


def peer_map(x: np.ndarray, y: np.ndarray, test: np.ndarray, test_y: np.ndarray, cost: float) -> float:
    """scikit-learn's own, with the difficult ones left out."""
    x, test = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (x, test))
    found = []
    for column in range(y.shape[1]):
        kept, judged = y[:, column] >= 0, test_y[:, column] >= 0
        svm = LinearSVC(C=cost, class_weight={1: 2, 0: 1}, max_iter=2000).fit(x[kept], y[kept, column])
        found.append(average_precision_score(test_y[judged, column], svm.decision_function(test[judged])))
    return float(np.mean(found))


@pytest.mark.parametrize(("cost", "difficult"), list(itertools.product([0.1, 1.0, 20.0], [False, True])))
def test_agrees_with_scikit_learn_at_the_same_cost(cost: float, difficult: bool) -> None:
    (x, y), (test, test_y) = tasks(150), tasks(120, seed=1)
    if difficult:
        y[np.random.default_rng(2).random(y.shape) < 0.1] = -1
        test_y[np.random.default_rng(3).random(test_y.shape) < 0.1] = -1
    result = svm_map(x, y, test, test_y, SvmSettings(costs=(cost,)))
    assert result.mean_average_precision == pytest.approx(peer_map(x, y, test, test_y, cost), abs=1e-6)
    assert set(result.costs.values()) == {cost}
    assert result.n_unconverged == 0
    assert (result.n_train, result.n_test) == (150, 120)


def test_cross_validation_chooses_without_the_test() -> None:
    (x, y), (test, test_y) = tasks(120, c=3), tasks(200, c=3, seed=1)
    settings = SvmSettings(costs=(1e-4, 0.1, 100.0))
    result = svm_map(torch.from_numpy(x), torch.from_numpy(y), test, test_y, settings, class_names=list("abc"))
    assert list(result.average_precision) == list(result.costs) == ["a", "b", "c"]
    assert set(result.costs.values()) <= set(settings.costs)
    assert result.mean_average_precision == pytest.approx(np.mean(list(result.average_precision.values())))
    assert result.mean_average_precision_11 == pytest.approx(np.mean(list(result.average_precision_11.values())))
    # Test targets turned round change the figures and nothing that was chosen.
    turned = svm_map(x, y, test, 1 - test_y, settings, class_names=list("abc"))
    assert turned.costs == result.costs
    assert turned.mean_average_precision < result.mean_average_precision
    # Far better than chance, which is the share of positives.
    assert result.mean_average_precision > 2 * test_y.mean()


def test_the_order_of_classes_does_not_matter() -> None:
    (x, y), (test, test_y) = tasks(90), tasks(90, seed=1)
    settings = SvmSettings(costs=(0.1, 1.0))
    one = svm_map(x, y, test, test_y, settings)
    other = svm_map(x, y[:, ::-1], test, test_y[:, ::-1], settings, class_names=["3", "2", "1", "0"])
    assert one.average_precision == other.average_precision


def test_the_length_of_features_makes_no_difference_but_without_normalising() -> None:
    (x, y), (test, test_y) = tasks(90), tasks(90, seed=1)
    scales = np.random.default_rng(5).uniform(0.1, 10, (90, 1))
    settings = SvmSettings(costs=(1.0,))
    plain, scaled = (svm_map(rows, y, test, test_y, settings).average_precision for rows in (x, x * scales))
    assert plain == pytest.approx(scaled)
    raw = SvmSettings(costs=(1.0,), normalise=False)
    assert svm_map(x, y, test, test_y, raw).average_precision != pytest.approx(plain)


def test_a_class_with_one_positive_takes_the_cost_nearest_to_one() -> None:
    (x, y), (test, test_y) = tasks(60, c=1), tasks(60, c=1, seed=1)
    y[:] = 0
    y[7] = 1
    assert svm_map(x, y, test, test_y, SvmSettings(costs=(0.01, 2.0, 50.0))).costs == {"0": 2.0}


def test_a_solver_that_is_stopped_is_counted() -> None:
    (x, y), (test, test_y) = tasks(30, d=40), tasks(30, d=40, seed=1)
    assert svm_map(x, y, test, test_y, SvmSettings(costs=(1000.0,), max_iter=2)).n_unconverged == 4


def test_progress_counts_classes() -> None:
    (x, y), (test, test_y) = tasks(60), tasks(60, seed=1)
    seen: list[tuple[int, int]] = []
    svm_map(x, y, test, test_y, SvmSettings(costs=(1.0,)), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test_targets": np.zeros((60, 3), int)}, "4 classes and the test targets 3"),
        ({"train_targets": np.zeros((60, 4), int)}, "No training image shows the class '0' (nor 3 others)"),
        ({"train_targets": np.ones((60, 4), int)}, "No training image is without the class '0'"),
        ({"test_targets": np.zeros((60, 4), int)}, "No test image shows the class '0'"),
        ({"train_targets": np.zeros((59, 4), int)}, "59 rows of training targets for 60 features"),
        ({"train_targets": np.zeros(60, int)}, "a column for each class"),
        ({"train_targets": np.full((60, 4), 3)}, "The targets hold"),
        ({"test_features": np.zeros((60, 5))}, "embed both with the same encoder"),
        ({"train_features": np.full((60, 12), np.nan)}, "60 of the 60 rows of the training features hold NaN"),
        ({"class_names": ["a", "b", "c"]}, "3 names for 4 classes"),
    ],
)
def test_what_cannot_be_fitted_is_refused(change: dict[str, Any], message: str) -> None:
    (x, y), (test, test_y) = tasks(60), tasks(60, seed=1)
    given: dict[str, Any] = {"train_features": x, "train_targets": y, "test_features": test, "test_targets": test_y}
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        svm_map(**(given | change))
    assert "\n" not in str(caught.value)


def test_settings_are_checked() -> None:
    for given, message in (
        ({"costs": ()}, "one or more"),
        ({"costs": (0.0,)}, "above 0"),
        ({"folds": 1}, "at least 2"),
        ({"positive_weight": 0}, "above 0"),
        ({"max_iter": 0}, "at least 1"),
    ):
        with pytest.raises(InputError, match=message):
            SvmSettings(**given)  # pyright: ignore[reportArgumentType]
