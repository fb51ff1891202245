"""What the tests of faults share: a run that was stopped, and one that is finished."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults import runs
from tests.nursery import Command, Nursery


@dataclass
class Commands:
    """Runs commands in the working folder, each in a process of its own, to their end."""

    nursery: Nursery
    printed: Path
    """A folder for what they print: that in which they work may be looked at."""

    def done(self, *arguments: str | Path) -> str:
        """What a command prints that ends well, words separated by single spaces."""
        command = self._ended(*arguments)
        assert command.wait() == 0, command.err
        return " ".join((command.out + command.err).split())

    def refused(self, *arguments: str | Path, silent: bool = True) -> str:
        """The sentence of one that refuses; if ``silent``, before it has printed anything else."""
        command = self._ended(*arguments)
        sentence = command.refusal()
        assert not command.out or not silent
        return sentence

    def _ended(self, *arguments: str | Path) -> Command:
        command = self.nursery.start(
            [str(argument) for argument in arguments], cwd=Path.cwd(), environment={"COLUMNS": "400"},
            stdout=str(self.printed / "out"), stderr=str(self.printed / "err"),
        )  # fmt: skip
        command.wait()
        return command


@pytest.fixture
def command(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Commands:
    return Commands(nursery, tmp_path_factory.mktemp("printed"))


@pytest.fixture(scope="session")
def stopped_once(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    runs.stopped_run(nursery, folder)
    return folder


@pytest.fixture
def stopped(stopped_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the stopped run, ``run``, and of its ``images``, in the working folder; resume with DATA."""
    shutil.copytree(stopped_once, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return Path("run")


@pytest.fixture(scope="session")
def finished_once(nursery: Nursery, stopped_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    shutil.copytree(stopped_once, folder, dirs_exist_ok=True)
    path = folder / "run"
    arguments = ["train", str(folder / "images"), "--resume", "run", *runs.little_more(path)]
    command = nursery.start(arguments, cwd=folder)
    assert command.wait() == 0, command.err
    for name in (".out", ".err"):
        (folder / name).unlink()
    return folder


@pytest.fixture
def finished(finished_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the finished run; its images are where they were."""
    shutil.copytree(finished_once / "run", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return Path("run")
