"""What is wrong with the words of a command line, in one sentence: unknown flags, wrong values, words too many.

A command line is read twice. tyro makes the help and the typed settings, but says what is wrong in a box of its own,
without the limit and the remedy, and offers no hook to say it otherwise. And it needs the defaults of ``train`` before
it reads the flags, while they depend on some of them (``--preset``). So this module reads the words first, by the same
types: ``fault`` gives the sentence, ``given_values`` the flags on which defaults depend. What it does not know, it
leaves to tyro.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from siammm.core.text import listed, shown
from siammm.settings.arguments import BY_POSITION

_LEFT_TO_TYRO = {"-h", "--help", "--help-all", "--"}
_LONGEST = 40  # characters of a value that a sentence repeats
_TRUTH_VALUES = {"true", "false", "yes", "no", "on", "off"}


@dataclasses.dataclass
class _Words:
    """The words behind the name of a command, sorted by what they are."""

    flags: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """The values given to each flag, by the name of its setting; those given last."""
    positions: list[str] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)
    """What is wrong with the flags, a sentence for each."""


def fault(command: str, kind: type, words: Sequence[str]) -> str | None:
    """The first thing that is wrong with the words behind the name of a command; None if nothing is known to be."""
    if _LEFT_TO_TYRO & set(words):
        return None
    found = _sorted(command, kind, words)
    if found.faults:
        return found.faults[0]
    positions = _flags_and_positions(kind)[1]
    if "" in found.positions:
        return f"siammm {command} was given an empty word; name the data or the run."
    return _wrong_count(command, positions, found.positions) or _missing(command, kind, set(found.flags))


def given_values(command: str, kind: type, words: Sequence[str]) -> dict[str, str]:
    """The last value given to each flag that takes one, by the name of its setting; faults are passed over."""
    return {name: values[-1] for name, values in _sorted(command, kind, words).flags.items() if values}


def _sorted(command: str, kind: type, words: Sequence[str]) -> _Words:
    flags = _flags_and_positions(kind)[0]
    found = _Words()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word in _LEFT_TO_TYRO:
            continue
        if not word.startswith("-") or word == "-":
            found.positions.append(word)
            continue
        flag, equals, given = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        home = name if name in flags else name.removeprefix("no_")
        wanted = flags.get(home)
        is_switch = wanted is not None and _members(wanted) == [bool]
        if wanted is None or (home != name and not is_switch):
            found.faults.append(_unknown(command, flag, flags))
            continue
        found.flags[home] = []
        if is_switch:
            if equals or (rest and rest[0].lower() in _TRUTH_VALUES):
                word = home.replace("_", "-")
                found.faults.append(f"{flag} takes no value; use --{word} or --no-{word} alone.")
            continue
        several = get_origin(_without_none(wanted)) is tuple
        values = [given] if equals else _values(rest, several=several)
        if not values and not several:
            choices = "" if _takes_any_word(wanted) else f": {_described(wanted)}"
            found.faults.append(f"{flag} needs a value{choices or f'; siammm {command} --help-all says which'}.")
        for value in values:
            if not value and Path in _members(wanted):
                found.faults.append(f"{flag} is empty; give a path.")
            if not _is_one(wanted, value):
                hint = "; put spaces between several values" if several and "," in value else ""
                found.faults.append(f"{flag} takes {_described(wanted)}, not {_shortened(value)}{hint}.")
        found.flags[home] = values
    return found


def _missing(command: str, kind: type, given: set[str]) -> str | None:
    """What to say where a flag that has no default is not given."""
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        notes = get_args(hints[field.name])[1:] if get_origin(hints[field.name]) is Annotated else ()
        if not has_default and BY_POSITION not in notes and field.name not in given:
            flag = f"--{field.name.replace('_', '-')}"
            return f"siammm {command} also needs {flag}; siammm {command} --help says what it is."
    return None


def _flags_and_positions(kind: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """The types of a command's flags, those of its groups of settings too, and of what is given by position."""
    flags: dict[str, Any] = {}
    positions: dict[str, Any] = {}
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        plain, notes = (get_args(hint)[0], get_args(hint)[1:]) if get_origin(hint) is Annotated else (hint, ())
        if BY_POSITION in notes:
            is_needed = field.default is dataclasses.MISSING
            name = next((note.metavar for note in notes if getattr(note, "metavar", None)), field.name.upper())
            positions[name.split()[0]] = (is_needed, get_origin(plain) is tuple)
        elif dataclasses.is_dataclass(plain):
            flags |= _flags_and_positions(plain if isinstance(plain, type) else type(plain))[0]
        else:
            flags[field.name] = plain
    return flags, positions


def _without_none(kind: Any) -> Any:
    """The type of a value that is given: ``tuple[int, ...]`` of ``tuple[int, ...] | None``."""
    members = _members(kind)
    return members[0] if len(members) == 1 else kind


def _is_optional(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType) and types.NoneType in get_args(kind)


def _members(kind: Any) -> list[Any]:
    """The types that a union consists of, without None."""
    if get_origin(kind) not in (Union, types.UnionType):
        return [kind]
    return [member for member in get_args(kind) if member is not types.NoneType]


def _values(rest: list[str], *, several: bool) -> list[str]:
    """Take the words that are values of a flag; a number below 0 is one."""
    taken: list[str] = []
    while rest and not rest[0].startswith("--") and (several or not taken):
        taken.append(rest.pop(0))
    return taken


def _is_one(kind: Any, value: str) -> bool:
    """Whether a word can be read as this type; of a type that is not known here, everything can."""
    if value == "None" and _is_optional(kind):  # tyro's word for no value
        return True
    kind = _without_none(kind)
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
    return any(_reads(member, value) for member in _members(kind))


def _reads(kind: Any, value: str) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind not in (int, float):
        return True
    try:
        kind(value)
    except ValueError:
        return False
    return True


def _takes_any_word(kind: Any) -> bool:
    return any(get_origin(member) is not Literal and member not in (int, float) for member in _members(kind))


def _described(kind: Any) -> str:
    """The values of a type in words: ``auto, paper or none``, ``a whole number``."""
    kind = _without_none(kind)
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
    words: list[str] = []
    for member in _members(kind):
        if get_origin(member) is Literal:
            words += [str(one) for one in get_args(member)]
        else:
            words.append({int: "a whole number", float: "a number", Path: "a path"}.get(member, "a word"))
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _shortened(value: str) -> str:
    value = value if len(value) <= _LONGEST else f"{value[:_LONGEST]}..."
    return repr(value)


def _unknown(command: str, flag: str, flags: dict[str, Any]) -> str:
    known = [f"--{name.replace('_', '-')}" for name in flags] + ["--help", "--help-all"]
    alike = difflib.get_close_matches(flag, known, n=1)
    remedy = f"did you mean {alike[0]}?" if alike else f"siammm {command} --help-all lists them."
    return f"siammm {command} has no flag {shown(flag)}; {remedy}"


def _wrong_count(command: str, positions: dict[str, Any], own: list[str]) -> str | None:
    """What to say where words that are no flags are missing or too many."""
    needed = [name for name, (is_needed, _) in positions.items() if is_needed]
    if len(own) < len(needed):
        return f"siammm {command} needs {needed[len(own)]}; siammm {command} --help says what it is."
    if len(own) > len(positions) and not any(several for _, several in positions.values()):
        extra = listed(shown(word) for word in own[len(positions) :])
        takes = f"one {next(iter(positions))}" if positions else "flags only"
        return f"siammm {command} takes {takes}, not also {extra}; put quotes around a pattern or a name with spaces."
    return None
