"""A run that has just begun, and one with some of its parts replaced."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from siammm.data.set_aside import SetAside
from siammm.runs.run import Run
from siammm.runs.writer import RunWriter
from siammm.settings.training import TrainConfig


def begun(path: Path, config: TrainConfig, facts: dict[str, Any] | None = None) -> RunWriter:
    """The writer of a new run, whose settings are on disk."""
    writer = RunWriter.planned(path, config, facts or {})
    writer.begin(SetAside(0))
    return writer


def changed(run: Run, **parts: Any) -> Run:
    """The run with other parts, as if it had read them."""
    other = copy.copy(run)
    if "config" in parts:  # what follows from it
        for name in ("settings", "merging", "backbone", "started_from", "method", "epochs", "random_state", "data"):
            vars(other).pop(name, None)
    vars(other).update(parts)
    return other
