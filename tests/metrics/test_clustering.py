"""Scores of clusterings: equal to scikit-learn's and scipy's where those are feasible, and quick where they are not."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import adjusted_mutual_info_score, adjusted_rand_score, normalized_mutual_info_score
from sklearn.metrics.cluster import contingency_matrix

from siammm.core.errors import InputError
from siammm.metrics.clustering import clustering_scores, label_codes, purities

pairs = st.lists(st.tuples(st.integers(-1, 6), st.integers(0, 9)), min_size=1, max_size=60)


@given(pairs)
def test_equal_to_the_references(pairs: list[tuple[int, int]]) -> None:
    true, pred = (np.array(side) for side in zip(*pairs, strict=True))
    table = np.asarray(contingency_matrix(true, pred))
    rows, columns = linear_sum_assignment(table, maximize=True)
    scores = clustering_scores(true, pred)
    assert scores.nmi == pytest.approx(normalized_mutual_info_score(true, pred), abs=1e-9)
    assert scores.ari == pytest.approx(adjusted_rand_score(true, pred), abs=1e-9)
    assert scores.hungarian_accuracy == table[rows, columns].sum() / len(true)
    assert scores.majority_accuracy == pytest.approx(table.max(axis=0).sum() / len(true))
    assert (scores.n_classes, scores.n_clusters) == table.shape
    assert scores.hungarian_accuracy <= scores.majority_accuracy + 1e-12
    # Where every partition of these sizes is as good, AMI is 0/0 and its value rounding.
    if min(table.shape) > 1 and max(table.shape) < len(true):
        assert scores.ami == pytest.approx(adjusted_mutual_info_score(true, pred), abs=1e-8)


@pytest.mark.parametrize(("n", "n_clusters", "n_classes"), [(5000, 300, 20), (5000, 10, 10), (2000, 1500, 900)])
def test_ami_is_scikit_learns(n: int, n_clusters: int, n_classes: int) -> None:
    rng = np.random.default_rng(0)
    true = rng.zipf(1.5, n) % n_classes
    pred = np.where(rng.random(n) < 0.4, rng.integers(0, n_clusters, n), true % n_clusters)
    assert clustering_scores(true, pred).ami == pytest.approx(adjusted_mutual_info_score(true, pred), abs=1e-9)


@given(pairs, st.randoms())
def test_names_and_order_do_not_matter(pairs: list[tuple[int, int]], random: object) -> None:
    true, pred = (np.array(side) for side in zip(*pairs, strict=True))
    order = np.random.default_rng(0).permutation(len(true))
    renamed = np.random.default_rng(1).permutation(10)[pred] + 100
    one, other = clustering_scores(true, pred), clustering_scores(true[order].astype(str), renamed[order])
    for name in ("ami", "nmi", "ari", "hungarian_accuracy", "majority_accuracy"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), abs=1e-9)


def test_a_perfect_and_a_useless_clustering() -> None:
    true = np.repeat(["cat", "dog", "cow"], 20)
    perfect = clustering_scores(true, np.repeat([2, 0, 1], 20))
    assert (perfect.ami, perfect.nmi, perfect.ari) == pytest.approx((1, 1, 1))
    assert (perfect.hungarian_accuracy, perfect.majority_accuracy) == (1, 1)
    useless = clustering_scores(true, np.zeros(60, int))
    assert (useless.ami, useless.nmi, useless.ari) == pytest.approx((0, 0, 0))
    assert (useless.hungarian_accuracy, useless.majority_accuracy) == pytest.approx((1 / 3, 1 / 3))


def test_the_two_accuracies_differ_when_clusters_are_many() -> None:
    scores = clustering_scores(np.repeat([0, 1], 10), np.arange(20))
    assert scores.majority_accuracy == 1
    assert scores.hungarian_accuracy == pytest.approx(2 / 20)


@pytest.mark.parametrize(
    "labels", [["a", None, "b", "", "a"], [0.0, float("nan"), 1.0, None, 0.0], np.array([0, np.nan, 1, np.nan, 0])]
)
def test_samples_without_a_label_are_left_out_and_counted(labels: object) -> None:
    scores = clustering_scores(labels, [0, 1, 1, 0, 0])  # pyright: ignore[reportArgumentType]
    assert (scores.n_samples, scores.n_unlabelled) == (3, 2)
    assert (scores.n_classes, scores.n_clusters, scores.ari) == (2, 2, 1)


def test_minus_one_is_a_class() -> None:
    assert clustering_scores([-1, -1, 3], [0, 0, 1]).n_classes == 2


def test_codes_of_mixed_labels() -> None:
    codes, names = label_codes(["b", 1, None, "b"])
    assert codes.tolist() == [0, 1, -1, 0]
    assert names == ["b", 1]


@pytest.mark.parametrize("endless", [np.inf, -np.inf])
def test_a_label_without_end_is_refused(endless: float) -> None:
    """It could not be written to the JSON of a result."""
    with pytest.raises(InputError, match=f"label of row 1 is {endless}"):
        label_codes(np.array([1.0, endless, 2.0]))


@pytest.mark.parametrize(
    ("true", "pred", "match"),
    [
        ([1, 2, 3], [0, 0], "3 labels for 2 samples"),
        ([None, None], [0, 0], "None of the 2"),
        (np.zeros((2, 2)), [0, 0], "2 dimensions"),
    ],
)
def test_refused(true: object, pred: list[int], match: str) -> None:
    with pytest.raises(InputError, match=match):
        clustering_scores(true, pred)  # pyright: ignore[reportArgumentType]


def test_a_million_samples_in_100_k_clusters() -> None:
    """At this size scikit-learn's AMI takes over half a minute, and a dense table for Hungarian matching 800 MB."""
    rng = np.random.default_rng(0)
    true = rng.integers(0, 1000, 1_000_000)
    pred = true * 100 + rng.integers(0, 100, 1_000_000)
    start = time.perf_counter()
    scores = clustering_scores(true, pred)
    assert time.perf_counter() - start < 15
    assert scores.majority_accuracy == 1
    assert (scores.n_classes, scores.n_clusters) == (1000, len(np.unique(pred)))


@given(pairs)
def test_purities_make_up_the_majority_accuracy(pairs: list[tuple[int, int]]) -> None:
    true, pred = (np.array(side) for side in zip(*pairs, strict=True))
    found, scores = purities(true, pred), clustering_scores(true, pred)
    for purity, size in (
        (found.class_purity, found.class_size),
        (found.cluster_purity, found.cluster_size),
    ):
        assert sum(size) == len(true)
        assert np.dot(purity, size) / len(true) == pytest.approx(scores.majority_accuracy)
        assert all(0 <= value <= 1 for value in purity)
    assert (len(found.classes), len(found.clusters)) == (scores.n_classes, scores.n_clusters)
    table = np.asarray(contingency_matrix(true, pred))
    assert found.cluster_purity == pytest.approx(table.max(axis=0) / table.sum(axis=0))
    assert found.cluster_class == [np.unique(true).tolist()[row] for row in table.argmax(axis=0)]


def test_purities_by_hand() -> None:
    found = purities(["cat", "cat", "dog", None, "dog", "cow"], [4, 4, 4, 4, 7, 7])
    assert (found.classes, found.class_size, found.class_purity) == (["cat", "dog", "cow"], [2, 2, 1], [1, 0.5, 0])
    assert (found.clusters, found.cluster_size, found.cluster_class) == ([4, 7], [3, 2], ["cat", "dog"])
    assert found.cluster_purity == pytest.approx([2 / 3, 1 / 2])
