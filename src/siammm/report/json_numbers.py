"""Values as the page may have them: finite numbers and valid Unicode, whatever came in."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np


def number(value: Any, digits: int = 6) -> float:
    """A finite number, to so many significant digits; 0 where it is none."""
    value = float(value)
    return float(f"{value:.{digits}g}") if math.isfinite(value) else 0.0


def numbers(values: Iterable[Any] | np.ndarray, digits: int = 4) -> list[float]:
    """Finite numbers to so many decimals: a column of the page, where each character counts; 0 where there is none."""
    column = np.nan_to_num(np.asarray(values, dtype=np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    return np.round(column, digits).tolist()


def is_number(value: object) -> bool:
    """Whether a value that was read from JSON is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
