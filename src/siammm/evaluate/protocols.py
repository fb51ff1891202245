"""The protocols by name: what each measures, by which published recipe, and what it can be used on.

A protocol is a function of a task, the settings and a seed; it returns figures. Only the seed makes it random, so that
mean and deviation over seeds are meaningful; protocols without randomness are run once.

Legend:  N images, D features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from siammm.core.errors import InputError
from siammm.data.subset import SourceSubset, positions_of, read_names
from siammm.evaluate.fine_tuning import FineTuneSettings, fine_tune, labelled_subset, settings_for
from siammm.evaluate.linear_probe import LINEAR, PLACES205, LinearSettings, linear_probe
from siammm.evaluate.task import Features, LabelledSet, Task
from siammm.evaluate.training import Setup
from siammm.metrics.clustering import clustering_scores, mapped_accuracy, purities
from siammm.metrics.kmeans import MOST_STEPS, clusters_of, k_means
from siammm.metrics.knn import RULES, knn_accuracies
from siammm.metrics.linear import PENALTIES, ProbeResult, linear_scores
from siammm.metrics.multilabel import svm_map
from siammm.runs.models import Model
from siammm.settings.commands import EvaluateConfig

# The paper clusters ImageNet into 25,000; k-means does so too by default where clusters then hold ten images or more.
LARGE_K = 25_000
_IMAGES_FOR_LARGE_K = 250_000
_CLUSTERING_FIGURES = {
    "AMI": "ami", "NMI": "nmi", "ARI": "ari", "Hungarian": "hungarian_accuracy", "majority": "majority_accuracy"
}  # fmt: skip
# What differs between seeds and is not part of the recipe.
_RANDOM = ("seed", "penalty")

_Recipe = TypeVar("_Recipe", LinearSettings, FineTuneSettings)


@dataclass(frozen=True)
class Outcome:
    """What a protocol found with one seed."""

    figures: dict[str, float]
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that depend on the data, such as the number of clusters; the same for every seed."""
    detail: dict[str, Any] = field(default_factory=dict)
    neutral: list[str] = field(default_factory=list)


Function = Callable[[Task, EvaluateConfig, int, bool], Outcome]
"""Called with the task, the settings, the seed, and whether it is the first seed."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """One way to measure."""

    name: str
    recipe: str
    """How it is done, in words, with its source."""
    run: Function
    needs: Literal["features", "images", "run", "transfer"] = "images"
    """Rows of features; images and an encoder; a run of ours with clusters; or another labelled set of images."""
    chance: bool = True
    """Whether the seed changes anything."""
    quick: bool = False
    """Whether it is run by default."""
    settings: dict[str, Any] = field(default_factory=dict)


PROTOCOLS: dict[str, Protocol] = {}
"""All protocols, in the order in which they are run."""


def _protocol(name: str, recipe: str, **how: Any) -> Callable[[Function], Function]:
    """Add a function to the protocols."""

    def add(run: Function) -> Function:
        PROTOCOLS[name] = Protocol(name=name, recipe=recipe, run=run, **how)
        return run

    return add


# -- without training --------------------------------------------------------------------------------------------------


@_protocol(
    "knn",
    "Weighted vote of the k nearest training images by cosine of the backbone's features, each with exp(cosine / T); "
    "k = 200 and 20, T = 0.1 and 0.07 (Wu et al. 2018). Nothing is trained.",
    needs="features",
    chance=False,
    quick=True,
    settings={"rules": [list(rule) for rule in RULES]},
)
def _knn(task: Task, settings: EvaluateConfig, seed: int, first: bool) -> Outcome:
    bank, query = task.features(task.train), task.features(task.test)
    accuracies = knn_accuracies(query.row_ND, query.label_N, bank.row_ND, bank.label_N, RULES)
    names = [f"top-1, k = {k}, T = {temperature:g}" for k, temperature in RULES]
    # With fewer training images than k all of them vote, which the record must not hide.
    return Outcome(dict(zip(names, accuracies, strict=True)), settings={"images_that_can_vote": len(bank.row_ND)})


# -- with training -----------------------------------------------------------------------------------------------------


@_protocol(
    "linear",
    "Multinomial logistic regression on the frozen, standardised features of images without augmentation, by L-BFGS; "
    "the penalty is chosen on training images that are held out. Quick; linear-paper is the paper's.",
    needs="features",
    quick=True,
    settings={"penalties": list(PENALTIES)},
)
def _linear(task: Task, settings: EvaluateConfig, seed: int, first: bool) -> Outcome:
    train, test = task.features(task.train), task.features(task.test)
    return _accuracies({"": linear_scores(train.row_ND, train.label_N, test.row_ND, test.label_N, seed=seed)})


@_protocol(
    "linear-paper",
    "The paper's: one linear layer on the frozen backbone, by SGD at 0.1 x batch / 256 along a cosine, momentum 0.9, "
    "no decay, batch 1024, 90 epochs, random resized crops and flips.",
)
def _linear_paper(task: Task, settings: EvaluateConfig, seed: int, first: bool) -> Outcome:
    recipe = changed(LINEAR, settings, flip=task.encoder.view.flip)
    images = task.train.images, task.test.images
    return _accuracies({"": linear_probe(task.encoder.backbone, *images, recipe, _setup(task, "linear-paper", seed))})


@_protocol(
    "semi",
    "Backbone and linear layer are fine-tuned on 1 % and 10 % of the labels, the same share of every class drawn by "
    "the seed, or on listed images; SwAV's rates (0.02 and 5, 0.01 and 0.2), 20 epochs or 1,000 updates, batch 256, "
    "times 0.2 after 60 and 80 %.",
)
def _semi(task: Task, settings: EvaluateConfig, seed: int, first: bool) -> Outcome:
    labels = task.train.labels
    subsets: dict[str, tuple[np.ndarray, float]] = {}
    if settings.label_lists:
        for path in settings.label_lists:
            positions = listed_images(task.train, path)
            subsets[path.stem] = (positions, len(positions) / len(labels))
    else:
        for share in settings.label_shares:
            subsets[f"{100 * share:g} %"] = (labelled_subset(labels, share, seed), share)
    results: dict[str, ProbeResult] = {}
    for name, (subset, share) in subsets.items():
        recipe = changed(settings_for(share), settings, flip=task.encoder.view.flip)
        setup = _setup(task, f"semi, {name}", seed)
        images = task.train.images, task.test.images
        results[f"{name}: "] = fine_tune(task.encoder.backbone, *images, recipe, setup, subset=subset)
    return _accuracies(results)


@_protocol(
    "transfer",
    "Linear softmax on the frozen backbone on another set, as PIRL does on Places205 (SGD, 0.01, 14 epochs, batch "
    "256, decay 5e-4, BatchNorm before the layer); or on VOC2007 one-vs-rest linear SVMs and mAP.",
    needs="transfer",
)
def _transfer(task: Task, settings: EvaluateConfig, seed: int, first: bool) -> Outcome:
    assert task.transfer is not None
    train, test = task.transfer
    if train.targets is not None:
        return _several_classes(task, train, test, seed)
    recipe = changed(PLACES205, settings, flip=task.encoder.view.flip)
    images = train.images, test.images
    return _accuracies({"": linear_probe(task.encoder.backbone, *images, recipe, _setup(task, "transfer", seed))})


def _several_classes(task: Task, train: LabelledSet, test: LabelledSet, seed: int) -> Outcome:
    """One SVM per class on the features of images that show several."""
    assert train.targets is not None
    assert test.targets is not None
    features, test_features = task.features(train), task.features(test)
    result = svm_map(
        features.row_ND,
        train.targets[features.kept_N],
        test_features.row_ND,
        test.targets[test_features.kept_N],
        class_names=train.class_names,
        seed=seed,
        progress=lambda done, total: task.progress(f"SVMs, seed {seed}", done, total),
    )
    detail = dataclasses.asdict(result)
    figures = {"mAP": detail.pop("mean_average_precision"), "mAP, 11 points": detail.pop("mean_average_precision_11")}
    return Outcome(figures, settings={"SVMs": _without_seed(detail.pop("recipe"))}, detail=detail)


def listed_images(train: LabelledSet, path: Path) -> np.ndarray:
    """Ascending positions of the training images that a file lists, one name per line.

    A name is an image's whole identifier, or its end where that is unique: SimCLR's lists hold base names.
    """
    source, _ = train.images
    try:
        return positions_of(source, read_names(path))
    except InputError as error:
        if not isinstance(source, SourceSubset):
            raise
        positions_of(source.source, read_names(path))  # raises where the list itself is wrong
        raise InputError(
            f"The list {path} names images that are held out for testing; give a test set with --test."
        ) from error


def _setup(task: Task, name: str, seed: int) -> Setup:
    def progress(done: int, total: int) -> None:
        task.progress(f"{name}, seed {seed}", done, total)

    return Setup(view=task.encoder.view, device=task.device, seed=seed, progress=progress, reading=task.reading)


def _accuracies(results: dict[str, ProbeResult]) -> Outcome:
    """Top-1 and top-5 of classifiers, by the prefix of their figures."""
    outcome = Outcome({})
    for prefix, result in results.items():
        outcome.figures[f"{prefix}top-1"] = result.top1
        if result.top5 is not None:
            outcome.figures[f"{prefix}top-5"] = result.top5
        name = prefix.removesuffix(": ") or "training"
        outcome.settings[name] = _without_seed(result.recipe)
        outcome.detail[name] = {"recipe": result.recipe, "n_train": result.n_train, "n_test": result.n_test}
    return outcome


def _without_seed(recipe: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in recipe.items() if key not in _RANDOM}


def changed(recipe: _Recipe, settings: EvaluateConfig, **own: Any) -> _Recipe:
    """A published recipe with the user's changes."""
    wanted: dict[str, Any] = {"epochs": settings.epochs, "batch_size": settings.batch_size}
    if isinstance(recipe, LinearSettings):
        wanted["learning_rate"] = settings.learning_rate
    elif settings.learning_rate is not None:
        # The head's rate keeps its ratio to the backbone's.
        wanted["backbone_rate"] = settings.learning_rate
        wanted["head_rate"] = recipe.head_rate * settings.learning_rate / recipe.backbone_rate
    if settings.epochs is not None and isinstance(recipe, FineTuneSettings):
        wanted["min_updates"] = 1
    return dataclasses.replace(recipe, **own, **{key: value for key, value in wanted.items() if value is not None})


# -- clusters ----------------------------------------------------------------------------------------------------------


@_protocol(
    "clustering",
    "Agreement of clusters with labels: of the run's own mixture, and of spherical k-means on the backbone's features "
    "of the training images, by which test images are assigned. Hungarian matches clusters and classes one to one; "
    "majority gives each cluster its commonest class among the scored images, named by train its commonest among the "
    "training images. Purities are means over classes (the share of a class in clusters where it is the commonest) "
    "and over clusters (the share of its commonest class).",
    needs="features",
    quick=True,
    settings={"k_means_steps": MOST_STEPS},
)
def _clustering(task: Task, settings: EvaluateConfig, seed: int, first: bool) -> Outcome:
    train, test = task.features(task.train), task.features(task.test)
    numbers = settings.k_means
    if numbers is None:
        large = (LARGE_K,) if len(train.row_ND) >= _IMAGES_FOR_LARGE_K else ()
        numbers = (task.n_classes, *large)
    outcome = Outcome({}, settings={"k_means": list(numbers)})
    subject = task.subject
    if first and isinstance(subject, Model) and subject.mixture is not None:
        assert train.embedding_NE is not None
        assert test.embedding_NE is not None
        clusters = [clusters_of(subject.mixture, rows) for rows in (train.embedding_NE, test.embedding_NE)]
        _add_scores(outcome, "mixture", task, train, test, clusters, detailed=True)
    for number in numbers:
        task.progress(f"k-means with {number:,} clusters", 0, 0)
        fitted = k_means(train.row_ND, number, seed=seed)
        clusters = [clusters_of(fitted, rows) for rows in (train.row_ND, test.row_ND)]
        _add_scores(outcome, f"k-means {number:,}", task, train, test, clusters, detailed=first)
    return outcome


def _add_scores(
    outcome: Outcome,
    name: str,
    task: Task,
    train: Features,
    test: Features,
    clusters: Sequence[np.ndarray],
    *,
    detailed: bool,
) -> None:
    """The scores of one clustering on both sets, and with ``detailed`` the purities."""
    for part, labels, found in (("train", train.labels, clusters[0]), ("test", test.labels, clusters[1])):
        scores, pure = clustering_scores(labels, found), purities(labels, found)
        figures = {heading: getattr(scores, key) for heading, key in _CLUSTERING_FIGURES.items()} | {
            "clusters": scores.n_clusters,
            "class purity": float(np.mean(pure.class_purity)),
            "cluster purity": float(np.mean(pure.cluster_purity)),
        }
        outcome.figures.update({f"{name}, {part}: {heading}": value for heading, value in figures.items()})
        outcome.neutral.append(f"{name}, {part}: clusters")
        if detailed:
            plain = dataclasses.asdict(pure)
            for key in ("classes", "cluster_class"):
                plain[key] = [task.class_names[code] for code in plain[key]]
            outcome.detail[f"{name}, {part}"] = {"scores": dataclasses.asdict(scores), "purities": plain}
    accuracy = mapped_accuracy(train.labels, clusters[0], test.labels, clusters[1])
    outcome.figures[f"{name}, test: named by train"] = accuracy


@_protocol(
    "k",
    "The number of clusters after each epoch of training and of the final mixture, beside that of the classes.",
    needs="run",
    chance=False,
    quick=True,
)
def _k(task: Task, settings: EvaluateConfig, seed: int, first: bool) -> Outcome:
    subject, n_classes = task.encoder, task.n_classes
    assert subject.mixture is not None
    assert subject.run is not None
    curve = [
        {key: row[key] for key in ("epoch", "n_clusters", "knn", "linear", "ami", "majority_accuracy") if key in row}
        for row in subject.run.metrics
        if "n_clusters" in row
    ]
    counts = [row["n_clusters"] for row in curve]
    final = int(subject.mixture.n_components_)
    figures = {"K": float(final), "classes": float(n_classes), "K / classes": final / n_classes}
    if counts:
        figures = {"K after the first epoch": float(counts[0]), "K after the last epoch": float(counts[-1])} | figures
    return Outcome(figures, detail={"curve": curve, "n_classes": n_classes}, neutral=list(figures))
