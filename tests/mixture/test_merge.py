"""Merging: Eq. 11 written out, the acceptance test in closed form, the number of components it finds, and the tree."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch
from benchmarks import merge_families
from scipy.cluster import hierarchy
from scipy.spatial.distance import pdist, squareform
from sklearn.datasets import load_digits, make_blobs
from torch import Tensor

from siammm import GaussianMixture, VonMisesFisherMixture
from siammm.core.errors import ZeroRowWarning
from siammm.mixture import acceptance, em, merge, neighbours
from siammm.mixture.acceptance import Evidence
from siammm.mixture.components import ConcentrationSettings, VonMisesFisherComponents
from siammm.mixture.em import Assignment
from siammm.mixture.gaussian import GaussianComponents
from siammm.mixture.merge import MergeHistory, Merges, MergeSettings
from siammm.mixture.samples import Samples
from tests.conftest import Known, known_mixture

CPU = torch.device("cpu")
HARD = Assignment(n_neighbours=1)


def centres(k: int, d: int, *, unit: bool, seed: int = 0) -> Tensor:
    rows = torch.randn(k, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.nn.functional.normalize(rows, dim=1) if unit else 3 * rows + 1


def components_at(samples: Samples, centre_KD: Tensor, *, unit: bool) -> Any:
    start: Any
    if unit:
        start = VonMisesFisherComponents.started(centre_KD, ConcentrationSettings())
    else:
        start = GaussianComponents.started(centre_KD, "spherical", 1.0)
    return merge.restarted(samples, start, centre_KD, HARD)


def z_of_all_pairs(centre_KD: Tensor) -> np.ndarray:
    """Eq. 11 by brute force: every distance, standardised over all pairs."""
    distance = pdist(centre_KD.numpy())
    z = squareform((distance - distance.mean()) / distance.std())
    np.fill_diagonal(z, np.inf)
    return z


# -- the distances of all pairs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize(("k", "d"), [(2, 3), (3, 2), (70, 5), (300, 64)])
@pytest.mark.parametrize("block_bytes", [1, 8 * 2**20])
def test_pair_statistics_are_exact(
    unit: bool, k: int, d: int, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "_CPU_SCORE_BYTES", block_bytes)
    centre_KD = centres(k, d, unit=unit)
    distance = pdist(centre_KD.numpy())
    found = merge.pair_statistics(centre_KD, unit=unit)
    assert found.mean == pytest.approx(distance.mean(), rel=1e-12)
    assert found.deviation == pytest.approx(distance.std(), rel=1e-9, abs=1e-7)
    square = squareform(distance)
    np.fill_diagonal(square, np.inf)
    np.testing.assert_array_equal(found.nearest_K.numpy(), square.argmin(axis=1))
    np.testing.assert_allclose(found.distance_K.numpy(), square.min(axis=1), rtol=1e-12)


def test_many_centres_are_summed_in_single_precision_without_harm() -> None:
    centre_KD = centres(4200, 8, unit=True)
    distance = pdist(centre_KD.numpy())
    mean, deviation = merge.pair_moments(centre_KD, unit=True)
    assert mean == pytest.approx(distance.mean(), rel=1e-6)
    assert deviation == pytest.approx(distance.std(), rel=1e-5)


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("copies", [2, 3, 7])
def test_a_copy_is_nearest_to_another_copy_never_to_itself(unit: bool, copies: int) -> None:
    centre_KD = centres(20, 6, unit=unit).repeat(copies, 1)
    nearest_K, distance_K = merge.nearest_others(centre_KD, unit=unit)
    itself = torch.arange(20 * copies)
    assert (nearest_K != itself).all()
    assert (nearest_K % 20 == itself % 20).all()
    assert (distance_K == 0).all()
    # Whichever copies come first, some pair of each is mutual: merging copies never stalls.
    assert set(merge.mutual_pairs(nearest_K, distance_K)[0][:, 0].remainder(20).tolist()) == set(range(20))


def test_mutual_pairs_are_mutual_disjoint_and_sorted() -> None:
    nearest_K, distance_K = merge.nearest_others(centres(200, 4, unit=False), unit=False)
    pair_P2, distance_P = merge.mutual_pairs(nearest_K, distance_K)
    first, second = pair_P2.T
    assert (first < second).all()
    assert torch.equal(nearest_K[first], second)
    assert torch.equal(nearest_K[second], first)
    assert pair_P2.unique().numel() == pair_P2.numel()
    assert torch.equal(distance_P, distance_P.sort().values)
    expected = sum(int(nearest_K[int(j)]) == i for i, j in enumerate(nearest_K)) // 2
    assert len(pair_P2) == expected


def test_two_centres_have_one_distance_and_no_deviation() -> None:
    found = merge.pair_statistics(centres(2, 5, unit=True), unit=True)
    assert found.deviation == pytest.approx(0, abs=1e-7)
    assert found.nearest_K.tolist() == [1, 0]


@pytest.mark.parametrize(("k", "share", "pairs"), [(1, 0.1, 1), (5, 0.1, 1), (100, 0.1, 10), (100, 1.0, 100)])
def test_share_is_of_the_components_and_at_least_one(k: int, share: float, pairs: int) -> None:
    assert merge.share_of(k, share) == pairs


# -- the paper's rule -------------------------------------------------------------------------------------------------


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


# -- the acceptance test: a pair --------------------------------------------------------------------------------------


def moments(*sides: tuple[float, float, float]) -> Tensor:
    """(count, mean, variance) of either side as the sums the test is given."""
    return torch.tensor([[[n, n * m, n * (v + m * m)] for n, m, v in sides]], dtype=torch.float64)


def test_a_flat_density_cut_in_half_gains_nothing() -> None:
    gain, apart = acceptance.pair_gain(moments((500, 0.5, 1 / 12), (500, -0.5, 1 / 12)))
    assert gain.item() == pytest.approx(0, abs=1e-12)
    assert not apart.item()


def test_a_bell_cut_in_half_gains_less_than_nothing() -> None:
    half = math.sqrt(2 / math.pi)
    for n in (10, 1e9):
        gain, apart = acceptance.pair_gain(moments((n, half, 1 - half**2), (n, -half, 1 - half**2)))
        assert gain.item() == pytest.approx(0.5 * math.log(1 / (1 - 2 / math.pi)) - math.log(2))
        assert gain.item() < -0.15
        assert not apart.item()


@pytest.mark.parametrize("share", [0.5, 0.1, 0.9])
def test_two_bells_gain_as_they_part(share: float) -> None:
    """With n samples, Delta apart in deviations: 1/2 ln(1 + p (1 - p) Delta^2) - Hb(p) nats a sample."""
    n, entropy = 1000, -share * math.log(share) - (1 - share) * math.log(1 - share)
    gains = []
    for delta in (2.0, 4.0, 8.0, 16.0):
        gain, apart = acceptance.pair_gain(moments((n * share, delta / 2, 1), (n * (1 - share), -delta / 2, 1)))
        expected = 0.5 * math.log(1 + share * (1 - share) * delta**2) - entropy
        assert gain.item() == pytest.approx(expected)
        assert apart.item() == (n * (expected - acceptance.MARGIN) > acceptance.NATS)
        gains.append(gain.item())
    assert gains == sorted(gains)
    assert gains[0] < 0 < gains[2]


def test_gain_has_no_unit() -> None:
    """Points may come in any unit: only the distance in deviations matters."""
    for scale in (1e-12, 1.0, 1e12):
        gain, apart = acceptance.pair_gain(moments((300, 4 * scale, scale**2), (500, -4 * scale, scale**2)))
        assert gain.item() == pytest.approx(0.5 * math.log(1 + 15 / 64 * 64) - 0.6615632381579821)
        assert apart.item()


@pytest.mark.parametrize(
    "sides",
    [
        ((500, -1.0, 0.1), (500, 1.0, 0.1)),  # each nearer to the other side, once left out
        ((1, 9.0, 0.0), (500, -9.0, 0.1)),
        ((500, 9.0, 0.1), (0, 0.0, 0.0)),
    ],
)
def test_sides_that_cross_over_or_hold_one_sample_are_no_evidence(sides: Any) -> None:
    gain, apart = acceptance.pair_gain(moments(*sides))
    assert gain.item() == -1
    assert not apart.item()


def test_copies_without_any_spread_are_kept_apart_and_finite() -> None:
    gain, apart = acceptance.pair_gain(moments((30, 1.0, 0.0), (30, -1.0, 0.0)))
    assert math.isfinite(gain.item())
    assert apart.item()


# -- the acceptance test: samples left out ----------------------------------------------------------------------------


def left_out_by_brute_force(X: np.ndarray, labels: np.ndarray, *, unit: bool) -> np.ndarray:
    """Each sample beside the mean of the others of its component, one at a time."""
    similarity = np.zeros(len(X))
    for row, x in enumerate(X):
        others = X[(labels == labels[row]) & (np.arange(len(X)) != row)]
        if len(others):
            mean = others.mean(axis=0)
            similarity[row] = x @ mean / np.linalg.norm(mean) if unit else -0.5 * ((x - mean) ** 2).sum()
    return similarity


def scattered(*, unit: bool) -> tuple[np.ndarray, Samples, Any, np.ndarray]:
    """Samples in no clear groups, seven components, and each sample's own."""
    rng = np.random.default_rng(4)
    X = rng.normal(size=(90, 3)) + (0.0 if unit else 2.0)
    X = X / np.linalg.norm(X, axis=1, keepdims=True) if unit else X
    X[80:] = X[80]  # copies
    samples = Samples(X, device=CPU, unit=unit)
    chosen = torch.from_numpy(X[[0, 9, 18, 27, 36, 45, 80]])
    start: Any
    if unit:
        start = VonMisesFisherComponents.started(chosen, ConcentrationSettings())
    else:
        start = GaussianComponents.started(chosen, "spherical", 1.0)
    found = acceptance.members(samples, start, HARD)
    return X, samples, start, found.first_N.numpy()


@pytest.mark.parametrize("unit", [True, False])
def test_members_are_the_two_nearest_and_their_sums(unit: bool) -> None:
    X, samples, components, labels = scattered(unit=unit)
    found = acceptance.members(samples, components, Assignment(n_neighbours=5))
    centre = components.centre_KD.numpy()
    distance = ((X[:, None, :] - centre) ** 2).sum(axis=2)
    np.testing.assert_array_equal(labels, distance.argmin(axis=1))
    np.testing.assert_array_equal(found.second_N.numpy(), distance.argsort(axis=1)[:, 1])
    for k in range(7):
        assert found.statistics.count_K[k].item() == (labels == k).sum()
        np.testing.assert_allclose(found.statistics.total_KF[k, :3].numpy(), X[labels == k].sum(axis=0), atol=1e-9)


@pytest.mark.parametrize("unit", [True, False])
def test_left_out_similarity_is_that_to_the_others(unit: bool) -> None:
    X, samples, components, labels = scattered(unit=unit)
    found = acceptance.members(samples, components, HARD)
    mean_KD = found.statistics.mean_KF[:, :3]
    centre_KD = torch.nn.functional.normalize(mean_KD, dim=1) if unit else mean_KD
    similarity = acceptance._left_out(
        torch.from_numpy(X), centre_KD, found.first_N, found.statistics.count_K,
        found.statistics.total_KF[:, :3].norm(dim=1), unit=unit,
    )  # fmt: skip
    np.testing.assert_allclose(similarity.numpy(), left_out_by_brute_force(X, labels, unit=unit), atol=1e-6)


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("entries", [1, 2**15])
def test_evidence_is_the_pairs_moments_and_the_strays(
    unit: bool, entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, "_ENTRIES", entries)
    X, samples, components, labels = scattered(unit=unit)
    found = acceptance.members(samples, components, HARD)
    pair_P2 = acceptance.nearby_pairs(components.centre_KD, unit=unit)
    evidence = acceptance.evidence(samples, found, pair_P2, unit=unit)
    own = left_out_by_brute_force(X, labels, unit=unit)
    mean = np.stack([X[labels == k].mean(axis=0) for k in range(7)])
    mean = mean / np.linalg.norm(mean, axis=1, keepdims=True) if unit else mean
    other = X @ mean.T if unit else -0.5 * ((X[:, None, :] - mean) ** 2).sum(axis=2)

    second = found.second_N.numpy()
    strays = np.bincount(labels[own < other[np.arange(90), second]], minlength=7)
    np.testing.assert_array_equal(evidence.alone_K.numpy(), strays + 1 <= 0.05 * np.bincount(labels, minlength=7))
    rows = []
    for i, j in pair_P2.tolist():
        t_i, t_j = (own - other[:, j])[labels == i], (other[:, i] - own)[labels == j]
        rows.append([[len(t), t.sum(), (t * t).sum()] for t in (t_i, t_j)])
    gain, apart = acceptance.pair_gain(torch.tensor(rows, dtype=torch.float64))
    np.testing.assert_allclose(evidence.gain_P.numpy(), gain.numpy(), atol=1e-6)
    np.testing.assert_array_equal(evidence.apart_P.numpy(), apart.numpy())


def test_standing_alone_takes_twenty_samples_and_few_strays() -> None:
    """Two tight clouds, one of 19 and one of 20 samples: only the second has no more than 5 % of strays, plus one."""
    rng = np.random.default_rng(0)
    X = np.repeat(np.eye(8)[:2], [19, 20], axis=0) + 0.05 * rng.normal(size=(39, 8))
    samples = Samples(X, device=CPU, unit=True)
    components = components_at(samples, torch.eye(8, dtype=torch.float64)[:2], unit=True)
    found = acceptance.members(samples, components, HARD)
    evidence = acceptance.evidence(samples, found, torch.tensor([[0, 1]]), unit=True)
    assert evidence.alone_K.tolist() == [False, True]
    assert evidence.apart_P.tolist() == [True]


def test_nearby_pairs_hold_each_components_nearest_once() -> None:
    for unit in (True, False):
        centre_KD = centres(80, 66, unit=unit)
        pair_P2 = acceptance.nearby_pairs(centre_KD, unit=unit)
        order = squareform(pdist(centre_KD.numpy())).argsort(axis=1)[:, 1 : acceptance.PARTNERS + 1]
        expected = {tuple(sorted((i, int(j)))) for i in range(80) for j in order[i]}
        assert {tuple(pair) for pair in pair_P2.tolist()} == expected
        assert len(pair_P2) == len(expected)
    assert acceptance.nearby_pairs(centres(2, 3, unit=True), unit=True).tolist() == [[0, 1]]


# -- the acceptance test: proposals -----------------------------------------------------------------------------------


def proposed(pairs: list[tuple[int, int, float, bool]], alone: list[bool], most: int = 99) -> list[tuple[int, int]]:
    """The proposals of pairs given as (i, j, gain, kept apart)."""
    return acceptance.proposals(
        Evidence(
            torch.tensor([pair[:2] for pair in pairs]),
            torch.tensor([pair[2] for pair in pairs]),
            torch.tensor([pair[3] for pair in pairs]),
            torch.tensor(alone),
        ),
        most,
    )


def test_proposals_come_in_order_of_gain_and_use_no_component_twice() -> None:
    pairs = [(0, 1, 0.3, False), (1, 2, -0.5, False), (2, 3, -0.4, False), (4, 5, -0.9, False)]
    # 3 proposes to 2, which 1 has taken; 0 proposes to 1 likewise.
    assert proposed(pairs, [True] * 6) == [(4, 5), (1, 2)]
    assert proposed(pairs, [True] * 6, most=1) == [(4, 5)]


def test_a_component_proposes_once_to_the_one_it_gains_least_from() -> None:
    # 1 proposes to 0, whom it is kept apart from; 2 proposes to 1 and is kept apart too. That 0 and 2 might merge with
    # others further on does not matter: they have asked.
    pairs = [(0, 1, 0.6, True), (1, 2, 0.7, True), (0, 2, 0.8, False)]
    assert proposed(pairs, [True] * 3) == []
    # 3 has not asked before, so its pair with 2 is a proposal of its own.
    assert proposed([*pairs, (2, 3, 0.9, False)], [True] * 4) == [(2, 3)]


def test_who_does_not_stand_alone_merges_even_if_apart() -> None:
    assert proposed([(0, 1, 0.9, True)], [True, True]) == []
    assert proposed([(0, 1, 0.9, True)], [True, False]) == [(0, 1)]
    # Only the proposer counts: 1 has asked before, and 2, which now asks it, stands alone.
    assert proposed([(0, 1, 0.1, True), (1, 2, 0.2, True)], [True, False, True]) == [(0, 1)]
    assert proposed([(1, 3, 0.1, False), (1, 2, 0.2, True)], [True, False, True, True]) == [(1, 3)]


def test_proposals_by_brute_force() -> None:
    """Random evidence: the same pairs as the rule read off the words, component by component."""
    rng = np.random.default_rng(1)
    for _ in range(50):
        k = int(rng.integers(2, 12))
        codes = rng.permutation([(i, j) for i in range(k) for j in range(i + 1, k)])[: 3 * k]
        gain, apart = rng.permutation(len(codes)).astype(float), rng.random(len(codes)) < 0.5
        alone = rng.random(k) < 0.7
        pairs = [(int(i), int(j), float(g), bool(a)) for (i, j), g, a in zip(codes, gain, apart, strict=True)]
        first = {
            c: min((p for p in pairs if c in p[:2]), key=lambda p: p[2])
            for c in range(k)
            if any(c in p[:2] for p in pairs)
        }
        expected, used = [], set[int]()
        for pair in sorted(set(first.values()), key=lambda p: p[2]):
            asks = [c for c in pair[:2] if first[c] == pair]
            if not used & set(pair[:2]) and (not pair[3] or any(not alone[c] for c in asks)):
                used |= set(pair[:2])
                expected.append(pair[:2])
        assert proposed(pairs, alone.tolist()) == expected


# -- halves -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", [True, False])
def test_halves_separate_a_dumbbell(unit: bool) -> None:
    rng = np.random.default_rng(0)
    side = rng.random(600) < 0.4
    X = 0.1 * rng.normal(size=(600, 12)) + np.eye(12)[0] + np.where(side[:, None], 0.5, -0.5) * np.eye(12)[1]
    samples = Samples(X, device=CPU, unit=unit)
    components = components_at(samples, samples.rows().mean(dim=0, keepdim=True), unit=unit)
    centre_2KD, pair_P2 = acceptance.halves(samples, components, HARD, unit=unit)
    assert pair_P2.tolist() == [[0, 1]]
    rows = samples.rows().numpy()
    expected = np.stack([rows[side].mean(axis=0), rows[~side].mean(axis=0)])
    expected = expected / np.linalg.norm(expected, axis=1, keepdims=True) if unit else expected
    found = centre_2KD.numpy()[np.argsort(-centre_2KD[:, 1].numpy())]
    np.testing.assert_allclose(found, expected, atol=1e-2)


def test_halves_leave_out_an_empty_side() -> None:
    """One sample alone has no axis, and copies have none either."""
    X = np.repeat(np.eye(4)[:2], [1, 5], axis=0)
    samples = Samples(X, device=CPU, unit=True)
    components = components_at(samples, torch.eye(4, dtype=torch.float64)[:2], unit=True)
    centre_SD, pair_P2 = acceptance.halves(samples, components, HARD, unit=True)
    np.testing.assert_allclose(centre_SD.numpy(), np.eye(4)[:2], atol=1e-12)
    assert pair_P2.shape == (0, 2)


def test_halves_of_one_beside_an_empty_side() -> None:
    """Which two belong together is said of the centres that are left."""
    X = np.array([[1, 0, 0, 0], [0, 1, 0.1, 0], [0, 1, -0.1, 0], [0, 1, 0.1, 0], [0, 1, -0.1, 0]])
    samples = Samples(X, device=CPU, unit=True)
    components = components_at(samples, torch.eye(4, dtype=torch.float64)[:2], unit=True)
    centre_SD, pair_P2 = acceptance.halves(samples, components, HARD, unit=True)
    assert centre_SD.shape[0] == 3
    assert pair_P2.tolist() == [[1, 2]]
    assert float(centre_SD[1, 2] * centre_SD[2, 2]) < 0


def test_a_split_compares_halves_with_each_other_alone(small: Known) -> None:
    """Two of six in one: that one is split again, the other four stay whole, whatever their halves are near to."""
    samples = Samples(small.X, device=CPU, unit=True)
    centre_KD = torch.from_numpy(small.mean_directions)
    joined_KD = torch.cat([centre_KD[:2].mean(dim=0, keepdim=True), centre_KD[2:]])
    components = components_at(samples, joined_KD, unit=True)
    split = merge._split(samples, components, HARD, MergeSettings(rule="auto"))
    assert split is not None
    assert split.weight_K.shape[0] == 6
    whole = components_at(samples, centre_KD, unit=True)
    assert merge._split(samples, whole, HARD, MergeSettings(rule="auto")) is None


def test_a_split_frees_what_was_merged_too_early(small: Known) -> None:
    """From one component, merging has nothing to do; splits alone find all six."""
    mixture = VonMisesFisherMixture(1, merge="auto", random_state=0).fit(small.X)
    assert mixture.n_components_ == 6
    assert mixture.merges_ is not None
    assert max(mixture.merges_.n_components) > mixture.merges_.n_components[0] == 1
    check_history(mixture, start=1)


# -- how many components ----------------------------------------------------------------------------------------------

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


# -- the tree ---------------------------------------------------------------------------------------------------------


def leaf_groups(merges: Merges, n_merges: int) -> np.ndarray:
    """Which leaves are together after the first so many rows of the tree, by following the rows."""
    leaves = len(merges.linkage) + 1
    members = {i: [i] for i in range(leaves)}
    for row, (a, b, _, count) in enumerate(merges.linkage[:n_merges]):
        members[leaves + row] = members.pop(int(a)) + members.pop(int(b))
        assert len(members[leaves + row]) == count
    group = np.empty(leaves, dtype=int)
    for number, mine in enumerate(members.values()):
        group[mine] = number
    return group


def same_groups(one: np.ndarray, other: np.ndarray) -> bool:
    pairs = set(zip(one.tolist(), other.tolist(), strict=True))
    return len(pairs) == len(set(one.tolist())) == len(set(other.tolist()))


def check_history(mixture: Any, *, start: int) -> None:
    """What must hold of every history of merging."""
    merges, k = mixture.merges_, mixture.n_components_
    counts = merges.n_components
    assert counts[0] == start
    assert counts[-1] == k == len(mixture.weights_)
    rises = [b for a, b in pairwise(counts) if b > a]
    leaves = rises[-1] if rises else start  # a split that was kept begins a tree of its own
    assert merges.linkage.shape == (leaves - 1, 4)
    assert merges.n_merges == leaves - k
    if leaves == 1:
        return
    assert hierarchy.is_valid_linkage(merges.linkage)
    assert hierarchy.is_monotonic(merges.linkage)
    assert merges.linkage[-1, 3] == leaves
    assert len(hierarchy.dendrogram(merges.linkage, no_plot=True)["leaves"]) == leaves
    cut = hierarchy.fcluster(merges.linkage, k, criterion="maxclust")
    assert len(np.unique(cut)) == k
    assert same_groups(cut, leaf_groups(merges, merges.n_merges))


@pytest.mark.parametrize("rule", merge.MERGE_RULES)
def test_the_tree_can_be_cut_at_every_number(small: Known, rule: Any) -> None:
    mixture = VonMisesFisherMixture(30, merge=rule, random_state=0).fit(small.X)
    check_history(mixture, start=30)
    assert mixture.merges_ is not None
    leaves = len(mixture.merges_.linkage) + 1
    for k in range(1, leaves + 1):
        cut = hierarchy.fcluster(mixture.merges_.linkage, k, criterion="maxclust")
        assert same_groups(cut, leaf_groups(mixture.merges_, leaves - k))


def test_history_records_rounds_of_any_shape() -> None:
    """Random rounds, groups of any size and order: the tree's groups are the composition of the rounds."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        history, group = MergeHistory(40), np.arange(40)
        for _ in range(4):
            k = history.n_components[-1]
            _, number = np.unique(rng.integers(0, max(1, k - 5), size=k), return_inverse=True)
            history.record_round(torch.from_numpy(number), torch.from_numpy(rng.random(k)))
            group = number[group]
        k = history.n_components[-1]
        merges = history.finished(torch.from_numpy(rng.random((k, 3))))
        assert hierarchy.is_valid_linkage(merges.linkage)
        assert (np.diff(merges.linkage[:, 2]) > 0).all()
        assert merges.n_merges == 40 - k
        assert same_groups(hierarchy.fcluster(merges.linkage, k, criterion="maxclust"), group)


def test_an_empty_component_is_taken_in_at_its_distance() -> None:
    """Also where the one that takes it in has the higher number."""
    X = np.repeat(np.eye(3)[:2], 5, axis=0)
    samples = Samples(X, device=CPU, unit=True)
    centre_KD = torch.nn.functional.normalize(torch.tensor([[1.0, 0, 3], [0, 1, 0], [1, 0, 0]], dtype=torch.float64))
    components = components_at(samples, centre_KD, unit=True)
    history = MergeHistory(3)
    after, changed = merge.merge_round(samples, components, HARD, MergeSettings(rule="paper", floor=1), history)
    assert changed
    assert history.n_components == [3, 2]
    row = history.finished(after.centre_KD).linkage[0]
    assert row.tolist() == [0, 2, pytest.approx(math.sqrt(2 - 2 / math.sqrt(10))), 2]


# -- the edges --------------------------------------------------------------------------------------------------------


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


def test_a_tree_of_many_centres_is_whole_without_the_table_of_all_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    centres = torch.randn(300, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    monkeypatch.setattr(merge, "_LINKAGE_LIMIT", 40)
    tree = merge.MergeHistory(300).finished(centres).linkage
    assert hierarchy.is_valid_linkage(tree)
    assert hierarchy.is_monotonic(tree)
    assert len(set(hierarchy.fcluster(tree, 7, criterion="maxclust"))) == 7
