"""Muon: matrices turn, all their directions alike; LARS moves everything else.

LARS follows the gradient of a layer, in which few directions are large: it learns these and hardly moves along the
others. Muon makes the update orthogonal first (Newton and Schulz's iteration), so that every direction of a layer moves
as far. Two things are our own. A matrix keeps its size, which means nothing where a normalisation follows, as in all
networks here; so there is no decay, and nothing that grows over a long training. And a step is as long as one of LARS
at the same settings when the gradients of successive steps have nothing in common, so that one rate serves both.

Legend:  M matrices of one shape, R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from siammm.learn.lars import LARS, by_kind, gradients, replace

# The operations on whole lists of tensors have no types.
_torch = cast(Any, torch)

# The odd polynomial of degree 5 that Muon's author chose: it brings singular values near 1 in few rounds, not exactly.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ROUNDS = 5
# Most products are too small to fill a GPU: on streams beside each other, they take as long as the longest.
_STREAMS = 4


class Muon(LARS):
    """LARS, but for groups with ``turned=True``: these hold matrices and convolutions, which turn and keep their size.

    A matrix moves by ``lr * trust_coefficient / sqrt(1 - momentum**2)`` of its size, then is brought back to that. One
    that is 0 stays 0. ``lr`` is a number, or a 0-d tensor on the parameters' device.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; it is turned only if it says so."""
        param_group.setdefault("turned", False)
        super().add_param_group(param_group)

    def _move_groups(
        self, groups: Sequence[dict[str, Any]], grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        for group in groups:
            if group["turned"]:
                for params in by_kind(p for p in group["params"] if p.grad is not None):
                    self._turn(params, group, grad_scale, found_inf)
        rest = [group for group in groups if not group["turned"] and group["params"]]
        if rest:
            super()._move_groups(rest, grad_scale, found_inf)

    def _streams(self, device: torch.device) -> list[torch.cuda.Stream]:
        """The same in every step: each has a workspace of its own for products."""
        made: dict[torch.device, list[torch.cuda.Stream]] = self.__dict__.setdefault("_made_streams", {})
        if device.type == "cuda" and device not in made:
            made[device] = [torch.cuda.Stream(device) for _ in range(_STREAMS)]
        return made.get(device, [])

    def _turn(
        self, params: list[Tensor], group: dict[str, Any], grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """One step of matrices of one type on one device."""
        buffers = [self._buffer(p) for p in params]
        grads, momentum = gradients(params, grad_scale), group["momentum"]
        new_buffers = _torch._foreach_add(grads, buffers, alpha=momentum)
        # Nesterov's: the gradient counts once more than in the momentum.
        moves = _orthogonal(_torch._foreach_add(grads, new_buffers, alpha=momentum), self._streams(params[0].device))
        size, length = (torch.stack(_torch._foreach_norm(tensors)) for tensors in (params, moves))
        reach = group["trust_coefficient"] / math.sqrt(1 - momentum**2)
        factor = -group["lr"] * reach * size / length.where(length > 0, 1.0)
        new_params = _torch._foreach_mul(moves, list(factor.to(size.dtype).unbind()))
        _torch._foreach_add_(new_params, params)
        turned = torch.stack(_torch._foreach_norm(new_params))
        _torch._foreach_mul_(new_params, list((size / turned.where(turned > 0, 1.0)).unbind()))
        # Written beside the old values, which stay until it is known whether the step counts.
        replace([*params, *buffers], [*new_params, *new_buffers], found_inf)


def is_turned(p: Tensor) -> bool:
    """Whether a parameter is a matrix that can turn: not a depthwise convolution, which is many small filters."""
    rows, columns = (p.shape[0], p[0].numel()) if p.ndim in (2, 4) else (0, 0)
    return min(rows, columns) > 1 and not (p.ndim == 4 and p.shape[1] == 1) and bool(p.detach().any())


def _orthogonal(updates: list[Tensor], streams: Sequence[torch.cuda.Stream]) -> list[Tensor]:
    """The updates made orthogonal, in their own shapes and type."""
    alike: dict[tuple[int, int], list[int]] = {}
    for number, update in enumerate(updates):
        alike.setdefault((update.shape[0], update[0].numel()), []).append(number)
    # The longest first, so that none begins when the others are done.
    shapes = sorted(alike, key=lambda shape: -len(alike[shape]) * math.prod(shape) * min(shape))
    stacks = [torch.stack([_as_matrix(updates[number]) for number in alike[shape]]) for shape in shapes]
    found: list[Tensor] = []
    for number, stack_MRC in enumerate(stacks):
        if not streams:
            found.append(nearest_orthogonal(stack_MRC))
            continue
        stream = streams[number % len(streams)]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found.append(nearest_orthogonal(stack_MRC))
    for stream in streams[: len(stacks)]:
        torch.cuda.current_stream().wait_stream(stream)
    moves: dict[int, Tensor] = {}
    for shape, found_MRC in zip(shapes, found, strict=True):
        moves |= zip(alike[shape], found_MRC, strict=True)
    return [_as_it_was(moves[number], update) for number, update in enumerate(updates)]


def nearest_orthogonal(x_MRC: Tensor) -> Tensor:
    """The nearest matrices whose rows, or columns if these are fewer, are orthogonal and of length 1: roughly.

    Singular values end between about 0.7 and 1.2, but those that begin below a thousandth of the whole end smaller. On
    a GPU it is done in bf16, which is as good for this.
    """
    x = x_MRC.bfloat16() if x_MRC.is_cuda else x_MRC
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    length = torch.linalg.vector_norm(x_MRC, dim=(1, 2), keepdim=True)
    x = x / length.where(length > 0, 1.0).to(x.dtype)
    for _ in range(_ROUNDS):
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=_B, alpha=_C)
        x = torch.baddbmm(x, polynomial, x, beta=_A)
    return (x.mT if tall else x).to(x_MRC.dtype, memory_format=torch.contiguous_format)


def _as_matrix(update: Tensor) -> Tensor:
    """A row for each channel that comes out; no copy of a convolution whose channels are last in memory."""
    return update if update.ndim == 2 else update.permute(0, 2, 3, 1).reshape(update.shape[0], -1)


def _as_it_was(matrix: Tensor, update: Tensor) -> Tensor:
    if update.ndim == 2:
        return matrix
    out, channels, height, width = update.shape
    return matrix.view(out, height, width, channels).permute(0, 3, 1, 2)
