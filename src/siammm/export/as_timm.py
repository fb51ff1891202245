"""A backbone of ours as weights and arguments that ``timm.create_model`` builds by itself, with the same features.

Most backbones are timm's already. Those for small images are not: their ResNets begin with a convolution of 3 x 3 and
stride 1, without max-pooling up to 40 pixels, and no argument of timm gives a ResNet such a stem (7 x 7, stride 2, then
a pool of stride 2). But timm's stem can compute ours, bit for bit but for the order of sums, on an image whose pixels
are repeated:

- Repeat every pixel r times in both directions: pixel p of the large image is pixel p // r of the small one.
- *r = 2*, where max-pooling stays: the 7 x 7 kernel at output o sees pixels 2o - 3 ... 2o + 3; those at 2o - 2, 2o and
  2o + 2 are the small image's o - 1, o, o + 1. So the 3 x 3 kernel, spread by 2 with zeros between, is ours.
- *r = 4*, without pooling: at output 2o + 1 the kernel sees 4o - 1, 4o + 2, 4o + 5, which are o - 1, o, o + 1: the
  3 x 3 kernel spread by 3. timm's ``replace_stem_pool`` puts a convolution in place of the pool, 3 x 3 with stride 2,
  which here does nothing but pick outputs 2o + 1; its BatchNorm and ReLU leave what is 0 or more as it is.

Zeros beside the image meet zeros in both. ``conv-small`` is no ResNet, but four convolutions are a path through one: a
block whose shortcut is multiplied by 0 is two convolutions in a row, and one whose other branch is, is nothing at all.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from siammm.learn.backbones import CONV_SMALL, ConvSmall


@dataclass(frozen=True, kw_only=True)
class TimmModel:
    """What timm needs to build a backbone."""

    architecture: str
    arguments: dict[str, Any] = field(default_factory=dict)
    """Beside ``num_classes=0``; plain values, for JSON."""
    tensors: dict[str, Tensor]
    repeat: int = 1
    """How often each pixel is repeated, in both directions, before timm's model sees an image."""

    def built(self) -> nn.Module:
        """timm's model with these weights."""
        import timm

        with torch.random.fork_rng(devices=[]):  # new weights are drawn only to be replaced
            model = timm.create_model(self.architecture, num_classes=0, **self.arguments)
        model.load_state_dict(self.tensors, strict=True)
        return model.eval()


def as_timm(backbone: nn.Module, name: str, image_size: int) -> TimmModel | None:
    """The backbone for timm, tried on images; None where timm's arguments cannot describe it.

    ``name`` and ``image_size`` are those that ``build_backbone`` was given. All is compared on the CPU: a GPU may round
    the inputs of convolutions to 10 bits.
    """
    backbone = deepcopy(backbone).cpu().float().eval()
    for candidate in _candidates(backbone, name, image_size, _tensors(backbone)):
        try:
            model = candidate.built()
        except Exception:  # what a family of timm says of arguments or weights that are not its own is of any type
            continue
        if same_features(model, backbone, image_size, candidate.repeat, tolerance=1e-5):
            return candidate
    return None


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {key: value.detach().cpu().contiguous().clone() for key, value in module.state_dict().items()}


def _candidates(backbone: nn.Module, name: str, size: int, tensors: dict[str, Tensor]) -> list[TimmModel]:
    if name == CONV_SMALL:
        return [_conv_small(cast(ConvSmall, backbone))]
    # A tag says where weights come from, and these come from a run.
    architecture = name.partition(".")[0]
    stem, pool = getattr(backbone, "conv1", None), getattr(backbone, "maxpool", None)
    if isinstance(stem, nn.Conv2d) and stem.kernel_size == (3, 3) and stem.stride == (1, 1) and pool is not None:
        if not isinstance(pool, nn.Identity):
            tensors["conv1.weight"] = _spread(tensors["conv1.weight"], 2)
            return [TimmModel(architecture=architecture, tensors=tensors, repeat=2)]
        tensors["conv1.weight"] = _spread(tensors["conv1.weight"], 3)
        tensors |= _picking("maxpool", stem.out_channels)
        return [TimmModel(architecture=architecture, arguments={"replace_stem_pool": True}, tensors=tensors, repeat=4)]
    every: list[dict[str, Any]] = [{}, {"img_size": size}]
    return [TimmModel(architecture=architecture, arguments=arguments, tensors=tensors) for arguments in every]


@torch.no_grad()
def same_features(model: nn.Module, backbone: nn.Module, size: int, repeat: int, *, tolerance: float) -> bool:
    """Whether timm's model and ours make the same of images, on the CPU."""
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    ours, theirs = backbone(x), model(repeated(x, repeat))
    limit = tolerance * max(1.0, float(ours.abs().max()))
    return theirs.shape == ours.shape and float((theirs - ours).abs().max()) <= limit


def repeated(x_NCHW: Tensor, repeat: int) -> Tensor:
    """Images whose pixels are repeated in both directions."""
    return x_NCHW.repeat_interleave(repeat, dim=2).repeat_interleave(repeat, dim=3)


# -- stems -------------------------------------------------------------------------------------------------------------


def _spread(kernel_OI33: Tensor, step: int) -> Tensor:
    """A 3 x 3 kernel within one of 7 x 7, ``step`` pixels apart."""
    wide = kernel_OI33.new_zeros(*kernel_OI33.shape[:2], 7, 7)
    wide[:, :, 3 - step : 4 + step : step, 3 - step : 4 + step : step] = kernel_OI33
    return wide


def _picking(name: str, channels: int) -> dict[str, Tensor]:
    """A convolution of stride 2 that picks the outputs 2o + 1 of each channel, and a BatchNorm that does nothing."""
    return {f"{name}.0.weight": _delta(channels, at=2), **_plain_norm(f"{name}.1", channels)}


def _delta(channels: int, *, at: int = 1) -> Tensor:
    """A 3 x 3 kernel that takes one pixel of its own channel, by default the middle one."""
    kernel = torch.zeros(channels, channels, 3, 3)
    kernel[:, :, at, at] = torch.eye(channels)
    return kernel


def _plain_norm(name: str, channels: int, *, scale: float = 1.0) -> dict[str, Tensor]:
    """A BatchNorm that multiplies by ``scale``; its epsilon is made up for."""
    weight = torch.full((channels,), scale * math.sqrt(1 + nn.BatchNorm2d(1).eps))
    return {
        f"{name}.weight": weight,
        f"{name}.bias": torch.zeros(channels),
        f"{name}.running_mean": torch.zeros(channels),
        f"{name}.running_var": torch.ones(channels),
        f"{name}.num_batches_tracked": torch.tensor(0),
    }


# -- conv-small --------------------------------------------------------------------------------------------------------


def _conv_small(backbone: ConvSmall) -> TimmModel:
    """The four convolutions as a ResNet of four blocks, of which the first and the last do nothing.

    The first convolution is the stem; the second and third are the second block, with stride 2; the fourth is the first
    half of the third block, whose second half passes it on. ``output_stride`` keeps the last block from halving.
    """
    parts = [_tensors(layer) for layer in backbone.layers]
    first, second, third, fourth = (part["0.weight"].shape[0] for part in parts)
    tensors = {
        "conv1.weight": _spread(parts[0]["0.weight"], 3),
        **_norm_of(parts[0], "bn1"),
        **_picking("maxpool", first),
        **_idle_block("layer1.0", first),
        **_convolution_of(parts[1], "layer2.0", 1),
        **_convolution_of(parts[2], "layer2.0", 2),
        **_no_shortcut("layer2.0", first, third),
        **_convolution_of(parts[3], "layer3.0", 1),
        "layer3.0.conv2.weight": _delta(fourth),
        **_plain_norm("layer3.0.bn2", fourth),
        **_no_shortcut("layer3.0", third, fourth),
        **_idle_block("layer4.0", fourth),
    }
    arguments = {"layers": [1, 1, 1, 1], "channels": [first, second, fourth, fourth]}
    arguments |= {"replace_stem_pool": True, "output_stride": 16}
    return TimmModel(architecture="resnet18", arguments=arguments, tensors=tensors, repeat=4)


def _convolution_of(part: dict[str, Tensor], block: str, number: int) -> dict[str, Tensor]:
    return {f"{block}.conv{number}.weight": part["0.weight"], **_norm_of(part, f"{block}.bn{number}")}


def _norm_of(part: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {f"{name}.{key.removeprefix('1.')}": value for key, value in part.items() if key.startswith("1.")}


def _idle_block(block: str, channels: int) -> dict[str, Tensor]:
    """A block that passes on what comes in, which is 0 or more."""
    tensors: dict[str, Tensor] = {}
    for number in (1, 2):
        tensors[f"{block}.conv{number}.weight"] = torch.zeros(channels, channels, 3, 3)
        tensors |= _plain_norm(f"{block}.bn{number}", channels, scale=0.0)
    return tensors


def _no_shortcut(block: str, narrow: int, wide: int) -> dict[str, Tensor]:
    return {
        f"{block}.downsample.0.weight": torch.zeros(wide, narrow, 1, 1),
        **_plain_norm(f"{block}.downsample.1", wide, scale=0.0),
    }
