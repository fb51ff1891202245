"""The quick linear probe: as good as scikit-learn's logistic regression, without a look at the test labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from siammm.core.errors import InputError
from siammm.metrics.knn import knn_accuracy
from siammm.metrics.labels import even_folds, numbered_together
from siammm.metrics.linear import (
    fit_linear,
    linear_accuracy,
    linear_scores,
    out_of_fold_probabilities,
    top_accuracies,
)

Digits = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def digits() -> Digits:
    images, labels = (np.asarray(array) for array in load_digits(return_X_y=True))
    order = np.random.default_rng(0).permutation(len(images))
    x, y = torch.from_numpy(images[order]).float(), torch.from_numpy(labels[order])
    return x[:1200], y[:1200], x[1200:], y[1200:]


def peer(train: torch.Tensor, labels: torch.Tensor, penalty: float) -> tuple[StandardScaler, LogisticRegression]:
    scaler = StandardScaler().fit(train.double().numpy())
    fitted = LogisticRegression(C=1 / (penalty * len(train)), max_iter=5000, tol=1e-8)
    return scaler, fitted.fit(scaler.transform(train.double().numpy()), labels.numpy())


# -- the fit


def test_within_half_a_point_of_scikit_learns(digits: Digits) -> None:
    """Of its default, C = 1; the penalty is chosen here and not there."""
    train, labels, test, test_labels = digits
    scaler, fitted = peer(train, labels, 1 / len(train))
    expected = fitted.score(scaler.transform(test.double().numpy()), test_labels.numpy())
    result = linear_scores(train, labels, test, test_labels)
    assert result.top1 == pytest.approx(expected, abs=0.005)
    assert result.top5 is not None
    assert result.top5 > 0.99
    assert (result.n_classes, result.n_train, result.n_test) == (10, 1200, 597)
    assert result.recipe["penalty"] in result.recipe["penalties_tried"]
    assert knn_accuracy(test, test_labels, train, labels, k=5) > 0.97


@pytest.mark.parametrize("penalty", [1e-3, 1e-2])
def test_equal_to_scikit_learn_with_the_same_penalty(digits: Digits, penalty: float) -> None:
    train, labels, test, _ = digits
    scaler, expected = peer(train, labels, penalty)
    fitted = fit_linear(train, labels, penalties=[penalty])
    np.testing.assert_allclose(
        fitted.logits(test).softmax(dim=1).numpy(),
        expected.predict_proba(scaler.transform(test.double().numpy())),
        atol=2e-3,
    )
    assert fitted.penalty == penalty


def test_the_scale_and_place_of_features_make_no_difference(digits: Digits) -> None:
    train, labels, test, test_labels = digits
    plain = linear_scores(train, labels, test, test_labels, penalties=(1e-3,)).top1
    moved = linear_scores(100 * train + 7, labels, 100 * test + 7, test_labels, penalties=(1e-3,)).top1
    assert moved == pytest.approx(plain, abs=0.002)


def test_many_features_are_judged_by_a_tenth(digits: Digits) -> None:
    train, labels, test, test_labels = digits
    some = [train[:, 8:40] + 0.1 * i for i in range(5)]
    result = linear_scores(torch.cat(some), labels.repeat(5), test[:, 8:40], test_labels, penalties=(1e-2, 1e-1))
    assert result.n_train == 6000
    assert result.top1 > 0.8


def test_test_labels_choose_nothing(digits: Digits) -> None:
    train, labels, test, test_labels = (part[:300] for part in digits)
    one = linear_scores(train, labels, test, test_labels, penalties=(1e-3, 1e-1))
    assert linear_accuracy(train, labels, test, test_labels) == linear_scores(train, labels, test, test_labels).top1
    other = linear_scores(train, labels, test, (test_labels + 1) % 10, penalties=(1e-3, 1e-1))
    assert one.recipe == other.recipe


def test_labels_may_be_names_and_top_five_needs_more_than_five_classes(digits: Digits) -> None:
    train, labels, test, test_labels = (part[:300] for part in digits)
    few, test_few = labels < 5, test_labels < 5
    names = [f"digit {label}" for label in labels[few].tolist()]
    test_names = [f"digit {label}" for label in test_labels[test_few].tolist()]
    named = linear_scores(train[few], names, test[test_few], test_names, penalties=(1e-2,))
    numbered = linear_scores(train[few], labels[few], test[test_few], test_labels[test_few], penalties=(1e-2,))
    assert (named.top1, named.top5, named.n_classes) == (numbered.top1, None, 5)


def test_numbers_with_gaps_and_a_class_that_only_the_test_has(digits: Digits) -> None:
    train, labels, test, test_labels = (part[:300] for part in digits)
    plain = linear_scores(train, labels, test, test_labels, penalties=(1e-2,)).top1
    assert linear_scores(train, labels * 100, test, test_labels * 100, penalties=(1e-2,)).top1 == plain
    known = labels != 3
    without = linear_scores(train[known], labels[known], test, test_labels, penalties=(1e-2,)).top1
    assert without <= 1 - float((test_labels == 3).double().mean())


def test_top_accuracies_written_out() -> None:
    logits = torch.tensor([[6.0, 5, 4, 3, 2, 1], [1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]])
    assert top_accuracies(logits, torch.tensor([0, 0, 4])) == (pytest.approx(1 / 3), pytest.approx(2 / 3))


# -- probabilities of what was not seen


def test_folds_are_even_over_each_class_and_over_all() -> None:
    labels = np.repeat(np.arange(7), [1, 2, 3, 5, 8, 13, 20])
    fold = even_folds(np.random.default_rng(0).permutation(labels), 5, seed=1)
    assert np.ptp(np.bincount(fold.numpy(), minlength=5)) <= 1
    shuffled = np.random.default_rng(0).permutation(labels)
    for label in range(7):
        assert np.ptp(np.bincount(fold.numpy()[shuffled == label], minlength=5)) <= 1
    assert torch.equal(even_folds(shuffled, 5, seed=1), fold)
    assert not torch.equal(even_folds(shuffled, 5, seed=2), fold)


def test_out_of_fold_probabilities(digits: Digits) -> None:
    """They sum to one, find most labels, and doubt a wrong one."""
    train, labels = digits[0][:400], digits[1][:400]
    wrong = labels.clone()
    wrong[::20] = (wrong[::20] + 1) % 10
    probability = out_of_fold_probabilities(train.numpy(), wrong.numpy(), penalties=(1e-3, 1e-2))
    assert probability.shape == (400, 10)
    torch.testing.assert_close(probability.sum(dim=1), torch.ones_like(probability[:, 0]))
    given = probability.gather(1, wrong[:, None])[:, 0]
    assert float(given[::20].median()) < 0.05
    assert float(given[wrong == labels].median()) > 0.85
    again = out_of_fold_probabilities(train, wrong, penalties=(1e-3, 1e-2))
    torch.testing.assert_close(probability, again)


def test_a_label_is_not_seen_by_what_judges_it() -> None:
    """With labels drawn by lot, features that tell images apart find nothing beyond chance."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(200, 300)), rng.integers(0, 2, 200)
    found = out_of_fold_probabilities(x, y, penalties=(1e-4, 1e-2)).argmax(dim=1).numpy() == y
    assert found.mean() < 0.62
    assert float((fit_linear(x, y, penalties=(1e-4,)).logits(x).argmax(dim=1).numpy() == y).mean()) == 1


def test_a_class_of_one_feature_and_one_of_none(digits: Digits) -> None:
    train, labels = digits[0][:60], digits[1][:60].clone()
    labels[labels > 3] = 0
    labels[5] = 7
    probability = out_of_fold_probabilities(train, labels, penalties=(1e-2,))
    assert probability.shape == (60, 8)
    assert float(probability[5, 7]) == 0
    assert float(probability[:, [4, 5, 6]].abs().max()) == 0
    assert bool(probability.isfinite().all())


# -- what is refused


def test_what_cannot_be_probed_is_refused(digits: Digits) -> None:
    train, labels, test, test_labels = digits
    with pytest.raises(InputError, match="64 columns and the test features 5"):
        linear_accuracy(train, labels, test[:, :5], test_labels)
    with pytest.raises(InputError, match="needs 20 or more"):
        linear_accuracy(train[:10], labels[:10], test, labels.new_zeros(len(test)) + labels[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"train_labels": torch.zeros(300, dtype=torch.int64), "test_labels": torch.zeros(300).long()},
            "one class",
        ),
        ({"train_labels": None}, "The training images have no labels"),
        ({"test_labels": None}, "The test images have no labels"),
        ({"train_labels": torch.arange(300) % 3 - 1}, "100 of the 300 training images have no label"),
        ({"train_labels": [0, 1, -1, None] * 75}, "150 of the 300 training images have no label"),
        ({"test_labels": ["a", None, ""] * 100}, "200 of the 300 test images have no label"),
        ({"train_labels": torch.arange(299)}, "299 labels for 300 training images"),
        (
            {"train_labels": torch.arange(300), "test_labels": torch.arange(1, 301)},
            "300 training images for 301 classes",
        ),
        ({"train": torch.full((300, 64), torch.nan)}, "300 of the 300 rows of the training features hold NaN"),
        ({"train": torch.zeros(300)}, "one row of numbers per image"),
        ({"penalties": ()}, "one or more"),
    ],
)
def test_in_one_sentence(digits: Digits, change: dict[str, Any], message: str) -> None:
    train, labels, test, test_labels = (part[:300] for part in digits)
    given: dict[str, Any] = {
        "train": train,
        "train_labels": labels,
        "test": test,
        "test_labels": test_labels,
        "penalties": (1e-2,),
    }
    with pytest.raises(InputError, match=message) as caught:
        linear_scores(**(given | change))
    assert "\n" not in str(caught.value)


def test_fits_are_refused_too(digits: Digits) -> None:
    train, labels = digits[0][:100], digits[1][:100]
    for given, message in (
        (labels.float(), "whole numbers from 0"),
        (labels - 1, "have no label"),
        (labels[:50], "50 labels for 100 features"),
        (labels.new_zeros(100), "one class"),
    ):
        with pytest.raises(InputError, match=message):
            fit_linear(train, given)
    with pytest.raises(InputError, match="with 5 classes the largest is 4"):
        fit_linear(train, labels, n_classes=5)
    with pytest.raises(InputError, match="5 columns, but the classifier was fitted on 64"):
        fit_linear(train, labels, penalties=(1e-1,)).logits(train[:, :5])


def test_two_sets_are_numbered_together() -> None:
    train, test, classes = numbered_together(["b", "a", "b"], ["a", "b"], 3, 2)
    assert [classes[i] for i in train] == ["b", "a", "b"]
    assert [classes[i] for i in test] == ["a", "b"]
