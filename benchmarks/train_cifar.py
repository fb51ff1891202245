"""Is the trainer sound, what does the mixture add, how do the peers do? CIFAR-10, ResNet-18, one recipe, any objective.

    python benchmarks/train_cifar.py DATA --recipe byol --output OUT
    python benchmarks/train_cifar.py DATA --recipe siammm --output OUT

DATA is a folder with train.npz and test.npz. Figures are of the last epoch; test labels choose nothing. With
--validation, a share of the training images stands in for the test set: for choosing settings.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

import oracle
import record
import study_evaluations
from siammm.data.loader import Loader, open_loader
from siammm.data.sources import Source, open_source
from siammm.learn.bookkeeping import Interrupted
from siammm.learn.encode import Output, encode
from siammm.learn.guard import CollapseError
from siammm.learn.loop import Training
from siammm.learn.observers import Recorder, Silent
from siammm.learn.progress import metrics_line
from siammm.metrics import clustering_scores, knn_accuracy, linear_accuracy
from siammm.runs import files as run
from siammm.runs.network_file import save_network
from siammm.settings.checks import check_settings
from siammm.settings.fields import with_settings
from siammm.settings.methods import METHODS, with_method
from siammm.settings.presets import PRESETS
from siammm.settings.training import MethodName

_COSINE: dict[str, Any] = {"instance_loss": "cosine", "contrastive_temperature_end": None}
# Each a method, and what it changes of it. ProPos is told the number of classes; nothing else is.
RECIPES: dict[str, tuple[MethodName, dict[str, Any]]] = {
    **{name: (name, {}) for name in METHODS},
    # With SiamMM's heads: the network of the paper's objective, less the clusters.
    "byol": ("siammm", {**_COSINE, "cluster_loss": "none"}),
    "propos": ("propos", {"n_components": 10}),
    "siammm-cosine": ("siammm", {**_COSINE, "cluster_after": 0.0}),  # the paper's objective
    "siammm-paper": ("siammm", {**_COSINE, "cluster_after": 0.0, "merge": "paper"}),
    "siammm-fixed": ("siammm", {"merge": "none", "n_components": 1000}),
}

# Voters and the temperature of their weights: lightly's, and those of DINO.
KNN = {"knn": (200, 0.1), "knn20": (20, 0.07)}


class Lines(Silent):
    """One line an epoch, with the time; and now and then how well it goes, for runs that a limit may end early."""

    def __init__(
        self,
        looks: Callable[[Training], tuple[float, float]] | None = None,
        keeps: Callable[[Training, int], None] | None = None,
        keep_at: Sequence[int] = (),
    ) -> None:
        self._start = time.monotonic()
        self._looks, self._keeps, self._keep_at = looks, keeps, keep_at
        self._training: Training | None = None
        self.epochs = 0
        self.looked: list[dict[str, Any]] = []

    def began(self, training: Training) -> None:
        self._training = training

    def finished_epoch(self, row: dict[str, Any]) -> None:
        self.epochs = row["epoch"]
        print(f"{time.monotonic() - self._start:7.1f} s  epoch {row['epoch']}: {metrics_line(row)}", flush=True)
        training = self._training
        assert training is not None
        if self._looks is not None and row["epoch"] % max(1, training.config.optimisation.epochs // 10) == 0:
            many, few = self._looks(training)
            self.looked.append({"epoch": row["epoch"], "knn": many, "knn20": few, "n_clusters": row.get("n_clusters")})
            print(f"           {look(many, few)}", flush=True)
        if self._keeps is not None and row["epoch"] in self._keep_at:
            self._keeps(training, row["epoch"])


class Checkpoint(Recorder):
    """Keeps the last checkpoint in one file, with the metrics so far and what took how long; and nothing else."""

    def __init__(self, path: Path, lines: Lines, earlier: Mapping[str, Any] | None) -> None:
        self._path, self._lines, self._started = path, lines, time.monotonic()
        self._metrics: list[dict[str, Any]] = [] if earlier is None else earlier["metrics"]
        self._seconds: float = 0.0 if earlier is None else earlier["seconds"]
        lines.looked = [] if earlier is None else earlier["looked"]

    @property
    def seconds(self) -> float:
        """Since the training first began, without the time that it was stopped."""
        return self._seconds + time.monotonic() - self._started

    def add_metrics(self, row: dict[str, Any]) -> None:
        self._metrics.append(row)

    def truncate_metrics(self, epochs: int) -> list[dict[str, Any]]:
        self._metrics = self._metrics[:epochs]
        self._lines.looked = [look for look in self._lines.looked if look["epoch"] <= epochs]
        return list(self._metrics)

    def save_checkpoint(self, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        kept = {"tensors": dict(tensors), "facts": dict(facts), "metrics": self._metrics}
        kept |= {"looked": self._lines.looked, "seconds": self.seconds}
        scratch = self._path.with_suffix(".new")
        torch.save(kept, scratch)
        scratch.replace(self._path)


def look(many: float, few: float) -> str:
    """The accuracy with 200 and with 20 voters, as ``screen.py`` reads it again."""
    return f"kNN so far {many:.4f} (200 voters), {few:.4f} (20)"


def given(pairs: list[str]) -> dict[str, Any]:
    """Settings as name=value; a value is JSON, or else a word."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, value = pair.split("=", 1)
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings


def share(text: str) -> float:
    """Of the training images, for judging; there must be some, and some to train on."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is no share of the images; give one above 0 and below 1")
    return value


def file_name(words: list[str]) -> str:
    """One that a file system takes: settings of many words are told apart by their hash."""
    name = "-".join(re.sub(r"[^\w.-]", "-", word) for word in words)
    return name if len(name) <= 120 else f"{name[:100]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def named(pairs: list[str]) -> dict[str, Path]:
    """Sets as name=folder."""
    return {name: Path(folder) for name, folder in (pair.split("=", 1) for pair in pairs)}


def split(folder: Path, n_images: int | None, held_out: float | None) -> tuple[Source, np.ndarray, Source, np.ndarray]:
    """What is trained on, all of it or so many images, and what is judged: that share of it, or the test images."""
    train, test = np.load(folder / "train.npz"), np.load(folder / "test.npz")
    x, y = train["images"], train["labels"]
    if n_images is not None and n_images > len(x):
        raise SystemExit(f"--images is {n_images:,}, but {folder} has {len(x):,} training images.")
    # Without a share too, so that so many images are the same ones as in a trial.
    held, rest = np.split(np.random.default_rng(0).permutation(len(x)), [round(len(x) * (held_out or 0.1))])
    if held_out is not None:
        other, other_labels = x[held], y[held]
    else:
        other, other_labels, rest = test["images"], test["labels"], np.concatenate([rest, held])
    rest = np.sort(rest[:n_images])
    return open_source(x[rest]), y[rest], open_source(other), other_labels


def coarser(folder: Path) -> np.ndarray | None:
    """The coarse class of each class, of a set that has both."""
    train = np.load(folder / "train.npz")
    if "coarse_labels" not in train:
        return None
    labels = train["labels"]
    coarse = np.zeros(labels.max() + 1, dtype=np.int64)
    coarse[labels] = train["coarse_labels"]
    return coarse


def clusters_scored(labels: np.ndarray, found: np.ndarray, prefix: str = "") -> dict[str, float]:
    """How well what was found agrees with the labels, each score by its name."""
    scores = clustering_scores(labels, found)
    names = ("ami", "nmi", "ari", "hungarian_accuracy", "majority_accuracy")
    return {prefix + name: getattr(scores, name) for name in names}


@torch.no_grad()
def view_embeddings(training: Training, number: int) -> np.ndarray:
    """Unit embeddings of an augmented view of each training image; those of one number share a stream of chance."""
    loader, network = training.loader, training.network
    encoder = network.momentum_encoder or network.encoder
    epoch, which = training.config.optimisation.epochs + 1 + number // 2, number % 2  # views that no update has seen
    network.eval()
    rows: list[torch.Tensor] = []
    for batch in loader.batches(epoch, torch.arange(loader.n_images).split(2048)):
        view = loader.views(batch, training.config.run.random_state, epoch)[which]
        with torch.autocast(training.device.type, torch.bfloat16, enabled=training.autocast):
            rows.append(encoder.forward(view).float())
    return torch.nn.functional.normalize(torch.cat(rows), dim=1).half().cpu().numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--recipe", choices=RECIPES, default="siammm")
    parser.add_argument("--preset", default="cifar")
    parser.add_argument("--epochs", type=int, help="by default the preset's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--validation", type=share, nargs="?", const=0.1, metavar="SHARE",
        help="judge by this share of the training images, a tenth by default, and not by the test images",
    )  # fmt: skip
    parser.add_argument("--images", type=int, help="train on so many of the images only")
    parser.add_argument("--set", nargs="*", default=[], help="settings as name=value")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--keep", action="store_true", help="also keep the encoder, and features and clusters for an audit"
    )
    parser.add_argument(
        "--keep-at", type=int, nargs="*", default=[], metavar="EPOCH",
        help="keep features and embeddings after these epochs, for work on the groups",
    )  # fmt: skip
    parser.add_argument("--keep-rows", type=int, default=8000, help="with --keep-at: of so many of the images")
    parser.add_argument("--stop-at", type=int, metavar="EPOCH", help="stop after this epoch, with a checkpoint")
    parser.add_argument(
        "--checkpoint", type=Path,
        help="the file to write with --stop-at, every few minutes, and when the process is asked to end (SIGTERM)",
    )  # fmt: skip
    parser.add_argument(
        "--resume", type=Path, metavar="CHECKPOINT",
        help="go on from such a checkpoint, perhaps with other settings: trials of the last part of a training",
    )  # fmt: skip
    parser.add_argument(
        "--evaluations", nargs="*", default=[], choices=study_evaluations.EVALUATIONS,
        help="what else to measure at the end",
    )  # fmt: skip
    parser.add_argument("--others", nargs="*", default=[], metavar="NAME=FOLDER", help="sets to transfer to")
    parser.add_argument(
        "--oracle", action="store_true", help="a diagnosis, no result: the true labels in place of the clusters"
    )
    parser.add_argument("--views", type=int, default=0, help="with --keep: embeddings of so many augmented views, too")
    args = parser.parse_args()
    stop_asked: list[int] = []

    def ask_to_stop(number: int, frame: FrameType | None) -> None:
        stop_asked.append(number)

    if args.checkpoint is not None:
        signal.signal(signal.SIGTERM, ask_to_stop)
    method, changes = RECIPES[args.recipe]
    epochs = args.epochs or PRESETS[args.preset].optimisation.epochs
    settings = changes | {"epochs": epochs, "random_state": args.seed}
    settings |= given(args.set)
    # The objective alone: everything is trained with the preset's optimisation.
    preset = with_method(PRESETS[args.preset], method, recipe=False)
    config = with_settings(preset, data=str(args.data), **settings)
    check_settings(config)
    source, labels, other, other_labels = split(args.data, args.images, args.validation)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    started = time.monotonic()

    def judges(training: Training) -> Loader:
        return open_loader(other, (training.clean_view, training.clean_view), device, seed=0)

    def looked(training: Training) -> tuple[float, float]:
        bank, query = (encode(training.network, loader, "features") for loader in (training.loader, judges(training)))
        many, few = (knn_accuracy(query, other_labels, bank, labels, k=k, temperature=t) for k, t in KNN.values())
        return many, few

    words = [args.recipe, str(epochs), str(args.seed)]
    words += [args.preset] if args.preset != "cifar" else []
    words += [f"{args.images}-images"] if args.images else []
    words += ["validation"] if args.validation else []
    words += ["oracle"] if args.oracle else []
    name = file_name([*words, *args.set])
    args.output.mkdir(parents=True, exist_ok=True)

    def kept(training: Training, epoch: int) -> None:
        rows = min(args.keep_rows, len(labels))
        outputs: list[Output] = ["features", "embeddings"]
        found = {output: encode(training.network, training.loader, output, last=rows) for output in outputs}
        arrays = {output: found[output].half().cpu().numpy() for output in outputs}
        np.savez(args.output / f"{name}-epoch-{epoch}.npz", labels=labels[:rows], **arrays)  # pyright: ignore[reportArgumentType]

    # Test images are looked at once, at the end.
    lines = Lines(None if args.validation is None else looked, kept, args.keep_at)
    resumed = None if args.resume is None else torch.load(args.resume, weights_only=True)
    recorder = None if args.checkpoint is None else Checkpoint(args.checkpoint, lines, resumed)
    found: dict[str, Any] = {
        "recipe": args.recipe, "settings": settings, "preset": args.preset, "oracle": args.oracle,
        "validation": args.validation is not None, "evaluations": args.evaluations,
        "n": len(labels), "n_judged": len(other_labels), "n_classes": len(np.unique(labels)),
        "judged": f"{len(other_labels):,} of the training images" if args.validation else "the test images",
        **record.circumstances(),
    }  # fmt: skip
    training = Training(
        config, source, device, listener=lines, recorder=recorder,
        resume_from=None if resumed is None else (resumed["tensors"], resumed["facts"]),
        stop_requested=lambda: bool(stop_asked) or (args.stop_at is not None and lines.epochs >= args.stop_at),
    )  # fmt: skip
    if args.oracle:
        oracle.with_oracle(training, torch.from_numpy(np.unique(labels, return_inverse=True)[1]))
    try:
        trained = training.run()
    except Interrupted:
        print(f"stopped after epoch {training.epoch}; see {args.checkpoint}")
        return
    except CollapseError as error:  # which is a result, too
        found |= {"failed": str(error), "k_curve": [row.get("n_clusters") for row in training.metrics]}
        print(json.dumps(found), flush=True)
        (args.output / f"{name}.json").write_text(json.dumps(found | {"metrics": training.metrics}, indent=1))
        return
    seconds = time.monotonic() - started if recorder is None else recorder.seconds
    held = judges(training)
    found |= {
        "seconds": round(seconds, 1),
        "images_per_second": round(float(np.median([row["images_per_second"] for row in training.metrics]))),
        "effective_rank": round(training.metrics[-1]["effective_rank"], 1),
    }
    outputs: dict[str, Output] = {"online": "features", "momentum": "momentum features"}
    for network, output in outputs.items():
        bank, query = encode(trained.network, training.loader, output), encode(trained.network, held, output)
        for kind, (k, temperature) in KNN.items():
            found[f"{kind}_{network}"] = knn_accuracy(query, other_labels, bank, labels, k=k, temperature=temperature)
        if (epochs >= 50 or "linear" in args.evaluations) and output == "features":
            y, y_test = torch.from_numpy(labels), torch.from_numpy(other_labels)
            found[f"linear_{network}"] = linear_accuracy(bank, y, query, y_test)
    if trained.mixture is not None and trained.clusters is not None:
        found |= {"n_clusters": trained.mixture.n_components_, "n_clusters_at_start": training.clustering.n_start}
        found |= clusters_scored(labels, trained.clusters)
        if trained.groups is not None and trained.group_labels is not None:
            found |= {"n_groups": trained.groups.n_groups, "groups_ratio": trained.groups.ratio}
            # Of images that were neither trained on nor clustered.
            judged = encode(trained.network, held, "embeddings").cpu().numpy()
            judged_groups = trained.groups.predict(judged, trained.mixture.predict(judged))
            found |= clusters_scored(labels, trained.group_labels, "groups_")
            found |= clusters_scored(other_labels, judged_groups, "judged_groups_")
            coarse = coarser(args.data)
            if coarse is not None:
                found |= clusters_scored(coarse[labels], trained.group_labels, "groups_coarse_")
                found |= clusters_scored(coarse[other_labels], judged_groups, "judged_groups_coarse_")
        found["k_curve"] = [row.get("n_clusters") for row in training.metrics]
    if lines.looked:
        found["looked"] = lines.looked
    if args.evaluations:
        images = study_evaluations.Images(source, labels, other, other_labels)
        others = {set_name: study_evaluations.Images.of(folder) for set_name, folder in named(args.others).items()}
        began = time.monotonic()
        found |= study_evaluations.measured(args.evaluations, trained, images, others, device, args.seed)
        found["evaluation_seconds"] = round(time.monotonic() - began, 1)
    print(json.dumps({key: value for key, value in found.items() if key not in ("k_curve", "looked")}), flush=True)
    (args.output / f"{name}.json").write_text(json.dumps(found | {"metrics": training.metrics}, indent=1))
    if args.keep:
        arrays: dict[str, Any] = {
            "features": encode(trained.network, training.loader, "features").half().cpu().numpy(),
            "labels": labels,
            "embeddings": trained.embeddings.astype(np.float16),
        }
        if args.views:
            arrays["views"] = np.stack([view_embeddings(training, number) for number in range(args.views)])
        if trained.mixture is not None:
            shares = trained.mixture.predict_proba(trained.embeddings)
            arrays |= {
                "index_NH": shares.indices.reshape(len(labels), -1),
                "weight_NH": shares.data.reshape(len(labels), -1),
            }
        np.savez(args.output / f"{name}.npz", **arrays)
        folder = args.output / name  # which `siammm evaluate` opens as a run
        folder.mkdir(exist_ok=True)
        save_network(folder / run.ENCODER, trained.network, training.config, training.clean_view)
        if trained.mixture is not None:
            trained.mixture.save(folder / run.MIXTURE)


if __name__ == "__main__":
    main()
