"""The settings of training as a run stores them."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

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
        raise StoredFileError(f"{origin} does not hold the settings of a run ({error}); start the run anew.") from error


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
        else:
            value = tuple(value) if isinstance(value, list) else value  # JSON has no tuples, and no setting is a list
            values[name] = Path(value) if isinstance(value, str) and Path in _alternatives(hint) else value
    return kind(**values)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
