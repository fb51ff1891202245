"""The neighbour graph of samples, and its communities."""

from __future__ import annotations

import numpy as np
import pytest

from siammm.mixture import graph
from tests.mixture.planted import edges, planted


@pytest.mark.parametrize(("seed", "resolution"), [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0), (2, 0.4), (2, 3.0)])
def test_modularity_is_networkxs_and_about_as_high(seed: int, resolution: float) -> None:
    networkx = pytest.importorskip("networkx")
    rng = np.random.default_rng(seed)
    first, second = planted(rng, [5, 9, 3, 14, 7], 0.2 * seed, 3000)
    low, high, weight = edges(first, second, 38)
    label_K, modularity = graph.communities(low, high, weight, 38, resolution)
    theirs_graph = networkx.Graph()
    theirs_graph.add_nodes_from(range(38))
    theirs_graph.add_weighted_edges_from(zip(low.tolist(), high.tolist(), weight.tolist(), strict=True))
    ours = [set(np.flatnonzero(label_K == g).tolist()) for g in range(label_K.max() + 1)]
    assert modularity == pytest.approx(
        networkx.community.modularity(theirs_graph, ours, resolution=resolution), abs=1e-12
    )
    theirs = networkx.community.louvain_communities(theirs_graph, resolution=resolution, seed=0)
    assert modularity >= networkx.community.modularity(theirs_graph, theirs, resolution=resolution) - 0.01


def test_a_higher_resolution_finds_smaller_communities() -> None:
    first, second = planted(np.random.default_rng(0), [6] * 6, 0.8, 6000)
    low, high, weight = edges(first, second, 36)
    counts = [int(graph.communities(low, high, weight, 36, g)[0].max()) + 1 for g in (0.01, 1.0, 20.0)]
    assert counts == [1, 6, 36]


def blobs(seed: int = 0, k: int = 4, n: int = 400) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = rng.integers(k, size=n)
    return 4 * rng.normal(size=(k, 6))[y] + rng.normal(size=(n, 6)), y


def test_neighbours_are_those_of_all_distances() -> None:
    x, _ = blobs()
    index, distance = graph.nearest(x, 5)
    every = np.linalg.norm(x[:, None] - x[None], axis=2)
    np.fill_diagonal(every, np.inf)
    np.testing.assert_allclose(distance, np.sort(every, axis=1)[:, :5], atol=1e-9)
    np.testing.assert_allclose(np.take_along_axis(every, index, axis=1), distance, atol=1e-9)


def test_links_are_mutual_and_each_sample_has_its_own_scale() -> None:
    x, _ = blobs()
    own = graph.neighbour_graph(x, 10)
    assert (own.low_E < own.high_E).all(), "each link once, without loops"
    assert (own.weight_E > 0).all()
    assert (own.weight_E <= 1).all()
    assert own.degree_K.sum() == pytest.approx(2 * own.weight_E.sum())
    # Spread out ten times, or only one part of it, the links stay: distances count within a neighbourhood alone.
    np.testing.assert_allclose(graph.neighbour_graph(10 * x, 10).weight_E, own.weight_E, atol=1e-6)


def test_equal_rows_are_no_trouble() -> None:
    same = graph.neighbour_graph(np.ones((50, 3)), 5)
    assert np.isfinite(same.weight_E).all()


def test_the_loss_is_that_of_the_whole_graph_whatever_the_nodes() -> None:
    x, _ = blobs()
    own = graph.neighbour_graph(x, 10)
    for resolution in (0.3, 1.0, 2.0):
        [(label_N, loss)] = graph.path(own, np.array([resolution]))
        between = own.weight_E[label_N[own.low_E] != label_N[own.high_E]].sum() / own.weight_E.sum()
        share = np.bincount(label_N, own.degree_K) / own.degree_K.sum()
        assert loss == pytest.approx(between + resolution * (share**2).sum())
    coarse = own.coarse(np.arange(len(x)) % 7)
    assert coarse.degree_K.sum() == pytest.approx(own.degree_K.sum())
    assert own.communities(1.0)[1] == pytest.approx(1 - graph.communities(own.low_E, own.high_E, own.weight_E, 400)[1])


def test_separate_blobs_are_communities() -> None:
    x, y = blobs()
    label_N, loss = graph.path(graph.neighbour_graph(x, 10), np.array([0.3]))[0]
    table = np.zeros((4, label_N.max() + 1))
    np.add.at(table, (y, label_N), 1)
    assert label_N.max() == 3
    assert table.max(axis=1).sum() > 0.97 * len(y)
    assert loss < 0.3
