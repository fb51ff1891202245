"""Which of several changes help? A fractional factorial on held-out training images; then the best on the test images.

    python benchmarks/screen.py cifar10 --output runs --epochs 640 --trial-epochs 110 --held-out 0.2 \
        --common view_size=24 batch_size=512 --trial-only merge_share=0.25 \
        --factor learning_rate=4,6 --factor encoder_momentum=0.98,0.99 --factor cluster_weight=1,0.5

The first value of a factor is what is usual, the second the change. Four trials judge up to three factors, eight up to
seven: every value of every factor is in half of them, each pair of values of two factors in a quarter. So an effect is
the difference of the means of two halves, and eight trials have half the noise of a comparison of two. Effects of two
factors together are not told from those of a third; columns that no factor has hint at how large noise and these are.

A trial's score is the mean of kNN of 200 and of 20 voters, after the last epoch that all trials have reached. This
program takes the better value of each factor, and with --epochs runs them on the test images: the choice is made before
any of these combinations is measured on them.

Legend:  R trials, C columns of the design, K kinds of accuracy.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from train_cifar import share

HERE = Path(__file__).parent
KINDS = ("200 voters", "20 voters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--recipe", default="siammm")
    parser.add_argument("--trial-epochs", type=int, required=True)
    parser.add_argument("--trial-seconds", type=int, default=3600, help="trials that take longer are stopped")
    parser.add_argument("--held-out", type=share, default=0.1, help="share of the training images that judge trials")
    parser.add_argument("--common", nargs="*", default=[], help="settings of all, as name=value")
    parser.add_argument("--trial-only", nargs="*", default=[], help="settings of the trials alone")
    parser.add_argument("--factor", type=factor, action="append", required=True, help="name=usual,changed")
    parser.add_argument("--epochs", type=int, help="then run the better values so long, on the test images")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    common = [str(args.data), "--recipe", args.recipe]
    trials = args.output / "trials"
    design_RC = design(len(args.factor))
    fixed = ["--validation", str(args.held_out), "--epochs", str(args.trial_epochs), "--set"]
    lanes = [
        " ".join([*common, *fixed, *args.common, *args.trial_only, *chosen(args.factor, row_C.tolist())])
        for row_C in design_RC
    ]
    lanes_command = ["bash", str(HERE / "lanes.sh"), str(args.trial_seconds), str(trials), *lanes]
    subprocess.run(lanes_command, env=os.environ | {"PYTHON": sys.executable}, check=True)
    looks = [looked((trials / f"{number}.log").read_text()) for number in range(1, len(lanes) + 1)]
    epochs = set.intersection(*map(set, looks))
    if not epochs:
        sys.exit(f"A trial ended before its first look at the held-out images; the logs are in {trials}.")
    epoch = max(epochs)
    found_RK = np.array([look[epoch] for look in looks])
    effect_CK = effects(design_RC, found_RK).round(5)  # a rounding error is no gain
    better = chosen(args.factor, (effect_CK.mean(axis=1) > 0).tolist())
    titles = ["{}: {} to {}".format(*words) for words in args.factor]
    titles += [f"no factor, column {column + 1}" for column in range(len(titles), len(effect_CK))]
    report = {
        "epoch": epoch,
        "trials": [
            dict(zip(KINDS, row_K, strict=True)) | {"trial": lane}
            for row_K, lane in zip(found_RK.tolist(), lanes, strict=True)
        ],
        "effects": {
            title: dict(zip(KINDS, row_K, strict=True)) for title, row_K in zip(titles, effect_CK.tolist(), strict=True)
        },
        "chosen": better,
    }
    (args.output / "screen.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(report, indent=1), flush=True)
    if args.epochs:
        began = time.monotonic()
        command = [sys.executable, "-u", str(HERE / "train_cifar.py"), *common, "--epochs", str(args.epochs)]
        command += ["--set", *args.common, *better, "--output", str(args.output)]
        subprocess.run(command, check=True)
        print(f"the whole command: {time.monotonic() - began:.1f} s", flush=True)


def factor(text: str) -> tuple[str, str, str]:
    """A setting, its usual value and the one that is tried."""
    name, values = text.split("=", 1)
    usual, changed = values.split(",")
    return name, usual, changed


def design(n_factors: int) -> np.ndarray:
    """Which factors (columns) are changed in which trial (rows): none in the first, each pair alike often as not.

    The columns beyond the factors are the ones that are left.
    """
    sign = np.ones((1, 1), dtype=int)
    while sign.shape[0] <= n_factors:
        sign = np.block([[sign, sign], [sign, -sign]])
    return sign[:, 1:] < 0


def effects(design_RC: np.ndarray, found_RK: np.ndarray) -> np.ndarray:
    """What changing a column gains of each kind, in the mean over all other changes."""
    return np.array([found_RK[on_R].mean(axis=0) - found_RK[~on_R].mean(axis=0) for on_R in design_RC.T])


def chosen(factors: list[tuple[str, str, str]], changes: list[bool]) -> list[str]:
    """Settings as name=value; the changes beyond the factors mean nothing."""
    return [f"{name}={values[changed]}" for (name, *values), changed in zip(factors, changes, strict=False)]


def looked(log: str) -> dict[int, tuple[float, float]]:
    """kNN of 200 and of 20 voters after each epoch in which a trial looked at the held-out images."""
    found: dict[int, tuple[float, float]] = {}
    epoch = 0
    for line in log.splitlines():
        if began := re.match(r" *[\d.]+ s  epoch (\d+):", line):
            epoch = int(began[1])
        elif look := re.match(r" +kNN so far ([\d.]+) \(200 voters\), ([\d.]+) \(20\)", line):
            found[epoch] = (float(look[1]), float(look[2]))
    return found


if __name__ == "__main__":
    main()
