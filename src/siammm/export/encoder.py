"""The encoder in a folder: for ``timm.create_model``, for ``SiamMM.from_pretrained``, and for the Hugging Face hub."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file

from siammm.core.errors import InputError
from siammm.core.files import make_readable
from siammm.core.text import one_line
from siammm.core.version import __version__
from siammm.data.augment import clean_side
from siammm.export.as_timm import TimmModel, as_timm, same_features
from siammm.export.card import as_bytes, data_name, is_edited, model_card
from siammm.learn.networks import Encoder
from siammm.runs import files
from siammm.runs.network_file import save_network
from siammm.runs.pretrained import EncoderChoice
from siammm.runs.records import is_run_folder
from siammm.runs.run import Run
from siammm.runs.starting_weights import public_name


def write_encoder(
    folder: Path, run: Run, *, choice: EncoderChoice = "online", card: str | None = None
) -> TimmModel | None:
    """Write the files of the encoder into an existing folder; how timm builds it, or None where timm cannot.

    ``card`` is a README.md to keep in place of a new one.
    """
    encoder = run.encoder(choice)
    timm_model = as_timm(encoder.backbone, run.config.network.backbone, run.view.size)
    # Without folders of the machine that trained: an export is often public.
    config = replace(run.config, data=data_name(run.config.data), output=None, resume=None)
    config = replace(config, run=replace(config.run, probe=None))
    config = replace(config, network=replace(config.network, weights=public_name(config.network.weights)))
    save_network(folder / files.NETWORKS, run.network, config, run.view)
    if run.has_clusters:
        run.mixture.save(folder / files.MIXTURE)
    if timm_model is not None:
        save_file(timm_model.tensors, folder / files.TIMM_WEIGHTS, metadata={"format": "pt"})
        make_readable(folder / files.TIMM_WEIGHTS)
    text = json.dumps(_config(run, timm_model, encoder), indent=2)
    (folder / files.CONFIG).write_text(text + "\n", encoding="utf-8")
    write_card(folder, card or model_card(run, timm_model, choice))
    if timm_model is not None:
        _check(folder, encoder, run.view.size, timm_model)
    return timm_model


def _config(run: Run, timm_model: TimmModel | None, encoder: Encoder) -> dict[str, Any]:
    """``config.json``: timm's keys, and ours under one that timm passes over."""
    ours = {
        "version": __version__,
        "image_size": run.view.size,
        "n_clusters": run.n_clusters if run.has_clusters else None,
        "n_groups": None if run.groups is None else run.groups.n_groups,
        "backbone": run.config.network.backbone,
    }
    if timm_model is None:
        return {"siammm": ours}
    import timm

    usual: dict[str, Any] = dict(cast(Any, timm.get_pretrained_cfg(timm_model.architecture)).to_dict())
    side = run.view.size * timm_model.repeat
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
            "crop_pct": run.view.size / clean_side(run.view.size),
            "crop_mode": "center",
            "mean": list(run.view.mean),
            "std": list(run.view.std),
            "num_classes": 0,
            # With these timm can take other channels, or add a classifier to be trained.
            "first_conv": usual.get("first_conv"),
            "classifier": usual.get("classifier"),
        },
        "siammm": ours | {"pixels_repeated": timm_model.repeat},
    }


def _check(folder: Path, encoder: Encoder, size: int, timm_model: TimmModel) -> None:
    """Load the folder as anybody would, and compare: what is written is what was tried."""
    import timm

    with torch.random.fork_rng(devices=[]):
        model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    ours = deepcopy(encoder.backbone).cpu().float().eval()
    if not same_features(model, ours, size, timm_model.repeat, tolerance=1e-4):
        raise InputError(
            f"timm reads the exported {timm_model.architecture} back with other features, so it was not kept; leave "
            "encoder out of --formats, and tell the developers."
        )


def kept_card(folder: Path) -> str | None:
    """The model card in a folder, if somebody has edited it."""
    try:
        # An editor may have left any bytes and ends of lines in it, which are kept.
        text = (folder / files.CARD).read_bytes().decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return None
    except OSError as error:
        what = f"The card {folder / files.CARD} cannot be read ({one_line(error)}) to be kept"
        raise InputError(f"{what}; choose another folder.") from error
    return text if is_edited(text) else None


def write_card(folder: Path, text: str) -> None:
    """Write a model card."""
    (folder / files.CARD).write_bytes(as_bytes(text))


def refuse_run_folder(folder: Path) -> None:
    """Refuse to replace the ``config.json`` of a run, which could then not be resumed."""
    if is_run_folder(folder):
        raise InputError(f"{folder} is a run folder, whose {files.CONFIG} would be replaced; choose another folder.")
