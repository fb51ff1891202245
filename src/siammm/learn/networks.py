"""Backbones, heads, and the pair of encoders that is trained.

A backbone turns images into features; the projector turns features into the embedding that is clustered; the predictor
guesses, from one view's embedding, what the momentum encoder makes of the other view. After training only the backbone
(for features) or the encoder (for clusters) is of use.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from siammm.core.checks import check_at_least, check_one_of
from siammm.core.errors import InputError

# The operations on whole lists of tensors have no types.
_torch = cast(Any, torch)

LastNorm = Literal["plain", "affine", "none"]
LAST_NORMS: tuple[LastNorm, ...] = ("plain", "affine", "none")

CONV_SMALL = "conv-small"

# A network made for 224 pixels halves an image five times. Small images lose the first halving, tiny ones two.
_LARGEST_WITHOUT_POOL = 40
_LARGEST_WITH_FINE_STEM = 96


# -- backbones ---------------------------------------------------------------------------------------------------------


class ConvSmall(nn.Module):
    """Four convolutions for images of 8 to 16 pixels, quick on a CPU; the mean over the image ends them.

    Made for scikit-learn's digits, of which one core trains an epoch (1,797 images, two views) in about 2 s.
    """

    def __init__(self, in_channels: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _convolution(in_channels, 64, stride=1),
            _convolution(64, 128, stride=2),
            _convolution(128, 128, stride=1),
            _convolution(128, 256, stride=2),
        )
        self.num_features = 256

    def forward(self, x: Tensor) -> Tensor:
        """Features (N, 256) of images (N, C, S, S)."""
        return _mean_over_image(self.layers(x))

    def parts_in_order(self) -> list[nn.Module | Callable[[Tensor], Tensor]]:
        """What ``forward`` does, one after another, for ``learn/cuda/fused.py``."""
        return [self.layers, _mean_over_image]


def build_backbone(
    name: str,
    *,
    image_size: int,
    in_channels: int = 3,
    pretrained: bool = False,
    zero_init_residual: bool = True,
    drop_path: float = 0.0,
) -> nn.Module:
    """A network that turns images (N, in_channels, image_size, image_size) into features (N, num_features).

    ``name`` is ``conv-small`` or any model of timm. ``zero_init_residual`` starts the blocks of a ResNet as the
    identity; families without such a start ignore it.

    For small images the stem of a ResNet is changed, since it was made for 224 pixels: up to 96 pixels its first
    convolution is 3 x 3 with stride 1, and up to 40 pixels there is no max-pooling either. A pretrained network keeps
    its stem, without which its weights mean nothing. A vision transformer is built for the image size, which must be a
    multiple of its patch size. Other families keep their stem, and see little of small images.
    """
    check_at_least("image_size", image_size, 4)
    check_at_least("in_channels", in_channels, 1)
    if not 0 <= drop_path < 1:
        raise InputError(f"drop_path is {drop_path!r}, but it must be at least 0 and below 1.")
    if name == CONV_SMALL:
        if pretrained or drop_path:
            asked = "pretrained weights" if pretrained else "drop_path"
            raise InputError(f"conv-small has no {asked}; choose a model of timm, such as resnet18.")
        return ConvSmall(in_channels)
    return _from_timm(name, image_size, in_channels, pretrained, zero_init_residual, drop_path)


def _from_timm(
    name: str, image_size: int, in_channels: int, pretrained: bool, zero_init_residual: bool, drop_path: float
) -> nn.Module:
    # Imported when asked for: it takes a second or two, and conv-small does without.
    import timm

    if not isinstance(name, str) or not timm.is_model(name):
        near = difflib.get_close_matches(str(name), [*timm.list_models(), CONV_SMALL], n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "timm.list_models() lists them."
        raise InputError(f"There is no backbone {name!r}; {hint}")
    settings: dict[str, Any] = {"num_classes": 0, "in_chans": in_channels}
    optional: dict[str, Any] = {"img_size": image_size, "zero_init_last": zero_init_residual}
    if drop_path:
        settings["drop_path_rate"] = drop_path
    model, taken = _created(name, image_size, settings, optional)
    _check_patches(model, name, image_size)
    if pretrained:
        # Only now, when it is known that the network fits the images: weights are large.
        model, _ = _created(name, image_size, settings | {"pretrained": True}, taken)
    else:
        _fit_stem(model, image_size)
    # Some families end in a layer that widens the features, which timm counts to the head.
    width = getattr(model, "head_hidden_size", None)
    if isinstance(width, int) and width != model.num_features:
        cast(Any, model).num_features = width
    return model


def _created(
    name: str, image_size: int, settings: dict[str, Any], optional: dict[str, Any]
) -> tuple[nn.Module, dict[str, Any]]:
    """A model of timm, and those of the optional settings that its family knows."""
    import timm

    optional = dict(optional)
    while True:
        try:
            return timm.create_model(name, **settings, **optional), optional
        except TypeError as error:
            unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if unknown is None or unknown.group(1) not in optional:
                raise _cannot_build(name, image_size, settings, error) from error
            del optional[unknown.group(1)]
        except Exception as error:  # what a download or a family's own checks raise is of any type
            raise _cannot_build(name, image_size, settings, error) from error


def _cannot_build(name: str, image_size: int, settings: dict[str, Any], error: Exception) -> InputError:
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    if settings.get("pretrained"):
        return InputError(f"The weights of {name!r} are out of reach ({reason}); train without them.")
    return InputError(f"{name!r} cannot be built for {image_size} pixels ({reason}); choose another backbone.")


def _check_patches(model: nn.Module, name: str, image_size: int) -> None:
    """Refuse an image size that does not divide into the patches of a vision transformer."""
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    sides = patch if isinstance(patch, tuple) else (patch,) if isinstance(patch, int) else ()
    uneven = [side for side in sides if image_size % side]
    if uneven:
        raise InputError(
            f"{name} cuts images into patches of {uneven[0]} pixels, but the image size is {image_size}; "
            f"use a multiple of {uneven[0]}, or another backbone."
        )


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


def _convolution(narrow: int, wide: int, *, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(narrow, wide, 3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(convolution, nn.BatchNorm2d(wide), nn.ReLU(inplace=True))


# -- heads -------------------------------------------------------------------------------------------------------------


def projector(
    in_features: int, hidden: int = 4096, out: int = 256, layers: int = 3, *, last_norm: LastNorm = "plain"
) -> nn.Sequential:
    """The head that makes features into embeddings: linear layers without bias, each with BatchNorm, ReLU between.

    The paper's is 3 layers deep "following MoCo v3", whose ResNet projector has 2. ``last_norm`` is the BatchNorm of
    the output layer: without learnt scale and shift as in MoCo v3 ("plain"), with them ("affine"), or none at all.
    """
    return _head(in_features, hidden, out, layers, last_norm)


def predictor(dim: int = 256, hidden: int = 4096, layers: int = 2, *, last_norm: LastNorm = "none") -> nn.Sequential:
    """The head that predicts the momentum encoder's embedding of the other view; built like the projector.

    MoCo v3 ends it in a BatchNorm for vision transformers and in none for ResNets; the paper has one on every layer.
    """
    return _head(dim, hidden, dim, layers, last_norm)


def _head(in_features: int, hidden: int, out: int, layers: int, last_norm: LastNorm) -> nn.Sequential:
    for name, value in (("in_features", in_features), ("hidden", hidden), ("out", out), ("layers", layers)):
        check_at_least(name, value, 1)
    check_one_of("last_norm", last_norm, LAST_NORMS)
    widths = [in_features, *[hidden] * (layers - 1), out]
    parts: list[nn.Module] = []
    for depth in range(layers):
        parts.append(nn.Linear(widths[depth], widths[depth + 1], bias=False))
        if depth < layers - 1:
            parts += [nn.BatchNorm1d(widths[depth + 1]), nn.ReLU(inplace=True)]
    if last_norm != "none":
        parts.append(nn.BatchNorm1d(out, affine=last_norm == "affine"))
    return nn.Sequential(*parts)


# -- encoders ----------------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """Backbone and projector: from images to embeddings."""

    def __init__(self, backbone: nn.Module, projector: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.projector = projector
        self.num_features = int(cast(Any, backbone).num_features)
        self.embedding_dim = [layer.out_features for layer in projector.modules() if isinstance(layer, nn.Linear)][-1]

    def features(self, x: Tensor) -> Tensor:
        """Features (N, num_features) of images, in single precision or better: for linear and kNN classifiers."""
        return _at_least_single(self.backbone(x))

    def forward(self, x: Tensor) -> Tensor:
        """Embeddings (N, D) of images, not normalised, in single precision or better."""
        return _at_least_single(self.projector(self.backbone(x)))

    def parts_in_order(self) -> list[nn.Module | Callable[[Tensor], Tensor]]:
        """What ``forward`` does, one after another, for ``learn/cuda/fused.py``."""
        return [self.backbone, self.projector, _at_least_single]


class Predictions(NamedTuple):
    """What the online encoder makes of two views."""

    v_1: Tensor
    v_2: Tensor
    """Predictions, with gradients."""
    z_1: Tensor
    z_2: Tensor
    """Projections, with gradients too; ``targets`` cuts them off."""
    scores: tuple[Tensor, Tensor] | None
    """Cosines of the predictions with the prototypes, where there are any, with gradients."""


class SiameseNetwork(nn.Module):
    """The online encoder with its predictor, and the momentum encoder that follows it.

    Each view is a BatchNorm batch of its own. The momentum encoder starts as a copy and follows by its parameters
    alone; the statistics of its BatchNorm layers are those of its own activations, without which it evaluates badly.

    With ``momentum=False`` (SimSiam) there is none, and the targets are the online encoder's own projections; with
    ``predictor=None`` predictions are projections. ``n_prototypes`` directions are learnt beside the encoder if that is
    above 0 (SwAV).
    """

    def __init__(
        self, encoder: Encoder, predictor: nn.Module | None = None, *, momentum: bool = True, n_prototypes: int = 0
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.predictor = predictor
        self.prototypes = nn.Linear(encoder.embedding_dim, n_prototypes, bias=False) if n_prototypes else None
        self.momentum_encoder = copy.deepcopy(encoder).requires_grad_(False) if momentum else None
        self.normalise_prototypes()
        # What ``learn/cuda`` puts in place of two calls of a network, and of the momentum encoder's update.
        self.fused: dict[str, Callable[[Tensor, int], Tensor]] = {}
        self.follow: Callable[[Sequence[Tensor], Sequence[Tensor], Tensor], bool] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For copies: without what was made for the layers of this very network."""
        return super().__getstate__() | {"fused": {}, "follow": None}

    def _both(self, name: str, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """What one of the networks makes of two batches, each a BatchNorm batch of its own."""
        network = cast(nn.Module, getattr(self, name))
        if name not in self.fused or not network.training:
            return network(first), network(second)
        one, two = self.fused[name](torch.cat([first, second]), 2).chunk(2)
        return one, two

    def forward(self, x_1: Tensor, x_2: Tensor, noise: tuple[Tensor, Tensor] | None = None) -> Predictions:
        """Predictions and projections of two views; ``noise`` is added to what the predictor reads of each (ProPos)."""
        z_1, z_2 = self._both("encoder", x_1, x_2)
        v_1, v_2 = (z_1, z_2) if noise is None else (z_1 + noise[0], z_2 + noise[1])
        if self.predictor is not None:
            v_1, v_2 = (_at_least_single(v) for v in self._both("predictor", v_1, v_2))
        scores = None if self.prototypes is None else (self.scored(v_1), self.scored(v_2))
        return Predictions(v_1, v_2, z_1, z_2, scores)

    def scored(self, v: Tensor) -> Tensor:
        """Cosines (N, K) of embeddings with the prototypes."""
        assert self.prototypes is not None
        # In single precision: codes divide the scores by .05, and their rounding with them.
        with torch.autocast(v.device.type, enabled=False):
            return functional.normalize(v.float(), dim=1) @ functional.normalize(self.prototypes.weight, dim=1).T

    @torch.no_grad()
    def normalise_prototypes(self) -> None:
        """Bring the prototypes back to unit length, as SwAV does at every step.

        Only their directions count; but weight decay shrinks them, and under LARS, which rescales even a decay alone,
        those that stand still would be gone within an epoch.
        """
        if self.prototypes is not None:
            self.prototypes.weight.copy_(functional.normalize(self.prototypes.weight, dim=1))

    @torch.no_grad()
    def targets(self, x_1: Tensor, x_2: Tensor, z_1: Tensor, z_2: Tensor) -> tuple[Tensor, Tensor]:
        """What the predictions are compared with, v_1m and v_2m, without gradients.

        The momentum encoder's embeddings of the views; without one, the projections z that ``forward`` returned.
        """
        return (z_1.detach(), z_2.detach()) if self.momentum_encoder is None else self.followed(x_1, x_2)

    @torch.no_grad()
    def followed(self, x_1: Tensor, x_2: Tensor) -> tuple[Tensor, Tensor]:
        """The momentum encoder's embeddings of two views, without gradients."""
        return self._both("momentum_encoder", x_1, x_2)

    @torch.no_grad()
    def update_momentum(self, momentum: float | Tensor) -> None:
        """Move the momentum encoder's parameters towards the online ones by 1 - momentum; buffers stay its own.

        A 0-d tensor is never read on the host, so that a captured graph can be replayed with another value; make it
        double precision, in which 1 - momentum is exact enough as momentum nears 1.
        """
        if self.momentum_encoder is None:
            return
        followers, leaders = list(self.momentum_encoder.parameters()), list(self.encoder.parameters())
        if not isinstance(momentum, Tensor):
            _torch._foreach_lerp_(followers, leaders, 1 - momentum)
            return
        share = (1 - momentum).to(followers[0])
        if self.follow is not None and self.follow(followers, leaders, share):
            return
        # The grouped lerp takes its weight from the host; the same in three steps does not.
        moves = _torch._foreach_sub(leaders, followers)
        _torch._foreach_mul_(moves, share)
        _torch._foreach_add_(followers, moves)


def _at_least_single(x: Tensor) -> Tensor:
    """What autocast left in half precision, in single: what follows are norms, losses and sums over many images."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
