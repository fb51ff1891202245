"""Merging by the paper's rule: who merges, when it stops, and the edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import merge_families
from scipy.spatial.distance import pdist, squareform
from torch import Tensor

from siammm import GaussianMixture, VonMisesFisherMixture
from siammm.core.errors import ZeroRowWarning
from siammm.mixture import acceptance, merge
from siammm.mixture.merge import MergeSettings
from siammm.mixture.merge_tree import MergeHistory
from siammm.mixture.samples import Samples
from tests.conftest import Known
from tests.mixture.merging import CPU, HARD, check_history, components_at


def z_of_all_pairs(centre_KD: Tensor) -> np.ndarray:
    """Eq. 11 by brute force: every distance, standardised over all pairs."""
    distance = pdist(centre_KD.numpy())
    z = squareform((distance - distance.mean()) / distance.std())
    np.fill_diagonal(z, np.inf)
    return z


@pytest.mark.parametrize(("k", "share", "pairs"), [(1, 0.1, 1), (5, 0.1, 1), (100, 0.1, 10), (100, 1.0, 100)])
def test_share_is_of_the_components_and_at_least_one(k: int, share: float, pairs: int) -> None:
    assert merge.share_of(k, share) == pairs


def paper_round(known: Known, k: int, **settings: Any) -> tuple[Any, Any, MergeHistory]:
    """A start, one round of the paper's rule on it, and what the round recorded."""
    samples = Samples(known.X, device=CPU, unit=True)
    generator = torch.Generator().manual_seed(0)
    start = components_at(samples, samples.draw(k, generator).double(), unit=True)
    history = MergeHistory(k)
    after, _ = merge.merge_round(samples, start, HARD, MergeSettings(rule="paper", **settings), history)
    return start, after, history


@pytest.mark.parametrize("threshold", [-1.2, -1.8, -0.5, -9.0])
def test_paper_merges_mutual_neighbours_below_the_threshold(small: Known, threshold: float) -> None:
    """Eq. 11, and the reading of it that has the paper's pace."""
    start, after, history = paper_round(small, 120, threshold=threshold, share=1.0)
    z = z_of_all_pairs(start.centre_KD)
    nearest = z.argmin(axis=1)
    expected = {(i, int(j)) for i, j in enumerate(nearest) if nearest[j] == i and i < j and z[i, j] < threshold}
    tree = history.finished(after.centre_KD)
    made = {tuple(sorted(pair)) for pair in tree.linkage[: tree.n_merges, :2].astype(int).tolist()}
    assert made == expected
    assert after.weight_K.shape[0] == 120 - len(expected)
    assert bool(expected) == (threshold > -9)


def test_paper_takes_the_closest_pairs_first_and_no_more_than_the_share(small: Known) -> None:
    start, _, history = paper_round(small, 120, threshold=-0.5, share=0.05)
    whole = paper_round(small, 120, threshold=-0.5, share=1.0)[2]
    assert history.n_components == [120, 114]
    capped, every = (h.finished(start.centre_KD[: h.n_components[-1]]) for h in (history, whole))
    pairs = {tuple(row[:2]) for row in capped.linkage[:6].tolist()}
    closest = np.argsort([np.linalg.norm(start.centre_KD[int(i)] - start.centre_KD[int(j)]) for i, j in
                          every.linkage[: every.n_merges, :2]])[:6]  # fmt: skip
    assert pairs == {tuple(every.linkage[row, :2].tolist()) for row in closest}


@pytest.mark.parametrize("floor", [2, 7, 117])
def test_merging_stops_at_the_floor(small: Known, floor: int) -> None:
    """Even if every pair is below the threshold; the distance of the last two is its own mean, so these never are."""
    assert paper_round(small, 120, threshold=9.0, share=1.0, floor=floor)[1].weight_K.shape[0] >= floor
    mixture = VonMisesFisherMixture(120, merge="paper", merge_threshold=9.0, merge_floor=floor, random_state=0)
    assert mixture.fit(small.X).n_components_ == floor


def test_merging_conserves_the_samples(small: Known) -> None:
    """What two components had is what their union has: weights and mean vectors, exactly."""
    start, after, _ = paper_round(small, 60, threshold=0.0, share=1.0)
    assert after.weight_K.sum().item() == pytest.approx(1)
    samples = Samples(small.X, device=CPU, unit=True)
    labels = acceptance.members(samples, start, HARD).first_N.numpy()
    sums = np.stack([small.X[labels == k].sum(axis=0) for k in range(60)])
    counts = np.bincount(labels, minlength=60)
    z = z_of_all_pairs(start.centre_KD)
    nearest = z.argmin(axis=1)
    group = [int(j) if nearest[j] == i and j < i and z[i, j] < 0 else i for i, j in enumerate(nearest)]
    keep = sorted(set(group))
    for number, representative in enumerate(keep):
        mine = [i for i in range(60) if group[i] == representative]
        total = sums[mine].sum(axis=0)
        assert after.weight_K[number].item() == pytest.approx(counts[mine].sum() / len(small.X))
        np.testing.assert_allclose(after.mu_KD[number].numpy(), total / np.linalg.norm(total), atol=1e-9)


def test_pace_of_the_paper() -> None:
    """4 to 10 % of the components a round at the beginning, and on to where nothing is below the threshold."""
    rng = np.random.default_rng(0)
    x, _ = merge_families.von_mises_fisher(
        rng, merge_families.spread(rng, 30, 64, 0.4), merge_families.sizes(rng, 6000, 30, "even"), 60, 200
    )
    mixture = VonMisesFisherMixture(600, merge="paper", merge_share=1.0, random_state=0).fit(x.astype(np.float32))
    assert mixture.merges_ is not None
    counts = np.array(mixture.merges_.n_components)
    share = 1 - counts[1:] / counts[:-1]
    assert (share[:10] > 0.04).all()
    assert (share[:10] < 0.10).all()
    assert (np.diff(counts) < 0).all()
    assert counts[10] < 300
    assert mixture.n_components_ <= 5  # no stop of its own at the true 30


def test_paper_ends_where_nothing_is_below_the_threshold(small: Known) -> None:
    mixture = VonMisesFisherMixture(40, merge="paper", merge_threshold=-2.0, random_state=0, max_iter=1).fit(small.X)
    assert 1 < mixture.n_components_ < 40
    final = VonMisesFisherMixture(merge="paper", merge_threshold=-2.0, merge_floor=1).fit(small.X, init=mixture)
    assert final.n_components_ >= mixture.n_components_ - 1


@pytest.mark.parametrize("rule", merge.MERGE_RULES)
@pytest.mark.parametrize(("start", "floor"), [(6, 6), (1, 1), (2, 2), (12, 12)])
def test_a_start_at_the_floor_stays(small: Known, rule: Any, start: int, floor: int) -> None:
    mixture = VonMisesFisherMixture(start, merge=rule, merge_floor=floor, random_state=0).fit(small.X)
    check_history(mixture, start=start)
    assert mixture.n_components_ >= floor
    if rule == "paper" or start >= 6:
        assert mixture.n_components_ == start


@pytest.mark.parametrize("kind", [VonMisesFisherMixture, GaussianMixture])
@pytest.mark.parametrize("rule", merge.MERGE_RULES)
@pytest.mark.parametrize("floor", [1, 8])
def test_copies_merge_to_finite_numbers(kind: Any, rule: Any, floor: int) -> None:
    """Fewer different rows than components: what no sample is nearest to is dropped, but not below the floor."""
    X = np.repeat(np.eye(5), 40, axis=0)
    mixture = kind(20, merge=rule, merge_floor=floor, random_state=0).fit(X)
    check_history(mixture, start=20)
    assert mixture.n_components_ == (8 if floor == 8 else 5)
    assert np.isfinite(mixture.lower_bound_)
    assert np.isfinite(mixture.weights_).all()


@pytest.mark.parametrize("rule", merge.MERGE_RULES)
def test_as_many_components_as_samples(rule: Any) -> None:
    X = np.random.default_rng(0).normal(size=(30, 4))
    mixture = VonMisesFisherMixture(30, merge=rule, init="random", random_state=0).fit(X)
    check_history(mixture, start=30)
    assert np.isfinite(mixture.concentrations_).all()


@pytest.mark.parametrize("rule", [None, "auto", "paper"])
@pytest.mark.parametrize("init", ["random", "k-means++"])
def test_rows_without_direction_leave_every_component_with_one(rule: Any, init: str) -> None:
    X = np.concatenate([np.random.default_rng(0).normal(size=(20, 4)), np.zeros((10, 4))])
    with pytest.warns(ZeroRowWarning):
        mixture = VonMisesFisherMixture(25, merge=rule, init=init, random_state=0).fit(X)
    np.testing.assert_allclose(np.linalg.norm(mixture.mean_directions_, axis=1), 1)
    assert np.isfinite(mixture.lower_bound_)
