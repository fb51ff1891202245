"""The word by which the processes of one start of torchrun know each other."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage] - torch's pages name it

from siammm.core import processes
from siammm.core.errors import InputError

_LONG, _SHORT = timedelta(seconds=60), timedelta(seconds=0.1)


def words(store: HashStore, world: int) -> list[str]:
    """What each rank of a start gets."""
    found = [""] * world

    def meet(rank: int) -> None:
        found[rank] = processes._word_of_this_start(store, rank, world, _LONG)

    ranks = [threading.Thread(target=meet, args=(rank,)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return found


def test_all_ranks_share_a_word_that_no_earlier_start_had() -> None:
    store = HashStore()
    first, second = words(store, 3), words(store, 3)
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]


def test_ranks_that_are_not_heard_of_are_counted() -> None:
    with pytest.raises(InputError, match="2 of 3 processes did not respond"):
        processes._word_of_this_start(HashStore(), 0, 3, _SHORT)


def test_one_that_answers_at_the_last_moment_is_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time may be over once all have answered."""
    clock = iter([0.0, *[1e9] * 100])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    assert processes._word_of_this_start(HashStore(), 0, 1, _SHORT).startswith("siammm/")
    store = HashStore()
    store.set("siammm/asked/1", "question")
    monkeypatch.setattr(processes.secrets, "token_hex", lambda _: "word")
    store.set("siammm/word/heard/1", "")
    clock = iter([0.0, *[1e9] * 100])
    assert processes._word_of_this_start(store, 0, 2, _SHORT) == "siammm/word"
    assert store.get("siammm/answer/question") == b"siammm/word"
