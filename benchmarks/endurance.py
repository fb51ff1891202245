"""Do memory and open files stay flat over thousands of epochs?

    python benchmarks/endurance.py 10000

One ``siammm train`` on 12 images of 8 x 8 pixels: an update, E step, M step, merging and metrics in each epoch, and a
checkpoint every second. Its memory and its open files are read from ``/proc`` along the way.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.commands import TINY
from tests.data.image_sets import example_images, write_npy

import record

ROOT = Path(__file__).parents[1]
_ROWS = 11


@dataclass(frozen=True)
class Look:
    """What a process has at a moment."""

    epochs: int
    resident: int
    """Bytes in memory."""
    own: int
    """Of these, what it allocated."""
    files: int
    threads: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("epochs", type=int, nargs="?", default=10_000)
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results")
    parser.add_argument("--output", type=Path, help="another folder for the result")
    args = parser.parse_args()
    where = record.circumstances()  # now: the files may change while it runs
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        looks = watched(Path(folder), args.epochs)
    seconds = time.monotonic() - started
    body = f"{table(looks)}\n\n{slopes(looks)} {seconds:.0f} s in all."
    sys.stdout.write(f"{body}\n")
    if args.record:
        n = f"{args.epochs:,} epochs of one update, 12 images of 8 x 8 pixels, one process, one thread"
        record.write("endurance", "Thousands of short epochs", body, seeds="0", n=n, output=args.output, measured=where)


def watched(folder: Path, epochs: int) -> list[Look]:
    """Train, and look at the process about a hundred times."""
    data = write_npy(folder, example_images(12, size=(8, 8)))
    arguments = ["train", str(data), *TINY, "--epochs", str(epochs), "--save-every", "0.016", "--cluster-after", "0"]
    arguments += ["--n-components", "6"]
    process = subprocess.Popen(
        [sys.executable, "-m", "siammm", *arguments, "--output", "run"], cwd=folder, stdout=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    looks: list[Look] = []
    while process.poll() is None:
        done = epochs_done(folder / "run" / "metrics.jsonl")
        due = looks[-1].epochs + epochs // 100 if looks else 1
        if done >= due and (look := looked(process.pid, done)) is not None:
            looks.append(look)
        time.sleep(0.05)
    if process.returncode:
        sys.exit(f"the training ended with {process.returncode}")
    return looks


def epochs_done(metrics: Path) -> int:
    try:
        return metrics.read_bytes().count(b"\n")
    except OSError:
        return 0


def looked(pid: int, epochs: int) -> Look | None:
    """None where the process has just ended."""
    try:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        own, resident = (1024 * int(status[name].split()[0]) for name in ("RssAnon", "VmRSS"))
        return Look(epochs, resident, own, len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]))
    except (OSError, KeyError):
        return None


def table(looks: list[Look]) -> str:
    shown = [looks[round(i * (len(looks) - 1) / (_ROWS - 1))] for i in range(_ROWS)]
    rows = [
        [f"{look.epochs:,}", mib(look.resident), mib(look.own), str(look.files), str(look.threads)] for look in shown
    ]
    return record.table(["epochs done", "memory", "of its own", "open files", "threads"], rows)


def slopes(looks: list[Look]) -> str:
    """How much is added by a thousand epochs, from a tenth of them on."""
    settled = [look for look in looks if look.epochs >= looks[-1].epochs / 10]
    first, last = settled[0], settled[-1]
    per_thousand = (last.own - first.own) / max(1, last.epochs - first.epochs) * 1000
    files = {look.files for look in settled}
    return (
        f"From epoch {first.epochs:,} to {last.epochs:,}: {per_thousand / 2**20:+.2f} MiB of its own memory per "
        f"thousand epochs, {min(files)} to {max(files)} open files, {len(looks)} looks. The metrics of each epoch stay "
        "in memory."
    )


def mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.1f} MiB"


if __name__ == "__main__":
    main()
