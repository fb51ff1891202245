"""What do kNN and the linear probe cost while training?

    PYTHONPATH=src python benchmarks/probe_cost.py cifar10 --output OUT

A short run of a preset on labelled images, measured after every other epoch with the test images as ``--probe``. An
ordinary run is measured ten times, whatever its length: the share of that is what counts. DATA is a folder with
train.npz and test.npz.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch

import record
from siammm.data.sources import open_source
from siammm.learn.loop import Training
from siammm.settings.fields import with_settings
from siammm.settings.presets import PRESETS
from sweep import fresh_question
from train_cifar import given

MEASURED = 10
"""How often in a run, by default."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--output", type=Path, default=record.RESULTS)
    parser.add_argument("--preset", choices=PRESETS, default="cifar")
    parser.add_argument("--epochs", type=int, default=12, help="of the short run; clusters count in the second half")
    parser.add_argument("--set", nargs="*", default=[], help="settings as name=value")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    settings: dict[str, Any] = {"epochs": args.epochs, "probe_every": 2, "cluster_after": 0.5}
    settings["probe"] = str(args.data / "test.npz")
    settings |= given(args.set)
    whole = PRESETS[args.preset].optimisation.epochs
    training = Training(
        with_settings(PRESETS[args.preset], **settings), open_source(args.data / "train.npz"), torch.device(args.device)
    )
    training.run()
    training.close()
    rows = training.metrics[2:]  # in the first two, step and probes are compiled and tried out
    epoch = statistics.median(row["seconds"] for row in rows)
    probes = [row["probe_seconds"] for row in rows if "probe_seconds" in row]
    probe = statistics.median(probes)
    body = record.table(
        ["", "seconds"],
        [
            ["an epoch", f"{epoch:.3f}"],
            ["features, kNN, linear probe, scores of the clusters: once", f"{probe:.3f}"],
            [f"the same {MEASURED} times", f"{MEASURED * probe:.2f}"],
            [f"{whole} epochs", f"{whole * epoch:.1f}"],
        ],
    )
    share, last = MEASURED * probe / (whole * epoch), rows[-1]
    body += (
        f"\n\n**{100 * share:.2f} %** of a run of the preset's {whole} epochs. Probes took {min(probes):.3f} to "
        f"{max(probes):.3f} s. At the end: kNN {last['knn']:.3f}, linear {last['linear']:.3f}."
    )
    path = record.write(
        fresh_question(f"probe-cost-{args.preset}", args.output),
        "What kNN and the linear probe cost while training",
        body,
        seeds="0",
        n=f"{training.loader.n_images:,} images and the labelled test images; median of {len(rows)} epochs and "
        f"{len(probes)} probes",
        output=args.output,
    )
    print(path.read_text())


if __name__ == "__main__":
    main()
