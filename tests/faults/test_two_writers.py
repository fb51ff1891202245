"""Two processes in one run folder: one writes, the other is refused, and nothing is mixed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import siammm
from siammm.core.errors import InputError
from siammm.core.locks import SILENT_SECONDS
from siammm.runs.run import Run
from siammm.runs.writer import run_lock
from tests.faults import runs
from tests.faults.conftest import Commands
from tests.nursery import Nursery

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(os.name != "posix", reason="other systems do not say which processes run"),
]


def owner(**changes: Any) -> str:
    """A lock as this very process would write it."""
    from siammm.core import locks

    record = {"host": socket.gethostname(), "pid": os.getpid(), "started": locks._started(os.getpid())}
    return json.dumps(record | {"place": locks._place(socket.gethostname()), "token": "0"} | changes)


def test_a_second_writer_is_refused_while_the_first_lives(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Commands
) -> None:
    monkeypatch.chdir(tmp_path)
    images, path = runs.new_images(Path()), Path("run")
    flags = ["train", str(images), *runs.SETTINGS, *runs.LONG, "--output", "run"]
    with runs.living(nursery, *flags, until=path / "metrics.jsonl") as process:
        for arguments in ([*flags, "--overwrite"], flags, ["train", "--resume", "run"], [*flags, "--resume-if-exists"]):
            error = command.refused(*arguments)
            assert f"is being written by process {process.pid} of this machine" in error
        before = len(runs.metrics(path))
        deadline = time.monotonic() + 30
        while len(runs.metrics(path)) < before + 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.signal(signal.SIGKILL)
    rows = runs.metrics(path)
    assert [row["epoch"] for row in rows] == list(range(1, len(rows) + 1))
    assert (path / ".lock").exists()  # nobody could remove it, and nobody has to
    command.done("train", str(images), *runs.SETTINGS, "--output", "run", "--overwrite")
    assert [row["epoch"] for row in runs.metrics(path)] == [1, 2]
    assert not (path / ".lock").exists()


GONE: dict[str, str] = {
    "a process that has ended": owner(pid=2**22 + 1),
    "another process by the same number": owner(started=1),
    "a process of a machine that is silent": owner(host="elsewhere", place="elsewhere"),
    "a damaged lock": "{",
    "an empty lock": "",
    "a lock of something else": '{"pid": "x"}',
}


def leave_lock(path: Path, name: str) -> None:
    (path / ".lock").write_text(GONE[name])
    os.utime(path / ".lock", (time.time() - 1000, time.time() - 1000))


@pytest.mark.parametrize("name", GONE)
def test_a_lock_that_is_left_behind_does_not_matter(name: str, tmp_path: Path) -> None:
    leave_lock(tmp_path, name)
    lock = run_lock(tmp_path, remedy="wait")
    lock.check_free()
    with lock:
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
        lock.check_mine()
    assert not (tmp_path / ".lock").exists()


def test_a_run_with_a_lock_that_is_left_behind_goes_on(stopped: Path, command: Commands) -> None:
    leave_lock(stopped, "a process that has ended")
    command.done("train", "images", "--resume", "run", *runs.little_more(stopped))
    assert not (stopped / ".lock").exists()


def test_a_lock_of_another_machine_is_believed_and_the_way_out_is_said(stopped: Path, command: Commands) -> None:
    (stopped / ".lock").write_text(owner(host="elsewhere", place="elsewhere", pid=77))
    for arguments in (["train", "--resume", "run"], ["train", "images", *runs.SETTINGS, "--output", "run"]):
        error = command.refused(*arguments)
        assert "is being written by process 77 on elsewhere, last seen" in error
        assert "if you remove run/.lock" in error
    (stopped / ".lock").unlink()
    command.done("train", "images", "--resume", "run", *runs.little_more(stopped))


def test_reading_needs_no_lock(finished: Path, command: Commands) -> None:
    (finished / ".lock").write_text(owner())
    assert Run.open(finished).n_clusters > 0
    command.done("report", str(finished), "--max-thumbnails", "0")
    with pytest.raises(InputError, match="is being written by process"):
        siammm.SiamMM.load(finished, device="cpu").save(finished)


def test_a_process_whose_lock_was_taken_stops_writing(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    images, path = runs.new_images(Path()), Path("run")
    flags = ["train", str(images), *runs.SETTINGS, *runs.LONG, "--output", "run"]
    with runs.living(nursery, *flags, until=path / "metrics.jsonl") as process:
        (path / ".lock").write_text(owner(pid=77))
        assert process.wait() == 2
    assert "Process 77 on" in runs.one_sentence(process.err)


def test_a_refused_start_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Commands) -> None:
    monkeypatch.chdir(tmp_path)
    images = runs.new_images(Path())
    arguments = ["train", images, *runs.SETTINGS, "--output", "deep/run", "--n-components", "301"]
    assert "--n-components is 301" in command.refused(*arguments, silent=False)
    assert not Path("deep").exists()


def test_a_run_that_appears_while_the_lock_is_waited_for(nursery: Nursery, stopped: Path) -> None:
    """The folder was empty at the first look; under the lock it is looked at again, and nothing is replaced."""
    stopped.rename("other")
    Path("run").mkdir()
    lock = Path("run/.lock")
    lock.write_text(owner(host="elsewhere", place="elsewhere", pid=77))
    nearly_silent = time.time() - SILENT_SECONDS + 6
    os.utime(lock, (nearly_silent, nearly_silent))
    arguments = ["train", "images", *runs.SETTINGS, "--output", "run", "--resume-if-exists"]
    waiting = nursery.start(arguments, cwd=Path.cwd(), watched=True)
    while "in _take" not in waiting.stack():  # it waits for the lock
        assert waiting.is_running(), waiting.err
        assert time.time() < nearly_silent + SILENT_SECONDS, "too slow to see it"
    shutil.copytree("other", "run", dirs_exist_ok=True)
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file() and path != lock}
    assert "run was written by another process meanwhile; start the same command again." in waiting.refusal()
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before


_RACE = """
import json, os, random, sys, time
import siammm.commands.train  # before the forks, so that both start at once
from siammm.cli import main

generator, path, arguments = random.Random(0), sys.argv[2], sys.argv[3:]
found = []
for number in range(50):
    children = []
    for _ in range(2):
        delay, child = generator.uniform(0, 0.3), os.fork()
        if child == 0:
            time.sleep(delay)
            os._exit(main(arguments))
        children.append(child)
    codes = sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
    with open(os.path.join(path, "metrics.jsonl")) as file:
        epochs = [json.loads(line)["epoch"] for line in file]
    found.append([codes, epochs, sorted(os.listdir(path))])
with open(sys.argv[1], "w") as file:
    json.dump(found, file)
"""


@pytest.mark.slow
def test_two_that_start_at_once(tmp_path: Path) -> None:
    """50 tries with random timing: one wins, one is refused, and each epoch is there once."""
    images, path = runs.new_images(tmp_path), tmp_path / "run"
    flags = ["train", str(images), *runs.SETTINGS, "--epochs", "3", "--output", str(path), "--overwrite"]
    done = subprocess.run(
        [sys.executable, "-c", _RACE, str(tmp_path / "found"), str(path), *flags],
        env=runs.environment(), capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    for codes, epochs, left in json.loads((tmp_path / "found").read_text()):
        assert (codes, epochs) == ([0, 2], [1, 2, 3])
        assert "encoder.safetensors" in left
        assert not [name for name in left if name.startswith(".")]
