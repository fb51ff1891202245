"""Text for people: pieces of one-sentence messages, and names and numbers as they are shown."""

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


def printable(text: object) -> str:
    r"""The text as valid Unicode: bytes of a name that are none, which Python keeps as surrogates, become ``\xff``.

    Everything else stays as it is, control characters and marks of direction too: they are data.
    """
    text = str(text)
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # a lone surrogate that stands for no byte
        return text.encode("utf-8", "backslashreplace").decode("utf-8")


def counted(count: int, what: str) -> str:
    """A number of things: 1 image, 1,797 images."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def left_out(n_images: int) -> str:
    """That so many images could not be read and were left out."""
    return f"{counted(n_images, 'image')} could not be read and {'was' if n_images == 1 else 'were'} left out"


def rough_duration(seconds: float) -> str:
    """A duration that is not known exactly: 40 seconds, 12 minutes, 5 hours, 3.2 days."""
    for unit, length, least in (("day", 86400.0, 2.0), ("hour", 3600.0, 2.0), ("minute", 60.0, 1.5)):
        if seconds >= least * length:
            n = seconds / length
            return f"{n:.1f} {unit}s" if n < 10 and unit != "minute" else f"{n:,.0f} {unit}s"
    return counted(max(1, round(seconds)), "second")
