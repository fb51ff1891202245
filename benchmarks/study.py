"""Run a table from a list of cells, several at once on a GPU, and go on where a time limit cut it off.

    python benchmarks/study.py plan studies/t5-fixed-or-merged.json --data DATA --output OUT/t5 --seconds 560
    python benchmarks/study.py run studies/t5-fixed-or-merged.json --data DATA --output OUT/t5 --at-once 4 --seconds 560
    python benchmarks/study.py table studies/t5-fixed-or-merged.json --output OUT/t5

A study is a JSON file (``study_cells.py``): its question, what the paper reports, the predictions made before it ran,
what all cells share, the cells, the seeds. Each cell and seed is one call of ``train_cifar.py``, whose record becomes
``OUT/<set>-<cell>-<seed>.json``: cells that have one are not run again, so partial tables add up. The same training in
a folder beside OUT, of another study, is taken over. What the limit stops leaves a checkpoint in ``OUT/partial`` and
goes on from it, if the next call is on the same machine.

With ``"keep": true`` among what they share, features and clusters of the training images are kept beside the records,
for an audit or ``number_of_groups.py``; with ``"keep_at": EPOCH`` those of some images then. ``plan`` says what is left
and what of it fits into the seconds, ``table`` writes a result (``study_table.py``).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import study_cells
import study_table
from study_cells import Cell

# A training that is asked to stop writes a checkpoint first.
_GRACE = 20.0
# With less than this left, nothing is started that cannot end.
_WORTH_STARTING = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["plan", "run", "table"])
    parser.add_argument("study", type=Path)
    parser.add_argument("--data", type=Path, help="a folder with train.npz and test.npz, or one of such folders")
    parser.add_argument("--output", type=Path, required=True, help="the folder of the cells' records")
    parser.add_argument("--cells", nargs="*", help="these cells alone")
    parser.add_argument("--sets", nargs="*", help="these sets of images alone")
    parser.add_argument("--seeds", nargs="*", type=int, help="these seeds alone")
    parser.add_argument("--at-once", type=int, help="trainings that share the GPU (default: the study's, or 4)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop what still runs after this long")
    args = parser.parse_args()
    started = time.monotonic()
    study = study_cells.read_study(args.study)
    if args.action == "table":
        print(study_table.written(args.study, study, args.output))
        return
    at_once = args.at_once or study.get("at_once", 4)
    args.output.mkdir(parents=True, exist_ok=True)
    cells = left(study, args.output, args.data, cells=args.cells, sets=args.sets, seeds=args.seeds)
    if args.action == "plan":
        for line in planned(cells, args.output, at_once, args.seconds):
            print(line)
    else:
        assert args.data is not None, "run needs --data"
        run(cells, args.data, args.output, at_once, started + args.seconds)


def left(
    study: dict[str, Any],
    output: Path,
    data: Path | None,
    *,
    cells: Sequence[str] | None = None,
    sets: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
) -> list[Cell]:
    """The cells without a record, of those that are asked for and whose images are there."""
    found: list[Cell] = []
    others = study_cells.beside(output)
    for cell in study_cells.cells_of(study, seeds):
        cell.check()
        if (cells and cell.name not in cells) or (sets and cell.image_set not in sets):
            continue
        if data is not None and cell.image_set and not (data / cell.image_set / "train.npz").exists():
            continue
        if study_cells.record_of(output, cell) is None and not study_cells.adopted(output, cell, others):
            found.append(cell)
    return found


def planned(cells: Sequence[Cell], output: Path, at_once: int, seconds: float) -> list[str]:
    """Each cell that is left, what it takes, and whether it ends in time."""
    earlier = study_cells.beside(output)
    known = [study_cells.seconds_for(cell, earlier, at_once) for cell in cells]
    ends = study_cells.ends([length for length, _ in known], at_once)
    lines = [
        f"{'fits' if end <= seconds else 'does not fit':12}  {cell.label:44} {length:6,.0f} s, "
        f"ends at {end:6,.0f} ({why})"
        for cell, (length, why), end in zip(cells, known, ends, strict=True)
    ]
    total = sum(length for length, _ in known) / at_once
    return [*lines, f"{len(cells)} cells left: {total / 60:,.1f} minutes with {at_once} at once"]


def run(cells: Sequence[Cell], data: Path, output: Path, at_once: int, ends: float) -> None:
    """Run the cells until the limit; first those that end in time."""
    _share_gpu()
    earlier, waiting = study_cells.beside(output), list(cells)
    running: dict[subprocess.Popen[bytes], Cell] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            rest = ends - time.monotonic()
            fits = (cell for cell in waiting if study_cells.seconds_for(cell, earlier, at_once)[0] <= rest)
            cell = next(fits, waiting[0] if rest > _WORTH_STARTING else None)
            if cell is None:
                waiting.clear()
                break
            waiting.remove(cell)
            running[started(cell, data, output)] = cell
        time.sleep(0.2)
        late = time.monotonic() > ends - _GRACE
        if late:
            waiting.clear()
            end_all(list(running))
        for child, cell in list(running.items()):
            if child.poll() is not None:
                del running[child]
                found = collected(cell, output, at_once)
                if found is not None:
                    earlier.append(found)


def started(cell: Cell, data: Path, output: Path) -> subprocess.Popen[bytes]:
    """The cell's training, from its checkpoint if it was stopped."""
    folder = output / "partial" / cell.label
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "checkpoint.pt"
    words = [*cell.words(data, folder)]
    words += ["--checkpoint", str(checkpoint)] + (["--resume", str(checkpoint)] if checkpoint.exists() else [])
    # The package takes few threads beside a GPU (decision 0043), and does not touch a number that is given. It is given
    # here because what trains is not all: reading, k-means' search for groups and SVMs have all cores otherwise, while
    # other trainings wait for theirs.
    environment = {"OMP_NUM_THREADS": "3"} | os.environ
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(words, stdout=log, stderr=log, env=environment, start_new_session=True)


def end_all(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask trainings to write a checkpoint and stop; after a while they have to. Only those that were started here.

    With NVIDIA's multi-process service, a training that is killed may take the others with it.
    """
    for child in children:
        child.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + _GRACE
    for child in children:
        try:
            child.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def collected(cell: Cell, output: Path, at_once: int) -> dict[str, Any] | None:
    """The record of a training that has ended, in its place; None, if it was stopped or went wrong."""
    folder = output / "partial" / cell.label
    file = next(folder.glob("*.json"), None)
    if file is None:
        lines = (folder / "log").read_text(errors="replace").splitlines()
        print(f"{cell.label}: stopped; {lines[-1][:300] if lines else ''}", flush=True)
        return None
    found = json.loads(file.read_text("utf-8"))
    said = {name: found[name] for name in ("failed", "knn_online", "linear_online", "n_clusters") if name in found}
    print(f"{cell.label}: done in {found.get('seconds', 0):.0f} s; {json.dumps(said)}", flush=True)
    found |= {"identity": cell.identity, "image_set": cell.image_set, "cell": cell.name, "at_once": at_once}
    for kept in folder.glob("*.npz"):
        os.replace(kept, output / f"{cell.label}.npz")
    place = output / f"{cell.label}.json"
    scratch = place.with_suffix(".new")
    scratch.write_text(json.dumps(found, indent=1), "utf-8")
    scratch.replace(place)
    shutil.rmtree(folder)
    return found


def _share_gpu() -> None:
    """Start NVIDIA's multi-process service, with which several trainings share a GPU well."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control and subprocess.run(["pgrep", "-f", control], capture_output=True, check=False).returncode:
        subprocess.run([control, "-d"], check=False)


if __name__ == "__main__":
    main()
