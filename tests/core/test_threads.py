"""Beside a GPU few CPU threads are used, and afterwards as many as before; no GPU is needed to see it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from siammm.core.threads import MOST_THREADS, all_threads, few_threads

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def threads() -> list[int]:
    """Of torch, and of each pool of OpenMP and BLAS."""
    return [torch.get_num_threads(), *(int(pool["num_threads"]) for pool in threadpool_info())]


@pytest.fixture(autouse=True)
def four_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """More threads than are left beside a GPU, on any machine."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    with threadpool_limits(4):
        torch.set_num_threads(4)
        yield
    torch.set_num_threads(before)


def test_few_threads_beside_a_gpu_and_as_many_as_before_afterwards() -> None:
    before = threads()
    assert max(before) == before[0] == 4
    with few_threads(GPU):
        assert max(threads()) == torch.get_num_threads() == MOST_THREADS
    assert threads() == before


def test_as_many_as_before_after_an_error() -> None:
    before = threads()
    with pytest.raises(KeyError), few_threads(GPU):
        raise KeyError
    assert threads() == before


def test_nothing_becomes_more() -> None:
    torch.set_num_threads(1)
    with few_threads(GPU):
        assert torch.get_num_threads() == 1
        with all_threads():
            assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 1


def test_work_of_the_cpu_has_the_usual_number() -> None:
    before = threads()
    with few_threads(GPU):
        with all_threads():
            assert threads() == before
        assert max(threads()) == MOST_THREADS
    with all_threads():
        assert threads() == before


def test_a_cpu_keeps_its_threads() -> None:
    before = threads()
    with few_threads(CPU):
        assert threads() == before


def test_the_number_that_the_user_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    before = threads()
    with few_threads(GPU):
        assert threads() == before
        with all_threads():
            assert threads() == before
