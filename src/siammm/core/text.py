"""Small pieces of the one-sentence messages that the readers of data share."""

from __future__ import annotations

from collections.abc import Iterable


def one_line(error: BaseException) -> str:
    """What an exception says, without line breaks and without its full stop."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(text.split()).rstrip(".")


def listed(names: Iterable[object]) -> str:
    """The names with commas between them; beyond twelve, how many more there are."""
    names = [str(name) for name in names]
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def shown(name: object) -> str:
    """A name as it is, or quoted and escaped where it would break the line or cannot be printed."""
    text = str(name)
    return text if text.isprintable() else repr(text)


def shape_text(shape: Iterable[int]) -> str:
    """A shape as people write it: (10 x 32 x 32 x 3)."""
    return f"({' x '.join(map(str, shape))})"
