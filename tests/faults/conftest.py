"""What the tests of faults share: a run that was stopped, and one that is finished."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from siammm.cli import main
from tests.faults import runs
from tests.nursery import Nursery


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
