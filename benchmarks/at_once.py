"""Several trainings at once on one GPU, started plainly: does one slow the others down, and how busy is the CPU?

    python benchmarks/at_once.py cifar10 --trainings 1 3 --epochs 25

Plainly: without NVIDIA's multi-process service and without OMP_NUM_THREADS, as somebody would who opens three
terminals. The package takes at most two threads of each pool while it trains on a GPU (decision 0043). The record has
the sum of the speeds, each training's median over its epochs; the load average at its highest; and the cores that the
trainings kept busy, by their processor time, which also holds their start and compiling. Run it before anything that
starts the multi-process service, ``study.py`` for example.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import record

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--trainings", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--preset", default="cifar-fast")
    parser.add_argument("--set", nargs="*", default=[], help="settings as name=value")
    parser.add_argument("--output", type=Path, help="folder for the result (default: benchmarks/results)")
    args = parser.parse_args()
    rows: list[list[str]] = []
    for number in args.trainings:
        words = ["--epochs", str(args.epochs), "--preset", args.preset, *(["--set", *args.set] if args.set else [])]
        found = together(number, [str(args.data), *words])
        print(json.dumps(found), flush=True)
        rows.append([
            str(number), f"{sum(found['speeds']):,.0f}", ", ".join(f"{speed:,.0f}" for speed in found["speeds"]),
            f"{found['load']:.1f}", f"{found['cores']:.1f}", f"{found['seconds']:.0f}",
        ])  # fmt: skip
    header = ["at once", "images/s in all", "of each", "highest load average", "cores busy on average", "seconds"]
    body = f"{record.table(header, rows)}\n\nThe machine has {os.cpu_count()} cores. {args.epochs} epochs of each."
    title = "Several trainings at once on one GPU, started plainly"
    n = f"{args.epochs} epochs of {args.data.name}"
    print(
        record.write("trainings-at-once", title, body, seeds="0 and on, one for each training", n=n, output=args.output)
    )


def together(number: int, words: list[str]) -> dict[str, Any]:
    """So many trainings at once, each with a seed of its own."""
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    before, started, load = _processor_seconds(), time.monotonic(), 0.0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / "train_cifar.py"), *words]
        own = [["--seed", str(seed), "--output", f"{folder}/{seed}"] for seed in range(number)]
        children = [
            subprocess.Popen([*command, *more], env=environment, stdout=subprocess.DEVNULL) for more in own
        ]  # fmt: skip
        while any(child.poll() is None for child in children):
            load = max(load, os.getloadavg()[0])
            time.sleep(1)
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*/*.json"))]
    if len(found) < number:
        raise SystemExit(f"{number - len(found)} of {number} trainings ended without a record.")
    seconds = time.monotonic() - started
    return {
        "trainings": number, "speeds": [run["images_per_second"] for run in found], "load": load,
        "cores": (_processor_seconds() - before) / seconds, "seconds": seconds,
    }  # fmt: skip


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
