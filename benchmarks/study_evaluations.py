"""What a cell of a study is measured by after its training, beside kNN: the protocols of the paper's tables 1 to 3.

    linear     logistic regression on the backbone's features (the fast probe; docs/results.md compares the two)
    clusters   spherical k-means on the features with 1, 5 and 25 clusters a class: agreement with the labels
    semi       the backbone fine-tuned with 1 % and 10 % of the labels (``siammm evaluate --protocols semi``)
    transfer   logistic regression on the features of other sets, whose images the encoder has not seen
    mosaics    several classes an image: 2 x 2 mosaics of the images, by VOC's protocol (SVMs and mAP)

The figures are numbers under plain names, for the cell's record. Test images choose nothing.

Legend:  N images, C classes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from siammm.data.sources import Source, open_source
from siammm.evaluate.protocols import PROTOCOLS
from siammm.evaluate.task import LabelledSet, Task
from siammm.learn.finish import Trained
from siammm.metrics import SvmSettings, clustering_scores, k_means, linear_accuracy, mapped_accuracy, svm_map
from siammm.metrics.kmeans import clusters_of
from siammm.runs import files as run
from siammm.runs.models import Model, open_model
from siammm.runs.network_file import save_network
from siammm.settings.commands import EvaluateConfig

EVALUATIONS = ("linear", "clusters", "semi", "transfer", "mosaics")
# Clusters a class: with 25 the paper scores AMI on ImageNet, with 1 the accuracy by majority.
CLUSTERS_A_CLASS = (1, 5, 25)
# Of each class there are so few that an image shows some classes and not most.
MOSAIC_CLASSES, MOSAICS = 20, 2500
# Fewer costs than VISSL's eleven, which take minutes of a CPU that several trainings share.
MOSAIC_SVM = SvmSettings(costs=(0.1, 1.0, 10.0))
# Images of other sets that a probe is fitted on, at most.
TRANSFER_IMAGES = 50_000


@dataclass(frozen=True)
class Images:
    """The training images and those that judge, with labels from 0 that mean the same in both."""

    source: Source
    labels: np.ndarray
    judged: Source
    judged_labels: np.ndarray

    @classmethod
    def of(cls, folder: Path) -> Images:
        """Those of a folder with train.npz and test.npz; the first of them where there are very many."""
        parts: list[Any] = []
        for name, most in (("train", TRANSFER_IMAGES), ("test", None)):
            with np.load(folder / f"{name}.npz") as arrays:
                parts += [open_source(arrays["images"][:most]), arrays["labels"][:most]]
        return cls(*parts)


def measured(
    names: Sequence[str],
    trained: Trained,
    images: Images,
    others: Mapping[str, Images],
    device: torch.device,
    seed: int,
) -> dict[str, float]:
    """The figures of these evaluations; ``linear`` is measured beside kNN, by ``train_cifar.py``."""
    if not set(names) - {"linear"}:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        # As people open it: by the file, not by the network that was compiled for training.
        save_network(Path(folder) / run.ENCODER, trained.network, trained.config, trained.clean_view)
        model = open_model(folder, device=device)
        task = task_of(model, images, device)
        found: dict[str, float] = {}
        if "clusters" in names:
            found |= clusters(task, seed)
        if "semi" in names:
            found |= semi(task, seed)
        if "transfer" in names:
            found |= transfer(model, others, device, seed)
        if "mosaics" in names:
            found |= mosaics(model, images, device, seed)
    return found


def task_of(model: Model, images: Images, device: torch.device) -> Task:
    """The model with a training set and a test set."""
    classes = int(max(images.labels.max(), images.judged_labels.max())) + 1
    train = LabelledSet("training", images.labels, images.source)
    test = LabelledSet("test", images.judged_labels, images.judged)
    return Task(model, train, test, [str(number) for number in range(classes)], device, {}, {})


def clusters(task: Task, seed: int) -> dict[str, float]:
    """Table 3: k-means on the features of the training images, by which the others are assigned."""
    train, test = task.features(task.train), task.features(task.test)
    found: dict[str, float] = {}
    for times in CLUSTERS_A_CLASS:
        number = times * task.n_classes
        if number > len(train.row_ND) // 2:
            continue
        fitted = k_means(train.row_ND, number, seed=seed)
        known, new = (clusters_of(fitted, part.row_ND) for part in (train, test))
        for part, labels, which in (("train", train.labels, known), ("judged", test.labels, new)):
            scores = clustering_scores(labels, which)
            for name in ("ami", "nmi", "ari", "hungarian_accuracy", "majority_accuracy"):
                found[f"k{times}_{part}_{name}"] = getattr(scores, name)
        found[f"k{times}_judged_named"] = mapped_accuracy(train.labels, known, test.labels, new)
    return found


def semi(task: Task, seed: int, **changes: Any) -> dict[str, float]:
    """Table 2, left: fine-tuned with 1 % and 10 % of the labels."""
    outcome = PROTOCOLS["semi"].run(task, EvaluateConfig(subject="", **changes), seed, True)
    return {
        f"semi_{name.replace(' %: top-', '_top')}": value  # semi_1_top1, semi_10_top5
        for name, value in outcome.figures.items()
    }


def transfer(model: Model, others: Mapping[str, Images], device: torch.device, seed: int) -> dict[str, float]:
    """Table 2, right: a linear probe on the features of other sets."""
    found: dict[str, float] = {}
    for name, images in others.items():
        task = task_of(model, images, device)
        train, test = task.features(task.train), task.features(task.test)
        found[f"transfer_{name}"] = linear_accuracy(
            train.row_ND, train.label_N.cpu().numpy(), test.row_ND, test.labels, seed=seed
        )
    if found:
        found["transfer_mean"] = float(np.mean(list(found.values())))
    return found


def mosaics(model: Model, images: Images, device: torch.device, seed: int) -> dict[str, float]:
    """Table 2, VOC's column: mean average precision on images of four, which the encoder sees at twice its size."""
    wide = replace(model, view=replace(model.view, size=2 * model.view.size))
    rows: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    for number, (source, labels) in enumerate(((images.source, images.labels), (images.judged, images.judged_labels))):
        picture_N, target_NC = mosaics_of(source, labels, MOSAICS, seed=number)
        part = LabelledSet("mosaics", np.zeros(len(picture_N), dtype=np.int64), open_source(picture_N))
        task = Task(wide, part, part, ["one"], device, {}, {})
        rows.append(task.features(part).row_ND.cpu().numpy())
        targets.append(target_NC)
    there_C = targets[0].any(axis=0) & targets[1].any(axis=0)
    targets = [target_NC[:, there_C] for target_NC in targets]
    result = svm_map(rows[0], targets[0], rows[1], targets[1], MOSAIC_SVM, seed=seed)
    return {"mosaics_map": result.mean_average_precision, "mosaics_map_11": result.mean_average_precision_11}


def mosaics_of(source: Source, labels: np.ndarray, number: int, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """So many 2 x 2 mosaics of images of the first classes, and which classes each of them shows (N x C)."""
    random = np.random.default_rng(seed)
    at_N4 = random.choice(np.flatnonzero(labels < MOSAIC_CLASSES), (number, 4))
    target_NC = np.zeros((number, min(MOSAIC_CLASSES, int(labels.max()) + 1)), dtype=np.int8)
    np.put_along_axis(target_NC, labels[at_N4], 1, axis=1)
    pictures: list[np.ndarray] = []
    for at_4 in at_N4.tolist():
        four = [np.asarray(source.image(at)) for at in at_4]
        pictures.append(np.concatenate([np.concatenate(four[:2], axis=1), np.concatenate(four[2:], axis=1)]))
    return np.stack(pictures), target_NC
