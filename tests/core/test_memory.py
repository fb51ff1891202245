from __future__ import annotations

import pytest

from siammm.core import memory


def test_a_machine_without_limits_says_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    # Neither in a container nor under ulimit, which the machine of the tests may be.
    monkeypatch.setattr(memory, "_of_container", list)
    monkeypatch.setattr(memory, "_of_process", list)
    assert 0 < memory.free_memory() == pytest.approx(memory._of_machine(), rel=0.2)


def test_the_smallest_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_of_container", lambda: [3 * 2**20])
    monkeypatch.setattr(memory, "_of_process", lambda: [5 * 2**20])
    assert memory.free_memory() == 3 * 2**20
