"""Choose settings on held-out training images, several trials at once on one GPU; then run the best on the test images.

    python benchmarks/choose_then_test.py cifar10 --output runs --epochs 640 --trial-epochs 190 \
        --common view_size=24 batch_size=512 --trial-only merge_share=0.25 \
        --candidate learning_rate=4 --candidate learning_rate=4 encoder_momentum=0.99

The choice is made by this program, by kNN of 200 voters at the last epoch of each trial, so that nobody sees the test
images before. The last run is alone on the GPU; its files are beside those of the trials, which `train_cifar_table.py`
makes into a result.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--recipe", default="siammm")
    parser.add_argument("--epochs", type=int, required=True, help="of the run that is tested")
    parser.add_argument("--trial-epochs", type=int, required=True)
    parser.add_argument("--trial-seconds", type=int, default=3600, help="trials that take longer are stopped")
    parser.add_argument("--common", nargs="*", default=[], help="settings of all, as name=value")
    parser.add_argument("--trial-only", nargs="*", default=[], help="settings of the trials alone")
    parser.add_argument("--candidate", nargs="*", action="append", required=True, help="settings to choose among")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    common = [str(args.data), "--recipe", args.recipe]
    trials = args.output / "trials"
    trial = [*common, "--validation", "--epochs", str(args.trial_epochs), "--set", *args.common, *args.trial_only]
    lanes = [" ".join([*trial, *candidate]) for candidate in args.candidate]
    subprocess.run(["bash", str(HERE / "lanes.sh"), str(args.trial_seconds), str(trials), *lanes], check=True)
    found = [_reached(trials / f"{number}.log") for number in range(1, len(lanes) + 1)]
    for candidate, accuracy in zip(args.candidate, found, strict=True):
        print(f"{'not done' if accuracy is None else f'{accuracy:.4f}'}  {' '.join(candidate)}", flush=True)
    done = [number for number, accuracy in enumerate(found) if accuracy is not None]
    if not done:
        sys.exit(f"None of the trials came to its end; their logs are in {trials}.")
    best = args.candidate[max(done, key=lambda number: found[number] or 0.0)]
    print(f"chosen: {' '.join(best)}", flush=True)
    began = time.monotonic()
    command = [sys.executable, "-u", str(HERE / "train_cifar.py"), *common, "--epochs", str(args.epochs)]
    command += ["--set", *args.common, *best, "--output", str(args.output)]
    subprocess.run(command, check=True)
    print(f"the whole command: {time.monotonic() - began:.1f} s", flush=True)


def _reached(log: Path) -> float | None:
    """The held-out accuracy at the end of a trial; none if it did not get there."""
    lines = [line for line in log.read_text().splitlines() if line.startswith("{")]
    record: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return record.get("knn_online")


if __name__ == "__main__":
    main()
