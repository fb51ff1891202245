"""Ranks of a training that are killed, or stand still."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from tests.distributed.launch import environment, free_port
from tests.faults import runs
from tests.nursery import Nursery


def test_ranks_that_stand_still_or_are_gone(nursery: Nursery, tmp_path: Path) -> None:
    """One that stands still is waited for; one that is gone is not, and the other says so."""
    runs.new_images(tmp_path)
    port, path = free_port(), tmp_path / "run"
    arguments = ["train", "images", *runs.SETTINGS, *runs.LONG, "--output", "run", "--save-every", "0"]
    first, second = [
        nursery.start(
            arguments, cwd=tmp_path, stdout=f"{rank}.out", stderr=f"{rank}.err",
            environment=environment(rank, 2, port) | {"COLUMNS": "300"},
        )
        for rank in range(2)
    ]  # fmt: skip

    def wait_for_epochs(count: int) -> None:
        until = time.monotonic() + 120
        while not (path / "metrics.jsonl").exists() or len(runs.metrics(path)) < count:
            assert first.is_running(), first.err
            assert time.monotonic() < until
            time.sleep(0.02)

    try:
        wait_for_epochs(1)
        second.signal(signal.SIGSTOP)
        time.sleep(1)
        before = len(runs.metrics(path))
        time.sleep(2)
        assert len(runs.metrics(path)) == before
        assert first.is_running()
        second.signal(signal.SIGCONT)
        wait_for_epochs(before + 2)
        second.signal(signal.SIGKILL)
        assert first.wait(60) == 2, first.err
    finally:
        second.kill()
    assert "Another rank has ended" in runs.one_sentence(first.err)
    rest = nursery.start(["train", "--resume", "run", *runs.little_more(path)], cwd=tmp_path)
    assert rest.wait() == 0, rest.err
