"""The weights that training starts from: of any model that ``runs/models.py`` opens, matched with the backbone.

Of the subject only the backbone is used: projector, predictor and clusters are of its own images, and start anew.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import Tensor

from siammm.core.errors import InputError
from siammm.core.text import shown
from siammm.data.sources import Source
from siammm.learn.backbones import build_backbone
from siammm.learn.build import image_size
from siammm.learn.start import NO_WEIGHTS, Start
from siammm.runs import lite
from siammm.runs.models import Model, open_model
from siammm.runs.pretrained import is_foreign
from siammm.runs.run import Run
from siammm.runs.weights import COUNTER, LEAST_SHARE
from siammm.settings.training import PresetName, TrainConfig

# Known weights need a short training at a low rate; a preset for new ones would soon have them forgotten.
PRESET: PresetName = "photos"
_SHOWN = 3


def settings_of(given: str) -> dict[str, Any]:
    """The settings that follow from weights where no others are given: their network and, for a run, its image size.

    Only names and settings are read, and nothing is downloaded.
    """
    if given == NO_WEIGHTS:
        return {}
    if is_foreign(given):
        return {"weights": given, "backbone": _foreign_backbone(given)}
    run = Run.open(given)
    return {"weights": given, "backbone": _architecture(run.backbone), "image_size": run.image_size}


def from_anywhere(given: str) -> str:
    """The weights as they are found from any folder: with an absolute path."""
    if given == NO_WEIGHTS or given == lite.LITE:
        return given
    if not is_foreign(given):
        return _absolute(given)
    kind, name, *file = given.split(":", 2)
    return ":".join([kind, name, *map(_absolute, file)])


def public_name(given: str) -> str:
    """What weights are called, without the folders of the machine that they lie on."""
    if given == NO_WEIGHTS or given == lite.LITE:
        return given
    if not is_foreign(given):
        return Path(given).name or given
    kind, name, *file = given.split(":", 2)
    return ":".join([kind, name, *(Path(path).name for path in file)])


def open_start(config: TrainConfig, source: Source) -> Start | None:
    """What the backbone of these settings starts from, for images of this source; None for random weights."""
    given, backbone = config.network.weights, config.network.backbone
    if given == NO_WEIGHTS:
        return None
    if not is_foreign(given) and not Path(given).expanduser().is_dir():
        raise InputError(
            f"--weights is {shown(given)}, but there is no such run; give the folder of one, lite, timm:MODEL, "
            "timm:MODEL:WEIGHTS or torchvision:MODEL:WEIGHTS."
        )
    size = image_size(config, source)
    model = open_model(given, image_size=size if is_foreign(given) else None)
    theirs = _architecture(str(model.record["backbone"]) if model.run is None else model.run.backbone)
    name = shown(public_name(given))
    if theirs != _architecture(backbone):
        raise InputError(
            f"--weights {name} is of the backbone {theirs}, but --backbone is {backbone}; leave --backbone out, give "
            f"weights of {backbone}, or use --weights none."
        )
    network = config.network
    ours = build_backbone(backbone, image_size=size, zero_init_residual=network.zero_init_residual).state_dict()
    wanted = {key: tensor for key, tensor in ours.items() if not key.endswith(COUNTER)}
    found = _known(model)
    fitting = {key: tensor for key, tensor in found.items() if key in ours and tensor.shape == ours[key].shape}
    anew = [key for key in wanted if key not in fitting]
    if len(wanted) - len(anew) < LEAST_SHARE * len(wanted):
        raise InputError(
            f"Only {len(wanted) - len(anew)} of the {len(wanted)} tensors of timm's {backbone} are in --weights {name} "
            f"with the same name and shape; give timm:{backbone}, or weights of timm's model."
        )
    return Start(
        tensors=fitting,
        normalisation=model.view.normalisation,
        is_whole=not anew,
        sentence=_sentence(name, anew, wanted, found),
    )


def _sentence(name: str, anew: list[str], wanted: dict[str, Tensor], found: dict[str, Tensor]) -> str:
    """What starts from the weights, and what starts anew."""
    heads = "the heads start from random weights"
    if not anew:
        return f"The backbone starts from {name}; {heads}."
    parts = [f"{key} {_difference(wanted[key], found.get(key))}" for key in anew[:_SHOWN]]
    more = f" and {len(anew) - _SHOWN:,} more" if len(anew) > _SHOWN else ""
    return f"The backbone starts from {name}, except for what does not fit: {', '.join(parts)}{more}; {heads} too."


def _difference(wanted: Tensor, found: Tensor | None) -> str:
    def sizes(tensor: Tensor) -> str:
        return " x ".join(map(str, tensor.shape))

    return "(not there)" if found is None else f"({sizes(found)} there, {sizes(wanted)} here)"


def _known(model: Model) -> dict[str, Tensor]:
    """The tensors of a model's backbone, without those that its checkpoint lacked, which are random."""
    missing = set(model.record.get("tensors_missing", ()))
    tensors = model.backbone.state_dict()
    return {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items() if key not in missing}


def _foreign_backbone(given: str) -> str:
    return lite.ARCHITECTURE if given == lite.LITE else _architecture(given.split(":", 2)[1])


def _architecture(name: str) -> str:
    """A model's name without the tag behind the dot, which says where its weights come from."""
    return name.partition(".")[0]


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))
