"""What training notes in a run folder beside its results: settings and facts, metrics, merges, images set aside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from siammm.core.errors import StoredFileError
from siammm.core.text import one_line
from siammm.runs import files
from siammm.settings.stored import from_plain
from siammm.settings.training import TrainConfig

# What training notes besides its settings, as far as anybody reads it.
_FACTS: dict[str, type] = {"data_path": str, "fingerprint": str, "n_images": int, "kind": str, "versions": dict}


def is_run_folder(path: Path) -> bool:
    """Whether a training has written into this folder."""
    return any((path / name).exists() for name in (files.ENCODER, files.METRICS, files.CHECKPOINTS))


def read_config(folder: Path) -> tuple[TrainConfig, dict[str, Any]]:
    """The settings of a training, and what it noted besides them."""
    path = folder / files.CONFIG
    try:
        facts = dict(json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number))
        settings = facts.pop("settings")
        for name, kind in _FACTS.items():
            if not isinstance(facts.get(name), kind | None):
                raise ValueError(f"{name} is {facts[name]!r:.40}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoredFileError(f"{path} cannot be read ({one_line(error)}); train again.") from error
    return from_plain(settings, path), facts


def _no_number(text: str) -> float:
    raise ValueError(f"it holds {text}")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The metrics in a run folder, one row per epoch; of rows that are damaged, the numbers that are left."""
    path = folder / files.METRICS
    try:
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    except OSError as error:
        raise StoredFileError(f"{path} cannot be read ({one_line(error)}); check it, or remove it.") from error
    rows: list[dict[str, Any]] = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # a line that was being written when the machine went down
            break
        if isinstance(row, dict) and isinstance(row.get("epoch"), int):
            rows.append({name: value for name, value in row.items() if isinstance(value, int | float)})
    return rows


def read_merges(folder: Path) -> dict[str, Any]:
    """The tree of merges; empty if the run kept none."""
    path = folder / files.MERGES
    if not path.is_file():
        return {}
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoredFileError(f"{path} cannot be read ({one_line(error)}); remove it, or train again.") from error
    return stored if isinstance(stored, dict) else {}


def count_set_aside(folder: Path) -> int:
    """How many images could not be read."""
    try:
        return len(json.loads((folder / files.SET_ASIDE).read_text(encoding="utf-8"))["set_aside"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
