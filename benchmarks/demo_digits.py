"""Does `make demo` find the digits? Three seeds of the demo's preset, beside the mixture on the pixels themselves.

    python benchmarks/demo_digits.py

The settings of the preset were chosen on these same images, with their labels in sight: the figures say what a newcomer
sees, not how the method does on data it was not tuned on.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits

import record
from siammm import VonMisesFisherMixture
from siammm.data.sources import open_source
from siammm.learn.encode import encode
from siammm.learn.loop import Training
from siammm.metrics import clustering_scores, knn_accuracy
from siammm.settings.fields import with_settings
from siammm.settings.presets import PRESETS

HEADER = ["seed", "what", "K at the start", "K", "AMI", "majority", "Hungarian", "kNN (k = 20)", "seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    source = open_source("digits")
    pixels, labels = (np.asarray(array) for array in load_digits(return_X_y=True))
    source.labels = None
    rows: list[list[str]] = []
    curves: list[str] = []
    for seed in args.seeds:
        start = time.perf_counter()
        training = Training(
            with_settings(PRESETS["demo"], data="digits", random_state=seed), source, torch.device("cpu")
        )
        trained = training.run()
        seconds = time.perf_counter() - start
        assert trained.mixture is not None
        assert trained.clusters is not None
        features = encode(trained.network, training.loader, "features").numpy()
        curve = [row["n_clusters"] for row in training.metrics if "n_clusters" in row]
        curves.append(f"seed {seed}: " + ", ".join(map(str, curve)))
        rows.append(_row(seed, "demo", training.clustering.n_start, trained.clusters, labels, features, seconds))
        print(rows[-1], flush=True)
        start = time.perf_counter()
        mixture = VonMisesFisherMixture(training.clustering.n_start, merge="auto", random_state=seed).fit(pixels)
        found = np.asarray(mixture.labels_)
        rows.append(
            _row(seed, "mixture on pixels", mixture.n_components, found, labels, pixels, time.perf_counter() - start)
        )
        print(rows[-1], flush=True)
    body = f"""{record.table(HEADER, rows)}

K after each epoch with clusters:

{chr(10).join(f"- {curve}" for curve in curves)}

The preset's settings were chosen on these images with their labels in sight; the labels themselves reach no training.
kNN is leave-one-out, on the backbone's features or on the pixels.
"""
    path = record.write(
        "demo-digits",
        "The demo on scikit-learn's digits",
        body,
        seeds=", ".join(map(str, args.seeds)),
        n=f"{len(labels):,} images",
        output=args.output,
    )
    print(path)


def _row(
    seed: int, what: str, start: int, found: np.ndarray, labels: np.ndarray, features: np.ndarray, seconds: float
) -> list[str]:
    scores = clustering_scores(labels, found)
    features = np.asarray(features, dtype=np.float32)
    knn = knn_accuracy(features, labels, features, labels, k=20, leave_one_out=True)
    return [
        str(seed), what, str(start), str(scores.n_clusters), f"{scores.ami:.3f}", f"{scores.majority_accuracy:.3f}",
        f"{scores.hungarian_accuracy:.3f}", f"{knn:.3f}", f"{seconds:.0f}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
