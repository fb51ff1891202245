"""The encoder in a folder: for ``timm.create_model``, for ``SiamMM.from_pretrained``, and for the Hugging Face hub.

model.safetensors, config.json    the backbone as timm reads it
siammm.safetensors                all networks, with the settings that build them
mixture.safetensors               the clusters
README.md                         the model card
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors.torch import save_file

from siammm import __version__
from siammm.core.errors import InputError
from siammm.core.files import make_readable
from siammm.core.text import one_line
from siammm.data.augment import clean_side
from siammm.export.as_timm import TimmModel, as_timm, repeated
from siammm.export.card import as_bytes, as_text, data_name, is_edited, model_card
from siammm.learn.networks import Encoder
from siammm.runs import folder as run
from siammm.runs import names, results
from siammm.runs.encoding import FinishedRun
from siammm.settings.training import TrainConfig

EncoderChoice = Literal["online", "momentum"]


def chosen_encoder(own: FinishedRun, choice: EncoderChoice) -> Encoder:
    """One of the run's two encoders."""
    if choice == "online":
        return own.network.encoder
    if own.network.momentum_encoder is None:
        raise InputError(f"The run {own.name} has no momentum encoder; leave --encoder out.")
    return own.network.momentum_encoder


def write_encoder(
    folder: Path, own: FinishedRun, *, choice: EncoderChoice = "online", card: str | None = None
) -> TimmModel | None:
    """Write the files of the encoder into an existing folder; how timm builds it, or None where timm cannot.

    ``card`` is a README.md to keep in place of a new one.
    """
    encoder = chosen_encoder(own, choice)
    timm_model = as_timm(encoder.backbone, own.config.network.backbone, own.view.size)
    results.save_network(folder / names.NETWORKS, own.network, without_paths(own.config), own.view)
    if own.mixture is not None:
        own.mixture.save(folder / names.MIXTURE)
    if timm_model is not None:
        save_file(timm_model.tensors, folder / names.WEIGHTS, metadata={"format": "pt"})
        make_readable(folder / names.WEIGHTS)
    text = json.dumps(_config(own, timm_model, encoder), indent=2)
    (folder / names.CONFIG).write_text(text + "\n", encoding="utf-8")
    write_card(folder, card or model_card(own, timm_model, choice))
    if timm_model is not None:
        _check(folder, encoder, own.view.size, timm_model)
    return timm_model


def without_paths(config: TrainConfig) -> TrainConfig:
    """The settings without folders of the machine that trained: an export is often public."""
    return replace(config, data=data_name(config.data), output=None, resume=None, run=replace(config.run, probe=None))


def _config(own: FinishedRun, timm_model: TimmModel | None, encoder: Encoder) -> dict[str, Any]:
    """``config.json``: timm's keys, and ours under one that timm passes over."""
    ours = {
        "version": __version__,
        "image_size": own.view.size,
        "n_clusters": None if own.mixture is None else int(own.mixture.n_components_),
        "backbone": own.config.network.backbone,
    }
    if timm_model is None:
        return {"siammm": ours}
    import timm

    usual: dict[str, Any] = dict(cast(Any, timm.get_pretrained_cfg(timm_model.architecture)).to_dict())
    side = own.view.size * timm_model.repeat
    return {
        "architecture": timm_model.architecture,
        "num_classes": 0,
        "num_features": encoder.num_features,
        "model_args": timm_model.arguments,
        "pretrained_cfg": {
            "tag": "siammm",
            "custom_load": False,
            "input_size": [3, side, side],
            "fixed_input_size": bool(usual.get("fixed_input_size", False)),
            # Pixels are repeated by nearest; where they are not, images are resized as siammm does it.
            "interpolation": "nearest" if timm_model.repeat > 1 else "bilinear",
            "crop_pct": own.view.size / clean_side(own.view.size),
            "crop_mode": "center",
            "mean": list(own.view.mean),
            "std": list(own.view.std),
            "num_classes": 0,
            # With these timm can take other channels, or add a classifier to be trained.
            "first_conv": usual.get("first_conv"),
            "classifier": usual.get("classifier"),
        },
        "siammm": ours | {"pixels_repeated": timm_model.repeat},
    }


@torch.no_grad()
def _check(folder: Path, encoder: Encoder, size: int, timm_model: TimmModel) -> None:
    """Load the folder as anybody would, and compare: what is written is what was tried."""
    import timm

    with torch.random.fork_rng(devices=[]):
        model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    x = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(1))
    ours = deepcopy(encoder.backbone).cpu().float().eval()(x)  # on the CPU, as the other
    theirs = model(repeated(x, timm_model.repeat))
    if not torch.allclose(theirs, ours, rtol=1e-4, atol=1e-4 * max(1.0, float(ours.abs().max()))):
        raise InputError(
            f"timm reads the exported {timm_model.architecture} back with other features, so it was not kept; leave "
            "encoder out of --formats, and tell the developers."
        )


def kept_card(folder: Path) -> str | None:
    """The model card in a folder, if somebody has edited it."""
    try:
        text = as_text((folder / names.CARD).read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(
            f"The card {folder / names.CARD} cannot be read ({one_line(error)}) to be kept; choose another folder."
        ) from error
    return text if is_edited(text) else None


def write_card(folder: Path, text: str) -> None:
    """Write a model card."""
    (folder / names.CARD).write_bytes(as_bytes(text))


def refuse_run_folder(folder: Path) -> None:
    """Never write an encoder's ``config.json`` over that of a run, which could then not go on."""
    if (folder / run.ENCODER).exists() or (folder / run.METRICS).exists() or (folder / run.CHECKPOINTS).exists():
        raise InputError(f"{folder} is a run folder, whose config.json would be replaced; choose another folder.")
