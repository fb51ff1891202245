"""The settings of training as a run stores them, in JSON."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args, get_type_hints

from siammm.core.errors import StoredFileError
from siammm.settings.training import TrainConfig


def as_plain(config: TrainConfig) -> dict[str, Any]:
    """The settings as JSON holds them."""
    return _plain(dataclasses.asdict(config))


def from_plain(stored: dict[str, Any], origin: Path) -> TrainConfig:
    """The settings that ``as_plain`` wrote, from the file ``origin``."""
    try:
        return _rebuilt(TrainConfig, stored)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoredFileError(f"{origin} does not contain the settings of a run ({error}); start a new run.") from error


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return str(value) if isinstance(value, Path) else value


def _rebuilt(kind: Any, stored: dict[str, Any]) -> Any:
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, value in stored.items():
        hint = hints[name]
        if dataclasses.is_dataclass(hint):
            values[name] = _rebuilt(hint, value)
        elif isinstance(value, str) and Path in get_args(hint):
            values[name] = Path(value)
        else:
            values[name] = tuple(value) if isinstance(value, list) else value  # JSON has no tuples
    return kind(**values)
