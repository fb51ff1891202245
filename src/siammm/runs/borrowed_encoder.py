"""The encoder of a run of ``siammm cluster``: it is not in the folder, which names it, with a digest of its weights."""

from __future__ import annotations

from pathlib import Path

import torch

from siammm.core.errors import InputError, StoredFileError
from siammm.data.view_settings import ViewSettings
from siammm.learn.networks import SiameseNetwork
from siammm.runs.clustered import Clustered
from siammm.runs.network_file import network_digest
from siammm.runs.pretrained import Backbone, name_of, open_pretrained


def open_again(clustering: Clustered, given: str, summary: Path, device: torch.device) -> Backbone:
    """The pretrained encoder, by its name in the ``summary``; ``given`` is the run's name."""
    if clustering.encoder is None:
        raise InputError(
            f"{given} {clustering.sentence}; give that table, or an encoder such as lite, to this command."
        )
    try:
        name, size = name_of(clustering.encoder), int(clustering.encoder["image_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise StoredFileError(f"{summary} does not say which encoder it was; cluster again.") from error
    return open_pretrained(name, image_size=size, device=device)


def check_unchanged(clustering: Clustered, given: str, network: SiameseNetwork, view: ViewSettings) -> None:
    """Refuse an encoder that is not the one that the images were clustered with."""
    digest = network_digest(network.momentum_encoder or network.encoder, view)
    if clustering.encoder is not None and clustering.encoder.get("digest") not in (None, digest):
        raise InputError(
            f"The encoder {clustering.encoder_name} has changed since {given} was clustered with it; restore the "
            "earlier one, or cluster again."
        )
