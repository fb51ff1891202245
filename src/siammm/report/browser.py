"""The user's browser, where there is one."""

from __future__ import annotations

import contextlib
import os
import sys
import webbrowser


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
