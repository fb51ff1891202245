"""How settings appear on the command line: their order, and which of them the short help shows.

``--help`` shows the settings that people change first, ``--help-all`` shows all. Every flag works in either case.
"""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from tyro.conf import arg
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

from siammm.settings import commands
from siammm.settings.training import TrainConfig

_COMMON = {"data", "output", "overwrite", "device"}
_PAGE = {"run", "data", "open", "audit", "evaluation", "compare", "map", "device"}
# What the short help of a command shows; commands that are not named here always show all.
_SHORT: dict[type, set[str]] = {
    TrainConfig: {
        "data", "output", "resume", "preset", "image_size", "backbone", "weights", "n_components", "merge", "epochs",
        "batch_size", "device",
    },
    commands.ClusterConfig: {
        "data", "output", "overwrite", "encoder", "image_size", "key", "label_column", "family",
        "n_components", "n_groups", "merge", "device", "random_state",
    },
    commands.EvaluateConfig: _COMMON | {"subject", "test", "protocols", "transfer", "seeds", "encoder"},
    commands.AuditConfig: _COMMON | {"subject", "labels", "label_column", "mixture", "threshold", "plant", "show"},
    commands.EmbedConfig: _COMMON | {"subject", "what", "image_size"},
    commands.ReportConfig: _PAGE | {"output", "overwrite"},
    commands.ExploreConfig: _PAGE | {"port"},
    commands.ExportConfig: _COMMON | {"run", "formats", "encoder", "hub"},
}  # fmt: skip
_FIRST, _LAST = ("data", "test", "labels", "output", "overwrite"), ("device", "random_state", "reading")


def has_short_help(command: type | None) -> bool:
    """Whether the help of this command leaves settings out."""
    return command in _SHORT


def arranged(command: type | None = None) -> ConstructorRegistry:
    """What tells tyro the order of settings; with a command, its help is the short one, and nothing can be parsed."""
    registry = ConstructorRegistry()
    shown = _SHORT.get(command or object)
    inside = False

    def arrange(info: StructTypeInfo) -> StructConstructorSpec | None:
        nonlocal inside
        ours = info.type.__module__ in (commands.__name__, TrainConfig.__module__)
        if inside or not ours:
            return None
        inside = True  # so that the next rule is tyro's own
        spec: Any = ConstructorRegistry.get_struct_spec(info)
        inside = False
        fields = spec.fields
        if info.type.__module__ == commands.__name__:  # where fields of a base class come before those of its command
            fields = sorted(fields, key=lambda field: _rank(field.name))
        if shown is not None:
            groups = {field.name for field in fields if dataclasses.is_dataclass(field.default)}
            fields = [field for field in fields if field.name in shown | groups]
        return dataclasses.replace(spec, fields=tuple(_with_readable_help(field) for field in fields))

    registry.struct_rule(arrange)
    return registry


def _with_readable_help(field: Any) -> Any:
    """A field whose text is not broken where our lines of code are; where a default is None, the text says it."""
    text: Any = field.helptext
    text = text() if callable(text) else text
    kind = Annotated[field.type, arg(help_behavior_hint="")] if field.default in (None, ()) else field.type
    value = _value_of_optional(field.type)
    if value is not None:
        kind = Annotated[kind, arg(metavar=value)]
    return dataclasses.replace(field, type=kind, helptext=None if text is None else " ".join(text.split()))


def _value_of_optional(kind: Any) -> str | None:
    """What to write for the value of a flag that may be None: ``PATH`` in place of ``{None}|PATH``."""
    if get_origin(kind) not in (Union, types.UnionType):
        return None
    values = [one for one in get_args(kind) if one is not types.NoneType]
    return values[0].__name__.upper() if len(values) == 1 and values[0] in (str, int, float, Path) else None


def _rank(name: str) -> int:
    if name in _FIRST:
        return _FIRST.index(name) - len(_FIRST)
    return 1 + _LAST.index(name) if name in _LAST else 0
