"""How long work reports how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Is told what is being done, how much of it is done, and how much there is (0 if that is not known)."""


def silent(what: str, done: int, total: int) -> None:
    """Tells nobody."""
