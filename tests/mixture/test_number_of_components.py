"""The number of components that merging finds."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from benchmarks import merge_families
from sklearn.datasets import load_digits, make_blobs

from siammm import GaussianMixture, VonMisesFisherMixture
from siammm.mixture import em, merge
from tests.conftest import Known, known_mixture
from tests.mixture.merging import check_history

QUICK = ["vMF, d 8, K 8, uneven", "caps, d 12, K 20", "arcs, d 20, K 24", "hierarchy of Gaussians 6 x 4, d 96"]


def found_in(name: str, factor: int, seed: int = 0) -> tuple[int, int]:
    x, _, k = merge_families.make(name, seed)
    mixture = VonMisesFisherMixture(factor * k, merge="auto", random_state=seed).fit(x)
    check_history(mixture, start=factor * k)
    return mixture.n_components_, k


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        *((name, 2) for name in QUICK),
        (QUICK[0], 20),
        (QUICK[2], 20),
        pytest.param(QUICK[1], 20, marks=pytest.mark.slow),
        pytest.param(QUICK[3], 20, marks=pytest.mark.slow),
    ],
)
def test_auto_finds_the_number(name: str, factor: int) -> None:
    found, k = found_in(name, factor)
    assert abs(found - k) <= 0.05 * k


@pytest.mark.slow
@pytest.mark.parametrize("factor", [2, 5, 20])
@pytest.mark.parametrize("name", merge_families.JUDGE)
def test_auto_finds_the_number_in_every_family_that_judges(name: str, factor: int) -> None:
    """Within 5 %; where there are outliers, some thirty of them may stay together as a component of their own."""
    found, k = found_in(name, factor)
    assert k - 0.05 * k <= found <= k + max(0.05 * k, 1 if "outliers" in name else 0)


# From the later seeds, merging alone would end at eight, with two pairs of digits as one each.
@pytest.mark.parametrize(
    ("start", "seed"),
    [(50, 0), (200, 0), (100, 3), *(pytest.param(100, seed, marks=pytest.mark.slow) for seed in (0, 4, 10, 12))],
)
def test_auto_finds_ten_digits(start: int, seed: int) -> None:
    mixture = VonMisesFisherMixture(start, merge="auto", random_state=seed).fit(cast(Any, load_digits)().data)
    assert 9 <= mixture.n_components_ <= 11
    check_history(mixture, start=start)


@pytest.mark.parametrize("name", ["one vMF, d 8", "one vMF, d 128", "uniform, d 16", "uniform, d 128"])
def test_auto_finds_nothing_where_there_is_nothing(name: str) -> None:
    x, _, _ = merge_families.make(name, 0)
    mixture = VonMisesFisherMixture(40, merge="auto", random_state=0).fit(x)
    assert mixture.n_components_ == 1
    check_history(mixture, start=40)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("covariance", ["spherical", "diag"])
def test_auto_finds_the_number_of_gaussians_in_any_unit(scale: float, covariance: Any) -> None:
    X = cast(Any, make_blobs)(1500, 8, centers=6, random_state=0)[0]
    for start in (12, 60):
        mixture = GaussianMixture(start, merge="auto", covariance=covariance, random_state=0).fit(X * scale)
        assert mixture.n_components_ == 6
        check_history(mixture, start=start)


@pytest.mark.parametrize("n_neighbours", [1, 5])
def test_order_of_samples_does_not_change_the_number(n_neighbours: int) -> None:
    known = known_mixture(k=9, d=24, n=900, low=60, high=200, seed=5)
    order = np.random.default_rng(0).permutation(len(known.X))
    settings: dict[str, Any] = {"merge": "auto", "n_neighbours": n_neighbours, "random_state": 0}
    one, other = (VonMisesFisherMixture(36, **settings).fit(X) for X in (known.X, known.X[order]))
    assert one.n_components_ == other.n_components_ == 9
    # From the same start the whole history is the same.
    start = known.X[:36]
    one, other = (VonMisesFisherMixture(**settings).fit(X, init=start) for X in (known.X, known.X[order]))
    assert one.merges_ is not None
    assert other.merges_ is not None
    assert one.merges_.n_components == other.merges_.n_components
    np.testing.assert_allclose(one.merges_.linkage, other.merges_.linkage, atol=1e-6)
    np.testing.assert_array_equal(one.labels_[order], other.labels_)


@pytest.mark.parametrize("rule", merge.MERGE_RULES)
def test_same_seed_same_tree(small: Known, rule: Any) -> None:
    one, other = (VonMisesFisherMixture(50, merge=rule, random_state=3).fit(small.X).merges_ for _ in range(2))
    assert one is not None
    assert other is not None
    np.testing.assert_array_equal(one.linkage, other.linkage)
    assert one.n_components == other.n_components


@pytest.mark.parametrize("rule", em.ASSIGNMENT_RULES)
def test_auto_works_under_either_assignment(small: Known, rule: Any) -> None:
    assert VonMisesFisherMixture(40, merge="auto", assignment=rule, random_state=0).fit(small.X).n_components_ == 6
