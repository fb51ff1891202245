"""Does the number of groups depend on where merging stopped, under encoders that are trained here on digits?

    python benchmarks/demo_groups.py CELLS
    python benchmarks/demo_groups.py CELLS --table

The demo's preset, with 40 epochs, at three merge shares, with clusters of the bank and of a clean pass, from four
starts, and with floors that keep merging from its end. CELLS is a folder: a file for each run with its figures, and one
with its embeddings, which ``number_of_groups.py`` reads. What is there is not run again. ``--table`` writes the record.

Up to the first epoch with clusters the runs of a seed are the same run. So they share it, and each goes on from a copy:
the result is that of a run by itself.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits

import record
from number_of_groups import is_right
from siammm.data.sources import open_source
from siammm.learn import build
from siammm.learn.filling import fill_bank
from siammm.learn.loop import Training
from siammm.metrics import clustering_scores
from siammm.mixture import groups
from siammm.settings.fields import with_settings
from siammm.settings.presets import PRESETS
from siammm.settings.training import TrainConfig

SHARES, STARTS, FLOORS = (0.1, 0.2, 0.4), (30, 60, 200), (20, 40)
# In place of 60: a third less to compute.
EPOCHS = 40
PREDICTIONS = """- Merging ends with 9 to 13 clusters at all shares and from all starts, because after the last epoch it
  goes on until its test stops it.
- So the number of groups is 10 within one in at least nine tenths of the runs without a floor. It differs by at most
  one between shares of the same seed and embeddings in 5 of 6, and between starts of the same seed in all 3.
- Bank or clean makes no difference of more than one in the mean number of groups.
- With 20 and 40 clusters that could not merge, the groups are still 10 within one in at least 4 of 6 runs, because the
  elbow says so."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--table", action="store_true", help="write the record of what is there")
    parser.add_argument("--output", type=Path, help="folder for the result (default: benchmarks/results)")
    options = parser.parse_args()
    if options.table:
        print(written(options.folder, options.output))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    labels = np.asarray(load_digits(return_X_y=True)[1])
    source = open_source("digits")
    source.labels = None
    for seed in options.seeds:
        waiting = [
            (name, changed)
            for name, changed in cells().items()
            if not (options.folder / f"{name}-{seed}.json").exists()
        ]
        trunk: Training | None = None
        for name, changed in waiting:
            if trunk is None:
                trunk = without_clusters(seed, source)
            start = time.process_time()
            figures = finished(trunk, settings(seed, **changed), labels, options.folder / f"digits-{name}-{seed}.npz")
            figures |= {"cell": name, "seed": seed, "seconds": round(time.process_time() - start, 1)}
            figures |= {"n": len(labels), **record.circumstances()}
            (options.folder / f"{name}-{seed}.json").write_text(json.dumps(figures, indent=1))
            print({key: figures[key] for key in ("cell", "seed", "clusters", "groups", "of_samples")}, flush=True)


def cells() -> dict[str, dict[str, Any]]:
    """What each run changes in the demo's settings."""
    found: dict[str, dict[str, Any]] = {}
    for embeddings in ("bank", "clean"):
        found |= {f"{embeddings}-share-{s}": {"embeddings": embeddings, "merge_share": s} for s in SHARES}
    found |= {f"bank-start-{k}": {"n_components": k} for k in STARTS}
    return found | {f"bank-floor-{k}": {"merge_floor": k} for k in FLOORS}


def settings(seed: int, **changed: Any) -> TrainConfig:
    return with_settings(PRESETS["demo"], data="digits", epochs=EPOCHS, random_state=seed, **changed)


def without_clusters(seed: int, source: Any) -> Training:
    """A run up to its first epoch with clusters."""
    training = Training(settings(seed), source, torch.device("cpu"))
    fill_bank(training)
    while not training.clustering_active:
        training.train_epoch()
    return training


def finished(trunk: Training, config: TrainConfig, labels: np.ndarray, kept: Path) -> dict[str, Any]:
    """The figures of a run with these settings that goes on from a copy of the trunk."""
    training = copy.deepcopy(trunk)
    training.config = config
    training.clusterings = build.clusterings(config, training.loader.n_images, training.device)
    training.clustering = training.clusterings[0]
    training._clustered = None  # what was clustered may be that of other settings
    trained = training.run()
    assert trained.clusters is not None
    assert trained.group_labels is not None
    assert trained.groups is not None
    np.savez(kept, embeddings=trained.embeddings, labels=labels)
    clusters, of_groups = (clustering_scores(labels, found) for found in (trained.clusters, trained.group_labels))
    # What the samples alone say, as if there were one component.
    nobody_N2 = np.zeros((len(labels), 2), dtype=np.int64)
    alone = groups.found(trained.embeddings, nobody_N2, 1, unit=True, separate=False, seed=config.run.random_state)
    return {
        "start": training.clustering.n_start, "clusters": clusters.n_clusters, "clusters_ami": clusters.ami,
        "clusters_accuracy": clusters.hungarian_accuracy, "groups": of_groups.n_clusters,
        "groups_found": trained.groups.is_found, "groups_ami": of_groups.ami,
        "groups_accuracy": of_groups.hungarian_accuracy, "of_samples": alone.n_groups, "ratio": alone.ratio,
    }  # fmt: skip


def written(folder: Path, output: Path | None) -> Path:
    """The record of the runs that are there."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    by_cell = {name: [run for run in runs if run["cell"] == name] for name in cells()}
    by_cell = {name: sorted(found, key=lambda run: run["seed"]) for name, found in by_cell.items() if found}
    header = [
        "run",
        "seeds",
        "clusters",
        "groups",
        "groups, samples alone",
        "AMI: clusters, groups",
        "accuracy",
        "ratio",
    ]
    rows: list[list[str]] = []
    for name, found in by_cell.items():
        numbers = [", ".join(str(run[key]) for run in found) for key in ("clusters", "groups", "of_samples")]
        pairs = [
            ", ".join(f"{np.mean([run[f'{what}_{key}'] for run in found]):.3f}" for what in ("clusters", "groups"))
            for key in ("ami", "accuracy")
        ]
        seeds = ", ".join(str(run["seed"]) for run in found)
        rows.append([name, seeds, *numbers, *pairs, f"{np.mean([run['ratio'] for run in found]):.2f}"])
    free, held = ([run for run in runs if ("floor" in run["cell"]) == is_held] for is_held in (False, True))
    counts = [
        f"- {title}: clusters {right(own, 'clusters')}, groups {right(own, 'groups')}, groups of the samples alone "
        f"{right(own, 'of_samples')}."
        for title, own in (("Without a floor", free), ("With a floor", held))
        if own
    ]
    shares = {kind: [f"{kind}-share-{s}" for s in SHARES] for kind in ("bank", "clean")}
    starts = ["bank-share-0.2", *(f"bank-start-{k}" for k in STARTS)]
    body = f"""{record.table(header, rows)}

{EPOCHS} epochs in place of the preset's 60. Numbers are one for each seed, the rest means. The ratio is that of the
communities to one Gaussian ([0035](../../docs/decisions/0035-groups-of-samples.md)). "Samples alone" is what the
rule says without any clusters.

Right (10 within a fifth, and within one), and from what to what:

{chr(10).join(counts)}
- Seeds whose numbers of groups differ by at most one, of those with all runs: over the shares
  {agreement(by_cell, shares["bank"])} (bank) and {agreement(by_cell, shares["clean"])} (clean), over the starts of 30,
  60, 144 and 200 {agreement(by_cell, starts)}.
- Mean number of groups with the bank and clean: {mean_groups(by_cell, "bank")}, {mean_groups(by_cell, "clean")}.

Predictions, written before the runs:

{PREDICTIONS}

The settings of the demo were chosen on these images with their labels in sight.
"""
    measured = {key: "; ".join(dict.fromkeys(run[key] for run in runs)) for key in ("commit", "hardware", "software")}
    seeds = ", ".join(sorted({str(run["seed"]) for run in runs}))
    title = "Does the number of groups depend on where merging stopped? Encoders trained on digits"
    measured["command"] = "python benchmarks/demo_groups.py CELLS"
    n = f"{runs[0]['n']:,} images, {len(runs)} runs"
    return record.write("demo-groups", title, body, seeds=seeds, n=n, measured=measured, output=output)


def right(runs: list[dict[str, Any]], what: str) -> str:
    """In how many runs a number is ten within a fifth, and within one, and between what it lies."""
    numbers = [run[what] for run in runs]
    fifth, one = sum(is_right(k, 10) for k in numbers), sum(abs(k - 10) <= 1 for k in numbers)
    return f"{fifth} and {one} of {len(numbers)} ({min(numbers)} to {max(numbers)})"


def agreement(by_cell: dict[str, list[dict[str, Any]]], names: list[str]) -> str:
    """How many seeds have numbers of groups that differ by at most one, of those that have all of these cells."""
    numbers: dict[int, list[int]] = {}
    for run in itertools.chain.from_iterable(by_cell.get(name, []) for name in names):
        numbers.setdefault(run["seed"], []).append(run["groups"])
    whole = [k for k in numbers.values() if len(k) == len(names)]
    return f"{sum(max(k) - min(k) <= 1 for k in whole)} of {len(whole)}"


def mean_groups(by_cell: dict[str, list[dict[str, Any]]], embeddings: str) -> str:
    return f"{np.mean([run['groups'] for s in SHARES for run in by_cell.get(f'{embeddings}-share-{s}', [])]):.1f}"


if __name__ == "__main__":
    main()
