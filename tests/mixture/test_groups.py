"""Groups of components: communities of the graph of second choices, where there are any."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from benchmarks import merge_families
from sklearn.exceptions import NotFittedError

from siammm import GaussianMixture, VonMisesFisherMixture
from siammm.core.errors import InputError
from siammm.mixture import groups
from tests.conftest import Known


def planted(rng: np.random.Generator, sizes: list[int], inside: float, n: int) -> tuple[np.ndarray, np.ndarray]:
    """First and second choices; the second is in the group of the first with this probability."""
    group_K = np.repeat(np.arange(len(sizes)), sizes)
    k = len(group_K)
    first = rng.integers(k, size=n)
    second = rng.integers(k, size=n)
    for i in np.flatnonzero(rng.random(n) < inside):
        own = np.flatnonzero(group_K == group_K[first[i]])
        second[i] = rng.choice(own)
    return first, second


def edges(first: np.ndarray, second: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    low, high = np.minimum(first, second), np.maximum(first, second)
    code, count = np.unique((low * k + high)[low != high], return_counts=True)
    return code // k, code % k, count.astype(float)


@pytest.mark.parametrize(("seed", "resolution"), [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0), (2, 0.4), (2, 3.0)])
def test_modularity_is_networkxs_and_about_as_high(seed: int, resolution: float) -> None:
    networkx = pytest.importorskip("networkx")
    rng = np.random.default_rng(seed)
    first, second = planted(rng, [5, 9, 3, 14, 7], 0.2 * seed, 3000)
    low, high, weight = edges(first, second, 38)
    label_K, modularity = groups.communities(low, high, weight, 38, resolution)
    graph = networkx.Graph()
    graph.add_nodes_from(range(38))
    graph.add_weighted_edges_from(zip(low.tolist(), high.tolist(), weight.tolist(), strict=True))
    ours = [set(np.flatnonzero(label_K == g).tolist()) for g in range(label_K.max() + 1)]
    assert modularity == pytest.approx(networkx.community.modularity(graph, ours, resolution=resolution), abs=1e-12)
    theirs = networkx.community.louvain_communities(graph, resolution=resolution, seed=0)
    assert modularity >= networkx.community.modularity(graph, theirs, resolution=resolution) - 0.01


def test_a_higher_resolution_finds_smaller_communities() -> None:
    first, second = planted(np.random.default_rng(0), [6] * 6, 0.8, 6000)
    low, high, weight = edges(first, second, 36)
    counts = [int(groups.communities(low, high, weight, 36, g)[0].max()) + 1 for g in (0.01, 1.0, 20.0)]
    assert counts == [1, 6, 36]


def test_planted_groups_are_found_and_numbered_by_size() -> None:
    first, second = planted(np.random.default_rng(0), [4, 12, 6, 8], 0.95, 6000)
    found = groups.found(first, second, 30)
    assert found.is_coarser
    assert found.n_groups == 4
    expected = np.repeat([3, 0, 2, 1], [4, 12, 6, 8])  # components are alike, so the larger group has more samples
    np.testing.assert_array_equal(found.label_K, expected)
    assert groups.found(second, first, 30).modularity == found.modularity, "who is first and who second is the same"


def test_chance_has_no_groups() -> None:
    found = groups.found(*planted(np.random.default_rng(1), [5] * 8, 0.0, 4000), 40)
    assert not found.is_coarser
    np.testing.assert_array_equal(found.label_K, np.arange(40))
    assert 0 < found.modularity < groups.chance(found.neighbours, 40)


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
@pytest.mark.parametrize("k", [10, 40, 150, 3000])
def test_components_strewn_at_random_are_no_groups(k: int, d: int, noise: float) -> None:
    assert not groups.found(*strewn(k, d, noise, seed=k + d), k).is_coarser


def test_too_few_neighbours_are_no_evidence() -> None:
    """Groups of three have two neighbours each; where that is all, the number of groups would often come out wrong."""
    found = groups.found(*planted(np.random.default_rng(3), [3] * 12, 1.0, 3000), 36)
    assert found.neighbours < groups.LEAST_NEIGHBOURS
    assert found.modularity > groups.chance(found.neighbours, 36)
    assert not found.is_coarser


def test_tight_clusters_say_nothing_of_their_groups() -> None:
    """Every sample of a cluster has the same second choice, so the graph falls into pairs, whose modularity is high."""
    first = np.repeat(np.arange(40), 50)
    found = groups.found(first, first ^ 1, 40)
    assert found.modularity > 0.9
    assert found.neighbours == pytest.approx(1)
    assert not found.is_coarser


@pytest.mark.parametrize("k", [1, 2, 3])
def test_few_components_and_no_second_choices(k: int) -> None:
    first = np.arange(30) % k
    for second in (first, (first + 1) % k):
        found = groups.found(first, second, k)
        assert found.n_groups == k
        assert not found.is_coarser


def test_a_component_that_nobody_is_near_is_a_group_by_itself() -> None:
    first, second = planted(np.random.default_rng(2), [5, 5, 5], 1.0, 3000)
    found = groups.found(first, second, 16)
    assert found.n_groups == 4
    assert np.count_nonzero(found.label_K == found.label_K[15]) == 1


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
def test_groups_are_of_components_that_stand_apart(merge: str | None, small: Known) -> None:
    """One cloud cut into many parts has groups of parts, which are nothing but the cloud's shape."""
    mixture = VonMisesFisherMixture(6, merge=merge, merge_floor=4, random_state=0).fit(small.X)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match=r"use that\."):
        mixture.groups(small.X)


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
