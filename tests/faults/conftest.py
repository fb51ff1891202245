"""What the tests of faults share."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.faults.nursery import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Starts commands as processes of their own."""
    if sys.platform == "win32":
        pytest.skip("processes are forked, which Windows cannot")
    with Nursery() as nursery:
        yield nursery
