"""``siammm.embed``: embeddings of images by a pretrained encoder, for whoever clusters them in Python."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from siammm.core.device import choose_device
from siammm.data.loader import open_loader
from siammm.data.sources import open_source
from siammm.runs.models import features, open_model
from siammm.runs.pretrained import default_encoder


def embed(
    images: Any, encoder: str | None = None, *, image_size: int | None = None, device: str = "auto"
) -> np.ndarray:
    """Embeddings of images, one row per image in their order, without training anything.

    The same rows that ``siammm cluster`` finds groups in.

    Parameters
    ----------
    images : what ``SiamMM.fit`` takes: a folder, a file, an array (N, H, W, 3) of uint8; all must be readable
    encoder : ``lite``, ``timm:MODEL``, ``timm:MODEL:WEIGHTS``, ``torchvision:MODEL:WEIGHTS`` or a run folder; by
        default ``lite``, a small network with ImageNet weights, or the same one from timm if that is not installed
    image_size : width and height of the encoder's input; by default its own
    device : auto, cpu, cuda, cuda:1, mps

    Returns
    -------
    array (N, D) of float32: features of a pretrained model, embeddings of a run, which are of unit length
    """
    chosen = choose_device(device)
    model = open_model(encoder or default_encoder(), image_size=image_size, device=chosen)
    if model.warning is not None:
        warnings.warn(model.warning, stacklevel=2)
    loader = open_loader(open_source(images), (model.view, model.view), chosen, seed=0, limit=0.0)
    try:
        feature_ND, embedding_NE = features(model, loader)
    finally:
        loader.close()
    return (feature_ND if embedding_NE is None else embedding_NE).cpu().numpy()
