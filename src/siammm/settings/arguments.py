"""How a field of the settings is given on the command line: by position, or under another name.

tyro parses the command line. Training from Python needs no command line, so settings can be used without tyro.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

if TYPE_CHECKING:
    from tyro.conf import Positional, arg
else:
    try:
        from tyro.conf import Positional, arg
    except ImportError:
        Positional = Annotated[TypeVar("T"), "given by position"]

        def arg(**settings: Any) -> Any:
            """A note beside a type that nobody reads."""
            return settings


BY_POSITION = get_args(Positional[int])[1]
"""What ``Positional`` adds to a type."""

__all__ = ["BY_POSITION", "Positional", "arg"]
