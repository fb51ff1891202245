"""Killed at any moment, a training that is started again ends as one that was not. ``killing.py`` does it."""

from __future__ import annotations

import pytest

from tests.faults.killing import AIMS, Killer
from tests.nursery import Nursery


@pytest.fixture(scope="module")
def killer(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Killer:
    return Killer(nursery, tmp_path_factory.mktemp("kills"))


@pytest.mark.parametrize("seed", [i for i, aim in enumerate(AIMS) if aim in ("saving", "leaving results")])
def test_a_killed_training_ends_with_the_same_bits(seed: int, killer: Killer) -> None:
    assert killer.killed(seed).problem is None


@pytest.mark.slow
def test_thirty_kills_at_random_moments(killer: Killer) -> None:
    found = [killer.killed(seed) for seed in range(100, 130)]
    assert not [one.problem for one in found if one.problem is not None]
    assert len({one.phase for one in found}) >= 4
