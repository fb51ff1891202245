"""The ``siammm`` command: reads the flags, runs the command, and turns failures into one sentence and an exit code.

0 is success, 2 is anything that the user can do something about, 130 is Ctrl-C. Commands are imported when they run:
``siammm --help`` does not wait for torch.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import io
import operator
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import tyro

from siammm import __version__
from siammm.core.errors import SiamMMError, Stopped
from siammm.settings.commands import (
    AuditConfig,
    BenchConfig,
    ClusterConfig,
    CompareConfig,
    DemoConfig,
    EmbedConfig,
    EvaluateConfig,
    ExploreConfig,
    ExportConfig,
    ReportConfig,
)
from siammm.settings.methods import METHODS, with_method
from siammm.settings.presets import PRESETS
from siammm.settings.training import TrainConfig

_Config = (
    DemoConfig
    | TrainConfig
    | ClusterConfig
    | EmbedConfig
    | EvaluateConfig
    | CompareConfig
    | AuditConfig
    | ReportConfig
    | ExploreConfig
    | ExportConfig
    | BenchConfig
)
# A command is the function of this name in the module of this name.
_COMMANDS: dict[type, str] = {
    DemoConfig: "demo",
    TrainConfig: "train",
    ClusterConfig: "cluster",
    EmbedConfig: "embed",
    EvaluateConfig: "evaluate",
    CompareConfig: "compare",
    AuditConfig: "audit",
    ReportConfig: "report",
    ExploreConfig: "explore",
    ExportConfig: "export",
    BenchConfig: "bench",
}

_DESCRIPTION = (
    f"siammm {__version__}: learn an encoder from images and find the clusters in them, and how many there are, "
    "without labels. New here? Run `siammm demo`."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments == ["--version"]:
        sys.stdout.write(f"siammm {__version__}\n")
        return 0
    try:
        config = parse(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    except BrokenPipeError:  # `siammm --help | head`
        return _reader_gone()
    # A terminal that cannot show a character gets a question mark in its place, never a traceback.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        _run(config)
        sys.stdout.flush()
    except SiamMMError as error:
        return _fail(str(error), 2)
    except Stopped as stopped:
        return _fail(str(stopped), stopped.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted.", 130)
    except BrokenPipeError:
        return _reader_gone()
    except MemoryError:
        return _fail(
            "there is not enough memory for this; use a .npy file, or --loader streaming: neither is loaded whole.", 2
        )
    return 0


def parse(arguments: Sequence[str]) -> _Config:
    """The settings that these arguments mean; exits with 2 where they mean none."""
    # Flags start from a preset, or from the run that goes on, so these must be known first. What is wrong with either
    # is said later, with all other flags.
    resumed = _stored(_flag(arguments, "--resume"))
    preset = resumed or _started(_flag(arguments, "--preset"), _flag(arguments, "--method"))
    subcommand: Any = tyro.conf.subcommand
    command: Any = functools.reduce(
        operator.or_,
        (
            Annotated[kind, subcommand(name, **({"default": preset} if kind is TrainConfig else {}))]
            for kind, name in _COMMANDS.items()
        ),
    )
    return tyro.cli(
        command,
        prog="siammm",
        description=_DESCRIPTION,
        args=arguments,
        # A switch has one name, the one that changes it; but when a run goes on, the whole command of its start may be
        # given again, with switches that are on already.
        config=(tyro.conf.OmitArgPrefixes, *(() if resumed else (tyro.conf.FlagCreatePairsOff,))),
    )


def _flag(arguments: Sequence[str], flag: str) -> Any:
    """What a flag is given, if it is."""
    for number, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name == flag:
            return value or next(iter(arguments[number + 1 :]), None)
    return None


def _started(preset: str | None, method: str | None) -> TrainConfig:
    """The settings that flags start from."""
    config = PRESETS.get(cast(Any, preset), PRESETS[TrainConfig.preset])
    return with_method(config, cast(Any, method)) if method in METHODS else config


def _stored(folder: str | None) -> TrainConfig | None:
    """The settings of the run in this folder, but for those that only began it."""
    if folder is None:
        return None
    from siammm.runs.folder import RunFolder

    try:
        stored = RunFolder.open(Path(folder))[1]
    except SiamMMError:
        return None
    return dataclasses.replace(stored, data=None, output=None, overwrite=False)


def _run(config: _Config) -> None:
    name = _COMMANDS[type(config)]
    getattr(importlib.import_module(f"siammm.commands.{name}"), name)(config)


def _reader_gone() -> int:
    """The reader of our output has gone (`siammm cluster ... | head`); Python must not complain at exit as well."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _fail(message: str, code: int) -> int:
    if message:
        sys.stderr.write(f"siammm: {' '.join(message.split())}\n")
    return code
