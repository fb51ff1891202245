"""What the losses ask of their tensors, and what they do to them first: shapes, unit length, precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import torch
from torch import Tensor

from siammm.core.errors import InputError

# An embedding shorter than this has no direction.
_SHORTEST = 1e-12

_P = ParamSpec("_P")


def without_autocast(loss: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
    """The same loss, in the precision of its tensors also where the caller's region would lower that of products."""

    @wraps(loss)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        device = next((a.device.type for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), "cpu")
        with torch.autocast(device, enabled=False):
            return loss(*args, **kwargs)

    return wrapped


def wide(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def unit(v_ND: Tensor) -> Tensor:
    """Rows of unit length, in float32 at least.

    A row of zeros stays one and gets no gradient, where dividing by a smallest length would give it one of 1e12. The
    mask is multiplied, so that a NaN remains a NaN for the caller's guard to find.
    """
    v_ND = wide(v_ND)
    length_N1 = torch.linalg.vector_norm(v_ND, dim=1, keepdim=True)
    return v_ND / length_N1.clamp_min(_SHORTEST) * (length_N1 > _SHORTEST)


def check_pair(name_1: str, v_1: Tensor, name_2: str, v_2: Tensor) -> None:
    """Refuse what are not embeddings of two views of the same samples."""
    check_shape(name_1, v_1, (None, None))
    if v_1.shape != v_2.shape:
        raise InputError(
            f"{name_1} has the shape {tuple(v_1.shape)}, but {name_2} {tuple(v_2.shape)}; "
            "give embeddings of two views of the same samples."
        )
    check_shape(name_2, v_2, (None, None))


def check_shape(name: str, x: Tensor, shape: tuple[int | None, ...], *, least: int = 1) -> tuple[int, ...]:
    """Refuse what has another shape, is empty, or is not of floating type; None stands for any length."""
    if not x.is_floating_point():
        raise InputError(f"{name} holds {x.dtype}, but it must hold floating-point numbers; convert it first.")
    return _check_lengths(name, x, shape, least=least)


def check_numbers(name: str, x: Tensor, shape: tuple[int | None, ...]) -> None:
    """Refuse what are not numbers of components, int64, one for each."""
    if x.dtype != torch.int64:
        raise InputError(f"{name} holds {x.dtype}, but it must hold int64 numbers of components; convert it first.")
    _check_lengths(name, x, shape, least=0)


def _check_lengths(name: str, x: Tensor, shape: tuple[int | None, ...], *, least: int) -> tuple[int, ...]:
    if x.ndim != len(shape) or any(want not in (None, got) for got, want in zip(x.shape, shape, strict=True)):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise InputError(f"{name} has the shape {tuple(x.shape)}, but it must be ({wanted}); see the shapes it needs.")
    if min(x.shape, default=0) < least:
        raise InputError(f"{name} has the shape {tuple(x.shape)}, but every length must be at least {least}.")
    return tuple(x.shape)
