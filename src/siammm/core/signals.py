"""Ctrl-C and SIGTERM as a request that a long computation honours when it is convenient."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self


class StopSignals:
    """While entered, the first Ctrl-C or SIGTERM only sets ``requested``; a second Ctrl-C stops at once.

    Only the main thread can receive signals; elsewhere nothing is changed.
    """

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    def requested(self) -> bool:
        """Whether a signal has asked to stop."""
        return self.number != 0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number
