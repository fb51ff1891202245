"""Triton kernels for what follows the gradients: LARS, and the momentum encoder's step after the online one.

Torch's grouped operations do these in a dozen passes over all parameters, each through memory. Here LARS reads weight
and gradient once for the norms of each tensor, then weight, gradient and momentum once to write weight and momentum;
and the momentum encoder follows in one pass. That is 40 bytes a parameter where the grouped operations move 150.

Tensors stay where they are. A kernel works on all of them at once by a table of their addresses, a part of a tensor for
each program. Gradients are new tensors in every step; another kernel, to which they are arguments, writes their
addresses into the table, so that a captured step finds those that it was captured with.

Sums are added up in a fixed order. They also run under Triton's interpreter on a CPU, which is how they are tested.

Legend:  T tensors, P parts of tensors;  p weight, g gradient, b momentum, q weight of the momentum encoder.
"""

from __future__ import annotations

# Triton's own types do not describe what its compiler accepts, so its names are Any here, also in annotations.
# pyright: basic, reportInvalidTypeForm=false
from collections.abc import Sequence

import torch
from torch import Tensor

from siammm.learn.norm_kernels import _jit, available, interpreted, tl

# Values of a part: 16 for each thread, in fours.
_PART = 2048
_WARPS = 4
_USUAL = {"num_warps": _WARPS, "enable_fp_fusion": True}
# Partial sums of a tensor that are added up at a time.
_AT_ONCE = 1024
# Addresses that one program notes.
_NOTED = 16


def supports(*lists: Sequence[Tensor]) -> bool:
    """Whether the kernels can work on these lists: float32 on one GPU, pairwise alike in memory."""
    if not lists[0] or not available():
        return False
    first = lists[0][0].device
    if not (first.type == "cuda" or interpreted()):
        return False
    return all(
        t.dtype == torch.float32
        and t.device == first
        and t.data_ptr() % 16 == 0
        and t.numel() % 4 == 0
        and torch.ops.aten.is_non_overlapping_and_dense(t)
        and _order(t) == _order(one)
        for tensors in lists
        for t, one in zip(tensors, lists[0], strict=True)
    )


def _order(t: Tensor) -> list[tuple[int, int]]:
    """How a dense tensor lies in memory: dimensions of one value are nowhere."""
    return [(size, stride) for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]


def capturing() -> bool:
    """Whether what is done now is written into a graph, to be done later."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Addresses:
    """Where tensors are, as the kernels read it."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.table_T = torch.zeros(-(-count // _NOTED) * _NOTED, dtype=torch.int64, device=device)
        self._known: list[int] = []

    def note(self, tensors: Sequence[Tensor], *, always: bool = False) -> Tensor:
        """The table, with these in it; ``always`` where a step that is captured now must note them when replayed."""
        now = [t.data_ptr() for t in tensors]
        if always or now != self._known:
            for start in range(0, len(tensors), _NOTED):
                some = list(tensors[start : start + _NOTED])
                some += some[:1] * (_NOTED - len(some))
                _note[(1,)](self.table_T, start, *some, **_USUAL)
            self._known = [] if capturing() else now  # what is only captured has not been written
        return self.table_T


class Parts:
    """How tensors of these sizes are cut into parts, a program for each: its tensor, and its number within that."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        counts = [-(-size // _PART) for size in sizes]
        size_T, count_T = torch.tensor(sizes), torch.tensor(counts)
        first_T = torch.cat([count_T.new_zeros(1), count_T.cumsum(0)])
        tensor_P = torch.repeat_interleave(torch.arange(len(sizes)), count_T)
        self.n = int(first_T[-1])
        self.first_T = first_T.to(device, torch.int32)
        self.tensor_P = tensor_P.to(device, torch.int32)
        self.number_P = (torch.arange(self.n) - first_T[tensor_P]).to(device, torch.int32)
        self.fours_T = (size_T // 4).to(device)


class LarsKernels:
    """LARS on these parameters and their momenta, with the decay of each and whether its step is rescaled."""

    def __init__(self, params: Sequence[Tensor], decays: Sequence[float], scaled: Sequence[bool]) -> None:
        device = params[0].device
        self._parts = Parts([p.numel() for p in params], device)
        self._decay_T = torch.tensor(decays, dtype=torch.float32, device=device)
        self._scaled_T = torch.tensor(scaled, dtype=torch.int32, device=device)
        self._ratio_T = torch.ones(len(params), device=device)
        self._sums_P2 = torch.zeros(self._parts.n, 2, device=device)
        self._p, self._g, self._b = (Addresses(len(params), device) for _ in range(3))

    def __call__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        buffers: Sequence[Tensor],
        *,
        lr: float | Tensor,
        momentum: float,
        trust_coefficient: float,
        found_inf: Tensor | None,
    ) -> None:
        """One step, unless ``found_inf`` holds something else than 0."""
        parts, device = self._parts, params[0].device
        p_T, b_T = self._p.note(params), self._b.note(buffers)
        g_T = self._g.note(grads, always=True)
        # Not by copying a number from the host, which would wait for the device.
        lr = lr.to(device, torch.float32) if isinstance(lr, Tensor) else torch.full((), lr, device=device)
        failed = torch.zeros((), device=device) if found_inf is None else found_inf.to(device, torch.float32)
        where = (parts.tensor_P, parts.number_P, parts.fours_T)
        _squares[(parts.n,)](p_T, g_T, *where, self._decay_T, self._sums_P2, PART=_PART, **_USUAL)
        _ratios[(len(params),)](
            self._sums_P2, parts.first_T, self._scaled_T, self._ratio_T, trust_coefficient, BLOCK=_AT_ONCE,
            **_USUAL,
        )  # fmt: skip
        _lars[(parts.n,)](
            p_T, g_T, b_T, *where, self._decay_T, self._ratio_T, lr, failed, momentum, PART=_PART, **_USUAL
        )


class FollowKernel:
    """q moves towards p by a share of the way, for all pairs at once."""

    def __init__(self, followers: Sequence[Tensor]) -> None:
        device = followers[0].device
        self._parts = Parts([q.numel() for q in followers], device)
        self._q, self._p = (Addresses(len(followers), device) for _ in range(2))

    def __call__(self, followers: Sequence[Tensor], leaders: Sequence[Tensor], share: Tensor) -> None:
        """Follow; ``share`` is a 0-d float32 tensor on the device."""
        parts = self._parts
        _follow[(parts.n,)](
            self._q.note(followers), self._p.note(leaders), parts.tensor_P, parts.number_P, parts.fours_T, share,
            PART=_PART, **_USUAL,
        )  # fmt: skip


@_jit
def _note(table, start, t0, t1, t2, t3, t4, t5, t6, t7, t8, t9, t10, t11, t12, t13, t14, t15):
    place = table + start
    tl.store(place, t0.to(tl.int64))
    tl.store(place + 1, t1.to(tl.int64))
    tl.store(place + 2, t2.to(tl.int64))
    tl.store(place + 3, t3.to(tl.int64))
    tl.store(place + 4, t4.to(tl.int64))
    tl.store(place + 5, t5.to(tl.int64))
    tl.store(place + 6, t6.to(tl.int64))
    tl.store(place + 7, t7.to(tl.int64))
    tl.store(place + 8, t8.to(tl.int64))
    tl.store(place + 9, t9.to(tl.int64))
    tl.store(place + 10, t10.to(tl.int64))
    tl.store(place + 11, t11.to(tl.int64))
    tl.store(place + 12, t12.to(tl.int64))
    tl.store(place + 13, t13.to(tl.int64))
    tl.store(place + 14, t14.to(tl.int64))
    tl.store(place + 15, t15.to(tl.int64))


# Values are read four at a time only where the compiler sees that addresses and sizes allow it: hence parts that are
# counted, sizes in fours, and what is said of addresses.


@_jit
def _places(table, tensor, number, PART: tl.constexpr):
    """Where the values of a part are: one after another from a multiple of 16 bytes."""
    place = tl.load(table + tensor).to(tl.pointer_type(tl.float32)) + number.to(tl.int64) * PART + tl.arange(0, PART)
    return tl.max_contiguous(tl.multiple_of(place, 16), PART)


@_jit
def _exists(number, fours, PART: tl.constexpr):
    """Which values of a part there are."""
    return number.to(tl.int64) * PART + tl.arange(0, PART) < fours * 4


@_jit
def _squares(p_table, g_table, tensors, numbers, fours, decays, sums, PART: tl.constexpr):
    """The sums of squares of weight, and of gradient with decay, of one part."""
    part = tl.program_id(0)
    tensor, number = tl.load(tensors + part), tl.load(numbers + part)
    exists = _exists(number, tl.load(fours + tensor), PART)
    p = tl.load(_places(p_table, tensor, number, PART), mask=exists, other=0.0)
    g = tl.load(_places(g_table, tensor, number, PART), mask=exists, other=0.0)
    update = g + tl.load(decays + tensor) * p
    tl.store(sums + 2 * part, tl.sum(p * p, axis=0))
    tl.store(sums + 2 * part + 1, tl.sum(update * update, axis=0))


@_jit
def _ratios(sums, firsts, scaled, ratios, trust, BLOCK: tl.constexpr):
    """What the update of one tensor is multiplied with; 1 where either norm is 0, or where it is not to be."""
    tensor = tl.program_id(0)
    first, last = tl.load(firsts + tensor), tl.load(firsts + tensor + 1)
    weight = tl.zeros((BLOCK,), dtype=tl.float32)
    update = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(first, last, BLOCK):
        part = start + tl.arange(0, BLOCK)
        weight += tl.load(sums + 2 * part, mask=part < last, other=0.0)
        update += tl.load(sums + 2 * part + 1, mask=part < last, other=0.0)
    norm, length = tl.sqrt(tl.sum(weight, axis=0)), tl.sqrt(tl.sum(update, axis=0))
    counts = (tl.load(scaled + tensor) != 0) & (norm > 0.0) & (length > 0.0)
    tl.store(ratios + tensor, tl.where(counts, trust * norm / tl.where(counts, length, 1.0), 1.0))


@_jit
def _lars(
    p_table, g_table, b_table, tensors, numbers, fours, decays, ratios, rate, failed, momentum, PART: tl.constexpr
):  # fmt: skip
    part = tl.program_id(0)
    tensor, number = tl.load(tensors + part), tl.load(numbers + part)
    # What is called off is not written at all: old values stay as they are, whatever the new ones would be.
    exists = _exists(number, tl.where(tl.load(failed) == 0.0, tl.load(fours + tensor), 0), PART)
    p_place = _places(p_table, tensor, number, PART)
    b_place = _places(b_table, tensor, number, PART)
    p = tl.load(p_place, mask=exists, other=0.0)
    g = tl.load(_places(g_table, tensor, number, PART), mask=exists, other=0.0)
    b = tl.load(b_place, mask=exists, other=0.0)
    b = (g + tl.load(decays + tensor) * p) * tl.load(ratios + tensor) + momentum * b
    tl.store(b_place, b, mask=exists)
    tl.store(p_place, p - tl.load(rate) * b, mask=exists)


@_jit
def _follow(q_table, p_table, tensors, numbers, fours, share, PART: tl.constexpr):
    part = tl.program_id(0)
    tensor, number = tl.load(tensors + part), tl.load(numbers + part)
    exists = _exists(number, tl.load(fours + tensor), PART)
    place = _places(q_table, tensor, number, PART)
    q = tl.load(place, mask=exists, other=0.0)
    p = tl.load(_places(p_table, tensor, number, PART), mask=exists, other=0.0)
    tl.store(place, q + (p - q) * tl.load(share), mask=exists)
