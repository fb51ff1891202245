"""The paper's linear protocol: one linear layer on a frozen backbone, trained on augmented images.

The backbone is any module that turns normalised images into rows of features. It stays in evaluation mode, so that its
BatchNorm layers use the statistics they have, and neither its weights nor its buffers change.
``linear.linear_scores`` is the quick variant on features that are computed once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as functional
from torch import nn

from siammm.core.errors import InputError
from siammm.data.augment import IMAGENET_MEAN, IMAGENET_STD
from siammm.data.decode import MAX_BAD_IMAGES
from siammm.data.loader import LoaderKind, Progress
from siammm.data.source import Source
from siammm.evaluate.supervised import (
    Channels,
    Schedule,
    check_rate,
    check_training,
    crop_view,
    frozen,
    judged,
    labelled,
    linear_head,
)
from siammm.metrics.labels import Labels
from siammm.metrics.linear import ProbeResult

__all__ = ["LINEAR", "PLACES205", "LinearSettings", "ProbeResult", "linear_probe"]


@dataclass(frozen=True, kw_only=True)
class LinearSettings:
    """How the linear layer is trained; the defaults are the paper's for ImageNet."""

    epochs: int = 90
    """Times that every training image is seen."""
    batch_size: int = 1024
    """Images of an update."""
    learning_rate: float = 0.1
    """The rate for 256 images at the start; it grows in proportion to the images of an update."""
    momentum: float = 0.9
    """Momentum of SGD."""
    nesterov: bool = False
    """Whether SGD looks ahead by its momentum."""
    weight_decay: float = 0.0
    """Decay of the linear layer's weights."""
    milestones: tuple[float, ...] = ()
    """Shares of training after which the rate is multiplied by decay; none: it falls along a half cosine."""
    decay: float = 0.1
    """What the rate is multiplied with at a milestone."""
    batch_norm: bool = False
    """Whether features are first standardised over the batch, without learnt scale and shift."""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """Area of the random crop, as a share of the image."""
    flip: float = 0.5
    """Probability of a horizontal flip; 0 for images that mean something else in the mirror."""

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        check_training(self.epochs, self.batch_size, self.momentum, self.weight_decay, self.milestones, self.decay)
        check_rate("learning_rate", self.learning_rate)
        if self.nesterov and self.momentum == 0:
            raise InputError("nesterov needs momentum, but momentum is 0; give one above 0 or leave nesterov out.")
        if self.batch_norm and self.batch_size < 2:
            raise InputError("batch_norm needs updates of 2 images or more, but batch_size is 1; give a larger one.")


LINEAR = LinearSettings()
"""The paper's, for ImageNet: SGD, 0.1 x batch / 256, momentum 0.9, no decay, batch 1024, 90 epochs, cosine."""

PLACES205 = LinearSettings(
    epochs=14,
    batch_size=256,
    learning_rate=0.01,
    nesterov=True,
    weight_decay=5e-4,
    milestones=(4 / 14, 8 / 14, 12 / 14),
    batch_norm=True,
)
"""For Places205, where the paper follows PIRL and gives no numbers: these are of VISSL's configuration, which is by
PIRL's authors. VISSL pools the last feature map to 2 x 2 places; here it is the backbone that decides."""


def linear_probe(
    backbone: nn.Module,
    train_source: Source,
    train_labels: Labels | None,
    test_source: Source,
    test_labels: Labels | None,
    settings: LinearSettings = LINEAR,
    *,
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
    """Train a linear layer on the frozen backbone's features of augmented images, and judge it on clean test images.

    ``train_labels`` and ``test_labels`` hold one number or name for each image of their source. ``mean`` and ``std``
    are those that the backbone was trained with. ``progress`` is told the updates done and to be done. The backbone
    comes back as it was.
    """
    device = torch.device(device)
    view = crop_view(image_size, settings.crop_scale, settings.flip, mean, std)
    with (
        labelled(
            (train_source, train_labels),
            (test_source, test_labels),
            view,
            device,
            seed,
            kind=loader,
            workers=workers,
            limit=max_bad_images,
        ) as (train, test, classes),
        frozen(backbone, device) as features,
    ):
        width = features(next(train.loader.clean(0, 1))[1]).shape[1]
        head = _head(width, len(classes), settings.batch_norm, seed).to(device)
        optimiser = torch.optim.SGD(
            head.parameters(),
            lr=settings.learning_rate,
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            weight_decay=settings.weight_decay,
        )
        schedule = Schedule(train.n, settings.epochs, settings.batch_size, settings.milestones, settings.decay)
        for update in schedule.updates(train, seed, progress):
            optimiser.param_groups[0]["lr"] = settings.learning_rate * update.scale
            loss = functional.cross_entropy(head(features(update.x)), update.labels_B)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            update.watch(loss)
        head.eval()
        top1, top5 = judged(lambda x: head(features(x)), test)
    return ProbeResult(
        top1=top1,
        top5=top5,
        n_classes=len(classes),
        n_train=train.n,
        n_test=test.n,
        recipe={"protocol": "linear layer on a frozen backbone", "optimiser": "SGD"}
        | asdict(settings)
        | {"updates": schedule.total, "image_size": image_size, "seed": seed},
    )


def _head(width: int, n_classes: int, batch_norm: bool, seed: int) -> nn.Sequential:
    head = nn.Sequential(linear_head(width, n_classes, seed))
    return nn.Sequential(nn.BatchNorm1d(width, affine=False), *head) if batch_norm else head
