"""BatchNorm as part of the convolutions before it: the same network in evaluation, with less work.

In evaluation BatchNorm multiplies and adds the same numbers for every image, which the weights of a convolution can do
as well. On a CPU, where passing over a tensor costs as much as computing with it, this saves a good part of the time.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

# Rounding may change features by this share of the largest one. A wrong guess changes them by far more.
_ROUNDING = 1e-3


@torch.no_grad()
def folded(network: nn.Module, size: int) -> nn.Module | None:
    """A copy of a network in evaluation mode without its BatchNorm layers; None if that is another function.

    Which convolution a layer follows is guessed by the order in which layers were made, and then tried on an image of
    ``size`` pixels.
    """
    lean = copy.deepcopy(network).eval()
    previous: tuple[str, nn.Conv2d] | None = None
    found = False
    for name, layer in list(lean.named_modules()):
        if isinstance(layer, nn.Conv2d):
            previous = (name, layer)
        elif isinstance(layer, nn.BatchNorm2d):
            if previous is None or previous[1].out_channels != layer.num_features or layer.running_mean is None:
                return None
            _replace(lean, previous[0], fuse_conv_bn_eval(previous[1], layer))
            # timm's layers have their activation inside.
            _replace(lean, name, cast(Any, getattr(layer, "act", nn.Identity())))
            previous, found = None, True
    return lean if found and _is_same(copy.deepcopy(network).eval(), lean, size) else None


def _replace(network: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(network.get_submodule(parent), child, layer)


def _is_same(network: nn.Module, other: nn.Module, size: int) -> bool:
    parameter = next(network.parameters())
    x_13SS = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0)).to(parameter)
    expected, found = cast(Tensor, network(x_13SS)), cast(Tensor, other(x_13SS))
    return bool((expected - found).abs().max() <= _ROUNDING * expected.abs().max())
