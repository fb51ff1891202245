"""Short runs on a GPU whose losses can be compared: on random pictures, without what rounds differently each time."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from siammm.data.sources import open_source
from siammm.learn.loop import Training
from siammm.settings.fields import with_settings
from siammm.settings.presets import PRESETS

SMALL: dict[str, Any] = {
    "data": "images", "hidden_dim": 64, "embedding_dim": 32, "batch_size": 32, "epochs": 3, "n_components": 24,
    "optimiser": "sgd", "learning_rate": 0.1, "warmup_epochs": 0, "precision": "fp32", "compile": False,
    "augmentation": "32", "accumulate": 1,
}  # fmt: skip


def images(n: int = 256, size: int = 32) -> np.ndarray:
    """Smooth random pictures: noise alone has nothing that two views could share."""
    rng = np.random.default_rng(0)
    coarse = torch.from_numpy(rng.random((n, 3, 4, 4), dtype=np.float32))
    fine = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bicubic").clamp(0, 1)
    return (fine * 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()


def losses(device: str, *, captured: bool = True, beside: bool = True, **settings: Any) -> np.ndarray:
    """The losses of every epoch: whole, instance, cluster."""
    return losses_of(device, captured, beside, tuple(sorted((SMALL | settings).items())))


@functools.cache  # several tests compare with the same run
def losses_of(device: str, captured: bool, beside: bool, settings: tuple[tuple[str, Any], ...]) -> np.ndarray:
    training = Training(with_settings(PRESETS["cifar"], **dict(settings)), open_source(images()), torch.device(device))
    if training.accelerated is not None:
        training.accelerated.captures &= captured
        if not beside:
            training.accelerated.side_stream = None
    training.run()
    training.close()
    return np.array([[row["loss"], row["instance_loss"], row["cluster_loss"]] for row in training.metrics])
