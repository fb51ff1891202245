"""Run a table from a list of cells, several at once on a GPU, and go on where a time limit cut it off.

    python benchmarks/study.py run studies/clusters.json --data cifar10 --output OUT --at-once 4 --seconds 560
    python benchmarks/study.py table studies/clusters.json --output OUT

A study is a JSON file: its question, the predictions made before it ran, what all cells share, the cells, the seeds.
Each cell and seed is one call of ``train_cifar.py``, whose record becomes ``OUT/<cell>-<seed>.json``: cells that have
one are not run again, so partial tables add up. All cells of a seed come before those of the next, so that what is
there is paired. With ``"keep": true`` among what they share, features and clusters of the training images are kept
beside the records, for an audit or ``number_of_groups.py``; with ``"keep_at": EPOCH`` those of some images then.
``table`` writes a result with the mean and deviation over the seeds, and the paired difference from the study's
baseline.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import record

HERE = Path(__file__).parent
COLUMNS = {
    "kNN, k = 200": "knn_online", "kNN, k = 20": "knn20_online", "linear": "linear_online",
    "effective rank": "effective_rank", "K": "n_clusters", "groups": "n_groups", "AMI of clusters": "ami",
    "AMI of groups": "groups_ami", "NMI of groups": "groups_nmi", "Hungarian, groups": "groups_hungarian_accuracy",
    "Hungarian, groups, judged": "judged_groups_hungarian_accuracy", "ratio of groups": "groups_ratio",
    "seconds": "seconds",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "table"])
    parser.add_argument("study", type=Path)
    parser.add_argument("--data", help="a folder with train.npz and test.npz")
    parser.add_argument("--output", type=Path, required=True, help="the folder of the cells' records")
    parser.add_argument("--cells", nargs="*", help="run these cells alone")
    parser.add_argument("--seeds", nargs="*", type=int, help="run these seeds alone")
    parser.add_argument("--at-once", type=int, default=4, help="trainings that share the GPU")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop what still runs after this long")
    args = parser.parse_args()
    study = json.loads(args.study.read_text())
    if args.action == "run":
        study["cells"] = {name: cell for name, cell in study["cells"].items() if name in (args.cells or study["cells"])}
        study["seeds"] = args.seeds or study["seeds"]
    args.output.mkdir(parents=True, exist_ok=True)
    if args.action == "run":
        run(study, args.data, args.output, args.at_once, time.monotonic() + args.seconds)
    else:
        table(args.study, study, args.output)


def command(study: dict[str, Any], cell: str, seed: int, data: str, folder: Path) -> list[str]:
    """The call of ``train_cifar.py`` that is this cell with this seed."""
    shared, own = study["shared"], study["cells"][cell]
    settings = shared.get("set", {}) | own.get("set", {})
    words = [data, "--recipe", own.get("recipe", shared.get("recipe", "siammm")), "--epochs", str(shared["epochs"])]
    words += ["--preset", shared["preset"]] if "preset" in shared else []
    words += ["--validation", str(shared["validation"])] if "validation" in shared else []
    words += ["--images", str(shared["images"])] if "images" in shared else []
    words += ["--keep"] if shared.get("keep") else []
    words += ["--keep-at", str(shared["keep_at"])] if "keep_at" in shared else []
    words += ["--seed", str(seed), "--output", str(folder)]
    words += ["--set", *(f"{name}={value}" for name, value in settings.items())] if settings else []
    return [sys.executable, "-u", str(HERE / "train_cifar.py"), *words]


def run(study: dict[str, Any], data: str, output: Path, at_once: int, ends: float) -> None:
    """Run what has no record yet."""
    _share_gpu()
    waiting = [
        (cell, seed)
        for seed, cell in itertools.product(study["seeds"], study["cells"])
        if not (output / f"{cell}-{seed}.json").exists()
    ]
    running: dict[subprocess.Popen[bytes], tuple[str, int, Path]] = {}
    # Threads that wait for the GPU spin: with one for each core, runs at once take every core from each other.
    environment = {"OMP_NUM_THREADS": "3"} | os.environ
    while waiting or running:
        while waiting and len(running) < at_once and time.monotonic() < ends:
            cell, seed = waiting.pop(0)
            folder = output / "partial" / f"{cell}-{seed}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            with (folder / "log").open("wb") as log:
                words = command(study, cell, seed, data, folder)
                child = subprocess.Popen(words, stdout=log, stderr=log, env=environment, start_new_session=True)
            running[child] = (cell, seed, folder)
        time.sleep(0.2)
        late = time.monotonic() > ends
        if late:
            waiting.clear()
        for child, (cell, seed, folder) in list(running.items()):
            if child.poll() is None and not late:
                continue
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            del running[child]
            found = next(folder.glob("*.json"), None)
            lines = (folder / "log").read_text(errors="replace").splitlines()
            print(f"{cell}, seed {seed}: {'done' if found else 'stopped'}; {lines[-1] if lines else ''}", flush=True)
            if found:
                for kept in folder.glob("*.npz"):
                    os.replace(kept, output / f"{cell}-{seed}.npz")
                os.replace(found, output / f"{cell}-{seed}.json")
                shutil.rmtree(folder)


def _share_gpu() -> None:
    """Start NVIDIA's multi-process service, with which several trainings share a GPU well."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control and subprocess.run(["pgrep", "-f", control], capture_output=True, check=False).returncode:
        subprocess.run([control, "-d"], check=False)


def table(path: Path, study: dict[str, Any], output: Path) -> None:
    """Write the result of all cells that have a record."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for cell, seed in itertools.product(study["cells"], study["seeds"]):
        file = output / f"{cell}-{seed}.json"
        if file.exists():
            found.setdefault(cell, {})[seed] = json.loads(file.read_text())
    runs = [run for seeds in found.values() for run in seeds.values()]
    if not runs:
        sys.exit(f"There is no record of a cell in {output}; run the study first.")
    columns = {title: name for title, name in COLUMNS.items() if any(run.get(name) is not None for run in runs)}
    baseline = found.get(study["baseline"], {})
    rows: list[list[str]] = []
    for cell, seeds in found.items():
        means = [
            _spread([run[name] for run in seeds.values() if run.get(name) is not None]) for name in columns.values()
        ]
        gains = [
            100 * (run["knn_online"] - baseline[seed]["knn_online"]) for seed, run in seeds.items() if seed in baseline
        ]
        rows.append([cell, str(len(seeds)), *means, "" if cell == study["baseline"] else _spread(gains)])
    header = ["cell", "seeds", *columns, f"kNN, points above {study['baseline']}"]
    settings = "\n".join(f"- {cell}: `{json.dumps(study['cells'][cell])}`" for cell in found)
    predictions = "\n".join(f"- {text}" for text in study["predictions"])
    findings = f"\nWhat came out:\n\n{chr(10).join(f'- {text}' for text in study.get('findings', []))}\n"
    body = f"""{study["text"]}

{record.table(header, rows)}

Mean and deviation over the seeds; the last column is the mean and deviation of the differences of paired seeds, in
points of kNN with 200 voters. Accuracies are of the last epoch, on {runs[0]["judged"]}, which were neither trained on
nor clustered; the scores of clusters and groups are of the training images.

Predictions, written before the study ran:

{predictions}
{findings}
All cells share `{json.dumps(study["shared"])}`; each changes:

{settings}
"""
    measured = {
        name: "; ".join(dict.fromkeys(str(run.get(name, "not noted")) for run in runs))
        for name in ("commit", "hardware", "software")
    }
    data, at_once = study.get("data", "cifar10"), study.get("at_once", 4)
    measured["command"] = f"python benchmarks/study.py run {path} --data {data} --at-once {at_once}"
    seeds = ", ".join(map(str, study["seeds"]))
    n = f"{runs[0]['n']:,} training images, {runs[0]['n_judged']:,} judged"
    print(record.write(study["name"], study["title"], body, seeds=seeds, n=n, measured=measured))


def _spread(values: list[float]) -> str:
    """Mean and deviation, with the digits that values of this size need."""
    if not values:
        return ""
    digits = 4 if max(map(abs, values)) <= 1 else 2 if max(map(abs, values)) < 20 else 0
    mean = f"{statistics.mean(values):,.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):,.{digits}f}" if len(values) > 1 else mean


if __name__ == "__main__":
    main()
