"""A training that is killed at a random moment and started again, compared with one that was not.

    killer = Killer(nursery, folder)
    outcome = killer.killed(seed)  # in which phase the kill fell, and what differs in the end, if anything does

The process is real, and so is the SIGKILL. Just before it, the process is asked by a signal where it is, which its
interpreter answers without running any Python.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from safetensors import safe_open
from safetensors.numpy import load_file

from tests.data.image_sets import example_images, write_folder
from tests.faults.runs import metrics
from tests.nursery import Command, Nursery

SETTINGS = [
    "--backbone", "conv-small", "--hidden-dim", "32", "--embedding-dim", "16", "--epochs", "3", "--batch-size", "100",
    "--optimiser", "sgd", "--learning-rate", "0.1", "--warmup-epochs", "1", "--n-components", "60", "--merge", "auto",
    "--cluster-after", "0", "--device", "cpu", "--no-tensorboard", "--save-every", "0", "--resume-if-exists",
]  # fmt: skip
# Where a process is, by the functions that are being called; the first that fits.
_PHASES = {
    "leaving results": r"runs/writer\.py\", line \d+ in write_results|learn/finish\.py\", line \d+ in finish",
    "saving": r"learn/(state|checkpoint)\.py\", line \d+ in save\b",
    "merging": r"learn/clustering\.py\", line \d+ in merge\b",
    "E and M step": r"in expectation_and_maximisation",
    "writing metrics": r"in add_metrics",
    "updating": r"learn/loop\.py\", line \d+ in (update|step)\b",
    "going on": r"learn/loop\.py\", line \d+ in run\b",
}
STARTING = "starting"
AIMS = (None, None, "updating", "saving", "merging", "leaving results")
"""What a kill waits for; None for any moment at all."""
ENVIRONMENT = {"COLUMNS": "300"}


@dataclass(frozen=True)
class Outcome:
    """What came of one kill."""

    phase: str
    epochs: int
    """How many epochs were done."""
    had_checkpoint: bool
    problem: str | None = None


class Killer:
    """Kills trainings on the same images, with the same settings as one that is left alone."""

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self.nursery, self.folder = nursery, folder
        self.images = write_folder(folder, example_images(300, size=(8, 8), n_classes=4))
        whole = self._started(folder / "whole")
        assert whole.wait() == 0, whole.err
        # Of the processor: a busy machine makes the clock go by otherwise.
        self.seconds = whole.seconds
        self.expected = contents(folder / "whole" / "run")

    def killed(self, seed: int) -> Outcome:
        """Kill a training in a random moment, start it again, and compare its end."""
        draw = random.Random(seed)
        folder = self.folder / f"seed{seed}"
        phase = self._kill(folder, AIMS[seed % len(AIMS)], draw)
        run = folder / "run"
        epochs = len(metrics(run)) if (run / "metrics.jsonl").exists() else 0
        had = any((run / "checkpoints").glob("[!.]*"))
        again = self._started(folder)
        code = again.wait()
        problem = f"exit code {code}: {again.err[-1000:]}" if code else None
        if not code and (different := differences(self.expected, contents(run))):
            problem = f"other than without a kill: {', '.join(different)}"
        if problem is not None:
            problem = f"seed {seed}, killed while {phase} after {epochs} epochs: {problem}"
        else:
            shutil.rmtree(folder)
        return Outcome(phase, epochs, had, problem)

    def _started(self, folder: Path) -> Command:
        folder.mkdir(exist_ok=True)
        arguments = ["train", str(self.images), *SETTINGS, "--output", "run"]
        return self.nursery.start(arguments, cwd=folder, watched=True, environment=ENVIRONMENT)

    def _kill(self, folder: Path, aim: str | None, draw: random.Random) -> str:
        """Kill a training, in a phase if one is aimed at; the phase in which it was."""
        while True:
            shutil.rmtree(folder, ignore_errors=True)
            command = self._started(folder)
            moment = draw.uniform(0, self.seconds * (1.0 if aim is None else 0.7))
            while command.is_running() and command.seconds_so_far() < moment:
                time.sleep(0.005)
            while aim is not None and (stack := command.stack()) and phase_of(stack) != aim:
                time.sleep(draw.uniform(0, 0.004))
            time.sleep(draw.uniform(0, 0.003) if aim is not None else 0)
            stack = command.stack()
            if stack or command.is_running():
                command.signal(signal.SIGKILL)
            # One that had ended before is no kill: again, with another moment.
            if command.wait() == -signal.SIGKILL:
                return phase_of(stack)


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """The files that two runs do not both have with the same contents."""
    names = sorted(expected.keys() | found.keys())
    return [
        name for name in names if name not in expected or name not in found or not _equal(expected[name], found[name])
    ]


def phase_of(stack: str) -> str:
    """What a process is doing, by its stack."""
    return next((phase for phase, pattern in _PHASES.items() if re.search(pattern, stack)), STARTING)


def contents(run: Path) -> dict[str, Any]:
    """Every file of a run by what it says; without the clock, and without orders that mean nothing."""
    found: dict[str, Any] = {}
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        name = str(path.relative_to(run))
        if path.suffix == ".safetensors":
            with safe_open(path, "numpy") as stored:
                header = {key: json_or_text(value) for key, value in (stored.metadata() or {}).items()}
            header.pop("digest", None)  # of the clock as well
            if isinstance(header.get("facts"), dict):
                header["facts"].pop("seconds", None)
            # The one before the last, which is of another moment where the saves were not the same.
            if path.stem != "previous":
                found[name] = {"header": header} | load_file(path)
        elif name == "metrics.jsonl":
            found[name] = metrics(run)
        elif path.suffix == ".parquet":
            found[name] = pq.read_table(path).to_pydict()
        elif path.suffix == ".json":
            found[name] = json.loads(path.read_text())
        else:
            found[name] = path.read_bytes()
    return found


def json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(value, right[name]) for name, value in left.items())
    if isinstance(left, np.ndarray):
        return (left.dtype, left.shape) == (right.dtype, right.shape) and left.tobytes() == right.tobytes()
    return repr(left) == repr(right)  # in which NaN equals itself
