"""Ctrl-C, SIGTERM and the loss of the terminal as a request that a long computation honours when it is convenient."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

# A lost terminal or connection is SIGHUP, which Windows has not.
STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""The signals that ask to stop."""


class StopSignals:
    """While entered, the first Ctrl-C, SIGTERM or SIGHUP only sets ``requested``; a second Ctrl-C stops at once.

    Only the main thread can receive signals; elsewhere nothing is changed. A SIGHUP that is ignored stays so: that is
    what ``nohup`` is for.
    """

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    def requested(self) -> bool:
        """Whether a signal has asked to stop."""
        return self.number != 0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in STOPPING if not _is_ignored_hangup(number)]
            self._before = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number


def _is_ignored_hangup(number: int) -> bool:
    return number not in (signal.SIGINT, signal.SIGTERM) and signal.getsignal(number) is signal.SIG_IGN
