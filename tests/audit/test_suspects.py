"""The audit of labels: nobody's own label is a witness, planted errors come first, and what is wrong is said."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.kernel_ridge import KernelRidge

from siammm.audit import Audit, audit, kernel, plant_errors
from siammm.audit import suspects as audits
from siammm.core.errors import InputError

N, D, C = 400, 8, 4


pytestmark = pytest.mark.usefixtures("one_thread_per_module")


def classes(n: int = N, seed: int = 0, spread: float = 0.35) -> tuple[np.ndarray, np.ndarray]:
    """Classes that touch a little."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, C, n)
    return (np.eye(C, D)[y] + spread * rng.normal(size=(n, D))).astype(np.float32), y


@pytest.fixture(scope="module")
def small() -> tuple[np.ndarray, np.ndarray, Audit, np.ndarray]:
    X, y = classes()
    given, is_planted = plant_errors(y, 0.1, seed=1)
    return X, given, audit(X, given), is_planted


# -- invariants


def test_what_it_says_of_every_image(small: Any) -> None:
    _, given, found, _ = small
    np.testing.assert_array_equal(found.image_N, np.arange(N))
    np.testing.assert_array_equal(found.label_N, given)
    assert sorted(found.rank_N) == list(range(1, N + 1))
    assert ((found.probability_N >= 0) & (found.probability_N <= 1)).all()
    np.testing.assert_allclose(found.probability_N, 1 / (1 + np.exp(found.score_N)), atol=1e-5)
    assert (np.diff(found.probability_N[found.order]) >= 0).all()
    assert tuple(found.witness_N) == tuple(found.weights) == ("neighbours", "linear", "kernel")
    for name, probability in found.witness_N.items():
        assert ((probability > 0) & (probability <= 1)).all(), name
    assert all(weight >= 0 for weight in found.weights.values())
    assert found.n_unlabelled == 0


def test_a_suggestion_differs_from_the_label_just_where_the_label_is_suspect(small: Any) -> None:
    found = small[2]
    np.testing.assert_array_equal(found.suggested_N != found.label_N, found.probability_N < found.threshold)
    assert found.n_suspects == (found.probability_N < 0.5).sum()


def test_planted_errors_come_first_and_are_put_right(small: Any) -> None:
    _, _, found, is_planted = small
    first = found.order[: is_planted.sum()]
    assert is_planted[first].mean() >= 0.8
    right = classes()[1]
    suspects = np.flatnonzero(is_planted & (found.probability_N < 0.5))
    assert (found.suggested_N[suspects] == right[suspects]).mean() > 0.9


def test_the_error_rate_is_estimated(small: Any) -> None:
    found, is_planted = small[2], small[3]
    assert found.error_rate == pytest.approx(0.1, abs=0.03)
    given = found.label_N
    assert found.error_rate == pytest.approx(float(found.error_rate_C @ np.bincount(given)) / N, abs=1e-6)
    truth = np.array([is_planted[given == c].mean() for c in range(C)])
    np.testing.assert_allclose(found.error_rate_C, truth, atol=0.06)


def test_labels_that_are_right_are_not_called_wrong() -> None:
    X, y = classes(spread=0.05)
    found = audit(X, y)
    assert found.n_suspects == 0
    assert found.error_rate < 0.01


@pytest.mark.parametrize("witness", ["neighbours", "kernel"])
def test_no_label_is_a_witness_for_itself(witness: str) -> None:
    """What a witness says about an image is the same whatever that image's own label is, but for how common it is."""
    X, y = classes(120)
    x, trust = torch.from_numpy(X), torch.ones(len(X))
    nearest = audits._nearest(torch.nn.functional.normalize(x, dim=1), 10)

    def says(labels: np.ndarray) -> torch.Tensor:
        label = torch.from_numpy(labels)
        if witness == "kernel":
            return kernel.left_out_scores(x, label, C, penalties=(1e-3,))
        return audits._votes(*nearest, label, C, trust)

    other = y.copy()
    other[7] = (y[7] + 1) % C
    before, after = says(y)[7], says(other)[7]
    # The prior and the shares of labels move by one image in 120; the votes of the others do not.
    torch.testing.assert_close(before, after, atol=0.12 if witness != "kernel" else 0.02, rtol=0)


def test_the_order_of_images_does_not_matter(small: Any) -> None:
    X, given, _, _ = small
    shuffle = np.random.default_rng(0).permutation(N)
    x, label = torch.from_numpy(X), torch.from_numpy(given)
    trust = torch.ones(N)
    nearest = audits._nearest(x, 7), audits._nearest(x[shuffle], 7)
    votes = [audits._votes(*near, y, C, trust) for near, y in zip(nearest, (label, label[shuffle]), strict=True)]
    torch.testing.assert_close(votes[0][shuffle], votes[1], atol=1e-5, rtol=0)


def test_images_without_a_label_take_no_part(small: Any) -> None:
    X, given, found, _ = small
    noise = np.full((5, D), 3.0, dtype=np.float32)
    more = np.concatenate([noise, X])
    again = audit(more, np.concatenate([np.full(5, -1), given]))
    assert again.n_unlabelled == 5
    np.testing.assert_array_equal(again.image_N, np.arange(5, N + 5))
    np.testing.assert_allclose(again.probability_N, found.probability_N, atol=1e-6)


def test_names_and_gaps_in_the_numbers(small: Any) -> None:
    X, given, found, _ = small
    again = audit(X, given * 3, class_names=[f"class {c}" for c in range(3 * C)])
    assert again.classes == ("class 0", "class 3", "class 6", "class 9")
    np.testing.assert_array_equal(again.rank_N, found.rank_N)
    assert found.classes == (0, 1, 2, 3)


def test_tensors_are_taken_too(small: Any) -> None:
    X, given, found, _ = small
    again = audit(torch.from_numpy(X), torch.from_numpy(given))
    np.testing.assert_allclose(again.probability_N, found.probability_N, atol=1e-6)


def test_the_same_seed_gives_the_same_ranking(small: Any) -> None:
    X, given, found, _ = small
    again = audit(X, given)
    np.testing.assert_array_equal(again.rank_N, found.rank_N)


def test_what_may_not_be_written_to_is_read(small: Any) -> None:
    X, given, _, _ = small
    locked = X.copy()
    locked.flags.writeable = False
    assert audit(locked, given, rounds=2).label_N.shape == (N,)


@pytest.mark.parametrize("kind", ["copies", "a constant column", "two dimensions", "zeros"])
def test_features_that_are_hardly_different(kind: str) -> None:
    X, y = classes(100)
    if kind == "copies":
        X = X[np.arange(100) % 5]
    elif kind == "a constant column":
        X[:, 0] = 1e6
    elif kind == "two dimensions":
        X = X[:, :2]
    else:
        X[:50] = 0
    found = audit(X, y)
    assert np.isfinite(found.score_N).all()
    assert sorted(found.rank_N) == list(range(1, 101))


def test_a_class_of_one_image_and_fewer_neighbours_than_asked() -> None:
    X, y = classes(60)
    y[5] = C
    found = audit(X, y, n_neighbours=500)
    assert np.isfinite(found.score_N).all()
    assert len(found.classes) == C + 1


def test_progress_is_told() -> None:
    X, y = classes(60)
    said: list[str] = []
    audit(X, y, rounds=2, progress=said.append)
    assert said == ["nearest neighbours", "linear classifier", "kernel regression", "round 2 of 2"]


# -- closed forms


def test_kernel_regression_is_that_without_the_sample() -> None:
    """With every sample a landmark, as scikit-learn's kernel ridge fitted N times, each without one sample."""
    X, y = classes(60)
    scores = kernel.left_out_scores(torch.from_numpy(X), torch.from_numpy(y), C, penalties=(1e-2,)).numpy()
    x = (X - X.mean(axis=0)) / X.std(axis=0, ddof=1)
    distance = ((x[:, None] - x[None]) ** 2).sum(axis=2)
    gamma = 1 / np.sort(distance.ravel())[(distance.size - 1) // 2]
    share = np.bincount(y, minlength=C) / len(y)
    targets = np.eye(C)[y] - share
    settings: dict[str, Any] = {"kernel": "rbf", "gamma": gamma, "alpha": 1e-2 * len(y)}
    for i in (0, 17, 59):
        rest = np.arange(len(y)) != i
        # Nystroem's ridge keeps the left-out sample's direction as a landmark, which changes nothing at its optimum.
        ridge: Any = KernelRidge(**settings).fit(x[rest], targets[rest])
        np.testing.assert_allclose(scores[i], ridge.predict(x[i : i + 1])[0] + share, atol=2e-4)


def test_bayes_rule() -> None:
    """One witness with known probabilities: the noise is found, and the odds are Bayes'."""
    rng = np.random.default_rng(0)
    n = 20_000
    p = rng.dirichlet([0.3, 0.3, 0.3], n)
    truth = np.array([rng.choice(3, p=row) for row in p])
    noisy = rng.random(n) < 0.15
    label = np.where(noisy, rng.integers(0, 3, n), truth)
    log_p = torch.from_numpy(p).clamp_min(1e-12).log()
    found = audits._combined({"oracle": log_p}, torch.from_numpy(label), 3, 0)
    assert float(found.weight_S[0]) == pytest.approx(1, abs=0.08)
    assert found.noise == pytest.approx(0.15, abs=0.02)
    own = p[np.arange(n), label]
    expected = own * (0.85 + 0.15 / 3) / (0.85 * own + 0.15 / 3)
    np.testing.assert_allclose(found.right_N.numpy(), expected, atol=0.04)
    # And so the estimated share of wrong labels is the true one.
    assert float(1 - found.right_N.mean()) == pytest.approx((label != truth).mean(), abs=0.01)


def test_planting() -> None:
    y = np.concatenate([np.full(10, -1), np.arange(200) % 5 * 2])
    planted, is_planted = plant_errors(y, 0.1, seed=3)
    assert is_planted.sum() == 20
    np.testing.assert_array_equal(planted != y, is_planted)
    assert set(planted[10:]) == {0, 2, 4, 6, 8}
    assert not is_planted[:10].any()
    np.testing.assert_array_equal(plant_errors(y, 0.1, seed=3)[0], planted)
    assert (plant_errors(y, 0.1, seed=4)[0] != planted).any()


# -- the real thing


def test_digits() -> None:
    """Half of the benchmark's images, as pixels in double precision."""
    X, y = (np.asarray(array)[:900] for array in load_digits(return_X_y=True))
    given, is_planted = plant_errors(y, 0.05, seed=0)
    found = audit(X, given)
    assert is_planted[found.order[: is_planted.sum()]].mean() >= 0.9
    assert found.error_rate == pytest.approx(0.05, abs=0.02)


# -- refusals


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"features_ND": np.zeros((N, 2, 2))}, r"The features have the shape \(400, 2, 2\)"),
        ({"labels_N": np.zeros(3, int)}, r"The labels have the shape \(3,\), but there are 400 images"),
        ({"labels_N": np.zeros(N)}, "The labels hold torch.float64"),
        ({"labels_N": np.full(N, -1)}, "None of the 400 images has a label"),
        ({"labels_N": np.full(N, 2), "class_names": ["a", "b", "cat"]}, "All 400 labels are 'cat'"),
        ({"labels_N": np.arange(N)}, "400 labelled images of 400 classes"),
        ({"labels_N": np.where(np.arange(N) < 9, np.arange(N) % 2, -1)}, "There are 9 labelled images of 2 classes"),
        ({"class_names": ["a"]}, "A label is 3, but there are 1 class names"),
        ({"features_ND": np.full((N, D), np.nan)}, "400 of the 400 rows of the features hold NaN or infinity"),
        ({"n_neighbours": 0}, "n_neighbours is 0"),
        ({"rounds": 0}, "rounds is 0"),
        ({"threshold": 1.5}, "threshold is 1.5"),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(arguments: dict[str, Any], says: str) -> None:
    X, y = classes()
    usual: dict[str, Any] = {"features_ND": X, "labels_N": y}
    with pytest.raises(InputError, match=says) as refused:
        audit(**(usual | arguments))
    assert re.fullmatch(r"[^\n]+\.", str(refused.value))


def test_planting_needs_two_classes_and_a_share() -> None:
    with pytest.raises(InputError, match="There are 1 classes"):
        plant_errors(np.zeros(5, int), 0.1)
    with pytest.raises(InputError, match=r"share is 1.0"):
        plant_errors(np.arange(5), 1.0)
