"""The test of merge="auto": the gain of a pair, the samples left out, and the proposals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist, squareform
from torch import Tensor

from siammm.mixture import acceptance
from siammm.mixture.acceptance import Evidence
from siammm.mixture.components import ConcentrationSettings, VonMisesFisherComponents
from siammm.mixture.em import Assignment
from siammm.mixture.gaussian import GaussianComponents
from siammm.mixture.samples import Samples
from tests.mixture.merging import CPU, HARD, centres, components_at


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
    own = acceptance._Similarities.of(torch.from_numpy(X), centre_KD, unit=unit).between(
        torch.arange(len(X)), found.first_N
    )
    count_N = found.statistics.count_K[found.first_N]
    resultant_N = found.statistics.total_KF[:, :3].norm(dim=1)[found.first_N]
    similarity = acceptance._left_out(own, count_N, resultant_N, unit=unit)
    np.testing.assert_allclose(similarity.numpy(), left_out_by_brute_force(X, labels, unit=unit), atol=1e-6)


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize(("entries", "few"), [(1, 2), (2**15, 2), (2**15, 1024)])
def test_evidence_is_the_pairs_moments_and_the_strays(
    unit: bool, entries: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, "_ENTRIES", entries)
    monkeypatch.setattr(acceptance, "_FEW_COMPONENTS", few)
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
