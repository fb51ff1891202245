"""The paper's linear protocol: one linear layer on a frozen backbone, trained on augmented images.

``metrics.linear_scores`` is the quick variant, on features that are computed once.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn

from siammm.core.errors import InputError
from siammm.evaluate.training import LabelledSource, Setup, TrainingSettings, check_rate, train_and_score
from siammm.metrics.linear import ProbeResult


@dataclass(frozen=True, kw_only=True)
class LinearSettings(TrainingSettings):
    """How the linear layer is trained; the defaults are the paper's for ImageNet."""

    learning_rate: float = 0.1
    """The initial rate for 256 images; it is proportional to the images per update."""
    nesterov: bool = False
    """Whether SGD uses Nesterov momentum."""
    batch_norm: bool = False
    """Whether features are first standardised over the batch, without learnt scale and shift."""

    def __post_init__(self) -> None:
        """Refuse values that cannot be trained with."""
        super().__post_init__()
        check_rate("learning_rate", self.learning_rate)
        if self.nesterov and self.momentum == 0:
            raise InputError("nesterov needs momentum, but momentum is 0; give one above 0 or leave nesterov out.")
        if self.batch_norm and self.batch_size < 2:
            raise InputError("batch_norm needs updates of 2 images or more, but batch_size is 1; give a larger one.")


LINEAR = LinearSettings()
"""The paper's, for ImageNet: SGD, 0.1 x batch / 256, momentum 0.9, no decay, batch 1024, 90 epochs, cosine."""

PLACES205 = LinearSettings(
    epochs=14, batch_size=256, learning_rate=0.01, nesterov=True, weight_decay=5e-4,
    milestones=(4 / 14, 8 / 14, 12 / 14), batch_norm=True,
)  # fmt: skip
"""For Places205, where the paper follows PIRL and gives no numbers: these are from VISSL's configuration, which is by
PIRL's authors. VISSL pools the last feature map to 2 x 2; here the backbone decides."""


def linear_probe(
    backbone: nn.Module, train: LabelledSource, test: LabelledSource, settings: LinearSettings, setup: Setup
) -> ProbeResult:
    """Train a linear layer on the frozen backbone's features of augmented images, and score it on clean test images.

    ``backbone`` turns normalised images into rows of features; its BatchNorm layers use the statistics they have, and
    it is returned to the mode it was in.
    """
    device, first = torch.device(setup.device), next(backbone.parameters(), None)
    # A device without a number is the current one of its type.
    if first is not None and (first.device.type != device.type or device.index not in (None, first.device.index)):
        backbone = copy.deepcopy(backbone).to(device)
    modes = {module: module.training for module in backbone.modules()}
    try:
        return train_and_score(
            backbone, train, test, settings, setup, protocol="linear layer on a frozen backbone",
            head_rate=settings.learning_rate, nesterov=settings.nesterov, batch_norm=settings.batch_norm,
        )  # fmt: skip
    finally:
        for module, training in modes.items():
            module.training = training
