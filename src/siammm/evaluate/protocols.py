"""The protocols by name: what each measures, by which published recipe, and on what it can be used.

A protocol is a function of what is measured, its settings and a seed; it returns figures. Chance enters only by the
seed, so that the mean and the deviation over seeds mean something; protocols without chance are run once.

Legend:  N images, D features.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from siammm.core.errors import InputError
from siammm.data.subset import SourceSubset
from siammm.evaluate.measured import Measured, Part
from siammm.evaluate.probe import LINEAR, PLACES205, LinearSettings, linear_probe
from siammm.evaluate.semi import FineTuneSettings, fine_tune, labelled_subset, listed_subset, settings_for
from siammm.metrics.clustering import clustering_scores, mapped_accuracy, purities
from siammm.metrics.kmeans import MOST_STEPS, clusters_of, k_means
from siammm.metrics.knn import RULES, knn_accuracies
from siammm.metrics.linear import PENALTIES, ProbeResult, linear_scores
from siammm.metrics.multilabel import check_classes, svm_map
from siammm.runs.evaluation import Figure, Result
from siammm.runs.subject import ImageSubject, TableSubject

# The paper clusters ImageNet into 25,000; k-means does so too by default where clusters then hold ten images or more.
LARGE_K = 25_000
_IMAGES_FOR_LARGE_K = 250_000
_CLUSTERING_FIGURES = {
    "AMI": "ami",
    "NMI": "nmi",
    "ARI": "ari",
    "Hungarian": "hungarian_accuracy",
    "majority": "majority_accuracy",
}
# What differs between seeds, and is no part of the recipe.
_CHANCE = ("seed", "penalty")

_Recipe = TypeVar("_Recipe", LinearSettings, FineTuneSettings)


@dataclass(frozen=True, kw_only=True)
class ProtocolSettings:
    """What the user may change of the recipes; None is the published value."""

    k_means: tuple[int, ...] | None = None
    """Numbers of clusters for k-means; by default that of the classes, and 25,000 too for 250,000 images or more."""
    label_shares: tuple[float, ...] = (0.01, 0.1)
    """Shares of the labels for semi."""
    label_lists: tuple[Path, ...] = ()
    """Files that list the labelled images for semi, one a line, in place of shares."""
    epochs: int | None = None
    """Epochs of the protocols that train on images."""
    batch_size: int | None = None
    """Images in one of their updates."""
    learning_rate: float | None = None
    """Their base learning rate."""


@dataclass(frozen=True)
class Outcome:
    """What a protocol found with one seed."""

    figures: dict[str, float]
    settings: dict[str, Any] = field(default_factory=dict)
    """What was settled by the data, such as the number of clusters; the same for every seed."""
    detail: dict[str, Any] = field(default_factory=dict)
    neutral: list[str] = field(default_factory=list)


Function = Callable[[Measured, ProtocolSettings, int, bool], Outcome]
"""What is measured, the settings, the seed, and whether it is the first: what has no chance in it is done then."""
Need = Literal["features", "images", "run", "transfer"]


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """One way to measure."""

    name: str
    recipe: str
    """How it is done, in words, with its source."""
    run: Function
    needs: Need
    """Rows of features; images and an encoder; a run of ours with clusters; or another labelled set of images."""
    chance: bool
    """Whether the seed changes anything."""
    quick: bool
    """Whether it is done unless others are asked for."""
    settings: dict[str, Any] = field(default_factory=dict)


# -- without training --------------------------------------------------------------------------------------------------


def _knn(measured: Measured, settings: ProtocolSettings, seed: int, first: bool) -> Outcome:
    bank, query = measured.features(measured.train), measured.features(measured.test)
    accuracies = knn_accuracies(query.row_ND, query.label_N, bank.row_ND, bank.label_N, RULES)
    names = [f"top-1, k = {k}, T = {temperature:g}" for k, temperature in RULES]
    # A bank of fewer images than k votes as a whole, which the record must not hide.
    return Outcome(dict(zip(names, accuracies, strict=True)), settings={"images_that_can_vote": len(bank.row_ND)})


def _clustering(measured: Measured, settings: ProtocolSettings, seed: int, first: bool) -> Outcome:
    train, test = measured.features(measured.train), measured.features(measured.test)
    numbers = settings.k_means
    if numbers is None:
        large = (LARGE_K,) if len(train.row_ND) >= _IMAGES_FOR_LARGE_K else ()
        numbers = (measured.n_classes, *large)
    outcome = Outcome({}, settings={"k_means": list(numbers)})
    subject = measured.subject
    if first and isinstance(subject, ImageSubject) and subject.mixture is not None:
        assert train.embedding_NE is not None
        assert test.embedding_NE is not None
        clusters = [clusters_of(subject.mixture, rows) for rows in (train.embedding_NE, test.embedding_NE)]
        _add_scores(outcome, "mixture", measured, train.labels, test.labels, clusters, detailed=True)
    for number in numbers:
        measured.progress(f"k-means with {number:,} clusters", 0, 0)
        fitted = k_means(train.row_ND, number, seed=seed)
        clusters = [clusters_of(fitted, rows) for rows in (train.row_ND, test.row_ND)]
        _add_scores(outcome, f"k-means {number:,}", measured, train.labels, test.labels, clusters, detailed=first)
    return outcome


def _add_scores(
    outcome: Outcome,
    name: str,
    measured: Measured,
    train_labels: np.ndarray,
    test_labels: np.ndarray,
    clusters: Sequence[np.ndarray],
    *,
    detailed: bool,
) -> None:
    """The scores of one clustering on both sets, and with ``detailed`` the purities."""
    for part, labels, found in (("train", train_labels, clusters[0]), ("test", test_labels, clusters[1])):
        scores = clustering_scores(labels, found)
        for heading, key in _CLUSTERING_FIGURES.items():
            outcome.figures[f"{name}, {part}: {heading}"] = getattr(scores, key)
        outcome.figures[f"{name}, {part}: clusters"] = scores.n_clusters
        outcome.neutral.append(f"{name}, {part}: clusters")
        pure = purities(labels, found)
        outcome.figures[f"{name}, {part}: class purity"] = float(np.mean(pure.class_purity))
        outcome.figures[f"{name}, {part}: cluster purity"] = float(np.mean(pure.cluster_purity))
        if detailed:
            plain = dataclasses.asdict(pure)
            plain["classes"] = [measured.class_names[code] for code in pure.classes]
            plain["cluster_class"] = [measured.class_names[code] for code in pure.cluster_class]
            outcome.detail[f"{name}, {part}"] = {"scores": dataclasses.asdict(scores), "purities": plain}
    outcome.figures[f"{name}, test: named by train"] = mapped_accuracy(
        train_labels, clusters[0], test_labels, clusters[1]
    )


def _k(measured: Measured, settings: ProtocolSettings, seed: int, first: bool) -> Outcome:
    subject = measured.images
    assert subject.mixture is not None
    curve = [
        {key: row[key] for key in ("epoch", "n_clusters", "knn", "linear", "ami", "majority_accuracy") if key in row}
        for row in subject.history
        if "n_clusters" in row
    ]
    counts = [row["n_clusters"] for row in curve]
    final = int(subject.mixture.n_components_)
    figures = {"K": float(final), "classes": float(measured.n_classes), "K / classes": final / measured.n_classes}
    if counts:
        figures = {"K after the first epoch": float(counts[0]), "K after the last epoch": float(counts[-1])} | figures
    return Outcome(figures, detail={"curve": curve, "n_classes": measured.n_classes}, neutral=list(figures))


# -- with training -----------------------------------------------------------------------------------------------------


def _linear(measured: Measured, settings: ProtocolSettings, seed: int, first: bool) -> Outcome:
    train, test = measured.features(measured.train), measured.features(measured.test)
    return _judged({"": linear_scores(train.row_ND, train.label_N, test.row_ND, test.label_N, seed=seed)})


def _linear_paper(measured: Measured, settings: ProtocolSettings, seed: int, first: bool) -> Outcome:
    recipe = _changed(LINEAR, settings, flip=measured.images.view.flip)
    return _probe(measured, measured.train, measured.test, recipe, seed, "linear-paper")


def _transfer(measured: Measured, settings: ProtocolSettings, seed: int, first: bool) -> Outcome:
    assert measured.transfer is not None
    train, test = measured.transfer
    if train.targets is not None:
        return _several_classes(measured, train, test, seed)
    recipe = _changed(PLACES205, settings, flip=measured.images.view.flip)
    return _probe(measured, train, test, recipe, seed, "transfer")


def _several_classes(measured: Measured, train: Part, test: Part, seed: int) -> Outcome:
    """One SVM a class on the features of images that show several."""
    assert train.targets is not None
    assert test.targets is not None
    features, judging = measured.features(train), measured.features(test)
    result = svm_map(
        features.row_ND,
        train.targets[features.kept_N],
        judging.row_ND,
        test.targets[judging.kept_N],
        class_names=train.class_names,
        seed=seed,
        progress=lambda done, total: measured.progress(f"SVMs, seed {seed}", done, total),
    )
    return Outcome(
        {"mAP": result.mean_average_precision, "mAP, 11 points": result.mean_average_precision_11},
        settings={"SVMs": {key: value for key, value in result.recipe.items() if key not in _CHANCE}},
        detail={
            "average_precision": result.average_precision,
            "average_precision_11": result.average_precision_11,
            "costs": result.costs,
            "n_unconverged": result.n_unconverged,
            "n_train": result.n_train,
            "n_test": result.n_test,
        },
    )


def _probe(measured: Measured, train: Part, test: Part, recipe: LinearSettings, seed: int, name: str) -> Outcome:
    assert train.source is not None
    assert test.source is not None
    subject, reading = measured.images, measured.reading
    result = linear_probe(
        subject.backbone,
        train.source,
        train.labels,
        test.source,
        test.labels,
        recipe,
        image_size=subject.view.size,
        device=measured.device,
        seed=seed,
        progress=lambda done, total: measured.progress(f"{name}, seed {seed}", done, total),
        mean=subject.view.mean,
        std=subject.view.std,
        loader=reading.loader,
        workers=reading.workers,
        max_bad_images=reading.max_bad_images,
    )
    return _judged({"": result})


def _semi(measured: Measured, settings: ProtocolSettings, seed: int, first: bool) -> Outcome:
    train, test = measured.train, measured.test
    assert train.source is not None
    assert test.source is not None
    subject, reading = measured.images, measured.reading
    chosen_images: dict[str, tuple[np.ndarray, float]] = {}
    if settings.label_lists:
        for path in settings.label_lists:
            listed = _listed(train, path)
            chosen_images[path.stem] = (listed, len(listed) / len(train.labels))
    else:
        for share in settings.label_shares:
            chosen_images[f"{100 * share:g} %"] = (labelled_subset(train.labels, share, seed), share)
    results: dict[str, ProbeResult] = {}
    for name, (subset, share) in chosen_images.items():
        results[f"{name}: "] = fine_tune(
            subject.backbone,
            train.source,
            train.labels,
            test.source,
            test.labels,
            _changed(settings_for(share), settings, flip=subject.view.flip),
            subset=subset,
            image_size=subject.view.size,
            device=measured.device,
            seed=seed,
            progress=lambda done, total, name=name: measured.progress(f"semi, {name}, seed {seed}", done, total),
            mean=subject.view.mean,
            std=subject.view.std,
            loader=reading.loader,
            workers=reading.workers,
            max_bad_images=reading.max_bad_images,
        )
    return _judged(results)


def _listed(train: Part, path: Path) -> np.ndarray:
    """The listed images among those that teach."""
    assert train.source is not None
    try:
        return listed_subset(train.source, path)
    except InputError as error:
        if not isinstance(train.source, SourceSubset):
            raise
        listed_subset(train.source.source, path)  # what is wrong with the list itself is said as it is
        raise InputError(
            f"The list {path} names images that are held out to judge; give others to judge with --test."
        ) from error


def _judged(results: dict[str, ProbeResult]) -> Outcome:
    """Top-1 and top-5 of classifiers, each with what its figures begin with."""
    outcome = Outcome({})
    for prefix, result in results.items():
        outcome.figures[f"{prefix}top-1"] = result.top1
        if result.top5 is not None:
            outcome.figures[f"{prefix}top-5"] = result.top5
        name = prefix.removesuffix(": ") or "training"
        outcome.settings[name] = {key: value for key, value in result.recipe.items() if key not in _CHANCE}
        outcome.detail[name] = {"recipe": result.recipe, "n_train": result.n_train, "n_test": result.n_test}
    return outcome


def _changed(recipe: _Recipe, settings: ProtocolSettings, **own: Any) -> _Recipe:
    """A published recipe with what the user wants otherwise."""
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


# -- all of them -------------------------------------------------------------------------------------------------------

PROTOCOLS: dict[str, Protocol] = {
    protocol.name: protocol
    for protocol in (
        Protocol(
            name="knn",
            recipe=(
                "Weighted vote of the k nearest training images by cosine of the backbone's features, each with "
                "exp(cosine / T); k = 200 and 20, T = 0.1 and 0.07 (Wu et al. 2018). Nothing is trained."
            ),
            run=_knn,
            needs="features",
            chance=False,
            quick=True,
            settings={"rules": [list(rule) for rule in RULES]},
        ),
        Protocol(
            name="linear",
            recipe=(
                "Multinomial logistic regression on the frozen, standardised features of images without augmentation, "
                "by L-BFGS; the penalty is chosen on training images that are held out. Quick; linear-paper is the "
                "paper's."
            ),
            run=_linear,
            needs="features",
            chance=True,
            quick=True,
            settings={"penalties": list(PENALTIES)},
        ),
        Protocol(
            name="linear-paper",
            recipe=(
                "The paper's: one linear layer on the frozen backbone, by SGD at 0.1 x batch / 256 along a cosine, "
                "momentum 0.9, no decay, batch 1024, 90 epochs, random resized crops and flips."
            ),
            run=_linear_paper,
            needs="images",
            chance=True,
            quick=False,
        ),
        Protocol(
            name="semi",
            recipe=(
                "Backbone and linear layer are fine-tuned on 1 % and 10 % of the labels, the same share of every class "
                "drawn by the seed, or on listed images; SwAV's rates (0.02 and 5, 0.01 and 0.2), 20 epochs or 1,000 "
                "updates, batch 256, times 0.2 after 60 and 80 %."
            ),
            run=_semi,
            needs="images",
            chance=True,
            quick=False,
        ),
        Protocol(
            name="transfer",
            recipe=(
                "Linear softmax on the frozen backbone on another set, as PIRL does on Places205 (SGD, 0.01, 14 "
                "epochs, batch 256, decay 5e-4, BatchNorm before the layer); or on VOC2007 one-vs-rest linear SVMs "
                "and mAP."
            ),
            run=_transfer,
            needs="transfer",
            chance=True,
            quick=False,
        ),
        Protocol(
            name="clustering",
            recipe=(
                "Agreement of clusters with labels: of the run's own mixture, and of spherical k-means on the "
                "backbone's features of the training images, by which test images are assigned. Hungarian matches "
                "clusters and classes one to one; majority gives each cluster its commonest class among the scored "
                "images, named by train its commonest among the training images. Purities are means over classes "
                "(the share of a class in clusters where it is the commonest) and over clusters (the share of its "
                "commonest class)."
            ),
            run=_clustering,
            needs="features",
            chance=True,
            quick=True,
            settings={"k_means_steps": MOST_STEPS},
        ),
        Protocol(
            name="k",
            recipe="The number of clusters after each epoch of training and of the final mixture, beside that of "
            "the classes.",
            run=_k,
            needs="run",
            chance=False,
            quick=True,
        ),
    )
}


def chosen(names: Sequence[str] | None, measured: Measured) -> list[Protocol]:
    """The protocols that were asked for, or the quick ones that apply; refuses what does not apply.

    Whoever gives a set for transfer asks for transfer.
    """
    if names is None:
        return [
            one
            for one in PROTOCOLS.values()
            if (one.quick or (one.needs == "transfer" and measured.transfer is not None))
            and _obstacle(one, measured) is None
        ]
    if not names:
        raise InputError(f"There is nothing to measure; give --protocols one or more of {', '.join(PROTOCOLS)}.")
    if measured.transfer is not None and not any(n in PROTOCOLS and PROTOCOLS[n].needs == "transfer" for n in names):
        raise InputError("--transfer is given, but transfer is not among --protocols; add it, or leave --transfer out.")
    found: list[Protocol] = []
    for name in dict.fromkeys(names):
        if name not in PROTOCOLS:
            raise InputError(f"There is no protocol {name!r}; there are {', '.join(PROTOCOLS)}.")
        obstacle = _obstacle(PROTOCOLS[name], measured)
        if obstacle is not None:
            raise InputError(obstacle)
        found.append(PROTOCOLS[name])
    return found


def _obstacle(protocol: Protocol, measured: Measured) -> str | None:
    """Why a protocol cannot be used here."""
    subject = measured.subject
    if protocol.needs != "features" and isinstance(subject, TableSubject):
        return f"The protocol {protocol.name} needs an encoder, but {subject.name} is a table; leave it out."
    if protocol.needs == "run" and (not isinstance(subject, ImageSubject) or subject.mixture is None):
        return f"The protocol {protocol.name} is about a run's own clusters, but {subject.name} has none; leave it out."
    if protocol.needs == "transfer" and measured.transfer is None:
        return "The protocol transfer needs another labelled set; give it with --transfer."
    return None


def check(protocols: Sequence[Protocol], measured: Measured, settings: ProtocolSettings) -> None:
    """Refuse settings that a protocol would refuse later, after the others have done their work."""
    names = {protocol.name for protocol in protocols}
    n = len(measured.train.labels)
    for number in settings.k_means or () if "clustering" in names else ():
        if not 1 <= number <= n:
            raise InputError(f"{number:,} clusters were asked of k-means for {n:,} samples; ask for 1 to {n:,}.")
    if "semi" in names and measured.train.source is not None:
        if not settings.label_lists and not settings.label_shares:
            raise InputError("The protocol semi has no shares of labels; give --label-shares or --label-lists.")
        for path in settings.label_lists:
            labels = measured.train.labels[_listed(measured.train, path)]
            lacking = np.setdiff1d(measured.train.labels, labels)
            if len(lacking):
                raise InputError(
                    f"The list {path} has no image of the class {measured.class_names[lacking[0]]!r}, but each of the "
                    f"{measured.n_classes} classes needs one; add some."
                )
        for share in settings.label_shares if not settings.label_lists else ():
            labelled_subset(measured.train.labels, share, seed=0)
        _changed(settings_for(1.0), settings)
    if names & {"linear-paper", "transfer"}:
        _changed(LINEAR, settings)
    if "transfer" in names and measured.transfer is not None:
        train, test = (part.targets for part in measured.transfer)
        if train is not None and test is not None:
            check_classes(train, test, class_names=measured.transfer[0].class_names)


def measure(protocol: Protocol, measured: Measured, settings: ProtocolSettings, seeds: Sequence[int]) -> Result:
    """Run a protocol with each seed, or once where chance has no part in it."""
    started = time.perf_counter()
    values: dict[str, list[float]] = {}
    found: list[Outcome] = []
    for number, seed in enumerate(seeds if protocol.chance else seeds[:1]):
        measured.progress(protocol.name, number, len(seeds) if protocol.chance else 1)
        outcome = protocol.run(measured, settings, seed, number == 0)
        for name, value in outcome.figures.items():
            values.setdefault(name, []).append(value)
        found.append(outcome)
    first = found[0]
    return Result(
        protocol=protocol.name,
        recipe=protocol.recipe,
        settings=protocol.settings | first.settings,
        figures={name: Figure.of(numbers) for name, numbers in values.items()},
        neutral=first.neutral,
        detail=first.detail,
        seconds=round(time.perf_counter() - started, 3),
    )
