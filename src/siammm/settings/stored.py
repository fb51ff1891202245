"""The settings of training as a run stores them, in JSON, and as it resumes with them."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from siammm.core.errors import InputError, StoredFileError
from siammm.settings.fields import setting_homes, value_of, with_settings
from siammm.settings.training import DataConfig, TrainConfig

# What may be changed when a run is resumed: where it runs, and how many groups are made of its embeddings in the end,
# which leaves its training as it is ...
_CHANGEABLE = frozenset({"data", "device", "workers", "save_every", "tensorboard", "probe", "n_groups"})
# ... and the course of the rest: how long it is, and how fast.
_COURSE = frozenset({"epochs", "learning_rate", "warmup_epochs"})
# What follows from the number of epochs once that has changed.
_FOLLOWING = frozenset({"cluster_after", "group_after", "queue_after"})
# What a command is told to do, which is no setting of the run.
_OF_THE_COMMAND = frozenset({"overwrite", "resume", "resume_if_exists", "allow_data_change"})
_DEFAULT = TrainConfig()


def as_plain(config: TrainConfig) -> dict[str, Any]:
    """The settings as JSON holds them; without what the command was told, which is no setting of the run."""
    config = dataclasses.replace(config, **{name: getattr(_DEFAULT, name) for name in _OF_THE_COMMAND})
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def from_plain(stored: dict[str, Any], origin: Path) -> TrainConfig:
    """The settings that ``as_plain`` wrote, from the file ``origin``."""
    try:
        return _rebuilt(TrainConfig, stored)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise StoredFileError(f"{origin} does not contain the settings of a run ({error}); start a new run.") from error


def reading_from_plain(stored: dict[str, Any], origin: Path) -> DataConfig:
    """How images are read, as a result of ``siammm cluster`` stores it in the file ``origin``."""
    try:
        return _rebuilt(DataConfig, stored)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise StoredFileError(f"{origin} does not say how images were read ({error}); cluster again.") from error


def starting_point(stored: TrainConfig) -> TrainConfig:
    """The settings of a run as flags start from them when it is resumed: without what its own command was told."""
    return dataclasses.replace(
        stored, data=None, output=None, overwrite=False, resume=None, resume_if_exists=False, allow_data_change=False
    )


def resumed(
    config: TrainConfig, stored: TrainConfig, *, was_changed: bool = False
) -> tuple[TrainConfig, dict[str, tuple[Any, Any]]]:
    """The stored settings of the run ``config.resume``, with those that may change taken from ``config``.

    Also what changes of the course of training, with the old and the new value. The command line starts from the stored
    settings, so what differs was asked for; except with ``resume_if_exists``, whose command is that of the first start.
    If the run ``was_changed`` since, some of its settings follow from that change and are kept.
    """
    assert config.resume is not None
    started = starting_point(stored)
    changed: dict[str, Any] = {}
    refused: list[str] = []
    for name in setting_homes():
        given, before = value_of(config, name), value_of(started, name)
        follows = name in _FOLLOWING or (name == "n_components" and given is None)  # the latter from the images
        if given == before or (was_changed and config.resume_if_exists and follows):
            continue
        if name in _OF_THE_COMMAND or (name == "output" and _same_place(given, config.resume)):
            continue
        if name in _CHANGEABLE | _COURSE:
            changed[name] = given
        else:
            place = config.resume if name == "output" else before
            flag = f"--{name.replace('_', '-')}"
            refused.append(f"{flag} cannot be changed by --resume ({place} in the run, {given} given)")
    if refused:
        raise InputError(
            f"{', '.join(refused)}; a resumed run keeps its own settings: leave it out, or start a new run."
        )
    course = {name: (value_of(stored, name), given) for name, given in changed.items() if name in _COURSE}
    return with_settings(stored, **changed | _same_starts(stored, changed) | {"data": stored.data}), course


def _same_starts(stored: TrainConfig, changed: dict[str, Any]) -> dict[str, Any]:
    """Shares of the epochs that, of another number of epochs, still mean the same epoch."""
    epochs, before = changed.get("epochs"), stored.optimisation.epochs
    if epochs is None or epochs < 1:
        return {}
    shares: dict[str, float] = {}
    for name in sorted(_FOLLOWING):
        first = int(value_of(stored, name) * before)
        if name == "cluster_after" and stored.objective.uses_mixture and epochs <= first:
            least = first + 1
            raise InputError(
                f"--epochs is {epochs}, but the clusters of this run begin in epoch {least}; use at least {least}."
            )
        # What was never to begin still does not.
        shares[name] = min(1.0, (first + 0.5) / epochs) if 0 < first < before else float(first > 0)
    return shares


def _same_place(given: Path | None, other: Path) -> bool:
    return given is None or given.expanduser().resolve() == other.expanduser().resolve()


def _rebuilt(kind: Any, stored: Any) -> Any:
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
            if not _is_of(values[name], hint):
                raise ValueError(f"{name} is {value!r:.40}")
    return kind(**values)


def _is_of(value: Any, hint: Any) -> bool:
    """Whether a value is of a type that a setting may have; JSON writes 1.0 and 1 as it likes."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_is_of(value, part) for part in parts)
    if origin is Literal:
        return isinstance(value, str) and value in parts
    if origin is tuple:
        return isinstance(value, tuple) and all(_is_of(one, parts[0]) for one in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, hint)
