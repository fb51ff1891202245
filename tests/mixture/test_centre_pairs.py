"""Distances of all pairs of centres, and each centre's nearest other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist, squareform

from siammm.mixture.centre_pairs import mutual_pairs, nearest_others, pair_moments, pair_statistics
from siammm.mixture.search import neighbours
from tests.mixture.merging import centres


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize(("k", "d"), [(2, 3), (3, 2), (70, 5), (300, 64)])
@pytest.mark.parametrize("block_bytes", [1, 8 * 2**20])
def test_pair_statistics_are_exact(
    unit: bool, k: int, d: int, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "_CPU_SCORE_BYTES", block_bytes)
    centre_KD = centres(k, d, unit=unit)
    distance = pdist(centre_KD.numpy())
    found = pair_statistics(centre_KD, unit=unit)
    assert found.mean == pytest.approx(distance.mean(), rel=1e-12)
    assert found.deviation == pytest.approx(distance.std(), rel=1e-9, abs=1e-7)
    square = squareform(distance)
    np.fill_diagonal(square, np.inf)
    np.testing.assert_array_equal(found.nearest_K.numpy(), square.argmin(axis=1))
    np.testing.assert_allclose(found.distance_K.numpy(), square.min(axis=1), rtol=1e-12)


def test_many_centres_are_summed_in_single_precision_without_harm() -> None:
    centre_KD = centres(4200, 8, unit=True)
    distance = pdist(centre_KD.numpy())
    mean, deviation = pair_moments(centre_KD, unit=True)
    assert mean == pytest.approx(distance.mean(), rel=1e-6)
    assert deviation == pytest.approx(distance.std(), rel=1e-5)


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("copies", [2, 3, 7])
def test_a_copy_is_nearest_to_another_copy_never_to_itself(unit: bool, copies: int) -> None:
    centre_KD = centres(20, 6, unit=unit).repeat(copies, 1)
    nearest_K, distance_K = nearest_others(centre_KD, unit=unit)
    itself = torch.arange(20 * copies)
    assert (nearest_K != itself).all()
    assert (nearest_K % 20 == itself % 20).all()
    assert (distance_K == 0).all()
    # Whichever copies come first, some pair of each is mutual: merging copies never stalls.
    assert set(mutual_pairs(nearest_K, distance_K)[0][:, 0].remainder(20).tolist()) == set(range(20))


def test_mutual_pairs_are_mutual_disjoint_and_sorted() -> None:
    nearest_K, distance_K = nearest_others(centres(200, 4, unit=False), unit=False)
    pair_P2, distance_P = mutual_pairs(nearest_K, distance_K)
    first, second = pair_P2.T
    assert (first < second).all()
    assert torch.equal(nearest_K[first], second)
    assert torch.equal(nearest_K[second], first)
    assert pair_P2.unique().numel() == pair_P2.numel()
    assert torch.equal(distance_P, distance_P.sort().values)
    expected = sum(int(nearest_K[int(j)]) == i for i, j in enumerate(nearest_K)) // 2
    assert len(pair_P2) == expected


def test_two_centres_have_one_distance_and_no_deviation() -> None:
    found = pair_statistics(centres(2, 5, unit=True), unit=True)
    assert found.deviation == pytest.approx(0, abs=1e-7)
    assert found.nearest_K.tolist() == [1, 0]
