"""Images through a trained network, without augmentation and without gradients.

There is one rule of precision, so that the same network gives the same embeddings whoever asks: float32, with
convolutions that do not round their inputs. Only training itself asks for bf16 (``autocast``), for what no run keeps:
its probes, and its clusters where the setting ``embeddings`` is "clean" (``Training.samples``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from siammm.data.loader import Loader
from siammm.learn.networks import SiameseNetwork

Output = Literal["embeddings", "features", "momentum features"]
_Rows = TypeVar("_Rows")
_Module = TypeVar("_Module", bound=nn.Module)


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
    the backbone makes of an image, for probes and for users; *momentum features* are those of the momentum encoder.
    ``autocast`` computes them in bf16, which is faster on a GPU.
    """
    encoder = network.encoder if output == "features" else network.momentum_encoder or network.encoder
    # Not by calling the encoder: a compiled one would be compiled again for evaluation and for every size of batch.
    function = encoder.forward if output == "embeddings" else encoder.features
    training = network.training
    network.eval()
    try:
        batches = encode_batches(function, loader, first=first, last=last, autocast=autocast)
        parts = [functional.normalize(rows.float(), dim=1) for _, rows in batches]
    finally:
        network.train(training)
    if not parts:  # a rank without images still has rows of the right width
        return torch.empty(0, width_of(network, output), device=loader.device)
    return torch.cat(parts)


@torch.no_grad()
def encode_batches(
    function: Callable[[Tensor], _Rows],
    loader: Loader,
    *,
    first: int = 0,
    last: int | None = None,
    autocast: bool = False,
) -> Iterator[tuple[int, _Rows]]:
    """What ``function`` makes of a loader's images, a batch at a time, with the position of the first of each batch."""
    for position, x in loader.clean(first, loader.n_images if last is None else last):
        if x.is_cuda:
            x = x.to(memory_format=torch.channels_last)
        with _full_precision(x.device), torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            rows = function(x)
        yield position, rows


def on_device(module: _Module, device: torch.device | str) -> _Module:
    """A network ready to encode: in evaluation mode, with the memory layout in which all images are encoded."""
    module.to(device).eval()
    if torch.device(device).type == "cuda":
        module.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    return module


def width_of(network: SiameseNetwork, output: Output) -> int:
    """Columns of ``encode``'s result."""
    return network.encoder.num_features if output != "embeddings" else network.encoder.embedding_dim


@contextlib.contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Convolutions in float32: by default a GPU rounds their inputs to 10 bits, which other tools do not."""
    if device.type != "cuda":
        yield
        return
    cudnn: Any = torch.backends.cudnn  # only partly typed
    before = cudnn.conv.fp32_precision
    cudnn.conv.fp32_precision = "ieee"
    try:
        yield
    finally:
        cudnn.conv.fp32_precision = before
