"""Runs to export: one that was trained, in a second or two, and untrained ones of any backbone and size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import nn

from siammm import VonMisesFisherMixture
from siammm.cli import main
from siammm.data.augment import clean
from siammm.data.view_settings import views
from siammm.learn.build import build_network
from siammm.runs.run import Run
from siammm.settings.fields import with_settings
from siammm.settings.training import TrainConfig
from tests.data.image_sets import example_images, write_folder

N_IMAGES = 120


def write_images(folder: Path, *, n: int = N_IMAGES, seed: int = 0) -> Path:
    """PNGs of 8 x 8 pixels in folders of four classes."""
    return write_folder(folder, example_images(n, size=(8, 8), n_classes=4, seed=seed))


def trained_run(folder: Path, *flags: str) -> Path:
    """A run of the command on such images."""
    images = write_images(folder)
    command = ["train", str(images), "--output", str(folder / "first"), "--preset", "demo", "--epochs", "8"]
    command += ["--batch-size", "30", "--hidden-dim", "32", "--embedding-dim", "16", "--no-tensorboard"]
    assert main([*command, "--device", "cpu", *flags]) == 0
    return folder / "first"


def made_run(backbone: str, size: int, *, n_clusters: int = 7, seed: int = 0, **settings: Any) -> Run:
    """Networks that nobody trained, with statistics that matter, and a mixture of what they make of images."""
    config = with_settings(
        TrainConfig(),
        backbone=backbone,
        image_size=size,
        hidden_dim=32,
        embedding_dim=16,
        data="/home/me/noise",
        **settings,
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = build_network(config, size).eval()
    shake(network, generator)
    view = views(size, config.views.augmentation)[0]
    encoder = network.momentum_encoder or network.encoder
    x = clean(torch.from_numpy(pictures(60, size, seed=seed)).permute(0, 3, 1, 2), size, view)
    settle(network.encoder, x)
    settle(encoder, x)
    with torch.no_grad():
        rows = functional.normalize(encoder(x), dim=1)
    mixture = VonMisesFisherMixture(n_clusters, random_state=seed, temperature=0.1, device="cpu").fit(rows.numpy())
    return Run.of("made", network, config, view, mixture, n_images=60)


@torch.no_grad()
def shake(network: nn.Module, generator: torch.Generator) -> None:
    """Move everything that begins at 0 or 1, so that nothing is right by chance."""
    for name, buffer in network.named_buffers():
        if name.endswith("running_mean"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
        elif name.endswith("running_var"):
            buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    for parameter in network.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


@torch.no_grad()
def settle(encoder: nn.Module, x: torch.Tensor) -> None:
    """Give BatchNorm the statistics of these images, as training does: without them all embeddings are the same."""
    for layer in encoder.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.reset_running_stats()
            layer.momentum = None
    encoder.train()(x)
    encoder.eval()


def pictures(n: int, side: int, *, seed: int = 0) -> np.ndarray:
    """uint8 images of many colours."""
    return example_images(n, size=(side, side), n_classes=min(n, 30), seed=seed).images
