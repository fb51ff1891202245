"""How settings appear on the command line: their order, and which of them the short help shows.

``--help`` shows the settings that people change first, ``--help-all`` shows all. Every flag works in either case.
"""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from tyro.conf import DisallowNone, arg
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

from siammm.settings import commands
from siammm.settings.arguments import BY_POSITION
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
# What the help writes for a value of these settings, where the type alone says little.
_VALUES = {
    "data": "DATA", "test": "DATA", "probe": "DATA", "transfer": "DATA", "transfer_test": "DATA",
    "key": "NAME", "id_column": "NAME", "label_column": "NAME", "image_key": "NAME", "label_key": "NAME",
    "backbone": "MODEL", "encoder": "MODEL", "weights": "WEIGHTS", "device": "DEVICE", "hub": "REPOSITORY",
    "image_cache": "FOLDER", "to": "FOLDER", "audit": "FOLDER", "evaluation": "FOLDER", "resume": "RUN",
    "compare": "RUN", "labels": "FILE", "label_lists": "FILE", "mixture": "FILE", "protocols": "NAME",
    "formats": "NAME",
}  # fmt: skip
_WORDS: dict[Any, str] = {int: "N", float: "NUMBER", Path: "PATH"}
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
    """A field whose help shows words instead of types: what its value is, and what the default is.

    Its text is not broken where our lines of code are. Where a default is None, the text says what happens.
    """
    text: Any = field.helptext
    text = text() if callable(text) else text
    notes: dict[str, Any] = {}
    members, is_optional = _members(field.type)
    is_by_position = get_origin(field.type) is Annotated and BY_POSITION in get_args(field.type)
    if bool in members:
        notes["help_behavior_hint"] = "(default: on)" if field.default else "(default: off)"
    elif not is_by_position:  # of those, the name stands beside the type
        notes["metavar"] = _value_word(field.name, members)
    if field.default in (None, ()):
        notes["help_behavior_hint"] = ""
    elif get_origin(members[0]) is tuple and not isinstance(field.default, tuple):
        notes["help_behavior_hint"] = "(required)"  # tyro calls several values optional, whatever their default
    kind = Annotated[field.type, arg(**notes)]
    if is_optional and members == [bool]:
        kind = Annotated[kind, DisallowNone]  # a pair of flags, and None where neither is given
    return dataclasses.replace(field, type=kind, helptext=None if text is None else " ".join(text.split()))


def _members(kind: Any) -> tuple[list[Any], bool]:
    """The types that a setting may have besides None, and whether it may be None."""
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) not in (Union, types.UnionType):
        return [kind], False
    members = [one for one in get_args(kind) if one is not types.NoneType]
    return members, len(members) < len(get_args(kind))


def _value_word(name: str, members: list[Any]) -> str:
    """What the help writes for the value of a flag: ``RUN``, ``N``, ``{auto,paper,none}``, ``NAME [NAME ...]``."""
    if get_origin(members[0]) is tuple:
        one = _VALUES.get(name) or _word(get_args(members[0])[0])
        return f"{one} [{one} ...]"
    if get_origin(members[0]) is not Literal and name in _VALUES:
        return _VALUES[name]
    # The choices first.
    return "|".join(sorted(map(_word, members), key=lambda word: not word.startswith("{")))


def _word(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"{{{','.join(map(str, get_args(kind)))}}}"
    return _WORDS.get(kind, "TEXT")


def _rank(name: str) -> int:
    if name in _FIRST:
        return _FIRST.index(name) - len(_FIRST)
    return 1 + _LAST.index(name) if name in _LAST else 0
