"""Memory that runs out and processes that are killed: one sentence that says what to change, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from siammm.runs import files
from tests.commands import TINY, refused
from tests.data.image_sets import example_images, write_folder
from tests.faults.killing import contents, differences
from tests.nursery import Nursery


class LittleMemory(TorchDispatchMode):
    """No tensor may be larger than this; where one is, torch is asked for more than any machine has, and says so.

    A limit on the process would not do: it also meets what torch's libraries ask for while they go backward, which
    they do not check, so that some runs end in a segmentation fault.
    """

    def __init__(self, most_bytes: int) -> None:
        super().__init__()
        self.most_bytes = most_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor) and leaf.nbytes > self.most_bytes:
                torch.empty(2**60, dtype=torch.uint8)
        return found


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_that_does_not_fit(accumulate: int, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sentence names a batch size that was tried and does."""
    write_folder(here, example_images(64, size=(16, 16)))
    arguments = ["train", "images", *TINY, "--batch-size", "64", "--accumulate", str(accumulate), "--output", "run"]
    # The first activations of 16 images are 1 MiB, those of 32 are 2 MiB.
    with LittleMemory(3 * 2**19):
        sentence = refused(arguments, capsys, silent=False)
    given = "--batch-size 64" + (" with --accumulate 2" if accumulate == 2 else "")
    assert f"does not have enough memory for {given}; --batch-size {16 * accumulate} fits, or" in sentence
    assert "--accumulate 4, which" in sentence


def test_a_table_that_does_not_fit(nursery: Nursery, tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.random.default_rng(0).normal(size=(60_000, 512)).astype(np.float32))
    arguments = ["cluster", "t.npy", "--n-components", "20000", "--merge", "none", "--max-iter", "1"]
    assert "does not have enough memory" in nursery.start(arguments, cwd=tmp_path, memory=2**27).refusal()
    assert not (tmp_path / "t-clusters").exists()


def test_a_checkpoint_for_which_there_is_no_room(nursery: Nursery, tmp_path: Path) -> None:
    """The last one stays, and the run goes on from it when there is room again."""
    write_folder(tmp_path, example_images(24, size=(8, 8)))
    arguments = ["train", "images", *TINY, "--output", "run", "--save-every", "0"]
    first = nursery.start(arguments, cwd=tmp_path)
    assert first.wait() == 0, first.err
    last = tmp_path / "run" / "checkpoints" / "last.safetensors"
    before = last.read_bytes()
    more = ["train", "--resume", "run", "--epochs", "3", "--save-every", "0"]
    full = nursery.start(more, cwd=tmp_path, largest_file=len(before) // 2)
    assert full.wait() == 2
    assert "cannot be written" in full.err
    assert "Traceback" not in full.err
    assert last.read_bytes() == before
    rest = nursery.start(more, cwd=tmp_path)
    assert rest.wait() == 0, rest.err
    assert (tmp_path / "run" / files.METRICS).read_text().count("\n") == 3


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_reader_that_is_killed(nursery: Nursery, tmp_path: Path) -> None:
    """What was learned is saved, and the run can be continued."""
    write_folder(tmp_path, example_images(24, size=(8, 8)))
    arguments = ["train", "images", *TINY, "--output", "run", "--loader", "streaming", "--workers", "2"]
    command = nursery.start([*arguments, "--epochs", "15"], cwd=tmp_path)
    metrics, until = tmp_path / "run" / files.METRICS, time.monotonic() + 240
    while not metrics.exists():
        assert time.monotonic() < until, command.err
        time.sleep(0.01)
    while not (readers := children(command.pid)):  # between two epochs there are none
        assert time.monotonic() < until, command.err
        time.sleep(0.001)
    os.kill(readers[0], signal.SIGKILL)
    sentence = " ".join(command.err.split()) if command.wait() == 2 else f"no error: {command.err}"
    assert "A process that reads images was killed" in sentence
    assert sentence.endswith("continue with: siammm train --resume run.")
    assert "Traceback" not in sentence
    rest = nursery.start(["train", "--resume", "run"], cwd=tmp_path)
    assert rest.wait() == 0, rest.err
    assert metrics.read_text().count("\n") == 15


def test_a_reader_that_dies_at_the_end_of_an_epoch(nursery: Nursery, tmp_path: Path) -> None:
    """What is noticed when the next batch is asked for costs nothing: the run goes on, and ends with the same bits."""
    write_folder(tmp_path, example_images(24, size=(8, 8)))
    arguments = ["train", "images", *TINY, "--loader", "streaming", "--workers", "1", "--cluster-after", "0"]
    arguments += ["--batch-size", "24", "--epochs", "8"]  # each update is the last of its epoch
    whole = nursery.start([*arguments, "--output", "whole"], cwd=tmp_path)
    assert whole.wait() == 0, whole.err
    command = nursery.start([*arguments, "--output", "run"], cwd=tmp_path)
    while not (tmp_path / "run" / files.METRICS).exists():  # which is written after the updates of an epoch
        assert command.is_running(), command.err
    (reader,) = children(command.pid)
    os.kill(reader, signal.SIGKILL)
    assert command.wait() == 2, command.err
    assert "A process that reads images was killed" in command.err
    assert "continue with: siammm train --resume run." in " ".join(command.err.split())
    rest = nursery.start(["train", "--resume", "run"], cwd=tmp_path)
    assert rest.wait() == 0, rest.err
    found = [contents(tmp_path / name) for name in ("whole", "run")]
    for one in found:  # the settings name another output
        one["encoder.safetensors"].pop("header")
    assert set(differences(*found)) <= {"config.json"}


def test_an_image_that_goes_away_while_it_is_trained_on(nursery: Nursery, tmp_path: Path) -> None:
    """It is named, and the command ends although a process still reads."""
    write_folder(tmp_path, example_images(24, size=(8, 8)))
    arguments = ["train", "images", *TINY, "--output", "run", "--loader", "streaming", "--workers", "1"]
    command = nursery.start([*arguments, "--epochs", "10000"], cwd=tmp_path)
    while not (tmp_path / "run" / files.METRICS).exists():
        assert command.is_running(), command.err
    next((tmp_path / "images").rglob("*.png")).write_bytes(b"")
    assert command.wait(60) == 2, command.err
    sentence = " ".join(command.err.split())
    assert "could be read when training began, but no longer" in sentence
    assert "Traceback" not in sentence


def test_a_program_that_is_interrupted_ends(nursery: Nursery, tmp_path: Path) -> None:
    """Although a process still reads, which ignores what the program is told to end by."""
    write_folder(tmp_path, example_images(24, size=(8, 8)))
    program = nursery.start_program(Path(__file__).with_name("fit_images.py"), ["images"], cwd=tmp_path)
    while not children(program.pid):
        assert program.is_running(), program.err
    time.sleep(0.5)
    program.signal(signal.SIGINT)
    assert program.wait(60) == 1
    assert program.err.rstrip().endswith("KeyboardInterrupt")


def test_a_program_still_hears_of_its_own_children(nursery: Nursery, tmp_path: Path) -> None:
    """torch and siammm listen for workers that die by the same signal."""
    write_folder(tmp_path, example_images(24, size=(8, 8)))
    program = nursery.start_program(Path(__file__).with_name("own_children.py"), ["images"], cwd=tmp_path)
    assert program.wait() == 0, program.err
    found = json.loads(program.out)
    assert "A process that reads images was killed" in found.pop("said")
    assert found == {"own": True, "worker": True, "afterwards": True}
