"""Killed, damaged and started again: what a run folder goes through between a start and its results."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from siammm.learn import checkpoint
from siammm.runs.run import Run
from tests.distributed.launch import LOOPBACK
from tests.faults import runs
from tests.faults.conftest import Commands
from tests.faults.killing import contents, differences
from tests.nursery import Nursery

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_damaged_checkpoint_is_named(stopped: Path, command: Commands) -> None:
    last, previous = (stopped / "checkpoints" / f"{name}.safetensors" for name in ("last", "previous"))
    previous.write_bytes(last.read_bytes())
    last.write_bytes(last.read_bytes()[:1000])
    printed = command.done("train", "images", "--resume", "run", *runs.little_more(stopped))
    assert "run/checkpoints/last.safetensors is not a checkpoint of siammm, or it is damaged. It is skipped" in printed
    assert "the run continues from previous.safetensors, after" in printed


def test_a_damaged_checkpoint_does_not_take_the_place_of_the_one_before(stopped: Path, command: Commands) -> None:
    """Which is still there after the next save, the only one of this run."""
    last, previous = (stopped / "checkpoints" / f"{name}.safetensors" for name in ("last", "previous"))
    good = last.read_bytes()
    previous.write_bytes(good)
    last.write_bytes(good[:-1000] + bytes(1000))
    command.done("train", "images", "--resume", "run", *runs.little_more(stopped))
    assert previous.read_bytes() == good
    assert checkpoint.load(last.parent).path == last


def test_a_rate_that_is_far_too_high(stopped: Path, command: Commands) -> None:
    """It is said where the loss was no longer finite, and the run can go on from before."""
    last = stopped / "checkpoints" / "last.safetensors"
    before = last.read_bytes()
    again = ["train", "--resume", "run", *runs.little_more(stopped)]
    said = command.refused(*again, "--learning-rate", "1e18", silent=False)
    assert re.search(
        r"no longer finite in update \d+ of epoch \d+ \(60 images: class\d+/\d+\.png, .+lower --learning-rate", said
    )
    assert last.read_bytes() == before
    command.done(*again, "--learning-rate", "0.1")


def test_a_checkpoint_of_a_newer_version_is_refused(stopped: Path, command: Commands) -> None:
    last = stopped / "checkpoints" / "last.safetensors"
    last.with_name("previous.safetensors").write_bytes(last.read_bytes())
    with safe_open(last, "pt") as stored:
        header = stored.metadata()
    save_file(load_file(last), last, metadata=header | {"format": "2"})
    assert "resume with the version that wrote it" in command.refused("train", "images", "--resume", "run")


def test_a_kill_while_results_are_written_does_not_block_the_folder(finished: Path, command: Commands) -> None:
    """What such a kill leaves: some files, half of another under its hidden name, and no encoder yet."""
    (finished / "encoder.safetensors").rename(finished / ".encoder.safetensors.0a1b2c3d.partial")
    assert "has not finished; continue with" in command.refused("report", "run")
    images = json.loads((finished / "config.json").read_text())["data_path"]
    flags = ["train", images, *runs.SETTINGS, "--output", "run"]
    (finished / ".notes.0a1b2c3d.partial").write_text("somebody's")
    assert "'.notes.0a1b2c3d.partial', which is not part" in command.refused(*flags, "--overwrite")
    (finished / ".notes.0a1b2c3d.partial").unlink()
    command.done("train", "--resume", "run")
    assert Run.open("run").n_clusters
    (finished / ".mixture.safetensors.0a1b2c3d.partial").write_text("half of it")
    command.done(*flags, "--overwrite")
    assert not list(Path("run").glob(".*"))


def test_the_same_command_starts_resumes_and_ends(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Commands
) -> None:
    monkeypatch.chdir(tmp_path)
    images, path = runs.new_images(Path()), Path("run")
    flags = ["train", str(images), *runs.SETTINGS, "--output", "run", "--resume-if-exists", "--save-every", "0"]
    with runs.living(nursery, *flags, *runs.LONG, until=path / "metrics.jsonl") as process:
        process.signal(signal.SIGKILL)
    done = len(runs.metrics(path))
    command.done(*flags, "--epochs", str(done + 2))
    assert [row["epoch"] for row in runs.metrics(path)] == list(range(1, done + 3))
    contents = {entry: entry.read_bytes() for entry in path.rglob("*") if entry.is_file()}
    said = command.done(*flags, "--epochs", str(done + 2))
    assert said == "The run is finished; there is nothing left to do."
    assert {entry: entry.read_bytes() for entry in path.rglob("*") if entry.is_file()} == contents
    error = command.refused(*flags, "--epochs", str(done + 3), "--n-components", "9")
    assert "--n-components cannot be changed by --resume (10 in the run, 9 given)" in error
    assert "contradict" in command.refused(*flags, "--overwrite")


def test_a_longer_run_that_was_killed_is_not_taken_for_finished(finished: Path, command: Commands) -> None:
    """Its settings have the new number of epochs, and its results are still those of the old one."""
    config = json.loads((finished / "config.json").read_text())
    config["settings"]["optimisation"]["epochs"] += 2
    config["settings"]["clustering"]["cluster_after"] /= 2  # the same epoch as before
    config["changes"] = [{"epoch": 2, "update": 0}]
    (finished / "config.json").write_text(json.dumps(config))
    epochs = config["settings"]["optimisation"]["epochs"]
    flags = ["train", config["data_path"], *runs.SETTINGS, "--output", "run", "--resume-if-exists"]
    command.done(*flags, "--epochs", str(epochs))
    assert [row["epoch"] for row in runs.metrics(finished)] == list(range(1, epochs + 1))


def test_a_run_killed_before_its_first_checkpoint_starts_anew(stopped: Path, command: Commands) -> None:
    (stopped / "checkpoints" / "last.safetensors").unlink()
    flags = ["train", "images", *runs.SETTINGS, "--output", "run", "--resume-if-exists"]
    command.done(*flags)
    assert [row["epoch"] for row in runs.metrics(stopped)] == [1, 2]


def test_a_folder_of_something_else_is_not_taken_for_a_run(stopped: Path, command: Commands) -> None:
    flags = ["train", "images", *runs.SETTINGS, "--resume-if-exists"]
    assert "is not empty" in command.refused(*flags, "--output", "images")
    (stopped / "checkpoints" / "last.safetensors").unlink()
    (stopped / "notes.txt").write_text("mine")
    assert "'notes.txt'" in command.refused(*flags, "--output", "run")


def test_a_run_of_two_processes_that_goes_on_in_one_says_so(stopped: Path, command: Commands) -> None:
    from siammm.learn import checkpoint

    tensors, facts, path, _ = checkpoint.load(stopped / "checkpoints")
    checkpoint.save(path.parent, tensors, facts | {"world_size": 2})
    printed = command.done("train", "images", "--resume", "run", *runs.little_more(stopped))
    assert "written by 2 processes and is resumed with 1" in printed
    assert "not bit for bit" in printed


@pytest.mark.slow
def test_torchrun_starts_a_killed_rank_again(tmp_path: Path) -> None:
    """And the run ends with the bits of one that was left alone, down to its last checkpoint."""
    images, path = runs.new_images(tmp_path), tmp_path / "run"
    flags = ["train", str(images), *runs.SETTINGS, "--output", str(path), "--resume-if-exists", "--save-every", "0"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

    def started() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*torchrun, "--max-restarts", "2", "-m", "siammm", *flags, "--epochs", "8", "--label-key", ""],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=runs.environment() | {"GLOO_SOCKET_IFNAME": LOOPBACK},
        )  # fmt: skip

    left_alone = started()
    output, _ = left_alone.communicate(timeout=240)
    assert left_alone.returncode == 0, output
    path.rename(tmp_path / "alone")
    process = started()
    try:
        deadline = time.monotonic() + 120
        while not (path / "checkpoints" / "previous.safetensors").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(json.loads((path / ".lock").read_text())["pid"], signal.SIGKILL)
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, output
    assert [row["epoch"] for row in runs.metrics(path)] == list(range(1, 9))
    assert len(Run.open(path).ids) == runs.N_IMAGES
    assert not differences(contents(tmp_path / "alone"), contents(path))
