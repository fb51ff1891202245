"""How mixed a cluster is with others."""

from __future__ import annotations

import numpy as np

from siammm.report import mixing


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def foreign_neighbours(rows: np.ndarray, cluster: np.ndarray, k: int) -> np.ndarray:
    return mixing.foreign_neighbours(mixing.nearest_samples(rows), cluster, k)


def test_clusters_apart_have_no_foreign_neighbours() -> None:
    random = np.random.default_rng(0)
    rows = unit(np.repeat(np.eye(3, 8), 40, axis=0) + 0.05 * random.normal(size=(120, 8)))
    cluster = np.repeat(np.arange(3), 40)
    assert foreign_neighbours(rows, cluster, 4)[:3].tolist() == [0, 0, 0]
    assert np.isnan(foreign_neighbours(rows, cluster, 4)[3])


def test_clusters_by_chance_have_those_of_chance() -> None:
    random = np.random.default_rng(0)
    rows, cluster = unit(random.normal(size=(1500, 8))), random.integers(0, 3, 1500)
    np.testing.assert_allclose(foreign_neighbours(rows, cluster, 3), 2 / 3, atol=0.04)


def test_small_clusters_are_asked_for_as_many_as_they_have() -> None:
    random = np.random.default_rng(0)
    rows = unit(np.repeat(np.eye(2, 8), [6, 60], axis=0) + 0.02 * random.normal(size=(66, 8)))
    cluster = np.repeat([0, 1], [6, 60])
    assert foreign_neighbours(rows, cluster, 2).tolist() == [0, 0]
    assert np.isnan(foreign_neighbours(rows[2:], cluster[2:], 2)[0]), "too few to judge"


def test_the_order_does_not_matter() -> None:
    random = np.random.default_rng(0)
    rows, cluster = unit(random.normal(size=(300, 8))), random.integers(0, 4, 300)
    order = random.permutation(300)
    np.testing.assert_allclose(foreign_neighbours(rows, cluster, 4), foreign_neighbours(rows[order], cluster[order], 4))


def test_one_sample() -> None:
    assert np.isnan(foreign_neighbours(np.eye(1, 3, dtype=np.float32), np.zeros(1, int), 1)).all()
