"""The ``siammm`` command: parses the flags, runs the command, and turns failures into one sentence and an exit code.

0 is success, 2 an error that the user can fix, 75 the loss of another process, 130 Ctrl-C. Commands are imported when
they run, so that ``siammm --help`` does not wait for torch.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import operator
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from siammm.core.errors import SiamMMError, Stopped
from siammm.core.memory import is_out_of_memory
from siammm.core.streams import unbreakable
from siammm.core.text import one_line, printable, shown
from siammm.core.version import __version__
from siammm.settings import commands
from siammm.settings.checks import check_shared
from siammm.settings.fields import with_settings
from siammm.settings.flags import arranged, has_short_help
from siammm.settings.methods import METHODS, with_method
from siammm.settings.presets import PRESETS
from siammm.settings.stored import starting_point
from siammm.settings.training import TrainConfig
from siammm.settings.usage import fault, given_values

# A command is the function of this name in the module of this name.
_COMMANDS: dict[str, type] = {
    "demo": commands.DemoConfig,
    "train": TrainConfig,
    "cluster": commands.ClusterConfig,
    "embed": commands.EmbedConfig,
    "evaluate": commands.EvaluateConfig,
    "compare": commands.CompareConfig,
    "audit": commands.AuditConfig,
    "report": commands.ReportConfig,
    "explore": commands.ExploreConfig,
    "sort": commands.SortConfig,
    "export": commands.ExportConfig,
    "bench": commands.BenchConfig,
}

_OWN_FLAGS = ("-h", "--help", "--help-all", "--version")

# Commands whose result is in files; what they print can be lost.
_WRITING = frozenset(_COMMANDS) - {"compare", "bench"}

_DESCRIPTION = (
    f"siammm {__version__}: train an encoder on unlabelled images, and find the clusters in them and their number. "
    "New here? Run `siammm cluster photos/` on a folder of yours, or `siammm demo`. `siammm COMMAND --help` shows the "
    "main settings of a command, `--help-all` all; `siammm --version` shows the version."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    with unbreakable() as streams:
        code = _run(arguments)
        # A result that is only printed, and that nobody got.
        lost = streams.output_was_lost and (not arguments or arguments[0] not in _WRITING)
    return code or int(lost)


def _run(arguments: Sequence[str]) -> int:
    if not arguments:
        return _fail(f"give a command: {', '.join(_COMMANDS)}; siammm --help says what each does.", 2)
    if arguments and arguments[0] == "--version":
        sys.stdout.write(f"siammm {__version__}\n")
        return 0
    if arguments and arguments[0] not in _COMMANDS and arguments[0] not in _OWN_FLAGS:
        return _fail(_no_command(arguments[0]), 2)
    if arguments and arguments[0] in _COMMANDS:
        wrong = fault(arguments[0], _COMMANDS[arguments[0]], arguments[1:])
        if wrong is not None:
            return _fail(wrong, 2)
    _let_waiting_threads_sleep()
    try:
        config = parse(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    name = arguments[0]
    try:
        check_shared(config)
        getattr(importlib.import_module(f"siammm.commands.{name}"), name)(config)
    except SiamMMError as error:
        return _fail(str(error), error.exit_code)
    except Stopped as stopped:
        return _fail(str(stopped), stopped.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted.", 130)
    except OSError as error:
        # Of a file or folder that no command looked at more closely.
        what = shown(error.filename) if error.filename is not None else "A file"
        return _fail(f"{what} cannot be used ({one_line(error)}); check it.", 2)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        remedy = f"use {'fewer --n-components' if name == 'cluster' else '--loader streaming'} or a .npy file"
        return _fail(f"this machine does not have enough memory; {remedy}, which is read in parts.", 2)
    return 0


def parse(arguments: Sequence[str]) -> Any:
    """The settings that these arguments give, as the class of the command; exits with 2 if they are wrong."""
    chosen = _COMMANDS.get(arguments[0]) if arguments else None
    is_short = has_short_help(chosen) and "--help-all" not in arguments and bool({"-h", "--help"} & set(arguments))
    arguments = ["--help" if argument == "--help-all" else argument for argument in arguments]
    every = [
        Annotated[kind, _subcommand(name, kind, arguments, whole=kind is chosen, is_short=is_short)]
        for name, kind in _COMMANDS.items()
    ]
    described: Any = functools.reduce(operator.or_, every)
    return tyro.cli(
        described,
        prog="siammm",
        description=_Wrapped(_DESCRIPTION),
        args=arguments,
        config=(tyro.conf.OmitArgPrefixes,),
        registry=arranged(chosen if is_short else None),
    )


def _let_waiting_threads_sleep() -> None:
    """Threads of torch that wait for each other use no processor, which other programs may need.

    By default they spin: beside other programs on two cores, EfficientNet-Lite0 then took nearly three times the
    processor time for an image. It is read when torch is first imported; a choice of the user's stays.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _no_command(given: str) -> str:
    """What to say to a first word that is none of the commands."""
    alike = difflib.get_close_matches(given.lower(), [*_COMMANDS, *_OWN_FLAGS], n=1)
    if alike:
        return f"There is no command {given!r}; did you mean {alike[0]}?"
    if os.path.exists(given):
        command = shlex.join(["siammm", "cluster", printable(given)])
        return f"{shown(given)} is not a command; to find the groups in it, use: {command}"
    return f"There is no command {given!r}; siammm --help lists them."


def _subcommand(name: str, kind: type, arguments: Sequence[str], *, whole: bool, is_short: bool) -> Any:
    """One command for tyro; only its own help shows its ``whole`` description."""
    paragraphs = [" ".join(lines.split()) for lines in (inspect.getdoc(kind) or "").split("\n\n")]
    if not whole:
        paragraphs = paragraphs[:1]
    elif is_short:
        paragraphs.append(f"These are the main settings; siammm {name} --help-all shows all of them.")
    description = _Wrapped(*paragraphs) if whole else paragraphs[0]
    default: dict[str, Any] = {"default": _starting_point(arguments[1:])} if whole and kind is TrainConfig else {}
    return tyro.conf.subcommand(name, description=description, **default)


class _Wrapped(str):
    """Paragraphs in lines that fit the terminal. tyro joins the lines of a description, and prints it in one."""

    def __new__(cls, *paragraphs: str) -> _Wrapped:
        width = shutil.get_terminal_size().columns
        lines = [textwrap.fill(one, width, break_long_words=False, break_on_hyphens=False) for one in paragraphs]
        return super().__new__(cls, "\n\n".join(lines))

    def split(self, *_: Any, **__: Any) -> list[str]:
        """The text as one line, so that its line breaks stay."""
        return [str(self)]


def _starting_point(arguments: Sequence[str]) -> TrainConfig:
    """The settings that the flags of train change: those of the run to resume, or of preset, weights and method.

    These flags must be known before the others are parsed. Wrong values are reported then, with all other flags.
    """
    given: Any = given_values("train", TrainConfig, arguments)
    if "resume" in given:
        from siammm.runs.run import Run

        try:
            stored = Run.unfinished(given["resume"]).config
        except (SiamMMError, OSError):
            pass
        else:
            return starting_point(stored)
    preset, method = PRESETS.get(given.get("preset"), TrainConfig()), given.get("method")
    if "weights" in given:
        preset = _with_weights(preset, given["weights"], is_given="preset" in given)
    return with_method(preset, method) if method in METHODS else preset


def _with_weights(preset: TrainConfig, weights: str, *, is_given: bool) -> TrainConfig:
    """The preset with the network of the weights to start from; unless it ``is_given``, that for known weights."""
    from siammm.runs.starting_weights import PRESET, settings_of

    try:
        settings = settings_of(weights)
    except (SiamMMError, OSError):
        return preset
    return with_settings(preset if is_given or not settings else PRESETS[PRESET], **settings)


def _fail(message: str, code: int) -> int:
    if message:
        sys.stderr.write(f"siammm: {' '.join(message.split())}\n")
    return code
