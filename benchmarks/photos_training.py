"""Does training on one's own photographs improve a pretrained encoder? Three ways, with paired seeds.

    python benchmarks/photos_training.py run DATA.npz --output OUT [--kinds 10 --per-kind 60] [--seconds 560]
    python benchmarks/photos_training.py table DATA.npz --output OUT [--kinds 10 --per-kind 60]

*frozen* is the encoder as it is, and ``siammm cluster`` on its features; *trained* is the preset ``photos`` from these
weights; *from nothing* is the same preset from random weights. DATA holds ``images`` and ``labels``, as
``group_sets.py`` writes them, or is anything else with labels that ``siammm train`` reads. A fifth of the images of
each kind is held out, another fifth for each seed: the rest is trained on and clustered, without labels, and the
held-out ones are classified by kNN and by a linear classifier that see the rest with labels.

Each way, size and seed is kept as a JSON file in OUT, and is not run again: a call that a time limit ended goes on, and
``--ways frozen --set image_size=224`` adds the encoder at another size. Kinds of
Tiny-ImageNet with an even number are for development, those with an odd number for judging.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import record
from siammm.cluster.find_clusters import find_clusters
from siammm.core.files import write_text
from siammm.data.embedding_table import EmbeddingTable
from siammm.data.sources import Source, open_source
from siammm.data.subset import SourceSubset
from siammm.learn.encode import encode
from siammm.learn.loop import Training
from siammm.metrics import clustering_scores, knn_accuracy, linear_accuracy
from siammm.runs.images import image_loader
from siammm.runs.models import features, open_model
from siammm.runs.pretrained import is_foreign
from siammm.runs.starting_weights import open_start, settings_of
from siammm.settings.commands import ClusterConfig
from siammm.settings.fields import with_settings
from siammm.settings.presets import PRESETS
from siammm.settings.training import TrainConfig

WAYS = ("frozen", "trained", "from nothing")
COLUMNS = {
    "kNN": "knn", "linear": "linear", "groups": "groups", "AMI of groups": "groups_ami", "clusters": "clusters",
    "AMI of clusters": "clusters_ami", "groups of features": "feature_groups", "AMI of these": "feature_groups_ami",
    "seconds": "seconds",
}  # fmt: skip
GAINS = {
    "knn": "kNN",
    "linear": "linear",
    "groups_ami": "AMI of groups",
    "feature_groups_ami": "AMI of groups of features",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "one", "table"])
    parser.add_argument("data", nargs="?", help="a labelled set of images")
    parser.add_argument("--output", type=Path, required=True, help="the folder of what was measured")
    parser.add_argument("--weights", default="lite")
    parser.add_argument("--kinds", type=int, help="use so many kinds, evenly from all")
    parser.add_argument("--per-kind", type=int, help="use the first so many images of each kind")
    parser.add_argument("--parity", choices=["even", "odd"], help="use kinds with such a number alone")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of training to change")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end what still runs after this long")
    parser.add_argument("--name", default="photos-training", help="table: the name of the record")
    parser.add_argument("--note", default="", help="table: what a reader should know besides")
    parser.add_argument("--records", type=Path, help="table: the folder of the record (default: benchmarks/results)")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    if args.action == "table":
        table(args)
    elif args.action == "one":
        measure(args, args.ways[0], args.seeds[0])
    else:
        run(args)


def run(args: argparse.Namespace) -> None:
    """Measure what has no file yet, each in a process of its own, all ways of a seed before the next."""
    ends = time.monotonic() + args.seconds
    same = [f"--output={args.output}", f"--weights={args.weights}", f"--device={args.device}", *choice(args)]
    for seed, way in itertools.product(args.seeds, args.ways):
        if file_of(args.output, way, seed, settings(args, way, seed).views.image_size).exists():
            continue
        own = ["--ways", way, "--seeds", str(seed), "--set", *args.set]
        command = [sys.executable, __file__, "one", args.data, *same, *own]
        try:
            subprocess.run(
                command, check=True, timeout=None if args.seconds == float("inf") else ends - time.monotonic()
            )
        except (subprocess.TimeoutExpired, ValueError):
            print("out of time; the same command goes on", flush=True)
            return


def choice(args: argparse.Namespace) -> list[str]:
    """The flags that choose images."""
    given = {name: getattr(args, name) for name in ("parity", "kinds", "per_kind")}
    return [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]


def measure(args: argparse.Namespace, way: str, seed: int) -> None:
    """One way with one seed."""
    config = settings(args, way, seed)
    source, labels = chosen(open_source(args.data), args)
    learnt, held_out = split(labels, seed)
    images, judged = SourceSubset(source, learnt), SourceSubset(source, held_out)
    images.labels = judged.labels = None  # neither training nor clustering may see them
    device, start = torch.device(args.device), time.perf_counter()
    if way == "frozen":
        found, rows, judged_rows = frozen(args.weights, images, judged, config, device)
    else:
        found, rows, judged_rows = trained(images, judged, config, device)
    found["seconds"] = round(time.perf_counter() - start, 1)
    classes = np.unique(labels, return_inverse=True)[1]
    known, asked = classes[learnt], classes[held_out]
    found |= {
        "knn": knn_accuracy(judged_rows, asked, rows, known, k=20),
        "linear": linear_accuracy(rows, known, judged_rows, asked),
    }
    for what in ("groups", "clusters", "feature_groups"):
        assigned = found.pop(what)
        found |= {what: len(np.unique(assigned)), f"{what}_ami": clustering_scores(known, assigned).ami}
    facts = {"way": way, "seed": seed, "weights": args.weights, "n": len(images), "n_judged": len(judged)}
    facts |= {"kinds": len(np.unique(labels)), "data": Path(args.data).name, "size": config.views.image_size}
    facts |= {"settings": args.set, "epochs": config.optimisation.epochs, **record.circumstances()}
    write_text(file_of(args.output, way, seed, config.views.image_size), json.dumps(found | facts, indent=1) + "\n")
    print({name: found[name] for name in COLUMNS.values()}, way, seed, flush=True)


def settings(args: argparse.Namespace, way: str, seed: int) -> TrainConfig:
    """The preset, from the weights or from nothing."""
    changed: dict[str, Any] = {}
    for text in args.set:
        name, _, value = text.partition("=")
        try:
            changed[name] = json.loads(value)
        except ValueError:
            changed[name] = value
    known = settings_of(args.weights) | ({} if way == "trained" else {"weights": "none"})
    own = known | {"random_state": seed, "device": args.device, "tensorboard": False, "data": args.data}
    return with_settings(PRESETS["photos"], **(own | changed))


def chosen(source: Source, args: argparse.Namespace) -> tuple[Source, np.ndarray]:
    """The images to use, and their labels."""
    if source.labels is None:
        sys.exit(f"{args.data} has no labels to judge with.")
    labels = np.asarray(source.labels)
    kinds = np.unique(labels)
    if args.parity is not None:
        kinds = kinds[kinds % 2 == (args.parity == "odd")]
    if args.kinds is not None:
        kinds = kinds[np.linspace(0, len(kinds) - 1, args.kinds).astype(int)]
    rows = np.sort(np.concatenate([np.flatnonzero(labels == kind)[: args.per_kind] for kind in kinds]))
    return SourceSubset(source, rows), labels[rows]


def split(labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The images to learn from, and a fifth of each kind to judge by."""
    generator = np.random.default_rng(seed)
    held_out: list[np.ndarray] = []
    for kind in np.unique(labels):
        rows = generator.permutation(np.flatnonzero(labels == kind))
        held_out.append(rows[: max(1, len(rows) // 5)])
    out = np.sort(np.concatenate(held_out))
    return np.setdiff1d(np.arange(len(labels)), out), out


Found = tuple[dict[str, Any], np.ndarray, np.ndarray]
"""Clusters and groups, then features of the images that were clustered and of those that judge."""


def frozen(weights: str, images: Source, judged: Source, config: TrainConfig, device: torch.device) -> Found:
    """The encoder as it is, at the size of the training."""
    model = open_model(weights, image_size=config.views.image_size if is_foreign(weights) else None, device=device)

    def encoded(source: Source) -> np.ndarray:
        loader = image_loader(source, model.view, config.reading, device)
        try:
            return unit(features(model, loader)[0].cpu().numpy())
        finally:
            loader.close()

    rows, judged_rows = encoded(images), encoded(judged)
    found = clustered(rows, config)
    return {
        "groups": found.group_labels, "clusters": found.clusters, "feature_groups": found.group_labels
    }, rows, judged_rows  # fmt: skip


def trained(images: Source, judged: Source, config: TrainConfig, device: torch.device) -> Found:
    """A training, with the clusters that it ends with, and those of its backbone's features."""
    training = Training(config, images, device, start=open_start(config, images))
    try:
        done = training.run()
        rows = encode(training.network, training.loader, "features").cpu().numpy()
        view = training.clean_view
        loader = image_loader(judged, view, config.reading, device)
        judged_rows = encode(training.network, loader, "features").cpu().numpy()
        loader.close()
    finally:
        training.close()
    return {
        "groups": done.group_labels,
        "clusters": done.clusters,
        "feature_groups": clustered(rows, config).group_labels,
        "curve": [row.get("n_clusters") for row in training.metrics],
    }, rows, judged_rows  # fmt: skip


def clustered(rows: np.ndarray, config: TrainConfig) -> Any:
    """What ``siammm cluster`` makes of these rows."""
    settings = ClusterConfig(data="", random_state=config.run.random_state, device=config.run.device)
    return find_clusters(EmbeddingTable(embeddings=rows, source=Path("features")), settings, {})


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def file_of(folder: Path, way: str, seed: int, size: int | None) -> Path:
    return folder / f"{way.replace(' ', '-')}-{size or 'own'}-{seed}.json"


def table(args: argparse.Namespace) -> None:
    """Write the record of all that was measured; the flags that chose the images are named in it."""
    folder = args.output
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not runs:
        sys.exit(f"Nothing was measured in {folder}; run it first.")
    first = next((run for run in runs if run["way"] == "trained"), runs[0])
    size, epochs = first["size"], first["epochs"]
    groups: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: (WAYS.index(run["way"]), run["size"], run["seed"])):
        groups.setdefault((run["way"], run["size"]), {})[run["seed"]] = run
    rows = [
        [way, str(pixels), str(len(own)), *(spread([run[name] for run in own.values()]) for name in COLUMNS.values())]
        for (way, pixels), own in groups.items()
    ]
    trained, frozen = groups.get(("trained", size), {}), groups.get(("frozen", size), {})
    both = [seed for seed in trained if seed in frozen]
    gains = [
        f"{what} {', '.join(f'{trained[seed][name] - frozen[seed][name]:+.3f}' for seed in both)}"
        for name, what in GAINS.items()
    ]
    changed = f", with {', '.join(first['settings'])}" if first["settings"] else ""
    body = f"""{record.table(["way", "pixels", "seeds", *COLUMNS], rows)}

Mean and deviation over the seeds; trained beside frozen at {size} pixels, by seed: {"; ".join(gains)}.

{args.data or first["data"]}: {first["n"]:,} images of {first["kinds"]} kinds, {epochs} epochs of the preset `photos`
from `{first["weights"]}`{changed}. kNN (20 voters) and linear are accuracies on {first["n_judged"]:,} images
that were neither trained on nor clustered, by the backbone's features; AMI is of the images that were. "Groups of
features" are what `siammm cluster` finds in the backbone's features.
Seconds are those of the whole way, from images to features, on a machine that may have done other things too.

{args.note}
"""
    measured = {
        key: "; ".join(dict.fromkeys(str(run[key]) for run in runs)) for key in ("commit", "hardware", "software")
    }
    own = [*choice(args), "--set", *first["settings"]] if first["settings"] else choice(args)
    measured["command"] = " ".join(["python benchmarks/photos_training.py run", args.data or first["data"], *own])
    seeds = ", ".join(map(str, sorted({run["seed"] for run in runs})))
    n = f"{first['n']:,} images, {first['n_judged']:,} judged"
    title = "Does training on one's own photographs improve a pretrained encoder?"
    print(record.write(args.name, title, body, seeds=seeds, n=n, measured=measured, output=args.records))


def spread(values: list[float]) -> str:
    """Mean and deviation."""
    digits = 3 if max(map(abs, values)) <= 1 else 1
    mean = f"{statistics.mean(values):,.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):,.{digits}f}" if len(values) > 1 else mean


if __name__ == "__main__":
    main()
