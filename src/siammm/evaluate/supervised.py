"""What the linear probe and fine-tuning share: labelled images in batches of one view, a schedule, and the judgement.

Images come from the loaders of training, of which only one view is cut.

Legend:  N images, Q test images, B images of a batch, S pixels of a side, F features, C classes.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from siammm.core.device import has_bf16
from siammm.core.errors import InputError
from siammm.data import augment
from siammm.data.augment import ViewSettings
from siammm.data.decode import MAX_BAD_IMAGES
from siammm.data.loader import Batch, Loader, LoaderKind, Progress, ResidentLoader, open_loader
from siammm.data.randomness import permutation
from siammm.data.source import Source
from siammm.metrics.labels import Labels, check_classes, numbered_together
from siammm.metrics.linear import top_accuracies

Channels = tuple[float, float, float]


def linear_head(width: int, n_classes: int, seed: int) -> nn.Linear:
    """The layer before training: weights of deviation 0.01 as in MoCo's protocol, biases of 0."""
    # Without a draw of its own, which would move the process's generator.
    head = cast(nn.Linear, nn.utils.skip_init(nn.Linear, width, n_classes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        head.weight.copy_(0.01 * torch.randn(n_classes, width, generator=generator))
        head.bias.zero_()
    return head


def check_training(
    epochs: int, batch_size: int, momentum: float, weight_decay: float, milestones: Sequence[float], decay: float
) -> None:
    """Refuse settings with which nothing can be trained."""
    for name, value in (("epochs", epochs), ("batch_size", batch_size)):
        if value < 1:
            raise InputError(f"{name} is {value}, but it must be at least 1.")
    if not 0 <= momentum < 1:
        raise InputError(f"momentum is {momentum!r}, but it must be at least 0 and below 1.")
    if not 0 <= weight_decay < math.inf:
        raise InputError(f"weight_decay is {weight_decay!r}, but it must be a number of at least 0.")
    if not all(0 < share < 1 for share in milestones) or list(milestones) != sorted(milestones):
        raise InputError(f"milestones is {tuple(milestones)}, but it must hold ascending shares between 0 and 1.")
    if not 0 < decay <= 1:
        raise InputError(f"decay is {decay!r}, but it must be above 0 and at most 1.")


def check_rate(name: str, rate: float) -> None:
    """Refuse a learning rate that is none."""
    if not 0 <= rate < math.inf:
        raise InputError(f"{name} is {rate!r}, but it must be a number of at least 0.")


def crop_view(size: int, scale: tuple[float, float], flip: float, mean: Channels, std: Channels) -> ViewSettings:
    """A random resized crop and a flip; no colour is changed."""
    return ViewSettings(size=size, scale=scale, flip=flip, jitter_probability=0.0, grey=0.0, mean=mean, std=std)


class LabelledImages:
    """A loader's images with the numbers of their classes, on the device."""

    def __init__(self, loader: Loader, labels: np.ndarray) -> None:
        self.loader = loader
        self.labels_N = torch.from_numpy(labels).to(loader.device)
        self._sample_N = loader.sample_N.to(loader.device)

    @property
    def n(self) -> int:
        """Images that can be read."""
        return self.loader.n_images

    def view(self, batch: Batch, seed: int, epoch: int) -> Tensor:
        """The first view of a batch alone, (B, 3, S, S)."""
        settings = self.loader.view_settings[0]
        sample_B = self._sample_N[batch.position_B]
        if batch.crops is not None:
            drawn = augment.draw(settings, settings.size, settings.size, seed, epoch, sample_B, 0)
            return augment.colour(batch.crops[0], drawn, settings)
        assert isinstance(self.loader, ResidentLoader), "a batch without crops has its images on the device"
        x_B3HW = self.loader.image_N3HW[batch.position_B]
        height, width = x_B3HW.shape[2:]
        drawn = augment.draw(settings, height, width, seed, epoch, sample_B, 0)
        return augment.apply(x_B3HW, drawn, settings)


@contextlib.contextmanager
def labelled(
    train: tuple[Source, Labels | None],
    test: tuple[Source, Labels | None],
    view: ViewSettings,
    device: torch.device,
    seed: int,
    *,
    kind: LoaderKind = "auto",
    workers: int | None = None,
    limit: float = MAX_BAD_IMAGES,
) -> Iterator[tuple[LabelledImages, LabelledImages, list[Any]]]:
    """Training and test images with numbered classes, and the classes; labels are checked before any image is read.

    Images that cannot be read are left out with their labels, up to the share ``limit`` of all. The loaders' workers
    end with the block.
    """
    numbers = numbered_together(train[1], test[1], len(train[0]), len(test[0]))
    # Workers always cut two views. The second is made next to nothing: a pixel of a small part of the image.
    speck = ViewSettings(size=1, scale=(1e-3, 1e-3), ratio=(1.0, 1.0), flip=0.0, jitter_probability=0.0, grey=0.0)
    opened: list[LabelledImages] = []
    try:
        for (source, _), codes in zip((train, test), numbers, strict=False):
            loader = open_loader(source, (view, speck), device, kind=kind, seed=seed, workers=workers, limit=limit)
            opened.append(LabelledImages(loader, codes[loader.sample_N.numpy()]))
        check_classes(opened[0].labels_N.cpu().numpy(), len(numbers[2]))
        yield opened[0], opened[1], numbers[2]
    finally:
        for images in opened:
            images.loader.close()


@contextlib.contextmanager
def frozen(backbone: nn.Module, device: torch.device) -> Iterator[Callable[[Tensor], Tensor]]:
    """The backbone as a function from images to features without gradients, in evaluation mode; then as it was."""
    first = next(backbone.parameters(), None)
    # A device without a number is the current one of its type.
    elsewhere = first is not None and (
        first.device.type != device.type or device.index not in (None, first.device.index)
    )
    if elsewhere:
        backbone = copy.deepcopy(backbone).to(device)
    modes = {module: module.training for module in backbone.modules()}
    backbone.eval()

    @torch.no_grad()
    def features(x_B3SS: Tensor) -> Tensor:
        return rows(backbone, x_B3SS)

    try:
        yield features
    finally:
        for module, training in modes.items():
            module.training = training


def rows(backbone: nn.Module, x_B3SS: Tensor) -> Tensor:
    """A backbone's features (B, F) in single precision; computed in bf16 on a GPU that has it."""
    if x_B3SS.is_cuda:
        x_B3SS = x_B3SS.to(memory_format=torch.channels_last)
    with torch.autocast(x_B3SS.device.type, torch.bfloat16, enabled=has_bf16(x_B3SS.device)):
        # Not by calling it: a module that training compiled would be compiled again for every size of batch.
        feature_BF = backbone.forward(x_B3SS)
    if not isinstance(feature_BF, Tensor) or feature_BF.ndim != 2 or feature_BF.shape[0] != x_B3SS.shape[0]:
        shape = tuple(feature_BF.shape) if isinstance(feature_BF, Tensor) else type(feature_BF).__name__
        raise InputError(
            f"The backbone turns {tuple(x_B3SS.shape)} into {shape}, but one row of features for each image is "
            "needed; pool or flatten its output."
        )
    return feature_BF.float()


@dataclass(frozen=True)
class Update:
    """What one update learns from."""

    x: Tensor
    """The views of its images, (B, 3, S, S)."""
    labels_B: Tensor
    """The numbers of their classes."""
    scale: float
    """What the rate for 256 images is multiplied with."""
    watch: Callable[[Tensor], None]
    """To be given the loss, which is looked at once an epoch: no update waits for the device."""


class Schedule:
    """How many updates there are, how large they are, and what their rates are."""

    def __init__(
        self, n: int, epochs: int, batch_size: int, milestones: Sequence[float], decay: float, min_updates: int = 1
    ) -> None:
        # Updates of equal size: a last one of two or three images would have a noisy gradient and useless statistics.
        self._groups = math.ceil(n / batch_size)
        if batch_size > 1:  # one image alone has no statistics at all
            self._groups = max(1, min(self._groups, n // 2))
        self.epochs = max(epochs, math.ceil(min_updates / self._groups))
        self.total = self.epochs * self._groups
        self.images = n / self._groups
        """Images of an update, on average."""
        self._n, self._milestones, self._decay = n, tuple(milestones), decay

    def scale(self, step: int) -> float:
        """What the rate for 256 images is multiplied with at a step."""
        done = step / self.total
        if self._milestones:
            fall = self._decay ** sum(done >= share - 1e-9 for share in self._milestones)
        else:
            fall = 0.5 * (1 + math.cos(math.pi * done))
        return fall * self.images / 256

    def updates(self, train: LabelledImages, seed: int, progress: Progress | None) -> Iterator[Update]:
        """All of them in turn."""
        worst = torch.zeros((), device=train.loader.device)

        def watch(loss: Tensor) -> None:
            # Once not finite, it stays so.
            worst.add_(loss.detach())

        step = 0
        for epoch in range(self.epochs):
            order = permutation(seed, epoch, self._n)
            for batch in train.loader.batches(epoch, list(order.tensor_split(self._groups))):
                labels_B = train.labels_N[batch.position_B]
                yield Update(train.view(batch, seed, epoch), labels_B, self.scale(step), watch)
                step += 1
                if progress is not None:
                    progress(step, self.total)
            if not math.isfinite(float(worst)):
                raise InputError(f"The loss was no longer finite in epoch {epoch + 1}; lower the learning rate.")


@torch.no_grad()
def judged(classify: Callable[[Tensor], Tensor], test: LabelledImages) -> tuple[float, float | None]:
    """Top-1 and top-5 accuracy on clean images."""
    logits_QC = torch.cat([classify(x) for _, x in test.loader.clean(0, test.n)])
    return top_accuracies(logits_QC, test.labels_N)
