"""Borders between groups: how far the scores of a discriminant may be believed."""

from __future__ import annotations

import numpy as np
import pytest

from siammm.mixture import borders, groups
from siammm.mixture.group_rule import Groups


def clouds(n: int, g: int, d: int, *, apart: float, seed: int, of: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ``g`` kinds around centres that ``of`` draws: the same ones for another sample of the same kinds."""
    centre_GD = np.random.default_rng([of, 7]).normal(size=(g, d))
    centre_GD *= apart / np.linalg.norm(centre_GD, axis=1, keepdims=True)
    rng = np.random.default_rng([of, seed, 8])
    y = rng.permutation(np.arange(n) % g)
    return centre_GD[y] + rng.normal(size=(n, d)), y


def probability(rule: tuple[np.ndarray, np.ndarray], x: np.ndarray) -> np.ndarray:
    return Groups(np.zeros(1, dtype=np.int64), 1.0, *rule).predict_proba(x)


@pytest.mark.parametrize(("g", "apart", "n"), [(2, 1.3, 120), (5, 2.0, 240), (12, 2.5, 240)])
def test_a_probability_says_how_often_it_is_right(g: int, apart: float, n: int) -> None:
    """On rows that nobody has seen, where the rule's own scores are far too certain."""
    (x, y), (new, truth) = (clouds(n, g, 60, apart=apart, seed=seed) for seed, n in enumerate((n, 4000)))
    label = borders.assigned(x, y)
    plain, found = borders.discriminant(x, label), borders.calibrated(x, label, y, 0)
    away = {}
    for name, rule in (("plain", plain), ("found", found)):
        share = probability(rule, new)
        surest, right = share.max(axis=1), share.argmax(axis=1) == truth
        away[name] = abs(surest.mean() - right.mean())
    assert away["plain"] > 0.08
    assert away["found"] < 0.04
    np.testing.assert_array_equal(probability(found, new).argmax(axis=1), probability(plain, new).argmax(axis=1))


def test_what_is_far_apart_is_nearly_sure_and_no_more() -> None:
    for n in (60, 600):
        x, y = clouds(n, 3, 8, apart=60, seed=0)
        share = probability(borders.calibrated(x, y, y, 0), x)
        assert np.isfinite(share).all()
        surest = share.max(axis=1)
        assert 1 - 3 / n < np.median(surest) < 1 - 0.1 / n, "one row in n might be wrong"
        assert surest.max() < 1


def test_rows_that_the_graph_and_the_border_disagree_about_make_it_less_sure() -> None:
    x, y = clouds(400, 4, 10, apart=4, seed=0)
    label = borders.assigned(x, y)
    doubted = np.where(np.random.default_rng(1).random(len(y)) < 0.2, (label + 1) % 4, label)
    sure, unsure = (probability(borders.calibrated(x, label, other, 0), x).max(axis=1) for other in (label, doubted))
    assert sure.mean() > 0.95
    assert 0.6 < unsure.mean() < 0.85


@pytest.mark.parametrize("sizes", [(2, 40), (1, 40), (2, 2), (1, 1), (4, 4, 1, 1, 1), (30, 2, 2, 2)])
@pytest.mark.parametrize("apart", [0.0, 3.0, 1e4])
def test_tiny_groups(sizes: tuple[int, ...], apart: float) -> None:
    y = np.repeat(np.arange(len(sizes)), sizes)
    x = apart * np.eye(len(sizes), 6)[y] + np.random.default_rng(0).normal(size=(len(y), 6))
    weight, offset = borders.calibrated(x, y, y, 0)
    assert np.isfinite(weight).all()
    assert np.isfinite(offset).all()
    np.testing.assert_allclose(probability((weight, offset), x).sum(axis=1), 1)


def test_equal_rows_and_a_community_that_went_elsewhere() -> None:
    x, y = np.repeat(np.eye(3), 5, axis=0), np.repeat(np.arange(3), 5)
    share = probability(borders.calibrated(x, y, y, 0), x)
    np.testing.assert_array_equal(share.argmax(axis=1), y)
    assert 0.8 < share.max(axis=1).min() <= share.max() < 1
    # All rows of the third were nearer to the second: it is no mistake that they are there.
    x, y = clouds(90, 2, 4, apart=30, seed=0)
    rule = borders.calibrated(x, y, np.where((y == 1) & (np.arange(90) % 3 == 0), 2, y), 0)
    assert probability(rule, x).max(axis=1).mean() > 0.98
    same = np.ones((20, 3))
    assert np.isfinite(borders.calibrated(same, np.arange(20) % 2, np.arange(20) % 2, 0)[0]).all()


@pytest.mark.parametrize("so_many", [None, 6])
def test_groups_are_as_certain_as_they_are_the_same_in_another_view(so_many: int | None) -> None:
    """Rows in 200 dimensions of which few say anything, and the same rows again with other noise in the others."""
    rng = np.random.default_rng(0)
    y = np.arange(600) % 6
    known = 5.5 * np.eye(6)[y] + 1.2 * rng.normal(size=(600, 6))
    x, view = (np.concatenate([known, rng.normal(size=(600, 194))], axis=1) for _ in range(2))
    found = groups.found(x, np.zeros((600, 2), dtype=np.int64), 1, unit=True, separate=False, so_many=so_many)
    assert found.n_groups == 6
    surest = found.predict_proba(x).max(axis=1).mean()
    assert abs(surest - (found.predict(x, None) == found.predict(view, None)).mean()) < 0.05
