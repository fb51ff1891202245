"""LARS: layer-wise adaptive rate scaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from siammm.core.errors import InputError

# The operations on whole lists of tensors have no types.
_torch = cast(Any, torch)

# Whole numbers as wide as each floating-point type, to copy bits whatever they mean.
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class LARS(torch.optim.Optimizer):
    """Layer-wise adaptive rates, in MoCo v3's order: decay, trust ratio, momentum, then the rate.

    A weight's gradient (with decay) is rescaled to ``trust_coefficient`` times the weight's own norm; a weight or a
    gradient of norm 0 is left as it is. A group with ``excluded=True`` gets neither decay nor rescaling, which makes it
    SGD with momentum: meant for biases and the parameters of normalisations, all 1-D.

    ``lr`` is a number, or a 0-d tensor on the parameters' device.
    """

    found_inf: Tensor | None = None
    """Where this 0-d tensor holds 1, a step changes nothing."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        *,
        weight_decay: float = 0.0,
        momentum: float = 0.9,
        trust_coefficient: float = 0.001,
        excluded: bool = False,
    ) -> None:
        check_settings(lr, weight_decay, momentum)
        if not trust_coefficient > 0:
            raise InputError(f"trust_coefficient is {trust_coefficient!r}, but it must be above 0.")
        settings = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(params, settings | {"trust_coefficient": trust_coefficient, "excluded": excluded})
        for group in self.param_groups:
            for p in group["params"]:
                self._buffer(p)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Move the parameters one step, unless ``found_inf`` holds 1."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._move_groups(self.param_groups)
        return loss

    def _move_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        for group in groups:
            for params in by_kind(group["params"]):
                self._move(params, group)

    def _buffer(self, p: Tensor) -> Tensor:
        if "momentum_buffer" not in self.state[p]:  # a group that was added later
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return self.state[p]["momentum_buffer"]

    def _move(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """One step of parameters of one type on one device."""
        buffers, updates = [self._buffer(p) for p in params], gradients(params)
        if not group["excluded"]:
            if group["weight_decay"]:
                updates = _torch._foreach_add(updates, params, alpha=group["weight_decay"])
            updates = _torch._foreach_mul(updates, _trust(params, updates, group["trust_coefficient"]))
        # Written beside the old values, which stay until it is known whether the step counts.
        new_buffers = _torch._foreach_add(updates, buffers, alpha=group["momentum"])
        new_params = _torch._foreach_mul(new_buffers, negative(group["lr"], params[0]))
        _torch._foreach_add_(new_params, params)
        replace([*params, *buffers], [*new_params, *new_buffers], self.found_inf)


def check_settings(lr: float | Tensor, weight_decay: float, momentum: float) -> None:
    """Refuse what no optimiser can be given; the value of a tensor is not read."""
    if isinstance(lr, Tensor) and lr.ndim != 0:
        raise InputError(f"lr is a tensor of shape {tuple(lr.shape)}, but it must be a number or a 0-d tensor.")
    for name, value in (("lr", 0.0 if isinstance(lr, Tensor) else lr), ("weight_decay", weight_decay)):
        if not 0 <= value < math.inf:
            raise InputError(f"{name} is {value!r}, but it must be a number of at least 0.")
    if not 0 <= momentum < 1:
        raise InputError(f"momentum is {momentum!r}, but it must be at least 0 and below 1.")


def by_kind(params: Iterable[Tensor]) -> list[list[Tensor]]:
    """Parameters that have gradients, by device and type, as the grouped operations need them."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for p in params:
        if p.grad is not None:
            kinds.setdefault((p.device, p.dtype), []).append(p)
    return list(kinds.values())


def gradients(params: Sequence[Tensor]) -> list[Tensor]:
    """The gradients in the parameters' type."""
    return [cast(Tensor, p.grad).to(p.dtype) for p in params]


def _trust(params: list[Tensor], updates: list[Tensor], coefficient: float) -> list[Tensor]:
    """What each update is multiplied with, as 0-d tensors; 1 where either norm is 0."""
    norm, update_norm = (torch.stack(_torch._foreach_norm(tensors)) for tensors in (params, updates))
    known = (norm > 0) & (update_norm > 0)
    ratio = torch.where(known, coefficient * norm / update_norm.where(known, 1.0), 1.0)
    return list(ratio.to(params[0].dtype).unbind())


def negative(lr: float | Tensor, like: Tensor) -> float | Tensor:
    """The rate with its sign changed, on the device and in the type of another tensor."""
    return -lr.to(like) if isinstance(lr, Tensor) else -lr


def replace(old: list[Tensor], new: list[Tensor], found_inf: Tensor | None) -> None:
    """Write the new values over the old ones, in place, unless ``found_inf`` holds 1."""
    if found_inf is None:
        _torch._foreach_copy_(old, new)
        return
    # On the bits as whole numbers a product with 0 is 0 even where the value is NaN, so that the old ones stay exactly.
    bits = _BITS[old[0].itemsize]
    stays = (found_inf.to(old[0].device) != 0).to(bits)
    old_bits, new_bits = ([tensor.view(bits) for tensor in tensors] for tensors in (old, new))
    _torch._foreach_mul_(old_bits, stays)
    _torch._foreach_mul_(new_bits, 1 - stays)
    _torch._foreach_add_(old_bits, new_bits)
