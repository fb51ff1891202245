"""Fine-tuning with few labels: 1 % and 10 % of them, as the paper and the works before it report.

The paper says that it fine-tunes the backbone with a linear classifier on SimCLR's split and reports top-5, and gives
no rates. The defaults are those that SwAV published for the same table, with separate rates for the backbone and for
the linear layer, which starts from nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as functional
from torch import nn

from siammm.core.errors import InputError
from siammm.data.augment import IMAGENET_MEAN, IMAGENET_STD
from siammm.data.decode import MAX_BAD_IMAGES
from siammm.data.loader import LoaderKind, Progress
from siammm.data.source import Source
from siammm.data.subset import SourceSubset, positions_of, read_names
from siammm.evaluate.supervised import (
    Channels,
    Schedule,
    check_rate,
    check_training,
    crop_view,
    judged,
    labelled,
    linear_head,
    rows,
)
from siammm.metrics.labels import Labels, label_codes, labels_as_array, numbered_together
from siammm.metrics.linear import ProbeResult

__all__ = [
    "ONE_PERCENT",
    "TEN_PERCENT",
    "FineTuneSettings",
    "fine_tune",
    "labelled_subset",
    "listed_subset",
    "settings_for",
]


@dataclass(frozen=True, kw_only=True)
class FineTuneSettings:
    """How backbone and linear layer are trained; the defaults are SwAV's for 10 % of ImageNet's labels."""

    epochs: int = 20
    """Times that every labelled image is seen."""
    min_updates: int = 1000
    """Epochs are added until there are this many updates: 1 % of ImageNet has 1,020, but 500 images would have 40."""
    batch_size: int = 256
    """Images of an update."""
    backbone_rate: float = 0.01
    """The backbone's rate for 256 images; it grows in proportion to the images of an update."""
    head_rate: float = 0.2
    """The linear layer's rate for 256 images."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 0.0
    """Decay of all weights."""
    milestones: tuple[float, ...] = (0.6, 0.8)
    """Shares of training after which the rates are multiplied by decay; none: they fall along a half cosine."""
    decay: float = 0.2
    """What the rates are multiplied with at a milestone."""
    freeze_batch_norm: bool = False
    """Whether BatchNorm layers keep the statistics that they came with."""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """Area of the random crop, as a share of the image."""
    flip: float = 0.5
    """Probability of a horizontal flip; 0 for images that mean something else in the mirror."""

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        check_training(self.epochs, self.batch_size, self.momentum, self.weight_decay, self.milestones, self.decay)
        check_rate("backbone_rate", self.backbone_rate)
        check_rate("head_rate", self.head_rate)
        if self.min_updates < 1:
            raise InputError(f"min_updates is {self.min_updates}, but it must be at least 1.")


TEN_PERCENT = FineTuneSettings()
"""SwAV's for 10 % of the labels: 0.01 and 0.2, 20 epochs of 8 x 32 images, times 0.2 after epochs 12 and 16."""

ONE_PERCENT = replace(TEN_PERCENT, backbone_rate=0.02, head_rate=5.0)
"""SwAV's for 1 % of the labels: 0.02 and 5."""


def settings_for(fraction: float) -> FineTuneSettings:
    """The published settings for the nearer of 1 % and 10 %, by ratio."""
    return ONE_PERCENT if fraction < 0.1**1.5 else TEN_PERCENT


def labelled_subset(labels: Labels | None, fraction: float, seed: int, *, n_classes: int | None = None) -> np.ndarray:
    """Positions of a share of the images, ascending: the same share of every class, one image of each at the least.

    With ``n_classes``, labels are numbers below it, and a class without any image is an error.
    """
    if not 0 < fraction <= 1:
        raise InputError(f"The fraction of labels is {fraction!r}, but it must be above 0 and at most 1.")
    if labels is None:
        raise InputError("The images have no labels, so none can be chosen from; give one for each image.")
    values = labels_as_array(labels)
    codes, classes = label_codes(values)
    if values.dtype.kind in "iu":
        codes = np.where(values < 0, -1, codes)
    absent = int((codes < 0).sum())
    if absent or not len(codes):
        raise InputError(f"{absent} of the {len(codes)} images have no label; label them or leave them out.")
    if n_classes is not None:
        empty = sorted(set(range(n_classes)) - set(classes))
        if empty:
            raise InputError(
                f"Class {empty[0]} has no image among the {len(codes)} that are labelled, but each of the {n_classes} "
                "classes needs one; add images or leave the class out."
            )
    random = np.random.default_rng(seed)
    chosen: list[np.ndarray] = []
    for code in range(len(classes)):
        members = np.flatnonzero(codes == code)
        if len(members):
            count = max(1, round(fraction * len(members)))
            chosen.append(random.permutation(members)[:count])
    return np.sort(np.concatenate(chosen))


def listed_subset(source: Source, names: str | Path | Sequence[str]) -> np.ndarray:
    """Positions of the images that a list names, ascending; a path is a file with one name a line.

    A name is an image's whole identifier, or its end where that means one image: SimCLR's lists hold base names.
    """
    return positions_of(source, read_names(names) if isinstance(names, str | Path) else names)


def fine_tune(
    backbone: nn.Module,
    train_source: Source,
    train_labels: Labels | None,
    test_source: Source,
    test_labels: Labels | None,
    settings: FineTuneSettings = TEN_PERCENT,
    *,
    subset: Sequence[int] | np.ndarray | None = None,
    image_size: int,
    device: torch.device | str,
    seed: int = 0,
    progress: Progress | None = None,
    mean: Channels = IMAGENET_MEAN,
    std: Channels = IMAGENET_STD,
    loader: LoaderKind = "auto",
    workers: int | None = None,
    max_bad_images: float = MAX_BAD_IMAGES,
) -> ProbeResult:
    """Train a copy of the backbone and a linear layer on labelled images, and judge it on clean test images.

    ``subset`` holds the positions in the training source of the images to learn from, as ``labelled_subset`` and
    ``listed_subset`` give them; all of them if left out. The rest is as for ``probe.linear_probe``. The given backbone
    is not touched.
    """
    device = torch.device(device)
    if subset is not None:
        train_source, train_labels = _part(train_source, train_labels, subset, test_labels, len(test_source))
    network = copy.deepcopy(backbone).to(device).requires_grad_(True)
    if device.type == "cuda":
        cast(Any, network).to(memory_format=torch.channels_last)
    view = crop_view(image_size, settings.crop_scale, settings.flip, mean, std)
    with labelled(
        (train_source, train_labels),
        (test_source, test_labels),
        view,
        device,
        seed,
        kind=loader,
        workers=workers,
        limit=max_bad_images,
    ) as (train, test, classes):
        network.eval()
        with torch.no_grad():
            width = rows(network, next(train.loader.clean(0, 1))[1]).shape[1]
        head = linear_head(width, len(classes), seed).to(device)
        optimiser = torch.optim.SGD(
            [{"params": list(network.parameters())}, {"params": list(head.parameters())}],
            lr=settings.backbone_rate,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        )
        _train_mode(network, settings.freeze_batch_norm)
        schedule = Schedule(
            train.n, settings.epochs, settings.batch_size, settings.milestones, settings.decay, settings.min_updates
        )
        for update in schedule.updates(train, seed, progress):
            for group, rate in zip(optimiser.param_groups, (settings.backbone_rate, settings.head_rate), strict=True):
                group["lr"] = rate * update.scale
            loss = functional.cross_entropy(head(rows(network, update.x)), update.labels_B)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            update.watch(loss)
        network.eval()
        top1, top5 = judged(lambda x: head(rows(network, x)), test)
    recipe: dict[str, Any] = {"protocol": "fine-tuning of backbone and linear layer", "optimiser": "SGD"}
    return ProbeResult(
        top1=top1,
        top5=top5,
        n_classes=len(classes),
        n_train=train.n,
        n_test=test.n,
        recipe=recipe
        | asdict(settings)
        | {"epochs": schedule.epochs, "updates": schedule.total, "image_size": image_size, "seed": seed},
    )


def _part(
    source: Source,
    labels: Labels | None,
    subset: Sequence[int] | np.ndarray,
    test_labels: Labels | None,
    n_test: int,
) -> tuple[Source, np.ndarray]:
    """The images to learn from and their labels, once it is known that every class is among them."""
    codes, test_codes, classes = numbered_together(labels, test_labels, len(source), n_test)
    part = SourceSubset(source, subset)
    empty = np.setdiff1d(np.concatenate([codes, test_codes]), codes[part.positions])
    if len(empty):
        raise InputError(
            f"Class {classes[int(empty[0])]!r} has none of the {len(part)} labelled images, but each of the "
            f"{len(classes)} classes needs one; choose more of them."
        )
    assert labels is not None, "numbered_together has refused it"
    return part, labels_as_array(labels)[part.positions]


def _train_mode(network: nn.Module, freeze_batch_norm: bool) -> None:
    network.train()
    if freeze_batch_norm:
        for module in network.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
