"""A run with some of its parts replaced."""

from __future__ import annotations

import copy
from typing import Any

from siammm.runs.run import Run


def changed(run: Run, **parts: Any) -> Run:
    """The run with other parts, as if it had read them."""
    other = copy.copy(run)
    vars(other).update(parts)
    return other
