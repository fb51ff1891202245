"""A real terminal of any width for a command: a pseudo-terminal, and what was drawn on it.

with Terminal(columns=80) as terminal:
    command = nursery.start(["train", "x.npy"], cwd=folder, **terminal.streams)
    command.wait()
terminal.lines  # every line that was drawn, without colours
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
import threading
from typing import Any

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """The terminal; a context manager. What was drawn can be read when it is closed."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._text = b""
        self._master, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self._reader = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Terminal:
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._slave)
        self._reader.join()
        os.close(self._master)

    @property
    def streams(self) -> dict[str, Any]:
        """For ``Nursery.start``: progress is shown on standard error, and results stay apart."""
        return {"stderr": os.ttyname(self._slave), "environment": {"TERM": "xterm-256color", "COLUMNS": ""}}

    @property
    def lines(self) -> list[str]:
        """All lines in the order in which they were drawn, without colours and movements."""
        text = _ESCAPE.sub("", self._text.decode("utf-8", "replace"))
        return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]

    def _read(self) -> None:
        while True:
            try:
                part = os.read(self._master, 65536)
            except OSError:  # the last one who had it open has closed it
                return
            if not part:
                return
            self._text += part
