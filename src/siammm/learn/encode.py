"""Images through a trained network, without augmentation and without gradients."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as functional
from torch import Tensor

from siammm.data.loader import Loader
from siammm.learn.networks import SiameseNetwork

Output = Literal["embeddings", "features", "momentum features"]


@torch.no_grad()
def encode(
    network: SiameseNetwork,
    loader: Loader,
    output: Output,
    *,
    first: int = 0,
    last: int | None = None,
    autocast: bool = False,
) -> Tensor:
    """Rows of unit length for a loader's images from ``first`` up to ``last``, in order.

    *embeddings* are what is clustered: the projections of the momentum encoder, or of the only one. *features* are what
    the backbone makes of an image, for probes and for users; those of the momentum encoder where they are asked for.
    ``autocast`` computes them in bf16, which is faster on a GPU.
    """
    last = loader.n_images if last is None else last
    encoder = network.momentum_encoder or network.encoder
    if output == "features":
        encoder = network.encoder
    # Not by calling the encoder: a compiled one would be compiled again for evaluation and for every size of batch.
    function = encoder.forward if output == "embeddings" else encoder.features
    training = network.training
    network.eval()
    parts: list[Tensor] = []
    try:
        for _, x in loader.clean(first, last):
            if x.is_cuda:
                x = x.to(memory_format=torch.channels_last)
            with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
                rows = function(x)
            parts.append(functional.normalize(rows.float(), dim=1))
    finally:
        network.train(training)
    if not parts:  # a rank without images still has rows of the right width
        return torch.empty(0, width_of(network, output), device=loader.device)
    return torch.cat(parts)


def width_of(network: SiameseNetwork, output: Output) -> int:
    """Columns of ``encode``'s result."""
    return network.encoder.num_features if output != "embeddings" else network.encoder.embedding_dim
