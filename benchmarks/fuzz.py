"""Does any damaged input end in a traceback, a hang, partial output or much memory?

    python benchmarks/fuzz.py 20000 --seed 0

Each input is made from its own seed and given to a command (``tests/faults/fuzz.py``), which must end with its result,
or with one sentence and exit code 2. Prints the failures as they are found, and how many inputs of each kind were
tried; ``--record`` keeps that. ``--only SEED ...`` tries single ones. With ``--keep FILE`` what came of each input is
added to a file, so that an interrupted run is not lost; ``--kept FILE ...`` tries nothing, and counts what is in such
files.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.faults.fuzz import KINDS, READERS, Outcome, prepared, tried
from tests.nursery import Nursery
from tests.settings.test_flags import FLAGS

import record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=1)
    parser.add_argument("--seed", type=int, default=0, help="the first; the others follow")
    parser.add_argument("--only", type=int, nargs="+", default=[], help="try just these seeds")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run at a time")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results")
    parser.add_argument("--output", type=Path, help="another folder for the result")
    parser.add_argument("--keep", type=Path, help="file to add what came of each input to, as JSON lines")
    parser.add_argument("--kept", type=Path, nargs="+", default=[], help="count what is in these files")
    args = parser.parse_args()
    seeds = args.only or list(range(args.seed, args.seed + args.count))
    started = time.monotonic()
    where = record.circumstances()  # now: the files may change while it runs
    if args.kept:
        found = [Outcome(**json.loads(line)) for path in args.kept for line in path.read_text().splitlines()]
        seeds = range(args.seed, args.seed + len(found))
    else:
        parts = [seeds[i :: args.jobs] for i in range(args.jobs)]
        with ThreadPoolExecutor(args.jobs) as pool:
            found = [one for part in pool.map(lambda part: outcomes(part, args.keep), parts) for one in part]
    failed = [one.problem for one in found if one.problem is not None]
    body = f"{table(found)}\n\n{summary(found, failed)}"
    sys.stdout.write(f"{body}\n{time.monotonic() - started:.0f} s\n")
    if args.record:
        n = f"{len(found):,} inputs; {args.jobs} processes at a time"
        seeds_tried = f"{seeds[0]} to {seeds[-1]}"
        record.write("fuzz", "Damaged inputs", body, seeds=seeds_tried, n=n, output=args.output, measured=where)
    sys.exit(bool(failed))


def outcomes(seeds: list[int], keep: Path | None) -> list[Outcome]:
    """What came of these seeds; failures are printed at once."""
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder, Nursery() as nursery:
        for outcome in tried(nursery, prepared(nursery, Path(folder)), seeds):
            found.append(outcome)
            if keep is not None:
                with keep.open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
            if outcome.problem is not None:
                sys.stdout.write(f"{outcome.problem}\n")
            if len(found) % 500 == 0:
                sys.stdout.write(f"{len(found):,} of {len(seeds):,}\n")
            sys.stdout.flush()
    return found


def table(found: list[Outcome]) -> str:
    """Counts by kind."""
    rows: list[list[str]] = []
    for kind in KINDS:
        of_kind = [one for one in found if one.kind == kind]
        ended = collections.Counter(
            "failed" if one.problem else "a result" if one.code == 0 else "refused" for one in of_kind
        )
        most = max((one.peak for one in of_kind), default=0)
        counts = [f"{ended[name]:,}" for name in ("a result", "refused", "failed")]
        rows.append([kind, f"{len(of_kind):,}", *counts, f"{most / 2**30:.2f} GiB"])
    total = [f"{sum(int(row[at].replace(',', '')) for row in rows):,}" for at in range(1, 5)]
    rows.append(["all", *total, f"{max(one.peak for one in found) / 2**30:.2f} GiB"])
    return record.table(["kind", "inputs", "a result", "refused in a sentence", "failed", "most memory"], rows)


def summary(found: list[Outcome], failed: list[str]) -> str:
    """What was covered, and what failed."""
    flags = {flag for one in found if one.kind == "flags" for flag in one.what.split()}
    known = {flag for line in FLAGS.values() for flag in line.split()}
    files = {one.what for one in found if one.kind == "stored"}
    listed = "".join(f"\n- {problem.splitlines()[0][:300]}" for problem in failed)
    return (
        "A failure is a traceback, another exit code than 0 and 2, more than one sentence, a warning, a file that is "
        "left behind, more than 120 s or more than 4 GiB. "
        f"{len(flags & known)} of {len(known)} flags and {len(files)} of {len(READERS)} stored files were harmed. "
        f"Failures: {len(failed) or 'none'}.{listed}"
    )


if __name__ == "__main__":
    main()
