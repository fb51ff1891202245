"""Fine-tuning with few labels: 1 % and 10 % of them, as the paper and the works before it report.

The paper says that it fine-tunes the backbone with a linear classifier on SimCLR's split and reports top-5, and gives
no rates. The defaults are those that SwAV published for the same table, with separate rates for the backbone and for
the linear layer, which starts from nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from siammm.core.checks import check_at_least
from siammm.core.errors import InputError
from siammm.data.subset import SourceSubset
from siammm.evaluate.training import LabelledSource, Setup, TrainingSettings, check_rate, train_and_score
from siammm.metrics.labels import labels_as_array, numbered_together
from siammm.metrics.linear import ProbeResult


@dataclass(frozen=True, kw_only=True)
class FineTuneSettings(TrainingSettings):
    """How backbone and linear layer are trained; the defaults are SwAV's for 10 % of ImageNet's labels."""

    epochs: int = 20
    batch_size: int = 256
    milestones: tuple[float, ...] = (0.6, 0.8)
    decay: float = 0.2
    min_updates: int = 1000
    """Epochs are added until there are this many updates: 1 % of ImageNet has 1,020, but 500 images would have 40."""
    backbone_rate: float = 0.01
    """The backbone's rate for 256 images; it is proportional to the images per update."""
    head_rate: float = 0.2
    """The linear layer's rate for 256 images."""
    freeze_batch_norm: bool = False
    """Whether BatchNorm layers keep their statistics."""

    def __post_init__(self) -> None:
        """Refuse values that cannot be trained with."""
        super().__post_init__()
        check_rate("backbone_rate", self.backbone_rate)
        check_rate("head_rate", self.head_rate)
        check_at_least("min_updates", self.min_updates, 1)


TEN_PERCENT = FineTuneSettings()
"""SwAV's for 10 % of the labels: 0.01 and 0.2, 20 epochs of 8 x 32 images, times 0.2 after epochs 12 and 16."""

ONE_PERCENT = replace(TEN_PERCENT, backbone_rate=0.02, head_rate=5.0)
"""SwAV's for 1 % of the labels: 0.02 and 5."""


def settings_for(fraction: float) -> FineTuneSettings:
    """The published settings for 1 % or 10 %, whichever is closer by ratio."""
    return ONE_PERCENT if fraction < 0.1**1.5 else TEN_PERCENT


def labelled_subset(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Ascending positions of a share of the images: the same share of every class, and at least one image of each."""
    if not 0 < fraction <= 1:
        raise InputError(f"The fraction of labels is {fraction!r}, but it must be above 0 and at most 1.")
    random = np.random.default_rng(seed)
    chosen: list[np.ndarray] = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        chosen.append(random.permutation(members)[: max(1, round(fraction * len(members)))])
    return np.sort(np.concatenate(chosen))


def fine_tune(
    backbone: nn.Module,
    train: LabelledSource,
    test: LabelledSource,
    settings: FineTuneSettings,
    setup: Setup,
    *,
    subset: Sequence[int] | np.ndarray | None = None,
) -> ProbeResult:
    """Train a copy of the backbone and a linear layer on labelled images, and score it on clean test images.

    ``subset`` holds the positions in the training source of the images to learn from, all of them by default. The given
    backbone is not changed.
    """
    device = torch.device(setup.device)
    if subset is not None:
        train = _subset(train, test, subset)
    network = copy.deepcopy(backbone).to(device).requires_grad_(True)
    if device.type == "cuda":
        cast(Any, network).to(memory_format=torch.channels_last)
    return train_and_score(
        network, train, test, settings, setup, protocol="fine-tuning of backbone and linear layer",
        head_rate=settings.head_rate, backbone_rate=settings.backbone_rate,
        freeze_batch_norm=settings.freeze_batch_norm, min_updates=settings.min_updates,
    )  # fmt: skip


def _subset(train: LabelledSource, test: LabelledSource, subset: Sequence[int] | np.ndarray) -> LabelledSource:
    """The images to learn from, among which every class must be."""
    (source, labels), (test_source, test_labels) = train, test
    codes, test_codes, classes = numbered_together(labels, test_labels, len(source), len(test_source))
    part = SourceSubset(source, subset)
    empty = np.setdiff1d(np.concatenate([codes, test_codes]), codes[part.positions])
    if len(empty):
        raise InputError(
            f"Class {classes[int(empty[0])]!r} has none of the {len(part)} labelled images, but each of the "
            f"{len(classes)} classes needs one; choose more of them."
        )
    assert labels is not None, "numbered_together has refused it"
    return part, labels_as_array(labels)[part.positions]
