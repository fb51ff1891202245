"""Heads, and the pair of encoders that is trained.

A backbone (``backbones.py``) turns images into features; the projector turns features into the embedding that is
clustered; the predictor guesses, from one view's embedding, what the momentum encoder makes of the other view. After
training only the backbone (for features) or the encoder (for clusters) is of use.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Self, cast, get_args

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from siammm.core.checks import check_at_least, check_one_of

# The operations on whole lists of tensors have no types.
_torch = cast(Any, torch)

LastNorm = Literal["plain", "affine", "none"]


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
