"""The settings of training by name: where each is, its value, and a copy with some changed."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

from siammm.core.errors import InputError
from siammm.settings.training import TrainConfig


def setting_homes() -> dict[str, str | None]:
    """Every setting of training with the group it is in; None for those of the command itself."""
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
    """The value of a setting by its name."""
    home = setting_homes()[name]
    return getattr(config if home is None else getattr(config, home), name)


def with_settings(config: TrainConfig, **settings: Any) -> TrainConfig:
    """A copy with these settings changed, each by its own word, whichever group it is in."""
    homes = setting_homes()
    changed: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        if name not in homes:
            raise InputError(f"{name!r} is no setting of training; the settings are {', '.join(homes)}.")
        if homes[name] is None:
            changed[name] = value
        else:
            groups.setdefault(str(homes[name]), {})[name] = value
    for group, values in groups.items():
        changed[group] = replace(getattr(config, group), **values)
    return replace(config, **changed)
