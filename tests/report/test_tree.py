"""Ward's joins against scipy's, groups within a cluster, and how fine a tree is."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from scipy.cluster.hierarchy import fcluster, linkage

from siammm.report.gather import GatherSettings, gather
from siammm.report.tree import n_leaves
from siammm.report.ward import groups_within, ward
from tests.report.made_runs import check_contents, made_run, opened


@pytest.mark.parametrize(("n", "d", "seed"), [(2, 2, 0), (5, 3, 1), (40, 4, 2), (200, 16, 3)])
def test_joins_are_scipys(n: int, d: int, seed: int) -> None:
    x_ND = np.random.default_rng(seed).normal(size=(n, d))
    pairs, heights = ward(np.ones(n), x_ND)
    expected = linkage(x_ND, method="ward")
    np.testing.assert_allclose(heights, expected[:, 2], rtol=1e-6)
    np.testing.assert_array_equal(np.sort(pairs, axis=1), np.sort(expected[:, :2].astype(int), axis=1))


def test_sizes_count() -> None:
    """Groups that are known by size and mean join as their samples would, had each group been joined first."""
    random = np.random.default_rng(0)
    centre_GD, count_G = random.normal(size=(6, 3)), np.array([1, 5, 2, 30, 4, 9])
    pairs, heights = ward(count_G, centre_GD)
    expected = linkage(np.repeat(centre_GD, count_G, axis=0), method="ward")[-5:, 2]
    np.testing.assert_allclose(heights, expected, rtol=1e-6)
    assert pairs.max() == 9


@pytest.mark.parametrize("n", [0, 1])
def test_nothing_to_join(n: int) -> None:
    pairs, heights = ward(np.ones(n), np.zeros((n, 2)))
    assert (len(pairs), len(heights)) == (0, 0)


def test_equal_groups_join_in_order() -> None:
    pairs, heights = ward(np.ones(9), np.zeros((9, 4)))
    assert (heights == 0).all()
    assert sorted(pairs.ravel().tolist()) == list(range(16))


def test_groups_are_found() -> None:
    random = np.random.default_rng(0)
    truth = np.repeat(np.arange(4), 50)
    x_ND = (10 * np.eye(4, 8)[truth] + random.normal(size=(200, 8))).astype(np.float32)
    found = groups_within(x_ND, 4, np.random.default_rng(1))
    assert len(np.unique(found)) == 4
    assert all(len(np.unique(found[truth == c])) == 1 for c in range(4))
    reference = fcluster(linkage(x_ND, "ward"), 4, "maxclust")
    assert len(set(zip(found.tolist(), reference.tolist(), strict=True))) == 4


def test_fewer_groups_of_equal_rows() -> None:
    random = np.random.default_rng(0)
    assert set(groups_within(np.ones((20, 3), np.float32), 5, random)) == {0}
    assert set(groups_within(np.eye(2, 3, dtype=np.float32).repeat(10, axis=0), 5, random)) == {0, 1}
    assert len(groups_within(np.zeros((0, 3), np.float32), 3, random)) == 0


def test_how_fine_a_tree_is() -> None:
    assert n_leaves(144, 1797, 11) == 144
    assert n_leaves(100_000, 1_280_000, 1000) == 1000
    assert n_leaves(4000, 50_000, 12) == 512
    assert n_leaves(24, 50, 3) == 10
    assert n_leaves(1, 1, 1) == 1


def test_clusters_are_split(tmp_path: Path) -> None:
    folder = made_run(tmp_path, n=500, k=3, spread=2.0)
    run = opened(folder)
    run.merges["n_components"] = [40]
    contents = gather(run, GatherSettings()).contents
    check_contents(contents, run)
    tree = contents["tree"]
    assert tree is not None
    assert 30 <= tree["n_leaves"] <= 40
    assert all(size > 0 for size in tree["size"])


@pytest.mark.slow
def test_a_hundred_thousand_images_take_seconds(tmp_path: Path) -> None:
    run = opened(made_run(tmp_path, n=100_000, k=12, d=256, spread=1.0))
    run.merges["n_components"] = [8000]
    started = time.perf_counter()
    contents = gather(run, GatherSettings()).contents
    assert time.perf_counter() - started < 60
    check_contents(contents, run)
    tree = contents["tree"]
    assert tree is not None
    assert 400 <= tree["n_leaves"] <= 512
