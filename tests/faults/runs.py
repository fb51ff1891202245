"""Runs to do harm to: real commands in processes of their own, on images that train in a moment."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.commands import TINY
from tests.data.image_sets import example_images, write_folder
from tests.learn.small_runs import TIMINGS

N_IMAGES = 300
"""More than the 256 whose contents the fingerprint covers."""
SETTINGS = [*TINY, "--batch-size", "60", "--cluster-after", "0"]
LONG = ["--epochs", "100000"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "siammm", *arguments]


def run(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """A command to its end."""
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=timeout, env=environment())


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "400"}


@contextlib.contextmanager
def living(*arguments: str, until: Path) -> Iterator[subprocess.Popen[str]]:
    """A command that runs while the block does, from when a file of it is there."""
    process = subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    try:
        deadline = time.monotonic() + 120
        while not until.exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.communicate()


def new_images(folder: Path) -> Path:
    return write_folder(folder, example_images(N_IMAGES, size=(8, 8), n_classes=4))


def stopped_run(folder: Path) -> Path:
    """``images`` and ``run``, stopped by a signal in some epoch; the run would go on for very long."""
    images = new_images(folder)
    path = folder / "run"
    with living("train", str(images), "--output", str(path), *SETTINGS, *LONG, until=path / "metrics.jsonl") as process:
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=240)
    assert process.returncode == 143, error
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
