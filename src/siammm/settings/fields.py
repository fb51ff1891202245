"""The settings of training by name: the group of each, its value, and a copy with some changed."""

from __future__ import annotations

import dataclasses
from typing import Any

from siammm.core.errors import InputError
from siammm.settings.training import TrainConfig


def setting_homes() -> dict[str, str | None]:
    """Every setting of training with the group it is in, or None for those of the command itself."""
    homes: dict[str, str | None] = {}
    default = TrainConfig()
    for field in dataclasses.fields(TrainConfig):
        value = getattr(default, field.name)
        if dataclasses.is_dataclass(value):
            homes |= {inner.name: field.name for inner in dataclasses.fields(value)}
        else:
            homes[field.name] = None
    return homes


def value_of(config: TrainConfig, name: str) -> Any:
    """The value of a setting."""
    home = setting_homes()[name]
    return getattr(config if home is None else getattr(config, home), name)


def with_settings(config: TrainConfig, **settings: Any) -> TrainConfig:
    """A copy with these settings changed, each given by its name, whichever group it is in."""
    homes = setting_homes()
    changed: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in homes:
            raise InputError(f"{name!r} is not a setting of training; the settings are {', '.join(homes)}.")
        home = homes[name]
        if home is None:
            changed[name] = value
        else:
            changed[home] = dataclasses.replace(changed.get(home, getattr(config, home)), **{name: value})
    return dataclasses.replace(config, **changed)
