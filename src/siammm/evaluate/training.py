"""Train a linear layer on labelled images, on a frozen backbone or together with it, and score it on test images.

Images come from the same loaders as in training, of which only the first view is used.

Legend:  N images, Q test images, B images of a batch, S pixels of a side, F features, C classes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from siammm.core.checks import check_at_least, check_number
from siammm.core.device import has_bf16
from siammm.core.errors import InputError
from siammm.core.threads import few_threads
from siammm.data.loader import Loader, Progress, open_loader
from siammm.data.randomness import permutation
from siammm.data.source import Source
from siammm.data.view_settings import ViewSettings
from siammm.metrics.labels import Labels, check_classes, numbered_together
from siammm.metrics.linear import ProbeResult, top_accuracies
from siammm.settings.training import DataConfig

LabelledSource = tuple[Source, Labels | None]
"""Images, and a number or name for each."""


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How a classifier is trained on labelled images, by SGD."""

    epochs: int = 90
    """Passes over the training images."""
    batch_size: int = 1024
    """Images per update."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 0.0
    """Decay of all trained weights."""
    milestones: tuple[float, ...] = ()
    """Shares of training after which rates are multiplied by decay; if there are none, they follow a half cosine."""
    decay: float = 0.1
    """The factor on the rates at a milestone."""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """Area of the random crop, as a share of the image."""
    flip: float = 0.5
    """Probability of a horizontal flip; 0 for images whose mirror image means something else."""

    def __post_init__(self) -> None:
        """Refuse values that cannot be trained with."""
        check_at_least("epochs", self.epochs, 1)
        check_at_least("batch_size", self.batch_size, 1)
        check_number("momentum", self.momentum, lambda value: 0 <= value < 1, "it must be at least 0 and below 1")
        check_rate("weight_decay", self.weight_decay)
        if not all(0 < share < 1 for share in self.milestones) or list(self.milestones) != sorted(self.milestones):
            raise InputError(f"milestones is {self.milestones}, but it must hold ascending shares between 0 and 1.")
        check_number("decay", self.decay, lambda value: 0 < value <= 1, "it must be above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How images are shown to a backbone, and where it runs."""

    view: ViewSettings
    """The image size, mean and deviation that the backbone was trained with."""
    device: torch.device | str
    seed: int = 0
    progress: Progress | None = None
    """Called with the number of updates done and their total."""
    reading: DataConfig = field(default_factory=DataConfig)


def check_rate(name: str, rate: float) -> None:
    """Refuse a rate that is negative or not finite."""
    check_number(name, rate, lambda value: 0 <= value < math.inf, "it must be a number of at least 0")


def train_and_score(
    network: nn.Module,
    train: LabelledSource,
    test: LabelledSource,
    settings: TrainingSettings,
    setup: Setup,
    *,
    protocol: str,
    head_rate: float,
    backbone_rate: float | None = None,
    nesterov: bool = False,
    batch_norm: bool = False,
    freeze_batch_norm: bool = False,
    min_updates: int = 1,
) -> ProbeResult:
    """Train a linear layer on a backbone's features of augmented images, and score it on clean test images.

    Without a ``backbone_rate`` the network stays in evaluation mode and is not changed. Rates are for 256 images.
    """
    device, seed = torch.device(setup.device), setup.seed
    crops = crop_view(setup.view, settings.crop_scale, settings.flip)
    # Images are read before the threads become few.
    with labelled(train, test, crops, device, seed, setup.reading) as (images, tests, classes), few_threads(device):
        network.eval()
        with torch.no_grad():
            width = rows(network, next(images.loader.clean(0, 1))[1]).shape[1]
        linear = linear_head(width, len(classes), seed)
        head = nn.Sequential(nn.BatchNorm1d(width, affine=False), linear) if batch_norm else linear
        head.to(device)
        groups: list[dict[str, Any]] = [{"params": list(head.parameters()), "rate": head_rate}]
        if backbone_rate is not None:
            groups.append({"params": list(network.parameters()), "rate": backbone_rate})
            network.train()
            for module in network.modules() if freeze_batch_norm else ():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        optimiser = torch.optim.SGD(
            groups, lr=0.0, momentum=settings.momentum, nesterov=nesterov, weight_decay=settings.weight_decay
        )
        schedule = Schedule(images.n, settings, min_updates)
        step, sum_of_losses = 0, torch.zeros((), device=device)
        for epoch in range(schedule.epochs):
            groups_of_images = permutation(seed, epoch, images.n).tensor_split(schedule.updates)
            for batch in images.loader.batches(epoch, list(groups_of_images)):
                for group in optimiser.param_groups:
                    group["lr"] = group["rate"] * schedule.scale(step)
                x_B3SS, _ = images.loader.views(batch, seed, epoch)
                with torch.set_grad_enabled(backbone_rate is not None):
                    feature_BF = rows(network, x_B3SS)
                loss = functional.cross_entropy(head(feature_BF), images.labels_N[batch.position_B])
                optimiser.zero_grad(set_to_none=True)
                loss.backward()
                optimiser.step()
                sum_of_losses += loss.detach()
                step += 1
                if setup.progress is not None:
                    setup.progress(step, schedule.total)
            # Once per epoch, so that no update waits for the device. Once the sum is not finite, it stays so.
            if not math.isfinite(float(sum_of_losses)):
                raise InputError(f"The loss was no longer finite in epoch {epoch + 1}; lower the learning rate.")
        network.eval()
        head.eval()
        with torch.no_grad():
            logits_QC = torch.cat([head(rows(network, x)) for _, x in tests.loader.clean(0, tests.n)])
        top1, top5 = top_accuracies(logits_QC, tests.labels_N)
    recipe = {"protocol": protocol, "optimiser": "SGD", **asdict(settings)}
    recipe |= {"epochs": schedule.epochs, "updates": schedule.total, "image_size": setup.view.size, "seed": seed}
    n, n_test = images.n, tests.n
    return ProbeResult(top1=top1, top5=top5, n_classes=len(classes), n_train=n, n_test=n_test, recipe=recipe)


def linear_head(width: int, n_classes: int, seed: int) -> nn.Linear:
    """The layer before training: weights with a deviation of 0.01 as in MoCo's protocol, biases of 0."""
    # Without the usual initialisation, which would advance the global random generator.
    head = cast(nn.Linear, nn.utils.skip_init(nn.Linear, width, n_classes))
    with torch.no_grad():
        head.weight.copy_(0.01 * torch.randn(n_classes, width, generator=torch.Generator().manual_seed(seed)))
        head.bias.zero_()
    return head


def crop_view(view: ViewSettings, scale: tuple[float, float], flip: float) -> ViewSettings:
    """A random resized crop and a flip at the view's size; colours are only normalised."""
    return ViewSettings(
        size=view.size, scale=scale, flip=flip, jitter_probability=0.0, grey=0.0, mean=view.mean, std=view.std
    )


class LabelledImages:
    """A loader's images with the numbers of their classes, on the device."""

    def __init__(self, loader: Loader, labels: np.ndarray) -> None:
        self.loader = loader
        self.n = loader.n_images
        self.labels_N = torch.from_numpy(labels[loader.sample_N.numpy()]).to(loader.device)


@contextlib.contextmanager
def labelled(
    train: LabelledSource,
    test: LabelledSource,
    view: ViewSettings,
    device: torch.device,
    seed: int,
    reading: DataConfig,
) -> Iterator[tuple[LabelledImages, LabelledImages, list[Any]]]:
    """Training and test images with numbered classes, and the classes; labels are checked before any image is read.

    Images that cannot be read are left out with their labels. The loaders' workers stop when the block ends.
    """
    codes, test_codes, classes = numbered_together(train[1], test[1], len(train[0]), len(test[0]))
    # Loaders always make two views. The second is made as cheap as possible: one pixel of a small part of the image.
    speck = ViewSettings(size=1, scale=(1e-3, 1e-3), ratio=(1.0, 1.0), flip=0.0, jitter_probability=0.0, grey=0.0)
    how: dict[str, Any] = {"kind": reading.loader, "workers": reading.workers, "limit": reading.max_bad_images}
    opened: list[LabelledImages] = []
    try:
        for source, numbers in ((train[0], codes), (test[0], test_codes)):
            loader = open_loader(source, (view, speck), device, seed=seed, **how)
            opened.append(LabelledImages(loader, numbers))
        check_classes(opened[0].labels_N.cpu().numpy(), len(classes))
        yield opened[0], opened[1], classes
    finally:
        for images in opened:
            images.loader.close()


def rows(backbone: nn.Module, x_B3SS: Tensor) -> Tensor:
    """A backbone's features (B, F) in single precision; computed in bf16 on a GPU that has it."""
    if x_B3SS.is_cuda:
        x_B3SS = x_B3SS.to(memory_format=torch.channels_last)
    with torch.autocast(x_B3SS.device.type, torch.bfloat16, enabled=has_bf16(x_B3SS.device)):
        # Not by calling it: a module that training compiled would be compiled again for every batch size.
        feature_BF = backbone.forward(x_B3SS)
    if not isinstance(feature_BF, Tensor) or feature_BF.ndim != 2 or feature_BF.shape[0] != x_B3SS.shape[0]:
        shape = tuple(feature_BF.shape) if isinstance(feature_BF, Tensor) else type(feature_BF).__name__
        raise InputError(
            f"The backbone turns {tuple(x_B3SS.shape)} into {shape}, but one row of features per image is needed; pool "
            "or flatten its output."
        )
    return feature_BF.float()


class Schedule:
    """The number of updates in an epoch and in all, and the rate of each."""

    def __init__(self, n: int, settings: TrainingSettings, min_updates: int = 1) -> None:
        # Updates of equal size: a last one of two or three images would have a noisy gradient and useless statistics.
        self.updates = math.ceil(n / settings.batch_size)
        if settings.batch_size > 1:  # a single image has no batch statistics at all
            self.updates = max(1, min(self.updates, n // 2))
        self.epochs = max(settings.epochs, math.ceil(min_updates / self.updates))
        self.total = self.epochs * self.updates
        self._n, self._settings = n, settings

    def scale(self, step: int) -> float:
        """The factor on the rates for 256 images at a step; it is proportional to the images per update."""
        done, milestones = step / self.total, self._settings.milestones
        if milestones:
            fall = self._settings.decay ** sum(done >= share - 1e-9 for share in milestones)
        else:
            fall = 0.5 * (1 + math.cos(math.pi * done))
        return fall * self._n / self.updates / 256
