"""A command that is killed while it writes its result: the next one removes what is left, and uses what it can."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.commands import TINY
from tests.data.image_sets import example_images, write_folder
from tests.nursery import Command, Nursery

X = np.random.default_rng(0).normal(size=(60, 6)).astype(np.float32)
CLUSTER = ["cluster", "t.npy", "--output", "out", "--n-components", "3", "--merge", "none", "--max-iter", "5"]


def hidden(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.name.startswith(".") and entry.name.count(".") > 1)


def is_writing(folder: Path) -> bool:
    """Whether there is half a result; before the work, the command tries whether it could write."""
    with contextlib.suppress(OSError):
        return any(os.listdir(folder / name) for name in hidden(folder))
    return False


def killed_when(begun: Callable[[], bool], start: Callable[[], Command]) -> None:
    """Kill a command as soon as something is there; again, if it was quicker."""
    for _ in range(20):
        command = start()
        while command.is_running():
            if begun():
                command.signal(signal.SIGKILL)
                break
        if command.wait() == -signal.SIGKILL:
            return
        shutil.rmtree(command.cwd / "out")
    raise AssertionError("it was never killed")


def test_half_a_result_is_removed_by_the_next_command(nursery: Nursery, tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", X)
    killed_when(
        lambda: is_writing(tmp_path),
        lambda: nursery.start(CLUSTER, cwd=tmp_path),
    )
    assert len(hidden(tmp_path)) == 1
    assert not (tmp_path / "out").exists()
    again = nursery.start(CLUSTER, cwd=tmp_path)
    assert again.wait() == 0, again.err
    assert (tmp_path / "out" / "assignments.parquet").exists()
    assert not hidden(tmp_path)


def test_what_a_living_command_writes_is_not_removed(nursery: Nursery, tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", X)
    first = nursery.start(CLUSTER, cwd=tmp_path, stdout=".out1", stderr=".err1")
    while not is_writing(tmp_path):
        assert first.is_running(), first.err
    first.signal(signal.SIGSTOP)
    (scratch,) = hidden(tmp_path)
    assert nursery.start([*CLUSTER, "--tol", "inf"], cwd=tmp_path).refusal()
    # A command that refuses looks for what was left behind, too.
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").write_text("")
    assert "is not empty" in nursery.start(CLUSTER, cwd=tmp_path).refusal()
    assert hidden(tmp_path) == [scratch]
    shutil.rmtree(tmp_path / "out")
    first.signal(signal.SIGCONT)
    assert first.wait() == 0
    assert not hidden(tmp_path)


def test_an_earlier_result_comes_back_if_its_successor_was_killed(nursery: Nursery, tmp_path: Path) -> None:
    """Killed between two moves: the earlier one is aside, and the new one has not taken its place."""
    np.save(tmp_path / "t.npy", X)
    assert nursery.start(CLUSTER, cwd=tmp_path).wait() == 0
    before = (tmp_path / "out" / "assignments.parquet").read_bytes()
    (tmp_path / "out").rename(tmp_path / ".out.0a1b2c3d.old")
    shutil.copytree(tmp_path / ".out.0a1b2c3d.old", tmp_path / ".out.0a1b2c3d.partial")
    (tmp_path / ".out.notes.old").write_text("somebody's")
    assert "is not empty" in nursery.start(CLUSTER, cwd=tmp_path).refusal()
    assert (tmp_path / "out" / "assignments.parquet").read_bytes() == before
    assert hidden(tmp_path) == [".out.notes.old"]
    # Killed after both: the earlier one has been replaced.
    shutil.copytree(tmp_path / "out", tmp_path / ".out.0a1b2c3d.old")
    assert nursery.start([*CLUSTER, "--overwrite"], cwd=tmp_path).wait() == 0
    assert hidden(tmp_path) == [".out.notes.old"]


@pytest.fixture(scope="module")
def run(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_folder(folder, example_images(24, size=(8, 8)))
    command = nursery.start(["train", "images", *TINY, "--epochs", "1", "--output", "run"], cwd=folder)
    assert command.wait() == 0, command.err
    return folder


def test_a_killed_embed_leaves_nothing_for_long(run: Path, nursery: Nursery, tmp_path: Path) -> None:
    arguments = ["embed", str(run / "run"), "--output", "out/e.npz"]
    killed_when(
        lambda: (tmp_path / "out").exists() and bool(hidden(tmp_path / "out")),
        lambda: nursery.start(arguments, cwd=tmp_path),
    )
    again = nursery.start([*arguments, "--overwrite"], cwd=tmp_path)
    assert again.wait() == 0, again.err
    assert os.listdir(tmp_path / "out") == ["e.npz"]


def test_a_killed_cluster_of_images_goes_on(run: Path, nursery: Nursery, tmp_path: Path) -> None:
    """What it has encoded is used, unless one of the images has changed: also one that no fingerprint covers."""
    shutil.copytree(run / "images", tmp_path / "images")
    arguments = ["cluster", "images", "--encoder", str(run / "run"), "--output", "out"]
    killed_when((tmp_path / "out-unfinished" / "rows.npy").exists, lambda: nursery.start(arguments, cwd=tmp_path))
    facts = tmp_path / "out-unfinished" / "rows.json"
    kept = facts.read_text()
    os.utime(sorted((tmp_path / "images").rglob("*.png"))[3], (1, 1))
    killed_when(lambda: facts.exists() and facts.read_text() != kept, lambda: nursery.start(arguments, cwd=tmp_path))
    again = nursery.start(arguments, cwd=tmp_path)
    assert again.wait() == 0, again.err
    assert not facts.parent.exists()
    assert not hidden(tmp_path)
