"""Standard output and standard error that may go away: what cannot be written is dropped, and the work goes on.

A terminal is closed, the reader of a pipe ends, the disk of a log is full: none of these should cost a training.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from collections.abc import Iterator
from typing import Any


class _Dropping(io.FileIO):
    """A descriptor that forgets what it cannot write. Every write is tried: a full disk may have room again."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.has_lost = False

    def write(self, data: Any, /) -> int:
        try:
            while (written := super().write(data)) is None:
                # A pipe that does not wait, as other programs may leave it behind; we do.
                select.select([], [self.fileno()], [])
        except OSError:
            self.has_lost = True
            return memoryview(data).nbytes
        return written


class Streams:
    """The standard streams of a command while it runs."""

    def __init__(self) -> None:
        self._raw: dict[str, _Dropping] = {}

    @property
    def output_was_lost(self) -> bool:
        """Whether some of what was printed on standard output could not be written."""
        if "stdout" in self._raw:
            sys.stdout.flush()
        return any(raw.has_lost for name, raw in self._raw.items() if name == "stdout")

    def wrapped(self, name: str, stream: Any) -> Any:
        """The stream, which drops what cannot be written."""
        if stream is None:  # closed by whoever started us
            return open(os.devnull, "w", encoding="utf-8")
        if not isinstance(stream, io.TextIOWrapper):
            return stream
        # A terminal that cannot show a character gets a question mark instead of a traceback.
        if stream is not getattr(sys, f"__{name}__"):
            stream.reconfigure(errors="replace")
            return stream  # somebody's own, as in tests
        with contextlib.suppress(OSError):
            stream.flush()
        raw = self._raw[name] = _Dropping(stream.fileno())
        by_line = stream.line_buffering or stream.write_through
        return io.TextIOWrapper(
            io.BufferedWriter(raw), encoding=stream.encoding, errors="replace", line_buffering=by_line
        )


@contextlib.contextmanager
def unbreakable() -> Iterator[Streams]:
    """While entered, what cannot be written to the standard streams is dropped."""
    _occupy_descriptors()
    streams, before = Streams(), {name: getattr(sys, name) for name in ("stdout", "stderr")}
    ours = {name: streams.wrapped(name, stream) for name, stream in before.items()}
    try:
        for name, stream in ours.items():
            setattr(sys, name, stream)
        yield streams
    finally:
        for name, stream in before.items():
            ours[name].flush()
            setattr(sys, name, stream)
            if ours[name] is not stream:
                ours[name].close()


def _occupy_descriptors() -> None:
    """Nothing else may get the numbers of the standard streams: what a library prints would end up in that file."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
