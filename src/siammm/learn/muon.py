"""Muon for the matrices of a network; LARS for everything else.

The gradient of a layer is large in few directions, which LARS follows. Muon makes the update orthogonal first
(Newton-Schulz iteration), so that all directions move equally far. Two things differ from the original. A matrix keeps
its norm, which has no effect before a normalisation layer, as in ResNets; so there is no weight decay, and no norm that
grows over a long training. And a step is as long as one of LARS at the same settings, if successive gradients are
uncorrelated, so that one learning rate serves both.

Legend:  M matrices of one shape, R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from siammm.core.errors import InputError
from siammm.learn.lars import LARS, by_kind, gradients, negative, replace

# The operations on whole lists of tensors have no types.
_torch = cast(Any, torch)

# The odd polynomial of degree 5 that Muon's author chose: it brings singular values near 1 in few rounds, not exactly.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ROUNDS = 5


class Muon(LARS):
    """LARS, but for groups with ``turned=True``: these hold matrices and convolutions, which turn and keep their size.

    A matrix moves by ``lr * trust_coefficient / sqrt(1 - momentum**2)`` of its size, then is brought back to that. One
    that is 0 stays 0. ``lr`` is a number, or a 0-d tensor on the parameters' device.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; it is turned only if it says so."""
        param_group.setdefault("turned", False)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if not group["turned"]:
            return
        odd = next((tuple(p.shape) for p in group["params"] if p.ndim not in (2, 4)), None)
        if odd is not None:
            self.param_groups.pop()
            raise InputError(f"A parameter of shape {odd} cannot turn; turned=True is for matrices and convolutions.")
        if not group["momentum"] < 1:
            self.param_groups.pop()
            raise InputError(f"momentum is {group['momentum']!r}, but it must be below 1.")

    def _move_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        for group in groups:
            if group["turned"]:
                for params in by_kind(group["params"]):
                    self._turn(params, group)
        rest = [group for group in groups if not group["turned"]]
        if rest:
            super()._move_groups(rest)

    def _turn(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """One step of matrices of one type on one device."""
        buffers, grads, momentum = [self._buffer(p) for p in params], gradients(params), group["momentum"]
        new_buffers = _torch._foreach_add(grads, buffers, alpha=momentum)
        # Nesterov's: the gradient counts once more than in the momentum.
        moves = _orthogonal(_torch._foreach_add(grads, new_buffers, alpha=momentum))
        # In float32 at least: in half precision a size would drift.
        wide = torch.promote_types(params[0].dtype, torch.float32)
        weights, moves = ([tensor.to(wide) for tensor in tensors] for tensors in (params, moves))
        size, length = _norms(weights), _norms(moves)
        factor = negative(group["lr"], size) * reach(group) * size / length.where(length > 0, 1.0)
        new_params = _torch._foreach_mul(moves, list(factor.unbind()))
        _torch._foreach_add_(new_params, weights)
        turned = _norms(new_params)
        _torch._foreach_mul_(new_params, list((size / turned.where(turned > 0, 1.0)).unbind()))
        new_params = [p.to(params[0].dtype) for p in new_params]
        # Written beside the old values, which stay until it is known whether the step counts.
        replace([*params, *buffers], [*new_params, *new_buffers], self.found_inf)


def matrices(module: nn.Module) -> list[Tensor]:
    """The parameters of a network that can turn: weights of linear layers and of convolutions over all channels.

    A convolution in groups is several matrices in one, a table of positions is none, and one that is 0 would stay so.
    """
    layers = [m for m in module.modules() if isinstance(m, nn.Linear) or (isinstance(m, nn.Conv2d) and m.groups == 1)]
    return [layer.weight for layer in layers if layer.weight.requires_grad and bool(layer.weight.detach().any())]


def nearest_orthogonal(x_MRC: Tensor) -> Tensor:
    """The nearest matrices whose rows, or columns if these are fewer, are orthogonal and of length 1: roughly.

    Singular values end between about 0.7 and 1.2, but those that begin below two thousandths of the whole end
    smaller.
    """
    length = torch.linalg.vector_norm(x_MRC, dim=(1, 2), keepdim=True)
    return newton_schulz(x_MRC / length.where(length > 0, 1.0))


def newton_schulz(x_MRC: Tensor, out_MRC: Tensor | None = None) -> Tensor:
    """Newton and Schulz's iteration on matrices of Frobenius norm 1; the result goes into ``out_MRC`` if given."""
    tall = x_MRC.shape[1] > x_MRC.shape[2]
    for number in range(_ROUNDS):
        square = x_MRC.mT @ x_MRC if tall else x_MRC @ x_MRC.mT
        polynomial = torch.baddbmm(square, square, square, beta=_B, alpha=_C)
        pair = (x_MRC, polynomial) if tall else (polynomial, x_MRC)
        x_MRC = torch.baddbmm(x_MRC, *pair, beta=_A, out=out_MRC if number == _ROUNDS - 1 else None)
    return x_MRC


def _orthogonal(updates: list[Tensor]) -> list[Tensor]:
    """The updates made orthogonal, in their own shapes and type."""
    alike: dict[tuple[int, int], list[int]] = {}
    for number, update in enumerate(updates):
        alike.setdefault(matrix_shape(update), []).append(number)
    moves: dict[int, Tensor] = {}
    for numbers in alike.values():
        found_MRC = nearest_orthogonal(torch.stack([_as_matrix(updates[number]) for number in numbers]))
        moves |= zip(numbers, found_MRC, strict=True)
    return [_as_it_was(moves[number], update) for number, update in enumerate(updates)]


def reach(group: dict[str, Any]) -> float:
    """How far a matrix moves at a rate of 1, as a share of its size."""
    return group["trust_coefficient"] / math.sqrt(1 - group["momentum"] ** 2)


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(_torch._foreach_norm(tensors))


def matrix_shape(p: Tensor) -> tuple[int, int]:
    """Rows and columns of a parameter as a matrix."""
    return p.shape[0], p[0].numel()


def _as_matrix(update: Tensor) -> Tensor:
    """A row for each channel that comes out; no copy of a convolution whose channels are last in memory."""
    return update if update.ndim == 2 else update.permute(0, 2, 3, 1).reshape(update.shape[0], -1)


def _as_it_was(matrix: Tensor, update: Tensor) -> Tensor:
    if update.ndim == 2:
        return matrix
    out, channels, height, width = update.shape
    return matrix.view(out, height, width, channels).permute(0, 3, 1, 2)
