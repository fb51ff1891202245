"""What the tests of faults share: a run that was stopped, one that is finished, and processes that start quickly."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from siammm.cli import main
from tests.faults import runs
from tests.faults.nursery import Nursery


@pytest.fixture(scope="session")
def stopped_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    runs.stopped_run(folder)
    return folder


@pytest.fixture
def stopped(stopped_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the stopped run, ``run``, and of its ``images``, in the working folder; resume with DATA."""
    shutil.copytree(stopped_once, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return Path("run")


@pytest.fixture(scope="session")
def finished_once(stopped_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    shutil.copytree(stopped_once, folder, dirs_exist_ok=True)
    path = folder / "run"
    assert main(["train", str(folder / "images"), "--resume", str(path), *runs.little_more(path)]) == 0
    return folder


@pytest.fixture
def finished(finished_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the finished run; its images are where they were."""
    shutil.copytree(finished_once / "run", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return Path("run")


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Starts commands as processes of their own."""
    if sys.platform == "win32":
        pytest.skip("processes are forked, which Windows cannot")
    with Nursery() as nursery:
        yield nursery
