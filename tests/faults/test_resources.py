"""Memory that runs out and processes that are killed: one sentence that says what to change, and nothing is lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from siammm.runs import files
from tests.commands import TINY
from tests.data.image_sets import example_images, write_folder
from tests.faults.nursery import Nursery


@pytest.mark.slow  # not dependable: how much memory a forked process has left under the limit varies
def test_a_batch_that_does_not_fit(nursery: Nursery, tmp_path: Path) -> None:
    """The sentence names a batch size that was tried and does."""
    write_folder(tmp_path, example_images(64, size=(32, 32)))
    arguments = ["train", "images", *TINY, "--batch-size", "64", "--output", "run"]
    command = nursery.start(arguments, cwd=tmp_path, memory=2**27)
    sentence = " ".join(command.err.split()) if command.wait() == 2 else f"no error: {command.err}"
    assert "does not have enough memory for --batch-size 64; --batch-size" in sentence
    assert "Traceback" not in sentence
    assert int(sentence.split("; --batch-size ")[1].split()[0]) < 64


def test_a_table_that_does_not_fit(nursery: Nursery, tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.random.default_rng(0).normal(size=(60_000, 512)).astype(np.float32))
    arguments = ["cluster", "t.npy", "--n-components", "20000", "--merge", "none", "--max-iter", "1"]
    assert "does not have enough memory" in nursery.start(arguments, cwd=tmp_path, memory=2**27).refusal()
    assert not (tmp_path / "t-clusters").exists()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_reader_that_is_killed(nursery: Nursery, tmp_path: Path) -> None:
    """What was learned is saved, and the run can be continued."""
    write_folder(tmp_path, example_images(24, size=(8, 8)))
    arguments = ["train", "images", *TINY, "--output", "run", "--loader", "streaming", "--workers", "2"]
    command = nursery.start([*arguments, "--epochs", "40"], cwd=tmp_path)
    metrics, until = tmp_path / "run" / files.METRICS, time.monotonic() + 240
    while not metrics.exists():
        assert time.monotonic() < until, command.err
        time.sleep(0.01)
    while not (readers := children(command.pid)):  # between two epochs there are none
        assert time.monotonic() < until, command.err
    os.kill(readers[0], signal.SIGKILL)
    sentence = " ".join(command.err.split()) if command.wait() == 2 else f"no error: {command.err}"
    assert "A process that reads images was killed" in sentence
    assert sentence.endswith("continue with: siammm train --resume run.")
    assert "Traceback" not in sentence
    rest = nursery.start(["train", "--resume", "run"], cwd=tmp_path)
    assert rest.wait() == 0, rest.err
    assert metrics.read_text().count("\n") == 40
