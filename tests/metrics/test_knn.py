"""The vote of the nearest: equal to scikit-learn's and to a loop, whatever the chunks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

from siammm.core.errors import InputError
from siammm.metrics import knn
from siammm.metrics.knn import RULES, knn_accuracies, knn_accuracy, knn_predict, knn_predictions

N_CLASSES = 4


def classes(n: int, d: int = 6, seed: int = 0, spread: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Overlapping classes, rows of any length."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, N_CLASSES, n)
    centres = np.random.default_rng(99).normal(size=(N_CLASSES, d))
    return (centres[y] + spread * rng.normal(size=(n, d))) * rng.uniform(0.1, 10, (n, 1)), y


def in_chunks(rows: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Score so many queries at once."""
    if rows is not None:
        monkeypatch.setattr(knn, "chunk_rows", lambda *_: rows)


def written_out(query: np.ndarray, bank: np.ndarray, labels: np.ndarray, k: int, temperature: float) -> np.ndarray:
    """One query after another, in float64."""
    query = query / np.linalg.norm(query, axis=1, keepdims=True)
    bank = bank / np.linalg.norm(bank, axis=1, keepdims=True)
    predicted = []
    for row in query:
        cosine = bank @ row
        nearest = np.argsort(-cosine, kind="stable")[:k]
        votes = np.bincount(labels[nearest], np.exp(cosine[nearest] / temperature), minlength=N_CLASSES)
        predicted.append(votes.argmax())
    return np.array(predicted)


@pytest.mark.parametrize("k", [1, 2, 5, 59, 60, 200])
@pytest.mark.parametrize("temperature", [0.02, 0.1, 1.0])
@pytest.mark.parametrize("chunk", [None, 1, 8, 33, 50])
def test_equal_to_the_vote_written_out(
    k: int, temperature: float, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where k is more than the bank's 60, and where the last chunk is short."""
    in_chunks(chunk, monkeypatch)
    (bank, labels), (query, _) = classes(60, seed=k), classes(33, seed=k + 5000)
    predicted = knn_predict(query, bank, labels, k=k, temperature=temperature)
    np.testing.assert_array_equal(predicted.numpy(), written_out(query, bank, labels, k, temperature))


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.1), (20, 0.1), (200, 0.07)])
def test_equal_to_scikit_learns(k: int, temperature: float) -> None:
    (bank, labels), (query, query_labels) = classes(800), classes(300, seed=1)

    def weigh(distance: np.ndarray) -> np.ndarray:
        return np.exp((1 - distance) / temperature)

    # scikit-learn's types know only the names of its own weights.
    reference = KNeighborsClassifier(k, metric="cosine", algorithm="brute", weights=cast(Any, weigh))
    reference.fit(bank, labels)
    expected = np.asarray(reference.predict(query))
    predicted = knn_predict(query, bank, labels, k=k, temperature=temperature)
    np.testing.assert_array_equal(predicted.numpy(), expected)
    accuracy = knn_accuracy(query, query_labels, bank, labels, k=k, temperature=temperature)
    assert accuracy == pytest.approx((expected == query_labels).mean())


@pytest.mark.parametrize("chunk", [None, 1, 7, 1000])
def test_leave_one_out_takes_each_query_out_of_the_bank(chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    in_chunks(chunk, monkeypatch)
    x, y = classes(50)
    expected = [written_out(x[i : i + 1], np.delete(x, i, 0), np.delete(y, i), 5, 0.1)[0] for i in range(len(x))]
    predicted = knn_predict(x, x, y, k=5, leave_one_out=True)
    np.testing.assert_array_equal(predicted.numpy(), expected)


def test_leave_one_out_is_not_fooled_by_labels_without_meaning() -> None:
    """Alone with itself every sample is right; left out, chance remains."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(600, 8)), rng.integers(0, N_CLASSES, 600)
    assert knn_accuracy(x, y, x, y, k=1) == 1
    assert knn_accuracy(x, y, x, y, k=1, leave_one_out=True) < 0.35


def test_leave_one_out_with_all_the_others_as_neighbours() -> None:
    """k is clipped to the others: nobody's vote is that of a sample for itself, which would be exp(-inf) or NaN."""
    x, y = classes(12)
    expected = [written_out(x[i : i + 1], np.delete(x, i, 0), np.delete(y, i), 99, 0.1)[0] for i in range(len(x))]
    np.testing.assert_array_equal(knn_predict(x, x, y, k=99, leave_one_out=True).numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_types_and_lengths_do_not_matter(dtype: torch.dtype) -> None:
    """Values that 16 bits hold exactly, scaled by powers of 2."""
    rng = np.random.default_rng(0)
    bank, labels = rng.integers(-8, 9, (90, 16)).astype(float), rng.integers(0, N_CLASSES, 90)
    query = rng.integers(-8, 9, (40, 16)).astype(float)
    expected = written_out(query, bank, labels, 10, 0.1)
    scaled = torch.tensor(bank).to(dtype) * 2.0 ** torch.arange(90).remainder(4)[:, None].to(dtype)
    predicted = knn_predict(torch.tensor(query).to(dtype), scaled, torch.tensor(labels, dtype=torch.uint8), k=10)
    assert predicted.dtype == torch.int64
    np.testing.assert_array_equal(predicted.numpy(), expected)
    with torch.autocast("cpu", torch.bfloat16):
        inside = knn_predict(torch.tensor(query).to(dtype), scaled, labels, k=10)
    assert torch.equal(inside, predicted)


def test_the_order_of_the_bank_does_not_matter() -> None:
    (bank, labels), (query, _) = classes(300), classes(100, seed=1)
    order = np.random.default_rng(2).permutation(300)
    predicted = knn_predict(query, bank, labels, k=20)
    assert torch.equal(knn_predict(query, bank[order], labels[order], k=20), predicted)
    assert torch.equal(knn_predict(query[::-1].copy(), bank, labels, k=20), predicted.flip(0))


def test_a_low_temperature_is_the_nearest_neighbour_and_does_not_overflow() -> None:
    (bank, labels), (query, _) = classes(200), classes(50, seed=1)
    cold = knn_predict(query, bank, labels, k=50, temperature=1e-6)
    assert torch.equal(cold, knn_predict(query, bank, labels, k=1))


def test_hot_votes_are_a_plain_majority_and_ties_go_to_the_smallest_label() -> None:
    bank = np.eye(4)
    predicted = knn_predict(np.ones((1, 4)), bank, np.array([3, 1, 1, 3]), k=4, temperature=100.0)
    assert predicted.tolist() == [1]


def test_classes_that_the_bank_lacks_are_never_predicted_and_count_as_wrong() -> None:
    x = classes(30)[0]
    predicted = knn_predict(x, x, np.zeros(30, int))
    assert (predicted == 0).all()
    assert knn_accuracy(x, np.full(30, 9), x, np.zeros(30, int)) == 0


def test_zero_rows_get_a_label_too() -> None:
    x, y = classes(30)
    x[3] = 0
    predicted = knn_predict(x, x, y, leave_one_out=True, k=3)
    assert 0 <= int(predicted[3]) < N_CLASSES


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_digits_come_out_as_with_scikit_learn(dtype: type, leave_one_out: bool) -> None:
    """By all of the papers' rules, in float32 too, where scikit-learn has float64.

    Ties are left out: queries whose k-th neighbour is as near as the next, but for float32's rounding.
    """
    x, y = map(np.asarray, load_digits(return_X_y=True))
    bank, query = (x, x) if leave_one_out else (x[:1200], x[1200:])
    labels, wanted = (y, y) if leave_one_out else (y[:1200], y[1200:])
    found = knn_predictions(query.astype(dtype), bank.astype(dtype), labels, leave_one_out=leave_one_out)
    accuracies = knn_accuracies(query.astype(dtype), wanted, bank.astype(dtype), labels, leave_one_out=leave_one_out)
    assert set(RULES) == {(20, 0.07), (20, 0.1), (200, 0.07), (200, 0.1)}
    for (k, temperature), predicted, accuracy in zip(RULES, found, accuracies, strict=True):
        reference = KNeighborsClassifier(
            k,
            metric="cosine",
            algorithm="brute",
            # scikit-learn's types know only the names of its own weights.
            weights=cast(Any, lambda distance, t=temperature: np.exp((1 - distance) / t)),
        ).fit(bank, labels)
        # Without queries it judges the bank, and leaves each sample out of its own neighbours.
        asked = cast(Any, None if leave_one_out else query)
        expected = np.asarray(reference.predict(asked))
        distance = reference.kneighbors(asked, k + 1)[0]
        certain = distance[:, k] - distance[:, k - 1] > 1e-6
        assert certain.mean() > 0.99
        right, as_right = predicted.numpy() == wanted, expected == wanted
        assert right[certain].mean() == pytest.approx(as_right[certain].mean(), abs=1e-6)
        assert accuracy == pytest.approx(as_right.mean(), abs=(~certain).mean() + 1e-6)
        assert accuracy > (0.95 if k == 20 else 0.9)


def test_embeddings_that_are_being_trained_are_taken() -> None:
    x, y = classes(30)
    predicted = knn_predict(torch.tensor(x, requires_grad=True), torch.tensor(x, requires_grad=True), y)
    assert not predicted.requires_grad


X, Y = classes(10)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: knn_predict(X[:, :3], X, Y), "queries have 3 dimensions and the bank 6"),
        (lambda: knn_predict(X[0], X, Y), r"The query embeddings have the shape \(6,\)"),
        (lambda: knn_predict(X, X[:0], Y[:0]), r"The bank embeddings have the shape \(0, 6\)"),
        (lambda: knn_predict(X, X.astype(int), Y), "The bank embeddings are torch.int64, but floating-point"),
        (
            lambda: knn_predict(X, np.where(X.mean() < X, np.nan, X), Y),
            "10 rows of the bank embeddings hold NaN",
        ),
        (lambda: knn_predict(X, X, Y[:4]), r"bank_labels has the shape \(4,\), but there are 10 embeddings"),
        (lambda: knn_predict(X, X, Y.astype(float)), "bank_labels holds torch.float64, but labels are whole numbers"),
        (lambda: knn_predict(X, X, Y - 9), "bank_labels holds -9, but labels start at 0"),
        (lambda: knn_predict(X, X, Y, k=0), "k is 0"),
        (lambda: knn_predict(X, X, Y, temperature=0.0), "temperature is 0.0"),
        (lambda: knn_predict(X[:4], X, Y, leave_one_out=True), "leave_one_out has 4 queries for a bank of 10"),
        (lambda: knn_predict(X[:1], X[:1], Y[:1], leave_one_out=True), "at least two"),
        (lambda: knn_accuracy(X, Y[:3], X, Y), r"query_labels has the shape \(3,\)"),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(InputError, match=says) as refused:
        call()
    assert re.fullmatch(r"[^\n]+\.", str(refused.value))


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_rules_share_one_search(leave_one_out: bool) -> None:
    bank, labels = classes(400)
    query, wanted = (bank, labels) if leave_one_out else classes(70, seed=1)
    rules = (*RULES, (1, 0.1), (1000, 0.5))
    together = knn_predictions(query, bank, labels, rules, leave_one_out=leave_one_out)
    for (k, temperature), found in zip(rules, together, strict=True):
        alone = knn_predict(query, bank, labels, k=k, temperature=temperature, leave_one_out=leave_one_out)
        assert torch.equal(found, alone)
    accuracies = knn_accuracies(query, wanted, bank, labels, rules, leave_one_out=leave_one_out)
    assert accuracies == [float(np.mean(found.numpy() == wanted)) for found in together]
    assert knn_predictions(query, bank, labels, []) == knn_accuracies(query, wanted, bank, labels, []) == []
