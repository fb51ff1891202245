"""The settings of training as a run stores them, in JSON, and as it resumes with them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

from siammm.core.errors import InputError, StoredFileError
from siammm.settings.fields import setting_homes, value_of, with_settings
from siammm.settings.training import TrainConfig

# What may be changed when a run is resumed: where it runs, not what it computes.
_CHANGEABLE = frozenset({"data", "resume", "device", "workers", "save_every", "tensorboard", "probe"})


def as_plain(config: TrainConfig) -> dict[str, Any]:
    """The settings as JSON holds them."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def from_plain(stored: dict[str, Any], origin: Path) -> TrainConfig:
    """The settings that ``as_plain`` wrote, from the file ``origin``."""
    try:
        return _rebuilt(TrainConfig, stored)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoredFileError(f"{origin} does not contain the settings of a run ({error}); start a new run.") from error


def resumed(config: TrainConfig, stored: TrainConfig) -> TrainConfig:
    """The stored settings of the run ``config.resume``, with the few that may change taken from ``config``.

    The command line starts from the stored ones, so what differs was asked for.
    """
    assert config.resume is not None
    started = dataclasses.replace(stored, data=None, output=None, overwrite=False)
    changed: dict[str, Any] = {}
    for name in setting_homes():
        given = value_of(config, name)
        if given == value_of(started, name) or (name == "output" and given.resolve() == config.resume.resolve()):
            continue
        if name not in _CHANGEABLE:
            raise InputError(
                f"A run goes on with its own settings, so --{name.replace('_', '-')} cannot be changed by --resume; "
                "leave it out, or start a new run."
            )
        changed[name] = given
    return with_settings(stored, **changed | {"data": stored.data, "resume": None})


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
