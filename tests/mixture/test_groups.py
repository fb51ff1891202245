"""Groups: how many kinds of samples there are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from benchmarks import merge_families
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from sklearn.metrics import adjusted_mutual_info_score

from siammm import GaussianMixture, VonMisesFisherMixture
from siammm.core.errors import InputError
from siammm.mixture import component_graph, groups
from siammm.mixture.group_rule import Groups, of_these_components
from tests.conftest import Known
from tests.mixture.planted import kinds, planted, unit


def found_in(x: np.ndarray, k: int = 1, *, unit_rows: bool = True, seed: int = 0) -> Groups:
    """The groups, where all that is known of components is that there is one, or k of equal rank."""
    nearest = np.stack([np.arange(len(x)) % k] * 2, axis=1)
    return groups.found(x, nearest, k, unit=unit_rows, separate=False, seed=seed)


# -- among samples ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "spread"), [(2, 0.8), (3, 0.8), (12, 0.8), (40, 0.4)])
def test_kinds_are_found(k: int, spread: float) -> None:
    x, y = kinds(k, n=1000, spread=spread)
    found = found_in(x)
    assert found.is_found
    assert found.n_groups == k
    assert adjusted_mutual_info_score(y, found.predict(x, None)) > 0.97


@pytest.mark.parametrize("k", [2, 5, 12])
def test_a_number_that_is_given(k: int) -> None:
    x, y = kinds(k, n=600, spread=0.8)
    nearest = np.zeros((len(x), 2), dtype=np.int64)
    for asked in (2, k, k + 3):
        found = groups.found(x, nearest, 1, unit=True, separate=True, so_many=asked)
        assert found.n_groups == asked
        assert found.is_found
    assert (
        adjusted_mutual_info_score(y, groups.found(x, nearest, 1, unit=True, separate=True, so_many=k).predict(x, None))
        > 0.97
    )


def test_a_number_that_is_given_counts_where_nothing_stands_apart() -> None:
    x = kinds(1)[0]
    assert not found_in(x).is_found
    for asked in (2, 7):
        assert (
            groups.found(x, np.zeros((len(x), 2), dtype=np.int64), 1, unit=True, separate=False, so_many=asked).n_groups
            == asked
        )


def test_parts_of_a_graph_without_links_are_joined_where_fewer_are_asked_for() -> None:
    x = np.repeat(np.eye(6), 20, axis=0) + np.random.default_rng(0).normal(scale=1e-3, size=(120, 6))
    for asked in (2, 3, 6):
        found = groups.found(x, np.zeros((120, 2), dtype=np.int64), 1, unit=True, separate=False, so_many=asked)
        assert found.n_groups == asked
        assert len({tuple(part) for part in found.predict(x, None).reshape(6, 20)}) == asked, "no part is divided"


@pytest.mark.parametrize("asked", [1, 0, -3, 16, 10**9])
def test_numbers_that_rows_cannot_have(asked: int) -> None:
    x = kinds(3, n=60)[0]
    with pytest.raises(InputError, match=f"n_groups is {asked:,}, but 60 samples can have 2 to 15 groups"):
        VonMisesFisherMixture(3, random_state=0).fit(x).groups(x, n_groups=asked)
    with pytest.raises(InputError, match="groups need at least 8 samples, not 5"):
        VonMisesFisherMixture(2, random_state=0).fit(x[:5]).groups(x[:5], n_groups=2)


def test_a_single_cloud_has_no_groups() -> None:
    rng = np.random.default_rng(0)
    stretched = rng.normal(size=(1000, 12)) * np.linspace(5, 0.5, 12)
    for x in (kinds(1)[0], unit(rng.normal(size=(1000, 8))), unit(stretched), unit(stretched + 12)):
        found = found_in(x, 3)
        assert not found.is_found
        assert found.ratio > groups.LARGEST_RATIO
        assert found.n_groups == 3, "the components"
        np.testing.assert_array_equal(found.predict(x, [2, 0]), [2, 0])


def test_the_twin_has_the_same_mean_and_covariance() -> None:
    rng = np.random.default_rng(0)
    x = rng.exponential(size=(3000, 6)) * np.arange(1, 7) + 10
    twin = groups.gaussian_twin(x, 0)
    np.testing.assert_allclose(twin.mean(axis=0), x.mean(axis=0), atol=0.6)
    np.testing.assert_allclose(np.cov(twin.T), np.cov(x.T), atol=4)
    assert not np.array_equal(twin, groups.gaussian_twin(x, 1))


def test_borders_are_not_those_of_the_nearest_mean() -> None:
    # What is stretched makes nearest means useless, and is the same for all kinds.
    x, y = kinds(4, n=2000, spread=0.9, stretched=7, seed=1)
    found = found_in(x)
    assert found.n_groups == 4
    told = VonMisesFisherMixture(4, n_neighbours=1, n_init=3, random_state=0).fit(x)
    ours, theirs = (adjusted_mutual_info_score(y, labels) for labels in (found.predict(x, None), told.labels_))
    assert ours > 0.95
    assert ours > theirs + 0.1


def test_groups_are_numbered_by_size_and_new_rows_get_one() -> None:
    x, y = kinds(5, n=2000, spread=0.7)
    keep = np.flatnonzero(np.random.default_rng(0).random(len(y)) < np.linspace(0.3, 1, 5)[y])
    found = found_in(x[keep])
    label = found.predict(x[keep], None)
    sizes = np.bincount(label)
    assert (np.diff(sizes) <= 0).all()
    rest = np.setdiff1d(np.arange(len(x)), keep)
    assert adjusted_mutual_info_score(y[rest], found.predict(x[rest], None)) > 0.97
    share = found.predict_proba(7 * x)  # only the direction counts
    np.testing.assert_allclose(share.sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_array_equal(share.argmax(axis=1), found.predict(x, None))


def test_more_rows_than_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = kinds(6, n=2500, spread=0.8)
    monkeypatch.setattr(groups, "MOST_ROWS", 700)
    found = found_in(x, seed=3)
    assert found.n_groups == 6
    assert adjusted_mutual_info_score(y, found.predict(x, None)) > 0.97
    np.testing.assert_array_equal(found.weight_GD, found_in(x, seed=3).weight_GD)


@pytest.mark.parametrize(("scale", "offset"), [(100, 1000), (1, 1e7), (1e-9, 0), (1e100, 0)])
def test_points_lie_anywhere_at_any_scale(scale: float, offset: float) -> None:
    x, y = kinds(4, n=600, spread=0.6)
    far = scale * x + offset
    found = found_in(far, unit_rows=False)
    assert found.n_groups == 4
    assert adjusted_mutual_info_score(y, found.predict(far, None)) > 0.97


def test_any_kind_of_tensor() -> None:
    x, y = kinds(4, n=600, spread=0.6)
    rows, nearest = torch.from_numpy(x).bfloat16(), torch.zeros(600, 2, dtype=torch.int64)
    found = groups.found(rows, nearest, 1, unit=True, separate=False)
    assert adjusted_mutual_info_score(y, found.predict(rows, None)) > 0.97
    np.testing.assert_array_equal(Groups.none(3).predict(rows, torch.tensor([2, 0])), [2, 0])


def test_a_group_that_no_deciding_row_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is nearest to the last component of all, which is a community by itself."""
    x, y = kinds(12, n=900, spread=0.15)
    monkeypatch.setattr(groups, "of_components", lambda *_: np.array([0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 1]))
    found = groups.found(x, np.stack([y, y], axis=1), 13, unit=True, separate=True)
    assert found.n_groups == 2


@pytest.mark.parametrize("n", [1, 2, 10, 59, 60])
def test_few_rows_and_equal_rows(n: int) -> None:
    assert not found_in(np.ones((n, 3)), unit_rows=False).is_found
    assert not found_in(kinds(2, n=n)[0][:, :3]).is_found or n == 60


def test_components_that_are_the_groups_leave_one_level() -> None:
    x, y = kinds(7, spread=0.7)
    second = (y + 1) % 7
    found = groups.found(x, np.stack([y, second], axis=1), 7, unit=True, separate=True)
    assert not found.is_found
    assert found.ratio < groups.LARGEST_RATIO, "they are there, and are the components"
    np.testing.assert_array_equal(found.label_K, np.arange(7))


def test_parts_of_kinds_are_grouped_and_what_no_part_has_is_left_out() -> None:
    x, y = kinds(5, spread=0.8)
    part = 4 * y + np.random.default_rng(9).integers(4, size=len(y))
    found = groups.found(x, np.stack([part, part], axis=1), 20, unit=True, separate=False)
    assert found.n_groups == 5
    assert adjusted_mutual_info_score(np.repeat(np.arange(5), 4), found.label_K) == pytest.approx(1)
    few = of_these_components(found, x, np.minimum(y, 3), 4)  # the last two kinds are one component
    assert few.n_groups == 4
    assert set(few.label_K.tolist()) == {0, 1, 2, 3}
    assert of_these_components(Groups.none(9), x, y, 5).n_groups == 5


def test_digits_have_clearer_groups_than_clusters() -> None:
    x, y = load_digits(return_X_y=True)
    mixture = VonMisesFisherMixture(144, merge="auto", random_state=0).fit(x)
    found = mixture.groups(x)
    of_groups, of_clusters = (
        adjusted_mutual_info_score(y, labels) for labels in (found.predict(x, mixture.labels_), mixture.labels_)
    )
    assert 9 <= found.n_groups <= 11
    assert of_groups > 0.78
    assert of_groups > of_clusters + 0.05


# -- among components -------------------------------------------------------------------------------------------------


def test_planted_groups_of_components_are_found() -> None:
    first, second = planted(np.random.default_rng(0), [4, 12, 6, 8], 0.95, 6000)
    label_K = component_graph.of_components(first, second, 30)
    assert label_K is not None
    assert adjusted_mutual_info_score(np.repeat(np.arange(4), [4, 12, 6, 8]), label_K) == pytest.approx(1)
    other_K = component_graph.of_components(second, first, 30)
    np.testing.assert_array_equal(label_K, other_K)  # who is first and who second is the same


def test_chance_has_no_groups() -> None:
    assert component_graph.of_components(*planted(np.random.default_rng(1), [5] * 8, 0.0, 4000), 40) is None


def strewn(k: int, d: int, noise: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The two nearest of centres in random directions, for samples around them."""
    rng = np.random.default_rng(seed)
    centre_KD = rng.normal(size=(k, d))
    centre_KD /= np.linalg.norm(centre_KD, axis=1, keepdims=True)
    n = max(6000, 5 * k)
    x_ND = centre_KD[rng.integers(k, size=n)] + noise * rng.normal(size=(n, d)) / np.sqrt(d)
    nearest = torch.cat([part @ torch.from_numpy(centre_KD).T for part in torch.from_numpy(x_ND).split(1000)])
    index_N2 = nearest.topk(2, dim=1).indices.numpy()
    return index_N2[:, 0], index_N2[:, 1]


@pytest.mark.parametrize("noise", [0.05, 0.3, 0.8])
@pytest.mark.parametrize("d", [2, 4, 8, 64])
@pytest.mark.parametrize("k", [10, 40, 150, pytest.param(3000, marks=pytest.mark.slow)])
def test_components_strewn_at_random_are_no_groups(k: int, d: int, noise: float) -> None:
    assert component_graph.of_components(*strewn(k, d, noise, seed=k + d), k) is None


@pytest.mark.parametrize(("d", "noise"), [(2, 0.05), (8, 0.8)])
def test_thousands_of_components_strewn_at_random_are_no_groups(d: int, noise: float) -> None:
    test_components_strewn_at_random_are_no_groups(1500, d, noise)


def test_too_few_neighbours_are_no_evidence() -> None:
    """Groups of three have two neighbours each; where that is all, the number of groups would often come out wrong."""
    assert component_graph.of_components(*planted(np.random.default_rng(3), [3] * 12, 1.0, 3000), 36) is None
    assert component_graph.of_components(*planted(np.random.default_rng(3), [9] * 4, 1.0, 3000), 36) is not None


def test_tight_clusters_say_nothing_of_their_groups() -> None:
    """Every sample of a cluster has the same second choice, so the graph falls into pairs, whose modularity is high."""
    first = np.repeat(np.arange(40), 50)
    assert component_graph.of_components(first, first ^ 1, 40) is None


@pytest.mark.parametrize("k", [1, 2, 3])
def test_few_components_and_no_second_choices(k: int) -> None:
    first = np.arange(30) % k
    for second in (first, (first + 1) % k):
        assert component_graph.of_components(first, second, k) is None


def test_a_component_that_nobody_is_near_is_a_group_by_itself() -> None:
    first, second = planted(np.random.default_rng(2), [5, 5, 5], 1.0, 3000)
    label_K = component_graph.of_components(first, second, 16)
    assert label_K is not None
    assert np.count_nonzero(label_K == label_K[15]) == 1


@pytest.mark.parametrize(("name", "n_groups"), [("hierarchy 8 x 6, d 32", 8), ("close hierarchy 5 x 8, d 24", 5)])
def test_a_hierarchy_has_its_groups(name: str, n_groups: int) -> None:
    x, y, k = merge_families.make(name, 0)
    mixture = VonMisesFisherMixture(2 * k, merge="auto", random_state=0).fit(x)
    found = mixture.groups(x)
    assert found.n_groups == n_groups
    each = k // n_groups
    for members in range(n_groups):  # components of a family are drawn one after another
        inside = found.label_K[mixture.labels_[y // each == members]]
        assert np.bincount(inside).max() > 0.98 * len(inside)


@pytest.mark.parametrize("name", ["vMF, d 16, K 10", "overlapping vMF, d 16, K 20", "small vMF, d 64, K 60, n 60 each"])
def test_what_lies_about_has_none(name: str) -> None:
    x, _, k = merge_families.make(name, 0)
    mixture = VonMisesFisherMixture(2 * k, merge="auto", random_state=0).fit(x)
    assert mixture.groups(x).n_groups == mixture.n_components_


def test_on_tensors_and_points_and_before_fitting(small: Known) -> None:
    mixture = VonMisesFisherMixture(12, merge="auto", random_state=0).fit(torch.from_numpy(small.X))
    label_K = mixture.groups(torch.from_numpy(small.X)).label_K
    np.testing.assert_array_equal(label_K, mixture.groups(small.X).label_K)
    twin = GaussianMixture(12, merge="auto", random_state=0).fit(small.X)
    assert twin.groups(small.X).label_K.shape == (twin.n_components_,)
    with pytest.raises(NotFittedError):
        VonMisesFisherMixture(6, merge="auto").groups(small.X)


@pytest.mark.parametrize("merge", [None, "paper"])
def test_parts_of_a_cloud_have_no_groups(merge: str | None) -> None:
    """One cloud cut into many parts has groups of parts, which are nothing but the cloud's shape."""
    x = unit(np.random.default_rng(0).normal(size=(2000, 8)) * np.linspace(4, 0.5, 8) + 6)
    mixture = VonMisesFisherMixture(60, merge=merge, merge_floor=40, random_state=0).fit(x)  # pyright: ignore[reportArgumentType]
    assert not mixture.groups(x).is_found


def test_the_nearest_components(small: Known) -> None:
    mixture = VonMisesFisherMixture(6, random_state=0).fit(small.X)
    found = mixture.nearest(small.X, 3)
    expected = np.argsort(-(small.X @ mixture.mean_directions_.T), axis=1)[:, :3]
    assert np.mean(found == expected) > 0.999
    np.testing.assert_array_equal(found[:, 0], mixture.predict(small.X))
    assert mixture.nearest(small.X, 9).shape == (900, 6)
    assert isinstance(mixture.nearest(torch.from_numpy(small.X)), torch.Tensor)
    with pytest.raises(InputError, match="count"):
        mixture.nearest(small.X, 0)
