"""Does a training that is stopped again and again, and restarted by torchrun each time, end with the same bits?

    python benchmarks/restarts.py --minutes 4

Two processes train under ``torchrun --max-restarts`` on the CPU. Every now and then one of them gets a SIGTERM, a
SIGHUP, a SIGKILL or a SIGSTOP, drawn from a seed; torchrun starts both again, with the same command
(``--resume-if-exists``). After a SIGSTOP the other one notices that it stands still.
At the end every file of the run is compared with that of a training that was left alone.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.data.image_sets import example_images, write_folder
from tests.distributed.launch import LOOPBACK
from tests.faults.killing import contents, differences

import record

ROOT = Path(__file__).parents[1]
SETTINGS = [
    "--backbone", "conv-small", "--hidden-dim", "64", "--embedding-dim", "32", "--batch-size", "120",
    "--optimiser", "sgd", "--learning-rate", "0.1", "--warmup-epochs", "1", "--n-components", "100",
    "--cluster-after", "0", "--device", "cpu", "--no-tensorboard", "--save-every", "0.05", "--resume-if-exists",
]  # fmt: skip
SIGNALS = [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGSTOP]
RANK_TIMEOUT = "10"
"""Seconds after which a process that stands still is lost."""
_TRIAL_EPOCHS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4.0, help="how long the training takes if it is left alone")
    parser.add_argument("--pause", type=float, default=20.0, help="seconds of training between two stops, on average")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results")
    parser.add_argument("--output", type=Path, help="another folder for the result")
    args = parser.parse_args()
    where = record.circumstances()  # now: the files may change while it runs
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_folder(folder, example_images(1200, size=(8, 8), n_classes=4))
        trial = trained(folder, "trial", _TRIAL_EPOCHS)
        epochs = max(_TRIAL_EPOCHS, round(_TRIAL_EPOCHS * 60 * args.minutes / trial))
        # The same name for both, which settings and headers of files hold.
        alone = trained(folder, "run", epochs)
        (folder / "run").rename(folder / "alone")
        stops, seconds = stopped_again_and_again(folder, epochs, args.pause, args.seed)
        found = differences(contents(folder / "alone"), contents(folder / "run"))
    kinds = collections.Counter(name for name, _ in stops)
    rows = [[name, str(kinds[name]), epochs_of(stops, name)] for name in sorted(kinds)]
    body = (
        f"{record.table(['signal', 'times', 'after so many epochs'], rows)}\n\n"
        f"{epochs:,} epochs of ten updates: {alone / 60:.1f} minutes if left alone, {seconds / 60:.1f} minutes with "
        f"{len(stops)} stops and restarts. Files that differ in the end: {', '.join(found) or 'none'}. Compared are "
        "networks, mixture, assignments, embeddings, merges, metrics (without the clock), settings, the list of files, "
        "and the last checkpoint with the optimiser. A process that stood still was lost after "
        f"{RANK_TIMEOUT} s (`SIAMMM_RANK_TIMEOUT`)."
    )
    sys.stdout.write(f"{body}\n")
    if args.record:
        n = "1,200 images of 8 x 8 pixels, two processes, a checkpoint every three seconds"
        record.write(
            "restarts", "Stopped and restarted", body, seeds=str(args.seed), n=n, output=args.output, measured=where
        )
    sys.exit(bool(found))


def started(folder: Path, output: str, epochs: int) -> subprocess.Popen[bytes]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    torchrun += ["--max-restarts", "1000", "--monitor-interval", "0.2"]
    command = ["train", "images", *SETTINGS, "--epochs", str(epochs), "--output", output]
    with (folder / f"{output}.log").open("wb") as log:
        return subprocess.Popen(
            [*torchrun, "-m", "siammm", *command], cwd=folder, stdout=log, stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK,
                              "SIAMMM_RANK_TIMEOUT": RANK_TIMEOUT},
        )  # fmt: skip


def trained(folder: Path, output: str, epochs: int) -> float:
    """Train without a stop; the seconds that it took."""
    begin = time.monotonic()
    process = started(folder, output, epochs)
    if process.wait():
        sys.exit((folder / f"{output}.log").read_text()[-3000:])
    return time.monotonic() - begin


def stopped_again_and_again(folder: Path, epochs: int, pause: float, seed: int) -> tuple[list[tuple[str, int]], float]:
    """The signals that were sent, with the epochs done then; and the seconds that all took."""
    draw, stops, begin = random.Random(seed), list[tuple[str, int]](), time.monotonic()
    process = started(folder, "run", epochs)
    while process.poll() is None:
        before, wait = epochs_done(folder), draw.uniform(0, 2 * pause)
        while process.poll() is None and epochs_done(folder) == before:  # until it trains again
            time.sleep(0.05)
        until = time.monotonic() + wait
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        ranks = ranks_of(process.pid)
        if process.poll() is None and ranks:
            number = draw.choice(SIGNALS)
            os.kill(draw.choice(ranks), number)
            stops.append((number.name, epochs_done(folder)))
    if process.returncode:
        sys.exit((folder / "run.log").read_text()[-3000:])
    return stops, time.monotonic() - begin


def epochs_done(folder: Path) -> int:
    try:
        return (folder / "run" / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def ranks_of(torchrun: int) -> list[int]:
    """The processes that train, of those that torchrun has started."""
    try:
        children = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()
        return [int(pid) for pid in children if b"siammm" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    except OSError:
        return []


def epochs_of(stops: list[tuple[str, int]], name: str) -> str:
    return ", ".join(f"{done:,}" for kind, done in stops if kind == name)


if __name__ == "__main__":
    main()
