"""What one process and several do alike: the layers, the network and the batches of ``test_batchnorm.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from siammm.learn.backbones import build_backbone
from siammm.learn.networks import Encoder, SiameseNetwork, predictor, projector


@dataclass(frozen=True)
class Case:
    """A layer, the shape of the joint batch, and how many of its rows each rank holds."""

    name: str
    shape: tuple[int, ...]
    rows: tuple[int, int]
    affine: bool = True
    momentum: float | None = 0.1
    track: bool = True
    dtype: torch.dtype = torch.float32
    offset: float = 0.0
    fused: bool = False
    channels_last: bool = False


CASES = [
    Case("flat", (8, 5), (4, 4)),
    Case("images", (8, 5, 4, 4), (4, 4)),
    Case("channels last", (8, 5, 4, 4), (4, 4), channels_last=True),
    Case("uneven", (9, 5, 3, 3), (7, 2)),
    Case("one row", (5, 4), (4, 1)),
    Case("none", (6, 5, 3, 3), (6, 0)),
    Case("none first", (6, 5), (0, 6)),
    Case("plain", (8, 5), (5, 3), affine=False),
    Case("cumulative", (8, 5), (5, 3), momentum=None),
    Case("untracked", (8, 5), (5, 3), track=False),
    Case("double", (8, 5), (5, 3), dtype=torch.float64),
    Case("far from zero", (64, 5), (40, 24), offset=1000.0),
    Case("with activation", (8, 5, 4, 4), (5, 3), fused=True),
]


class NormAndActivation(nn.BatchNorm2d):
    """Built as timm's BatchNormAct2d is, which would take every rank seconds to import."""

    def __init__(self, channels: int, **settings: Any) -> None:
        super().__init__(channels, **settings)
        self.drop, self.act = nn.Identity(), nn.SiLU()

    def forward(self, input: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(input)))


def layer(case: Case) -> nn.Module:
    torch.manual_seed(3)
    settings: dict[str, Any] = {"affine": case.affine, "momentum": case.momentum, "track_running_stats": case.track}
    if case.fused:
        norm: Any = NormAndActivation(case.shape[1], **settings)
    else:
        norm = (nn.BatchNorm1d if len(case.shape) == 2 else nn.BatchNorm2d)(case.shape[1], **settings)
    if case.affine:
        nn.init.normal_(norm.weight, 1, 0.3)
        nn.init.normal_(norm.bias)
    return norm.to(case.dtype)


def joint(case: Case) -> tuple[Tensor, Tensor]:
    """The joint batch, and what its outputs are multiplied with in the loss."""
    x, weigh = torch.randn(2, *case.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    x = (case.offset + 3 * x).to(case.dtype)
    return (x.contiguous(memory_format=torch.channels_last) if case.channels_last else x), weigh.to(case.dtype)


def shares(case: Case) -> list[tuple[Tensor, Tensor]]:
    x, weigh = joint(case)
    return list(zip(x.split(list(case.rows)), weigh.split(list(case.rows)), strict=True))


def passed(norm: Any, case: Case, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Two passes through the layer; what comes out of the second, forward and back, and what the layer remembers."""
    x, weigh = batch
    norm(2 * x.detach())
    x = x.detach().clone().requires_grad_()
    out = norm(x)
    (out.square() * weigh).sum().backward()
    assert x.grad is not None
    found = {"out": out.detach(), "grad": x.grad}
    if case.affine:
        found |= {"weight_grad": norm.weight.grad, "bias_grad": norm.bias.grad}
    if case.track:
        found |= {key: getattr(norm, key) for key in ("running_mean", "running_var", "num_batches_tracked")}
        with torch.no_grad():
            found["evaluated"] = norm.eval()(x)
    return found


def network() -> SiameseNetwork:
    torch.manual_seed(0)
    encoder = Encoder(build_backbone("conv-small", image_size=8), projector(256, 32, 16))
    return SiameseNetwork(encoder, predictor(16, 32))


def batches() -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(3, 2, 12, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return [(x_1, x_2) for x_1, x_2 in x]


def loss_of(v_1: Tensor, v_2: Tensor, v_1m: Tensor, v_2m: Tensor) -> Tensor:
    cosine = nn.functional.cosine_similarity
    return 2 - cosine(v_1, v_2m).mean() - cosine(v_2, v_1m).mean()
