"""Damaged inputs from seeds: none ends in a traceback, and none takes much memory. ``fuzz.py`` makes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.fuzz import prepared, tried
from tests.nursery import Nursery


@pytest.fixture(scope="module")
def whole(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(nursery, tmp_path_factory.mktemp("fuzz"))


FOUND = (
    421, 46, 1335, 100343, 100800, 101186, 101453, 101792, 102608, 102789, 103040, 103651, 103692, 103701, 200671,
    205555, 208708, 218703, 307084, 312759, 318602,
)  # fmt: skip
"""Seeds that once ended otherwise: a traceback, a warning, a process that was ended by a library."""


def test_damaged_inputs_are_refused_in_a_sentence(nursery: Nursery, whole: Path) -> None:
    """A first sixty, and those that once were not."""
    found = list(tried(nursery, whole, [*range(60), *FOUND]))
    assert not [one.problem for one in found if one.problem is not None]
    assert len({one.kind for one in found}) >= 6


@pytest.mark.slow
def test_thousands_of_damaged_inputs(nursery: Nursery, whole: Path) -> None:
    found = list(tried(nursery, whole, range(1000, 4000)))
    assert not [one.problem for one in found if one.problem is not None]
