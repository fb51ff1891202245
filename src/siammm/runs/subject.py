"""What is measured: a run of ours, a model of timm or torchvision with its weights, or a table of embeddings.

    runs/photos                            a folder that ``siammm train`` or ``SiamMM.save`` wrote
    timm:resnet50                          timm's pretrained weights, where they can be had
    timm:resnet50:weights.pth              somebody's checkpoint of that model
    torchvision:resnet50:weights.pth       the same for torchvision's models
    embeddings.npz                         a table, as ``siammm cluster`` reads it

Legend:  N images, D features, E dimensions of the embedding that is clustered, S pixels of an image's side.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from siammm.core.errors import InputError
from siammm.data.embeddings import EmbeddingTable, read_embeddings
from siammm.data.loader import Loader
from siammm.data.view_settings import ViewSettings, views
from siammm.learn.networks import Encoder, build_backbone
from siammm.mixture.estimator import VonMisesFisherMixture
from siammm.runs import folder as run
from siammm.runs import results, weights
from siammm.runs.folder import RunFolder
from siammm.settings.training import DataConfig

EncoderChoice = Literal["online", "momentum"]

TABLES = (".npy", ".npz", ".parquet", ".pq", ".safetensors")
_USUAL_SIZE = 224
_LARGEST_WITH_FINE_STEM = 96
_WHAT_IS_MEASURED = (
    "a run folder, timm:MODEL, timm:MODEL:WEIGHTS, torchvision:MODEL:WEIGHTS or a table of embeddings "
    f"({', '.join(TABLES)})"
)


@dataclass(frozen=True, kw_only=True)
class TableSubject:
    """Embeddings that somebody made; there is no encoder to see other images with."""

    name: str
    table: EmbeddingTable
    record: dict[str, Any]
    """What the evaluation says about it."""


@dataclass(frozen=True, kw_only=True)
class ImageSubject:
    """A backbone, and how images are shown to it."""

    name: str
    backbone: nn.Module
    view: ViewSettings
    """Size, mean and deviation of a clean image; for a run, its augmentation too."""
    record: dict[str, Any]
    """What the evaluation says about it."""
    mixture: VonMisesFisherMixture | None = None
    """The clusters that a run found."""
    clustered: Encoder | None = None
    """The encoder whose embeddings that mixture is of: a run's momentum encoder, or its only one."""
    data: str | None = None
    """The images that a run was trained on."""
    fingerprint: str | None = None
    """And how they are recognised."""
    reading: DataConfig | None = None
    """How the run read them."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """What a run measured after each epoch."""
    warning: str | None = None
    """A sentence that the user should see beside the figures."""

    @property
    def num_features(self) -> int:
        """Columns of its features."""
        return int(cast(Any, self.backbone).num_features)


Subject = TableSubject | ImageSubject


def open_subject(
    given: str,
    *,
    encoder: EncoderChoice = "online",
    image_size: int | None = None,
    key: str | None = None,
    label_column: str | None = None,
    device: torch.device | str = "cpu",
) -> Subject:
    """Open what is to be measured.

    ``encoder`` chooses between the two of a run, and between those of a checkpoint that holds both. ``image_size`` is
    for models of timm and torchvision, by default their own; a run is measured at its own. ``key`` and
    ``label_column`` are for tables.
    """
    if image_size is not None and image_size < 1:
        raise InputError(f"--image-size is {image_size}, but an image has 1 pixel or more a side; leave it out.")
    scheme, _, rest = given.partition(":")
    if scheme in ("timm", "torchvision") and rest:
        model, _, path = rest.partition(":")
        build = _from_timm if scheme == "timm" else _from_torchvision
        subject = build(given, model, Path(path).expanduser() if path else None, encoder, image_size)
        return _on(subject, device)
    path = Path(given).expanduser()
    if path.is_dir():
        if image_size is not None:
            raise InputError(f"{given} is a run, which is measured at its own size of images; leave --image-size out.")
        return _on(_from_run(given, path, encoder), device)
    if path.suffix.lower() in TABLES:
        table = read_embeddings(path, key=key, label_column=label_column)
        n, d = table.embeddings.shape
        return TableSubject(
            name=given, table=table, record={"kind": "embeddings", "name": given, "n_samples": n, "n_features": d}
        )
    what = "is not one of these" if path.exists() else "does not exist"
    raise InputError(f"{given} {what}: {_WHAT_IS_MEASURED}; check the path.")


def _on(subject: ImageSubject, device: torch.device | str) -> ImageSubject:
    for module in (subject.backbone, subject.clustered):
        if module is not None:
            module.to(device).eval()
            if torch.device(device).type == "cuda":
                cast(Any, module).to(memory_format=torch.channels_last)
    return subject


# -- runs --------------------------------------------------------------------------------------------------------------


def _from_run(given: str, path: Path, choice: EncoderChoice) -> ImageSubject:
    if not (path / run.ENCODER).is_file():
        if (path / run.CONFIG).is_file():
            raise InputError(f"The run {given} has not finished; go on with: siammm train --resume {given}.")
        raise InputError(f"{given} is a folder, but no run: it has no {run.ENCODER}; give {_WHAT_IS_MEASURED}.")
    network, config, view = results.load_network(path / run.ENCODER)
    if choice == "momentum" and network.momentum_encoder is None:
        raise InputError(f"The run {given} has no momentum encoder; leave --encoder out.")
    chosen = network.momentum_encoder if choice == "momentum" else network.encoder
    assert chosen is not None
    mixture = VonMisesFisherMixture.load(path / run.MIXTURE) if (path / run.MIXTURE).is_file() else None
    data, fingerprint, reading, history = None, None, None, []
    if (path / run.CONFIG).is_file():
        folder, stored, facts = RunFolder.open(path)
        data = facts.get("data_path", stored.data)
        fingerprint, reading, history = facts.get("fingerprint"), stored.reading, folder.metrics()
    return ImageSubject(
        name=given,
        backbone=chosen.backbone,
        view=view,
        mixture=mixture,
        clustered=None if mixture is None else network.momentum_encoder or network.encoder,
        data=data,
        fingerprint=fingerprint,
        reading=reading,
        history=history,
        record={
            "kind": "run",
            "name": given,
            "path": str(path.resolve()),
            "backbone": config.network.backbone,
            "encoder": choice,
            "image_size": view.size,
            "n_features": chosen.num_features,
            "n_clusters": None if mixture is None else int(mixture.n_components_),
            "epochs": config.optimisation.epochs,
            "random_state": config.run.random_state,
            "trained_on": {"data": data, "fingerprint": fingerprint},
        },
    )


# -- other people's models ---------------------------------------------------------------------------------------------


def _from_timm(given: str, name: str, path: Path | None, choice: EncoderChoice, image_size: int | None) -> ImageSubject:
    import timm

    if not timm.is_model(name):
        raise _unknown("timm", name, timm.list_models())
    settings: dict[str, Any] = dict(cast(Any, timm.get_pretrained_cfg(name) or _Nothing()).to_dict())
    usual = int((settings.get("input_size") or (3, _USUAL_SIZE, _USUAL_SIZE))[-1])
    size = image_size or usual
    if path is None:
        backbone, loaded = _pretrained(name, size), None
    else:
        tensors = weights.read_tensors(path)
        with torch.random.fork_rng(devices=[]):  # new weights are drawn only to be replaced
            backbone = build_backbone(name, image_size=_size_of_stem(tensors, size), zero_init_residual=False)
        loaded = weights.load_matching(backbone, tensors, name=name, path=path, prefer_slow=choice == "momentum")
    mean, std = (tuple(settings.get(key) or default) for key, default in _colours())
    view = replace(views(size)[0], mean=mean, std=std)  # pyright: ignore[reportArgumentType]
    return _foreign("timm", given, name, backbone, view, path, loaded)


def _pretrained(name: str, size: int) -> nn.Module:
    try:
        return build_backbone(name, image_size=size, pretrained=True, zero_init_residual=False)
    except InputError as error:
        # The sentence is written for training, which can do without.
        raise InputError(str(error).replace("train without them", f"give a file, as in timm:{name}:WEIGHTS")) from error


def _from_torchvision(
    given: str, name: str, path: Path | None, choice: EncoderChoice, image_size: int | None
) -> ImageSubject:
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        raise _unknown("torchvision", name, known)
    size = image_size or _USUAL_SIZE
    with torch.random.fork_rng(devices=[]):
        try:
            backbone = models.get_model(name, weights="DEFAULT" if path is None else None)
        except Exception as error:  # what a download raises is of any type
            reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            raise InputError(
                f"The weights of torchvision's {name} are out of reach ({reason}); give torchvision:{name}:WEIGHTS."
            ) from error
    _without_classifier(backbone, name)
    loaded = None
    if path is not None:
        tensors = weights.read_tensors(path)
        loaded = weights.load_matching(backbone, tensors, name=name, path=path, prefer_slow=choice == "momentum")
    view = replace(views(size)[0], **dict(_colours()))
    return _foreign("torchvision", given, name, backbone, view, path, loaded)


def _foreign(
    kind: str,
    given: str,
    name: str,
    backbone: nn.Module,
    view: ViewSettings,
    path: Path | None,
    loaded: weights.Loaded | None,
) -> ImageSubject:
    _try(backbone, given, view.size)
    record: dict[str, Any] = {
        "kind": kind,
        "name": given,
        "backbone": name,
        "image_size": view.size,
        "n_features": int(cast(Any, backbone).num_features),
        "weights": "pretrained" if path is None else str(path.resolve()),
    }
    if loaded is not None:
        record |= {
            "prefix": loaded.prefix,
            "tensors_matched": loaded.n_matched,
            "tensors_missing": loaded.missing,
            "tensors_unused": loaded.unused,
        }
    warning = None if loaded is None or path is None else loaded.sentence(path)
    return ImageSubject(name=given, backbone=backbone, view=view, record=record, warning=warning)


@torch.no_grad()
def _try(backbone: nn.Module, given: str, size: int) -> None:
    """Show the model an image: some take one size alone, and what they say then is a traceback."""
    backbone.eval()
    try:
        feature_1D = backbone(torch.zeros(1, 3, size, size))
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
        raise InputError(
            f"{given} cannot be shown images of {size} x {size} pixels ({reason}); give another --image-size."
        ) from error
    if not isinstance(feature_1D, Tensor) or feature_1D.ndim != 2:
        shape = tuple(feature_1D.shape) if isinstance(feature_1D, Tensor) else type(feature_1D).__name__
        raise InputError(f"{given} turns an image into {shape}, not into a row of features; measure another model.")


def _colours() -> list[tuple[str, tuple[float, float, float]]]:
    usual = ViewSettings(size=_USUAL_SIZE)
    return [("mean", usual.mean), ("std", usual.std)]


def _size_of_stem(tensors: dict[str, Tensor], size: int) -> int:
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


def _unknown(kind: str, name: str, known: list[str]) -> InputError:
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "check its name."
    return InputError(f"{kind} has no model {name!r}; {hint}")


class _Nothing:
    def to_dict(self) -> dict[str, Any]:
        return {}


# -- features ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def features(
    subject: ImageSubject,
    loader: Loader,
    *,
    embeddings: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Features (N, D) of a loader's images as the backbone leaves them, and on request the embeddings (N, E) that the
    run's mixture is of; both in float32 on the loader's device.
    """
    clustered = subject.clustered if embeddings else None
    parts_D: list[Tensor] = []
    parts_E: list[Tensor] = []
    for first, x in loader.clean(0, loader.n_images):
        if x.is_cuda:
            x = x.to(memory_format=torch.channels_last)
        feature_BD = subject.backbone(x).float()
        parts_D.append(feature_BD)
        if clustered is not None:
            same = clustered.backbone is subject.backbone
            parts_E.append((clustered.projector(feature_BD) if same else clustered(x)).float())
        if progress is not None:
            progress(first + x.shape[0], loader.n_images)
    if not parts_D:
        raise InputError(f"{loader.source.name} has no images that can be read; give another set.")
    return torch.cat(parts_D), torch.cat(parts_E) if parts_E else None
