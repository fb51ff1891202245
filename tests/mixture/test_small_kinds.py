"""The number of kinds that have few samples each."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import adjusted_mutual_info_score

from siammm.mixture import groups
from siammm.mixture.elbow import Elbow
from siammm.mixture.small_kinds import effective_number
from tests.mixture.planted import kinds


@pytest.mark.parametrize("k", [2, 8, 30])
@pytest.mark.parametrize("per_kind", [12, 40])
def test_the_number_does_not_depend_on_the_samples_of_a_kind(k: int, per_kind: int) -> None:
    x, _ = kinds(k, n=k * per_kind, spread=1.4, dims=48, seed=1)
    assert abs(effective_number(x) - k) <= max(1, k // 4)


def test_stray_samples_hardly_count() -> None:
    x, _ = kinds(8, n=400, spread=0.5, dims=48)
    stray = np.random.default_rng(0).normal(size=(12, 48))
    stray /= np.linalg.norm(stray, axis=1, keepdims=True)
    assert effective_number(np.concatenate([x, stray])) <= 11


def test_the_order_of_samples_does_not_matter() -> None:
    x, _ = kinds(9, n=150, spread=0.9)
    assert effective_number(x) == effective_number(x[np.random.default_rng(0).permutation(len(x))])


def test_samples_that_are_alike() -> None:
    assert effective_number(np.tile(np.eye(4), (20, 1))) == 4


def test_many_kinds_without_an_elbow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The communities alone are too few."""
    x, y = kinds(40, n=600, spread=1.3, dims=48)
    nobody = np.zeros((len(x), 2), dtype=int)
    monkeypatch.setattr(groups, "elbow", lambda *_: Elbow([], np.zeros(60)))
    found = groups.found(x, nobody, 1, unit=True, separate=False)
    assert 32 <= found.n_groups <= 48
    monkeypatch.setattr(groups, "effective_number", lambda *_: 0)
    without = groups.found(x, nobody, 1, unit=True, separate=False)
    assert without.n_groups < 25
    scores = [adjusted_mutual_info_score(y, one.predict(x, nobody[:, 0])) for one in (found, without)]
    assert scores[0] > scores[1] + 0.05


def test_a_number_whose_groups_are_not_clear_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = kinds(6, spread=0.4)
    nobody = np.zeros((len(x), 2), dtype=int)
    monkeypatch.setattr(groups, "LEAST_SHARED", np.inf)
    monkeypatch.setattr(groups, "effective_number", lambda *_: 60)
    assert groups.found(x, nobody, 1, unit=True, separate=False).n_groups == 6
    monkeypatch.setattr(groups, "_NEARLY_AS_CLEAR", np.inf)
    assert groups.found(x, nobody, 1, unit=True, separate=False).n_groups > 20
