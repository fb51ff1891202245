"""Kernels that work on many tensors at once, wherever these are in memory: what they share.

Tensors stay where they are. A kernel reads a table of their addresses and works on a part of a tensor in each program.
Gradients are new tensors in every step; another kernel, to which they are arguments, writes their addresses into the
table, so that a captured step finds those that it was captured with.

Legend:  T tensors, P parts of tensors.
"""

from __future__ import annotations

# Triton's own types do not describe what its compiler accepts, so its names are Any here, also in annotations.
# pyright: basic, reportInvalidTypeForm=false
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from siammm.learn.cuda.triton_support import available, interpreted, jit, tl

# Values of a part: 16 for each thread, in fours.
PART_SIZE = 2048
WARPS = 4
USUAL = {"num_warps": WARPS, "enable_fp_fusion": True}
# Partial sums of a tensor that are added up at a time.
AT_ONCE = 1024
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
                _note[(1,)](self.table_T, start, *some, **USUAL)
            self._known = [] if capturing() else now  # what is only captured has not been written
        return self.table_T


class Parts:
    """How tensors of these sizes are cut into parts, a program for each: its tensor, and its number within that."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        size_T = torch.tensor(sizes)
        count_T = -(-size_T // PART_SIZE)
        first_T = torch.cat([count_T.new_zeros(1), count_T.cumsum(0)])
        tensor_P = torch.repeat_interleave(torch.arange(len(sizes)), count_T)
        self.n = int(first_T[-1])
        self.first_T = first_T.to(device, torch.int32)
        self.tensor_P = tensor_P.to(device, torch.int32)
        self.number_P = (torch.arange(self.n) - first_T[tensor_P]).to(device, torch.int32)
        self.fours_T = (size_T // 4).to(device)


class Triples:
    """Where weights, gradients and momenta are, and the parts that they are worked on in: for an optimiser's step."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.device = params[0].device
        self.parts = Parts([p.numel() for p in params], self.device)
        self._p, self._g, self._b = (Addresses(len(params), self.device) for _ in range(3))

    def launch(self, tensors: Sequence[Sequence[Tensor]], lr: float | Tensor, found_inf: Tensor | None) -> Any:
        """The arguments of a step's kernels, given weights, gradients and momenta.

        The three tables of addresses; the tensor and number of each part, and the fours of each tensor; the rate and
        whether the step is called off; the settings of kernels that run once per part, and once per tensor.
        """
        params, grads, buffers = tensors
        tables = (self._p.note(params), self._g.note(grads, always=True), self._b.note(buffers))
        where = (self.parts.tensor_P, self.parts.number_P, self.parts.fours_T)
        part, block = {"PART": PART_SIZE, **USUAL}, {"BLOCK": AT_ONCE, **USUAL}
        return tables, where, self._number(lr), self._number(found_inf), part, block

    def _number(self, value: float | Tensor | None) -> Tensor:
        """A number as the kernels read it, None as 0; not by copying from the host, which would wait for the device."""
        if isinstance(value, Tensor):
            return value.to(self.device, torch.float32)
        return torch.full((), value or 0.0, device=self.device)


@jit
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


@jit
def places_of(table, tensor, number, PART: tl.constexpr):
    """Where the values of a part are: one after another from a multiple of 16 bytes."""
    place = tl.load(table + tensor).to(tl.pointer_type(tl.float32)) + number.to(tl.int64) * PART + tl.arange(0, PART)
    return tl.max_contiguous(tl.multiple_of(place, 16), PART)


@jit
def which_exist(number, fours, PART: tl.constexpr):
    """Which values of a part there are."""
    return number.to(tl.int64) * PART + tl.arange(0, PART) < fours * 4
