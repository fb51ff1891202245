"""Runs to do harm to: real commands in processes of their own, on images that train in a moment."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.commands import TINY
from tests.data.image_sets import example_images, write_folder
from tests.learn.small_runs import TIMINGS
from tests.nursery import Command, Nursery

N_IMAGES = 300
"""More than the 256 whose contents the fingerprint covers."""
SETTINGS = [*TINY, "--batch-size", "60", "--cluster-after", "0"]
LONG = ["--epochs", "100000"]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "400"}


@contextlib.contextmanager
def living(nursery: Nursery, *arguments: str, until: Path, cwd: Path | None = None) -> Iterator[Command]:
    """A command that runs while the block does, from when a file of it is there; by default in the working folder."""
    command = nursery.start(list(arguments), cwd=cwd or Path.cwd(), environment={"COLUMNS": "400"})
    try:
        deadline = time.monotonic() + 120
        while not until.exists():
            assert command.is_running(), command.err
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield command
    finally:
        command.kill()


def new_images(folder: Path) -> Path:
    return write_folder(folder, example_images(N_IMAGES, size=(8, 8), n_classes=4))


def stopped_run(nursery: Nursery, folder: Path) -> Path:
    """``images`` and ``run``, stopped by a signal in some epoch; the run would go on for very long."""
    images = new_images(folder)
    path = folder / "run"
    flags = ["train", str(images), "--output", str(path), *SETTINGS, *LONG]
    with living(nursery, *flags, until=path / "metrics.jsonl", cwd=folder) as command:
        command.signal(signal.SIGTERM)
        assert command.wait() == 143, command.err
    assert sorted(entry.name for entry in path.iterdir()) == [
        "checkpoints", "config.json", "inventory.parquet", "metrics.jsonl"
    ]  # fmt: skip
    return path


def metrics(path: Path) -> list[dict[str, Any]]:
    """What was measured, but for the clock."""
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in TIMINGS} for row in rows]


def little_more(path: Path) -> list[str]:
    """Flags with which a run ends soon."""
    return ["--epochs", str(len(metrics(path)) + 1)]


def one_sentence(error: str) -> str:
    """The last line of what a command said when it refused."""
    assert "Traceback" not in error, error
    last = error.splitlines()[-1]
    assert last.startswith("siammm: ")
    return last
