"""An experiment: Muon for the convolutions, and for the matrices of the heads if wanted; LARS for everything else.

Where LARS scales a layer's gradient to a share of its weight, Muon first makes it orthogonal: all directions of a layer
move alike, not only those in which gradients are large. A step is a share of the weight here too, so that one rate
serves both. Not tried on a GPU yet.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from siammm.learn.networks import SiameseNetwork
from siammm.learn.optim import LARS

# The polynomial that Newton and Schulz's iteration is run with, as Muon's authors chose it: quick, not exact.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """``share`` times the rate is how far a matrix moves in a step, as a share of its own size."""

    def __init__(
        self,
        network: SiameseNetwork,
        lr: float,
        *,
        weight_decay: float,
        momentum: float,
        trust_coefficient: float,
        share: float,
        heads: bool,
    ) -> None:
        part = network if heads else network.encoder.backbone
        matrices = [p for p in part.parameters() if p.requires_grad and p.ndim in (2, 4)]
        known = {id(p) for p in matrices}
        rest = [p for p in network.parameters() if p.requires_grad and id(p) not in known]
        self._others = LARS(
            [
                {"params": [p for p in rest if p.ndim > 1], "weight_decay": weight_decay},
                {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0, "excluded": True},
            ],
            lr,
            momentum=momentum,
            trust_coefficient=trust_coefficient,
        )
        super().__init__([{"params": matrices, "momentum": momentum}], {"lr": lr})
        self._share = share
        for p in matrices:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        self.param_groups += self._others.param_groups  # the same: a rate that is set is set for both
        # Matrices of one shape are worked on together.
        self._alike: dict[tuple[int, int], list[Tensor]] = {}
        for p in matrices:
            self._alike.setdefault((p.shape[0], p[0].numel()), []).append(p)
        # The longest first.
        self._alike = dict(sorted(self._alike.items(), key=lambda item: -(item[0][0] ** 2) * item[0][1] * len(item[1])))
        self._streams = [torch.cuda.Stream() for _ in range(4)] if matrices[0].is_cuda else []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Move the parameters one step, unless ``found_inf`` holds 1."""
        failed: Tensor = self.found_inf  # pyright: ignore[reportAttributeAccessIssue] - the step sets it
        self._others.found_inf = failed  # pyright: ignore[reportAttributeAccessIssue]
        if not self._streams:
            for params in self._alike.values():
                self._move(params, failed)
            self._others.step()
            return
        # Most of these products are too small for a GPU: side by side they take as long as the longest.
        here = torch.cuda.current_stream()
        for number, params in enumerate(self._alike.values()):
            stream = self._streams[number % len(self._streams)]
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                self._move(params, failed)
        self._others.step()
        for stream in self._streams:
            here.wait_stream(stream)

    def _move(self, params: list[Tensor], failed: Tensor) -> None:
        """One step of matrices of one shape."""
        group = self.param_groups[0]
        grads = torch.stack([_rows(p.grad) for p in params if p.grad is not None])
        buffers = torch.stack([_rows(self.state[p]["momentum_buffer"]) for p in params])
        buffers = group["momentum"] * buffers + grads
        moves = _orthogonal(grads + group["momentum"] * buffers)
        weights = torch.stack([_rows(p) for p in params])
        size, moved = (torch.linalg.vector_norm(m, dim=(1, 2), keepdim=True) for m in (weights, moves))
        weights = weights - group["lr"] * self._share * size * moves / moved.clamp_min(1e-9)
        for p, weight, buffer in zip(params, weights, buffers, strict=True):
            for old, new in ((p, weight), (self.state[p]["momentum_buffer"], buffer)):
                if old.ndim == 4:
                    out, channels, height, width = old.shape
                    new = new.view(out, height, width, channels).permute(0, 3, 1, 2)
                old.copy_(torch.where(failed > 0, old, new))


def _rows(weight: Tensor | None) -> Tensor:
    """A weight as a matrix, a row for each channel that it makes; no copy where channels are last."""
    assert weight is not None
    return weight if weight.ndim == 2 else weight.permute(0, 2, 3, 1).reshape(weight.shape[0], -1)


def _orthogonal(moves: Tensor) -> Tensor:
    """The nearest matrices of the shape whose rows, or columns if these are fewer, are orthogonal: about."""
    x = moves.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x.float(), dim=(1, 2), keepdim=True).clamp_min(1e-9).bfloat16()
    for _ in range(_ITERATIONS):
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=_B, alpha=_C)
        x = torch.baddbmm(x, polynomial, x, beta=_A)
    return (x.mT if tall else x).float()
