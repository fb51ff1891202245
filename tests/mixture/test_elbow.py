"""The elbow of the scatter that halves of the directions share, and the space in which it is looked for."""

from __future__ import annotations

# scikit-learn's parameters have types that are guessed from their defaults.
# pyright: reportArgumentType=false
import numpy as np
import pytest
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_mutual_info_score

from siammm.mixture import groups
from siammm.mixture.elbow import Elbow, bends, elbow, levels, principal_scores, whitened_by_neighbours
from siammm.mixture.graph import nearest, neighbour_graph, so_many_communities
from tests.mixture.planted import kinds, unit


def bent_at(k: int, before: float, after: float, n: int = 200) -> np.ndarray:
    """A gain that rises by ``before`` per octave up to k groups, and by ``after`` per octave beyond."""
    octave = np.log2(np.arange(1, n + 1))
    return np.where(octave < np.log2(k), before * octave, before * np.log2(k) + after * (octave - np.log2(k)))


@pytest.mark.parametrize("k", [2, 3, 7, 40, 100])
def test_the_sharpest_bend_is_found(k: int) -> None:
    gain = bent_at(k, 0.3, 0.1)
    assert levels(gain) == [k]
    assert bends(gain).max() == pytest.approx(0.2)


@pytest.mark.parametrize(("sharp", "found"), [(0.2, [4, 40]), (0.05, [4])])
def test_kinds_of_kinds_have_two_levels(sharp: float, found: list[int]) -> None:
    assert levels(bent_at(4, 0.5, 0.2) + bent_at(40, sharp, 0.0)) == found


@pytest.mark.parametrize("n", [1, 2, 3])
def test_too_few_numbers_for_a_bend(n: int) -> None:
    assert levels(np.zeros(n)) == []
    assert len(bends(np.zeros(n))) == 0


def test_a_straight_gain_has_no_bend() -> None:
    assert np.abs(bends(bent_at(5, 0.2, 0.2))).max() < 1e-9


@pytest.mark.parametrize("k", [2, 12, 40])
def test_the_number_of_kinds(k: int) -> None:
    found = elbow(kinds(k, n=1000, spread=0.7)[0])
    assert abs(found.levels[0] - k) <= k // 40
    assert found.shared(k) > 0.3
    assert found.gain_K[0] == 0


def test_halves_of_a_single_cloud_share_nothing_however_often_it_is_divided() -> None:
    rng = np.random.default_rng(0)
    stretched = rng.normal(size=(800, 64)) * np.linspace(3, 0.3, 64)
    for x in (rng.normal(size=(800, 64)), stretched, rng.random((800, 20)), rng.standard_t(3, (800, 10))):
        found = elbow(x)
        assert np.abs(found.gain_K).max() < groups.LEAST_SHARED


@pytest.mark.parametrize("d", [1, 2, 3])
def test_few_directions(d: int) -> None:
    found = elbow(np.random.default_rng(0).normal(size=(300, d)))
    assert np.isfinite(found.gain_K).all()
    assert all(found.shared(number) < groups.LEAST_SHARED for number in found.levels)


def test_equal_rows_share_nothing() -> None:
    assert elbow(np.ones((100, 5))).gain_K.max() <= 0


def test_whitened_rows_differ_from_their_neighbours_alike_in_all_directions() -> None:
    x, y = kinds(4, n=2000, spread=0.9, stretched=7, seed=1)
    z = principal_scores(x, 32, 0)
    white = whitened_by_neighbours(z)
    np.testing.assert_allclose(np.linalg.norm(white, axis=1), 1)

    def unevenness(rows: np.ndarray) -> float:
        difference = (rows[:, None] - rows[nearest(rows, 10)[0]]).reshape(-1, rows.shape[1])
        value = np.linalg.eigvalsh(difference.T @ difference)
        return float(value[-1] / value[len(value) // 2])

    assert unevenness(white) < 1.3 < unevenness(z)
    # No label was used, but k-means finds the kinds now.
    before, after = (
        adjusted_mutual_info_score(y, KMeans(4, n_init=3, random_state=0).fit(rows).labels_) for rows in (z, white)
    )
    assert after > 0.95 > before + 0.1


@pytest.mark.parametrize("count", [2, 5, 9, 20])
def test_so_many_communities(count: int) -> None:
    x, y = kinds(9, n=900, spread=1.2)
    label = so_many_communities(neighbour_graph(x, 10), count)
    assert len(np.unique(label)) == count
    if count == 9:
        assert adjusted_mutual_info_score(y, label) > 0.8


def test_parts_without_a_link_stay_apart() -> None:
    x, y = kinds(9, n=900, spread=0.3)
    assert adjusted_mutual_info_score(y, so_many_communities(neighbour_graph(x, 10), 2)) == pytest.approx(1)


def test_more_communities_than_there_are_samples() -> None:
    x, _ = kinds(3, n=60)
    assert 3 <= len(np.unique(so_many_communities(neighbour_graph(x, 5), 1000))) <= 60


def test_many_weak_kinds_are_not_a_dozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the communities alone miss: their number hardly grows with that of the kinds."""
    x, y = kinds(24, n=1200, spread=1.5, dims=48)
    nobody = np.zeros((len(x), 2), dtype=int)
    found = groups.found(x, nobody, 1, unit=True, separate=False)
    assert 20 <= found.n_groups <= 28
    assert adjusted_mutual_info_score(y, found.predict(x, nobody[:, 0])) > 0.9
    monkeypatch.setattr(groups, "LEAST_SHARED", np.inf)
    monkeypatch.setattr(groups, "effective_number", lambda *_: 0)
    assert groups.found(x, nobody, 1, unit=True, separate=False).n_groups < 20


def test_parts_of_clear_kinds_are_not_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the elbow says counts only where it is nearly as clear as the clearest communities."""
    x, _ = kinds(6, spread=0.4)
    nobody = np.zeros((len(x), 2), dtype=int)
    monkeypatch.setattr(groups, "elbow", lambda *_: Elbow([30], np.linspace(0, 1, 60)))
    assert groups.found(x, nobody, 1, unit=True, separate=False).n_groups == 6
    monkeypatch.setattr(groups, "_NEARLY_AS_CLEAR", np.inf)
    assert groups.found(x, nobody, 1, unit=True, separate=False).n_groups > 20


def test_of_two_levels_the_clearer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = kinds(6, spread=0.4)
    nobody = np.zeros((len(x), 2), dtype=int)
    monkeypatch.setattr(groups, "elbow", lambda *_: Elbow([2, 6, 30], np.linspace(0.1, 1, 60)))
    assert groups.found(x, nobody, 1, unit=True, separate=False).n_groups == 6


def test_two_components_are_not_the_answer_where_the_elbow_says_twelve(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    half, kind = rng.normal(size=(2, 64)), rng.normal(size=(12, 64))
    y = rng.integers(12, size=1200)
    x = unit(0.9 * half[y % 2] + kind[y] + 1.9 * rng.normal(size=(1200, 64)))
    nearest_two = np.stack([y % 2, 1 - y % 2], axis=1)
    found = groups.found(x, nearest_two, 2, unit=True, separate=True)
    assert 10 <= found.n_groups <= 14
    monkeypatch.setattr(groups, "LEAST_SHARED", np.inf)
    assert groups.found(x, nearest_two, 2, unit=True, separate=True).n_groups == 2, "they are as clear as communities"
