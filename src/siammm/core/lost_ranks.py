"""Not waiting for ever for another process: one that has ended, and one that stands still.

One that ends closes its connections, which the others notice at once. One that stands still (stopped by a signal, on a
machine that was suspended or no longer answers) keeps them. So each process counts up a number of its own in the store
through which all have met, from a thread, and looks at the numbers of the others. A process that only waits, for a slow
drive or for another process, goes on counting.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from siammm.core import ranks
from siammm.core.errors import InputError, LostRankError
from siammm.core.processes import Context

TIMEOUT_VARIABLE = "SIAMMM_RANK_TIMEOUT"
"""The seconds after which a process that stands still counts as lost; 0 waits for as long as torch does."""
_SILENT_SECONDS = 120.0
_BEAT_SECONDS = 10.0
_LEFT = b"left"
_LIMIT = "heartbeat/limit"


@contextmanager
def noticed(context: Context) -> Iterator[None]:
    """While this runs, another process that ends or stands still ends this one too, with a sentence.

    ``context`` is what ``processes.setup`` returned; without other processes nothing is watched.
    """
    seconds = _shared(_seconds(), context)
    watch = Heartbeats(context, seconds, lost=_end) if context.store is not None and seconds else None
    ended_well = False
    try:
        yield
        ended_well = True
    except RuntimeError as error:
        if not ranks.active() or (not isinstance(error, dist.DistError) and "gloo" not in str(error)):
            raise
        raise LostRankError(
            "Another rank has ended, so this one stops too; the message of that rank says why."
        ) from error
    finally:
        if watch is not None:
            watch.close(ended_well=ended_well)


class Heartbeats:
    """Counts in the store, and calls ``lost`` with a sentence once another process no longer does.

    One thread talks to the store, and waits for ever where the process that keeps it stands still; another one watches
    it. Silence is counted in beats and not by the clock: a machine that sleeps with all its processes is no reason to
    end. Neither is a store that is silent where torchrun itself keeps it: a Ctrl-Z stops torchrun, and not its
    processes. Each process watches the next two, so that the store has little to do where there are thousands.
    """

    def __init__(self, context: Context, seconds: float, lost: Callable[[str], object]) -> None:
        self._rank = context.rank
        self._others = sorted({(context.rank + ahead) % context.world_size for ahead in (1, 2)} - {context.rank})
        self._store_may_be_silent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._beat_seconds = min(_BEAT_SECONDS, seconds / 4)
        self._beats, self._seconds, self._lost = round(seconds / self._beat_seconds), seconds, lost
        self._store: Any = context.store.clone()  # the other client may be waiting
        self._over, self._ended_well = threading.Event(), False
        self._answers = 0
        self._silent = dict.fromkeys(self._others, 0)
        self._talker = self._started(self._talk)
        self._watcher = self._started(self._watch)

    def close(self, *, ended_well: bool) -> None:
        """Stop counting; tell the others that this is meant, unless it is an error that ends this process."""
        self._ended_well = ended_well
        self._over.set()
        self._watcher.join()
        self._talker.join(_BEAT_SECONDS)

    @staticmethod
    def _started(work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, daemon=True, name="siammm-heartbeats")
        thread.start()
        return thread

    def _talk(self) -> None:
        heard: dict[int, bytes] = {}
        count = 0
        while not self._over.wait(self._beat_seconds):
            count += 1
            with suppress(RuntimeError):  # whoever keeps the store has ended; the watcher counts
                self._store.set(self._key(self._rank), str(count))
                for other in self._others:
                    word = self._store.get(self._key(other)) if self._store.check([self._key(other)]) else b""
                    is_alive = word == _LEFT or word != heard.get(other, b"")
                    self._silent[other] = 0 if is_alive else self._silent[other] + 1
                    heard[other] = word
                self._answers += 1
        if self._ended_well:
            with suppress(RuntimeError):  # the others have left before
                self._store.set(self._key(self._rank), _LEFT)

    def _watch(self) -> None:
        seen, unanswered = 0, 0
        while not self._over.wait(self._beat_seconds):
            unanswered = 0 if self._answers != seen else unanswered + 1
            seen = self._answers
            still = [rank for rank, beats in self._silent.items() if beats >= self._beats]
            if still or (unanswered >= self._beats and not self._store_may_be_silent):
                who = f"Rank {still[0]}" if still else "The process that all ranks connect to"
                self._lost(f"{who} has not responded for {self._seconds:.0f} s, so this one stops.")
                return

    def _key(self, rank: int) -> str:
        return f"heartbeat/{rank}"


def _shared(seconds: float, context: Context) -> float:
    """The limit of the first process, for all of them: each must count at least as often as the others look."""
    if context.store is None:
        return seconds
    if context.rank == 0:
        context.store.set(_LIMIT, str(seconds))
    return float(context.store.get(_LIMIT))


def _seconds() -> float:
    """After how many seconds of silence a process counts as lost."""
    text = os.environ.get(TIMEOUT_VARIABLE, "")
    try:
        seconds = float(text or _SILENT_SECONDS)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise InputError(f"{TIMEOUT_VARIABLE} is {text!r}, but it must be a number of seconds of at least 0.")
    return seconds


def _end(sentence: str) -> None:
    """End this process at once: its main thread waits inside torch, where no exception reaches it."""
    sys.stderr.write(f"\nsiammm: {sentence}\n")
    sys.stderr.flush()
    os._exit(LostRankError.exit_code)
