"""Does a training that is killed at any moment, and started again, end with the same bits?

    python benchmarks/kills.py 100 --seed 0

Each training is a process of its own on the CPU, with a checkpoint after every update. It gets a SIGKILL at a random
moment, half of them aimed at updates, saving, merging and the writing of results, which are short. The same command
(``--resume-if-exists``) is run again, and every file of the run is compared with that of a training left alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.faults.killing import SETTINGS, Killer, Outcome
from tests.nursery import Nursery

import record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=100)
    parser.add_argument("--seed", type=int, default=0, help="the first; the others follow")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results")
    parser.add_argument("--output", type=Path, help="another folder for the result")
    args = parser.parse_args()
    where = record.circumstances()  # now: the files may change while it runs
    started, found = time.monotonic(), list[Outcome]()
    with tempfile.TemporaryDirectory() as folder, Nursery() as nursery:
        killer = Killer(nursery, Path(folder))
        for seed in range(args.seed, args.seed + args.count):
            found.append(killer.killed(seed))
            sys.stdout.write(
                f"{seed}: {found[-1].phase}, after {found[-1].epochs} epochs; {found[-1].problem or 'equal'}\n"
            )
            sys.stdout.flush()
    problems = [one.problem for one in found if one.problem is not None]
    rows: list[list[str]] = []
    for phase in sorted({one.phase for one in found}):
        of_phase = [one for one in found if one.phase == phase]
        epochs = sorted({one.epochs for one in of_phase})
        rows.append([
            phase, str(len(of_phase)), f"{epochs[0]} to {epochs[-1]}",
            str(sum(one.had_checkpoint for one in of_phase)), str(sum(one.problem is None for one in of_phase)),
        ])  # fmt: skip
    rows.append(
        ["all", str(len(found)), "", str(sum(one.had_checkpoint for one in found)), str(len(found) - len(problems))]
    )
    header = ["killed while", "kills", "epochs done", "with a checkpoint", "the same bits in the end"]
    body = (
        f"{record.table(header, rows)}\n\n"
        + (
            "Compared are networks, mixture, assignments, embeddings, merges, metrics (without the clock), settings, "
            "the list of files, the last checkpoint with the optimiser, and that nothing else is left. Without "
            f"a checkpoint the command starts the training anew. Settings: `{' '.join(SETTINGS)}`, on 300 images of "
            f"8 x 8 pixels. Runs that ended otherwise: {len(problems) or 'none'}."
        )
        + "".join(f"\n- {problem}" for problem in problems)
    )
    sys.stdout.write(f"{body}\n{time.monotonic() - started:.0f} s\n")
    if args.record:
        n = f"{len(found)} kills, one per training"
        seeds = f"{args.seed} to {args.seed + args.count - 1}"
        record.write("kills", "Killed at random moments", body, seeds=seeds, n=n, output=args.output, measured=where)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
