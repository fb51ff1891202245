"""The last line of a command: what to do next."""

from __future__ import annotations

import shlex

from rich.console import Console
from rich.markup import escape

from siammm.core.text import printable


def next_steps(console: Console, *commands: tuple[object, ...]) -> None:
    """Print commands that suit what was just done, one after another in one line; nothing where there are none."""
    lines = [_command(words) for words in commands]
    if lines:
        console.print(f"Next: {' or '.join(f'[bold cyan]{escape(line)}[/]' for line in lines)}", soft_wrap=True)


def _command(words: tuple[object, ...]) -> str:
    return shlex.join(["siammm", *(printable(word) for word in words)])
