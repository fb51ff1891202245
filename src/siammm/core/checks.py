"""Checks of parameters: each refuses with the value and the limit in one sentence."""

from __future__ import annotations

# pyright: reportUnknownArgumentType=false
from collections.abc import Callable
from typing import cast

import numpy as np

from siammm.core.errors import InputError


def check_at_least(name: str, value: object, least: int) -> None:
    """Refuse anything but a whole number of at least so much."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or int(value) < least:
        raise InputError(f"{name} is {value!r}, but it must be a whole number of at least {least}.")


def check_positive(name: str, value: object) -> None:
    """Refuse anything but a number above 0."""
    check_number(name, value, lambda number: 0 < number < float("inf"), "it must be a number above 0")


def check_number(name: str, value: object, accepts: Callable[[float], bool], says: str) -> None:
    """Refuse anything but a number that is accepted."""
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not number or not accepts(float(cast(float, value))):
        raise InputError(f"{name} is {value!r}, but {says}.")


def check_one_of(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Refuse anything but one of the choices."""
    if value not in choices:
        raise not_one_of(name, value, choices)


def not_one_of(name: str, value: object, choices: tuple[object, ...]) -> InputError:
    """The error for a value that is none of the choices."""
    shown = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"
    return InputError(f"{name} is {shown}, but it must be one of {', '.join(map(str, choices))}.")
