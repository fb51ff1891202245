"""Weights that a backbone starts from, in place of random ones; ``runs/starting_weights.py`` opens them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from siammm.core.errors import InputError
from siammm.data.view_settings import Channels
from siammm.learn.networks import SiameseNetwork
from siammm.settings.training import TrainConfig

NO_WEIGHTS = "none"


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a backbone starts from."""

    tensors: dict[str, Tensor]
    """Those of the backbone that were found in the weights and fit, by the names that they have in the backbone."""
    normalisation: tuple[Channels, Channels]
    """Mean and deviation of the pixels that these weights were trained on."""
    is_whole: bool
    """Whether all of the backbone is known. Where a layer is new, so is what the layers behind it see."""
    sentence: str
    """What starts from the weights and what does not, for the user."""


@torch.no_grad()
def start_from(network: SiameseNetwork, start: Start) -> None:
    """Put the weights into both encoders, which begin alike."""
    for encoder in (network.encoder, network.momentum_encoder):
        if encoder is not None:
            encoder.backbone.load_state_dict(start.tensors, strict=False)
    keep_statistics(network, keeps=start.is_whole)


def keep_statistics(network: SiameseNetwork, *, keeps: bool) -> None:
    """Whether the backbones keep the statistics of BatchNorm; see ``Encoder``."""
    for encoder in (network.encoder, network.momentum_encoder):
        if encoder is not None:
            encoder.keeps_statistics = keeps
    network.train(network.training)


def check_opened(config: TrainConfig, start: Start | None) -> None:
    """Refuse to start from random weights where others are asked for: whoever calls must open them."""
    given = config.network.weights
    if start is None and given != NO_WEIGHTS:
        raise InputError(
            f"weights is {given}, but they were not opened; pass start=open_start(config, source) of "
            "siammm.runs.starting_weights, or set weights to none."
        )
