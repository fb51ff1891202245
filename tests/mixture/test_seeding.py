"""Where the components start."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.cluster import AgglomerativeClustering
from torch import Tensor

from siammm.core import ranks
from siammm.mixture import samples as samples_module
from siammm.mixture import seeding
from siammm.mixture.samples import Samples
from tests.conftest import Known

CPU = torch.device("cpu")


def seeded(X: np.ndarray, k: int, init: seeding.Init = "k-means++", *, seed: int = 0, **settings: Any) -> Tensor:
    samples = Samples(X, device=CPU, unit=False)
    return seeding.seeds(samples, k, init, torch.Generator().manual_seed(seed), **settings)


def blobs(n: int, d: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, d))


def found(centres: Tensor, known: Known) -> int:
    """How many of the true components are some centre's nearest."""
    return len(np.unique((centres.numpy() @ known.mean_directions.T).argmax(axis=1)))


@pytest.mark.parametrize("init", seeding.INITS)
@pytest.mark.parametrize("k", [1, 2, 17, 100])
def test_drawn_seeds_are_different_rows(init: seeding.Init, k: int) -> None:
    X = blobs(100, 4)
    centres = seeded(X, k, init, overseed=False).numpy()
    assert centres.shape == (k, 4)
    rows = [int(np.flatnonzero((centre == X).all(axis=1))[0]) for centre in centres]
    assert len(set(rows)) == k


@pytest.mark.parametrize("k", [2, 5, 8])
def test_joined_seeds_are_means_of_rows(k: int) -> None:
    X = blobs(100, 4)
    centres = seeded(X, k).numpy()
    assert centres.shape == (k, 4)
    assert (centres > X.min(axis=0)).all()
    assert (centres < X.max(axis=0)).all()
    assert len(np.unique(centres, axis=0)) == k


@pytest.mark.parametrize("init", seeding.INITS)
@pytest.mark.parametrize("overseed", [True, False])
@pytest.mark.parametrize("k", [1, 3, 4, 9, 60])
def test_fewer_different_rows_than_seeds(init: seeding.Init, overseed: bool, k: int) -> None:
    X = np.repeat(blobs(3, 5), 20, axis=0)
    centres = seeded(X, k, init, overseed=overseed)
    assert centres.shape == (k, 5)
    distance = torch.cdist(centres, torch.from_numpy(X)).amin(dim=1)
    assert (distance < 1e-6).all()
    if init == "k-means++" and k >= 3:  # copies come last
        assert len(np.unique(centres.numpy().round(6), axis=0)) == 3


def test_k_means_plus_plus_prefers_what_is_far() -> None:
    """Three far rows among a thousand near ones are drawn first, whatever the seed."""
    X = np.concatenate([1e-3 * blobs(1000, 3), 100 * np.eye(3)])
    for seed in range(20):
        centres = seeded(X, 4, seed=seed, overseed=False).numpy()
        assert (centres.max(axis=1) > 50).sum() == 3


def test_more_seeds_than_rounds_come_several_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeding, "_ROUNDS", 8)
    for k in (7, 8, 9, 50, 500):
        centres = seeded(blobs(500, 4), k, overseed=False)
        assert len(np.unique(centres.numpy(), axis=0)) == k


@pytest.mark.parametrize("init", seeding.INITS)
def test_same_seed_same_start(init: seeding.Init) -> None:
    X = blobs(300, 4)
    assert torch.equal(seeded(X, 7, init, seed=3), seeded(X, 7, init, seed=3))
    assert not torch.equal(seeded(X, 7, init, seed=3), seeded(X, 7, init, seed=4))


def test_overseeding_finds_every_component(twenty: Known) -> None:
    """In 128 dimensions a draw like k-means++ misses some; three times as many seeds, joined, miss none."""
    joined = [found(seeded(twenty.X, 20, seed=seed), twenty) for seed in range(10)]
    plain = [found(seeded(twenty.X, 20, seed=seed, overseed=False), twenty) for seed in range(10)]
    assert joined == [20] * 10
    assert min(plain) < 20


def ward_by_brute_force(centre: np.ndarray, count: np.ndarray, k: int) -> np.ndarray:
    """Join the pair that costs least, one at a time, looking at every pair every time."""
    groups = [(c, n) for c, n in zip(centre, count, strict=True)]
    while len(groups) > k:
        cost = {
            (i, j): n * m / (n + m) * ((a - b) ** 2).sum()
            for i, (a, n) in enumerate(groups)
            for j, (b, m) in enumerate(groups)
            if i < j
        }
        i, j = min(cost, key=cost.__getitem__)
        (a, n), (b, m) = groups[i], groups.pop(j)
        groups[i] = ((n * a + m * b) / (n + m), n + m)
    return np.stack([c for c, _ in groups])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("k", [1, 2, 6, 29, 30])
def test_joining_is_wards(k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    centre, count = rng.normal(size=(30, 3)), rng.integers(1, 40, size=30).astype(float)
    joined = seeding._joined(torch.from_numpy(centre.copy()), torch.from_numpy(count.copy()), k).numpy()
    np.testing.assert_allclose(joined, ward_by_brute_force(centre, count, k), atol=1e-12)


def test_joining_single_rows_is_scikit_learns_ward() -> None:
    X = blobs(60, 4)
    joined = seeding._joined(torch.from_numpy(X.copy()), torch.ones(60, dtype=torch.float64), 7).numpy()
    labels = AgglomerativeClustering(7, linkage="ward").fit_predict(X)
    means = np.stack([X[labels == k].mean(axis=0) for k in range(7)])
    np.testing.assert_allclose(joined[np.lexsort(joined.T)], means[np.lexsort(means.T)], atol=1e-12)


@pytest.mark.parametrize("shards", [[100], [50, 50], [1, 99], [30, 0, 70], [10] * 10])
@pytest.mark.parametrize("count", [1, 13, 99, 100, 1000])
def test_a_draw_is_the_same_however_the_rows_are_sharded(
    shards: list[int], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    X = blobs(100, 3)
    whole = Samples(X, device=CPU, unit=True).draw(count, torch.Generator().manual_seed(0))
    assert len(whole) == min(count, 100)
    monkeypatch.setattr(ranks, "all_gather_rows", lambda rows, _: rows)
    drawn = []
    for rank, begin in enumerate(np.cumsum([0, *shards[:-1]])):
        shard = Samples(X[begin : begin + shards[rank]], device=CPU, unit=True)
        shard.n_total, shard.first_row = 100, int(begin)
        drawn.append(shard.draw(count, torch.Generator().manual_seed(0)))
    torch.testing.assert_close(torch.cat(drawn), whole, rtol=0, atol=0)


@pytest.mark.parametrize("permuted", [100, 2**24])
def test_a_draw_is_of_different_rows_in_order(permuted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples_module, "_PERMUTED_ROWS", permuted)
    X = np.arange(1000, dtype=np.float64)[:, None]
    samples = Samples(X, device=CPU, unit=False)
    for count in (1, 100, 250):
        rows = samples.draw(count, torch.Generator().manual_seed(0))[:, 0]
        assert rows.unique().numel() == count
        assert torch.equal(rows, rows.sort().values)
    whole = torch.cat([samples.draw(250, torch.Generator().manual_seed(seed))[:, 0] for seed in range(40)])
    assert whole.mean().item() == pytest.approx(499.5, abs=15)  # no part of the rows is preferred
