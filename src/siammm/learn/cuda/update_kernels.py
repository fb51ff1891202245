"""Triton kernels for what follows the gradients: LARS, and the momentum encoder's step after the online one.

They move 40 bytes per parameter where torch's grouped operations move 150: LARS reads weight and gradient once for the
norms of each tensor, then weight, gradient and momentum once to write weight and momentum; the momentum encoder follows
in one pass. All tensors are worked on at once (``addresses.py``), and sums are added up in a fixed order.

Legend:  T tensors, P parts of tensors;  p weight, g gradient, b momentum, q weight of the momentum encoder.
"""

from __future__ import annotations

# Triton's own types do not describe what its compiler accepts, so its names are Any here, also in annotations.
# pyright: basic, reportInvalidTypeForm=false
from collections.abc import Sequence

import torch
from torch import Tensor

from siammm.learn.cuda import addresses
from siammm.learn.cuda.addresses import USUAL, Addresses, Parts, Triples, places_of, which_exist
from siammm.learn.cuda.triton_support import jit, tl


class LarsKernels:
    """LARS on these parameters and their momenta, with the decay of each and whether its step is rescaled."""

    def __init__(self, params: Sequence[Tensor], decays: Sequence[float], scaled: Sequence[bool]) -> None:
        self._where = Triples(params)
        device = self._where.device
        self._decay_T = torch.tensor(decays, dtype=torch.float32, device=device)
        self._scaled_T = torch.tensor(scaled, dtype=torch.int32, device=device)
        self._ratio_T = torch.ones(len(params), device=device)
        self._sums_P2 = torch.zeros(self._where.parts.n, 2, device=device)

    def __call__(
        self,
        *tensors: Sequence[Tensor],
        lr: float | Tensor,
        momentum: float,
        trust_coefficient: float,
        found_inf: Tensor | None,
    ) -> None:
        """One step of weights, given gradients and momenta, unless ``found_inf`` holds something else than 0."""
        n, first_T = self._where.parts.n, self._where.parts.first_T
        (p_T, g_T, b_T), where, rate, failed, part, block = self._where.launch(tensors, lr, found_inf)
        _squares[(n,)](p_T, g_T, *where, self._decay_T, self._sums_P2, **part)
        _ratios[(len(tensors[0]),)](self._sums_P2, first_T, self._scaled_T, self._ratio_T, trust_coefficient, **block)
        _lars[(n,)](p_T, g_T, b_T, *where, self._decay_T, self._ratio_T, rate, failed, momentum, **part)


class FollowKernel:
    """The momentum encoder's weights q move towards p by a share of the way, all pairs at once."""

    def __init__(self) -> None:
        self._made: tuple[Parts, Addresses, Addresses] | None = None

    def __call__(self, followers: Sequence[Tensor], leaders: Sequence[Tensor], share: Tensor) -> bool:
        """Follow, if the kernel fits; whether it does. ``share`` is a 0-d float32 tensor on the device."""
        if not addresses.supports(followers, leaders):
            return False
        if self._made is None:
            if addresses.capturing():  # making the tables copies from the host
                return False
            device, n = followers[0].device, len(followers)
            self._made = Parts([q.numel() for q in followers], device), Addresses(n, device), Addresses(n, device)
        parts, q, p = self._made
        _follow[(parts.n,)](
            q.note(followers), p.note(leaders), parts.tensor_P, parts.number_P, parts.fours_T, share,
            PART=addresses.PART_SIZE, **USUAL,
        )  # fmt: skip
        return True


@jit
def _squares(p_table, g_table, tensors, numbers, fours, decays, sums, PART: tl.constexpr):
    """The sums of squares of weight, and of gradient with decay, of one part."""
    part = tl.program_id(0)
    tensor, number = tl.load(tensors + part), tl.load(numbers + part)
    exists = which_exist(number, tl.load(fours + tensor), PART)
    p = tl.load(places_of(p_table, tensor, number, PART), mask=exists, other=0.0)
    g = tl.load(places_of(g_table, tensor, number, PART), mask=exists, other=0.0)
    update = g + tl.load(decays + tensor) * p
    tl.store(sums + 2 * part, tl.sum(p * p, axis=0))
    tl.store(sums + 2 * part + 1, tl.sum(update * update, axis=0))


@jit
def _ratios(sums, firsts, scaled, ratios, trust, BLOCK: tl.constexpr):
    """What the update of one tensor is multiplied with; 1 where either norm is 0, or where it is not to be."""
    tensor = tl.program_id(0)
    first, last = tl.load(firsts + tensor), tl.load(firsts + tensor + 1)
    weight, update = tl.zeros((BLOCK,), dtype=tl.float32), tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(first, last, BLOCK):
        part = start + tl.arange(0, BLOCK)
        weight += tl.load(sums + 2 * part, mask=part < last, other=0.0)
        update += tl.load(sums + 2 * part + 1, mask=part < last, other=0.0)
    norm, length = tl.sqrt(tl.sum(weight, axis=0)), tl.sqrt(tl.sum(update, axis=0))
    counts = (tl.load(scaled + tensor) != 0) & (norm > 0.0) & (length > 0.0)
    tl.store(ratios + tensor, tl.where(counts, trust * norm / tl.where(counts, length, 1.0), 1.0))


@jit
def _lars(
    p_table, g_table, b_table, tensors, numbers, fours, decays, ratios, rate, failed, momentum, PART: tl.constexpr
):  # fmt: skip
    part = tl.program_id(0)
    tensor, number = tl.load(tensors + part), tl.load(numbers + part)
    # What is called off is not written at all: old values stay as they are, whatever the new ones would be.
    exists = which_exist(number, tl.where(tl.load(failed) == 0.0, tl.load(fours + tensor), 0), PART)
    p_place = places_of(p_table, tensor, number, PART)
    b_place = places_of(b_table, tensor, number, PART)
    p = tl.load(p_place, mask=exists, other=0.0)
    g = tl.load(places_of(g_table, tensor, number, PART), mask=exists, other=0.0)
    b = tl.load(b_place, mask=exists, other=0.0)
    b = (g + tl.load(decays + tensor) * p) * tl.load(ratios + tensor) + momentum * b
    tl.store(b_place, b, mask=exists)
    tl.store(p_place, p - tl.load(rate) * b, mask=exists)


@jit
def _follow(q_table, p_table, tensors, numbers, fours, share, PART: tl.constexpr):
    part = tl.program_id(0)
    tensor, number = tl.load(tensors + part), tl.load(numbers + part)
    exists = which_exist(number, tl.load(fours + tensor), PART)
    place = places_of(q_table, tensor, number, PART)
    q = tl.load(place, mask=exists, other=0.0)
    p = tl.load(places_of(p_table, tensor, number, PART), mask=exists, other=0.0)
    tl.store(place, q + (p - q) * tl.load(share), mask=exists)
