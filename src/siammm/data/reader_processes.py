"""Worker processes that read images: how each is prepared, and how its failure or death is noticed and said."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch

from siammm.core.errors import InputError, SiamMMError
from siammm.core.signals import STOPPING

_Handler = Callable[[int, FrameType | None], Any]


class ReaderError(SiamMMError):
    """A worker process was killed. Raised between two batches, so everything is as after the last one."""


def prepare_worker(worker: int) -> None:
    """One thread each; and a signal to all processes of a run is for the one that saves it, which ends its workers."""
    torch.set_num_threads(1)
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


def in_one_sentence(batches: Iterable[Any]) -> Iterator[Any]:
    """The same batches; what a worker refuses, or its death, is said without torch's traceback."""
    iterator: Iterator[Any] | None = None
    while True:
        try:
            with _deaths.heard():
                if iterator is None:
                    iterator = iter(batches)
                    _readers.update(getattr(iterator, "_workers", ()))
                batch = next(iterator)
        except StopIteration:
            return
        except InputError as error:
            raise InputError(str(error).rsplit(f"{InputError.__name__}: ", 1)[-1].strip()) from error
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise ReaderError(
                "A process that reads images was killed, which often means that memory ran out; use fewer --workers."
            ) from error
        yield batch


class _Deaths:
    """Worker processes that die, noticed while a batch is waited for.

    torch raises an error wherever the main thread is when a worker dies, also in the middle of an update, which could
    not be saved then. So its handler is in place only while a batch is waited for, where it also looks for workers that
    have died before. At all other times the handler is that of whoever uses this library, which torch's calls as well.
    """

    def __init__(self) -> None:
        self._torchs: _Handler | None = None
        self._theirs: _Handler | None = None

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Deaths before and during the block raise in it."""
        if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
            yield  # torch hears nothing there either
            return
        before: Any = signal.getsignal(signal.SIGCHLD)
        if _is_torchs(before):  # since before we came; it knows of theirs, if there is one
            self._torchs, before = before, self._quietly
        self._theirs = before if callable(before) and before != self._quietly else None
        # torch sets its handler once, when it starts its first workers, and calls after it what it finds there.
        signal.signal(signal.SIGCHLD, self._pass_on if self._torchs is None else self._hear)
        try:
            self._look()
            yield
        finally:
            now: Any = signal.getsignal(signal.SIGCHLD)
            if _is_torchs(now):
                self._torchs = now
            signal.signal(signal.SIGCHLD, signal.SIG_DFL if before is None else before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        assert self._torchs is not None
        try:
            self._torchs(number, frame)  # which passes it on, unless it raises
        except RuntimeError:
            self._pass_on(number, frame)
            raise

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self._theirs is not None:
            self._theirs(number, frame)

    def _quietly(self, number: int, frame: FrameType | None) -> None:
        with suppress(RuntimeError):
            self._hear(number, frame)

    def _look(self) -> None:
        """Raise if a worker has died. Theirs was told when it did."""
        if self._torchs is not None:
            theirs, self._theirs = self._theirs, None
            try:
                self._torchs(signal.SIGCHLD, None)
            finally:
                self._theirs = theirs


def _is_torchs(handler: Any) -> bool:
    return getattr(handler, "__module__", None) == "torch.utils.data._utils.signal_handling"


_deaths = _Deaths()


# Worker processes that this process has started. One that it was forked from has others.
_readers: WeakSet[Any] = WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_readers.clear)


@atexit.register
def _end_readers() -> None:
    """What still reads when the program ends, because an error holds on to it, ends with it.

    multiprocessing would ask by the signal that workers ignore, and wait for ever.
    """
    for reader in _readers:
        reader.kill()
