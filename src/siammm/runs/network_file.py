"""All networks of a run in one ``.safetensors`` file, with the settings that build them in its header."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from siammm.core.errors import StoredFileError
from siammm.core.files import written_whole
from siammm.data.view_settings import ViewSettings, normalisation_from_plain, views
from siammm.learn.build import build_network
from siammm.learn.checkpoint import digest
from siammm.learn.networks import Encoder, SiameseNetwork
from siammm.settings.stored import as_plain, from_plain
from siammm.settings.training import TrainConfig

_FORMAT = 1
# Pixels of a side that no network is trained on.
_LARGEST_IMAGE = 2**14


def save_network(path: Path, network: SiameseNetwork, config: TrainConfig, view: ViewSettings) -> None:
    """Write the networks; ``view`` is how images are shown to them without augmentation."""
    header = {"format": _FORMAT, "settings": as_plain(config), "image_size": view.size}
    header["normalisation"] = view.normalisation
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in network.state_dict().items()}
    with written_whole(path) as scratch:
        save_file(tensors, scratch, metadata={"siammm": json.dumps(header)})


def read_header(path: Path) -> tuple[TrainConfig, ViewSettings]:
    """The settings of the networks, and how images are shown to them without augmentation."""
    with _damage_named(path):
        with safe_open(path, framework="pt") as stored:
            header: dict[str, Any] = json.loads((stored.metadata() or {})["siammm"])
        if header["format"] != _FORMAT:
            raise StoredFileError(f"{path} is of another version of siammm; use the version that wrote it.")
        config, size = from_plain(header["settings"], path), int(header["image_size"])
        if not 1 <= size <= _LARGEST_IMAGE:
            raise ValueError(f"images of {size} pixels")
        stored = header.get("normalisation")  # an earlier version normalised as the augmentation says
        view = views(size, config.views.augmentation)[0]
        return config, view.normalised_by(None if stored is None else normalisation_from_plain(stored))


def load_network(path: Path) -> SiameseNetwork:
    """The networks that ``save_network`` wrote, in evaluation mode."""
    config, view = read_header(path)
    with _damage_named(path):
        with torch.random.fork_rng(devices=[]):  # new weights are drawn only to be replaced
            network = build_network(config, view.size)
        network.load_state_dict(load_file(path), strict=True)
    return network.eval()


def network_digest(network: nn.Module, view: ViewSettings) -> str:
    """Identifies what embeddings depend on besides the images: the weights, and how images are shown to them."""
    if isinstance(network, Encoder) and not list(network.projector.parameters()):
        network = network.backbone  # the same embeddings as those of the backbone by itself
    shown = [view.size, *view.mean, *view.std]
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    return digest(tensors, json.dumps(shown))


@contextlib.contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except StoredFileError:
        raise
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise StoredFileError(f"{path} is not an encoder saved by siammm, or it is damaged.") from error
