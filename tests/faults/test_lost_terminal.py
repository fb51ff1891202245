"""A terminal that is lost, a pipe that is closed, a log that cannot grow: nobody loses a training by that."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from siammm.runs import files
from tests.commands import TINY
from tests.data.image_sets import example_images, write_folder
from tests.nursery import Command, Nursery

RESULTS = {files.ENCODER, files.MIXTURE, files.ASSIGNMENTS, files.METRICS}


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    write_folder(tmp_path, example_images(24, size=(8, 8)))
    return ["train", "images", *TINY, "--output", "run"]


def wait_for_an_epoch(command: Command, terminal: int | None = None) -> None:
    """Until one is over; a terminal is read meanwhile, as otherwise the command would wait for that."""
    path, until = command.cwd / "run" / files.METRICS, time.monotonic() + 240
    while not path.exists() or not path.read_text():
        assert time.monotonic() < until, command.err
        if terminal is not None and select.select([terminal], [], [], 0)[0]:
            os.read(terminal, 2**16)
        time.sleep(0.01)


def results(command: Command) -> set[str]:
    return {path.name for path in (command.cwd / "run").iterdir()} & RESULTS


def test_a_hangup_saves_as_sigterm_does(arguments: list[str], nursery: Nursery, tmp_path: Path) -> None:
    command = nursery.start([*arguments, "--epochs", "2000"], cwd=tmp_path)
    wait_for_an_epoch(command)
    command.signal(signal.SIGHUP)
    assert command.wait() == 128 + signal.SIGHUP
    assert "and saved; continue with: siammm train --resume run" in command.err
    assert "Traceback" not in command.err
    assert any((tmp_path / "run" / files.CHECKPOINTS).iterdir())


def test_a_terminal_that_is_closed_saves(arguments: list[str], nursery: Nursery, tmp_path: Path) -> None:
    """The bars on it can no longer be drawn, and the system sends SIGHUP."""
    terminal, other_end = os.openpty()
    name = os.ttyname(other_end)
    try:
        command = nursery.start([*arguments, "--epochs", "2000"], cwd=tmp_path, stdout=name, stderr=name)
        wait_for_an_epoch(command, terminal)
    finally:
        os.close(terminal)
        os.close(other_end)
    assert command.wait() == 128 + signal.SIGHUP
    assert any((tmp_path / "run" / files.CHECKPOINTS).iterdir())


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_pipe_that_is_closed(stream: str, arguments: list[str], nursery: Nursery, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    command = nursery.start(arguments, cwd=tmp_path, **{stream: "pipe"})
    while not os.readlink(f"/proc/{command.pid}/fd/{1 if stream == 'stdout' else 2}").endswith("/pipe"):
        time.sleep(0.001)
    os.close(reader)
    assert command.wait() == 0
    assert results(command) == RESULTS


@pytest.mark.parametrize("where", ["/dev/full", "closed"])
def test_a_log_that_cannot_be_written(where: str, arguments: list[str], nursery: Nursery, tmp_path: Path) -> None:
    command = nursery.start(arguments, cwd=tmp_path, stdout=where, stderr=where)
    assert command.wait() == 0
    assert results(command) == RESULTS


def test_a_refusal_that_nobody_reads_is_still_one(nursery: Nursery, tmp_path: Path) -> None:
    assert nursery.start(["train", "gone"], cwd=tmp_path, stdout="/dev/full", stderr="/dev/full").wait() == 2


def test_a_result_that_is_only_printed_cannot_be_lost(nursery: Nursery, tmp_path: Path) -> None:
    assert nursery.start(["--version"], cwd=tmp_path, stdout="/dev/full").wait() == 1
    assert nursery.start(["--help"], cwd=tmp_path, stdout="/dev/full").wait() == 1
    assert nursery.start(["--version"], cwd=tmp_path).wait() == 0


def test_python_ends_without_a_complaint() -> None:
    """Of the streams that it flushes at its end, in a whole process."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "siammm", "--version"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "")
