"""A line on standard error that says what is being done, and the browser that shows the result."""

from __future__ import annotations

import contextlib
import os
import sys
import webbrowser
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn


class Bars:
    """What is being done and how far it is; nothing where standard error is not a terminal."""

    def __init__(self) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._progress.add_task("opening", total=None)

    def tell(self, what: str, done: int, total: int) -> None:
        """Show how far it is; a total of 0 is not known."""
        self._progress.update(self._task, description=what, completed=done, total=total or None)

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


def open_page(url: str) -> bool:
    """Show a page in the user's browser, if there is one; whether it was asked to."""
    if not url.startswith(("http://127.0.0.1:", "file:///")):
        raise ValueError(url)
    # Without a screen, Python would start a browser that takes over the terminal.
    screen = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER", "WSL_DISTRO_NAME"))
    if not screen and sys.platform not in ("darwin", "win32"):
        return False
    with contextlib.suppress(Exception):  # whatever a browser, or its absence, may raise
        return webbrowser.open(url)
    return False
