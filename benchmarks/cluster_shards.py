"""How long does `siammm cluster` take for a large table in Parquet files, and how much memory?

    python benchmarks/cluster_shards.py --largest 2000000

Rows of float16 are drawn around 1,000 directions and written to Parquet files of 250,000 rows in a temporary folder.
Then the command runs by itself on an eighth of the files, a quarter, half, and all, with a given number of components,
without merging, and with three steps of EM after the start. Its memory is the kernel's peak of the whole process
(VmHWM), which counts the pages of the mapped copy that a large table is read from, and the largest part of it that was
the process's own (RssAnon, looked at every 20 ms). A table of up to 2 GiB in float32 is in memory, a larger one is
copied to a file and mapped.

With ``--sizes 1`` it runs on all files only. With ``--data 6`` the system gives the process no more than 6 GiB of
memory of its own, used or not (RLIMIT_DATA).
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import record

HEADER = ["rows", "clock", "CPU time", "peak memory (VmHWM)", "of its own (RssAnon)"]
ROWS_OF_A_FILE, DIRECTIONS = 250_000, 1000


def main() -> None:
    numbers = {
        "largest": 2_000_000,
        "dimensions": 256,
        "components": 1000,
        "iterations": 3,
        "threads": 1,
        "sizes": 4,
        "data": 0,
    }
    args = record.arguments(__doc__, **numbers).parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        n_files = max(1, args.largest // ROWS_OF_A_FILE)
        write_tables(folder, n_files, args.dimensions)
        sizes = sorted({max(1, n_files // 2**halved) for halved in range(args.sizes)})
        found = [(n * ROWS_OF_A_FILE, *measured(folder, n, args)) for n in sizes]
    rows = [
        [f"{n:,}", f"{clock:.0f} s", f"{cpu:.0f} s", *(gib(one) for one in memory)] for n, clock, cpu, *memory in found
    ]
    limit = (
        f"\n\nThe process could have {args.data} GiB of memory of its own at most (RLIMIT_DATA)." if args.data else ""
    )
    path = record.write(
        "cluster-shards",
        "A large table in Parquet files",
        f"{record.table(HEADER, rows)}{limit}\n\n{slopes(found) if len(found) > 1 else ''}",
        seeds="0",
        n=f"up to {found[-1][0]:,} rows of {args.dimensions} dimensions in float16, {args.components:,} components, "
        f"{args.iterations} steps of EM, {args.threads} threads, one process, {os.cpu_count()} cores",
        output=args.output,
    )
    sys.stdout.write(path.read_text())


def write_tables(folder: Path, n_files: int, d: int) -> None:
    """Rows around random directions, in files of equal size."""
    random = np.random.default_rng(0)
    centre_KD = random.normal(size=(DIRECTIONS, d)).astype(np.float32)
    for number in range(n_files):
        kind_N = random.integers(DIRECTIONS, size=ROWS_OF_A_FILE)
        x_ND = centre_KD[kind_N] + random.normal(scale=0.7, size=(ROWS_OF_A_FILE, d)).astype(np.float32)
        flat = pa.array(x_ND.astype(np.float16).ravel())
        column = pa.FixedSizeListArray.from_arrays(flat, d)
        path = folder / f"part-{number:03}.parquet"
        pq.write_table(pa.table({"embedding": column}), path, row_group_size=50_000, use_dictionary=False)


def measured(folder: Path, n_files: int, args: argparse.Namespace) -> tuple[float, float, int, int]:
    """Seconds, CPU seconds and both peaks in bytes of the command on the first of the files."""
    pattern = f"part-{{000..{n_files - 1:03}}}.parquet"
    command = [
        sys.executable, "-m", "siammm", "cluster", pattern, "--output", f"found-{n_files}", "--merge", "none",
        "--n-components", str(args.components), "--max-iter", str(args.iterations), "--device", "cpu",
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads), "PYTHONPATH": str(_source())}
    start = time.perf_counter()
    running = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    if args.data:
        resource.prlimit(running.pid, resource.RLIMIT_DATA, (args.data * 2**30, args.data * 2**30))
    own, peak = 0, 0
    while True:
        status = Path(f"/proc/{running.pid}/status").read_text()
        facts = dict(line.split(":", 1) for line in status.splitlines())
        if "VmHWM" in facts:  # not of one that has just ended
            own, peak = max(own, _bytes(facts["RssAnon"])), max(peak, _bytes(facts["VmHWM"]))
        ended, code, usage = os.wait4(running.pid, os.WNOHANG)
        if ended:
            break
        time.sleep(0.02)
    if code:
        raise SystemExit(f"the command ended with {os.waitstatus_to_exitcode(code)}")
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime, peak, own


def slopes(found: list[tuple[int, float, float, int, int]]) -> str:
    """What a million rows more cost, from one size to the next."""
    rows = []
    for before, after in itertools.pairwise(found):
        millions = (after[0] - before[0]) / 1e6
        clock, cpu, peak, own = ((b - a) / millions for a, b in zip(before[1:], after[1:], strict=True))
        rows.append([f"{before[0]:,} to {after[0]:,}", f"{clock:.0f} s", f"{cpu:.0f} s", gib(peak), gib(own)])
    return "A million rows more cost:\n\n" + record.table(["between", *HEADER[1:]], rows)


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def _bytes(text: str) -> int:
    return 1024 * int(text.split()[0])


def _source() -> Path:
    return Path(__file__).parents[1] / "src"


if __name__ == "__main__":
    main()
