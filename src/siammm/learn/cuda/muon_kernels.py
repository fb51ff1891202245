"""Triton kernels for Muon: momentum and what goes into the products, then the matrices turned by what came out.

All matrices are worked on at once, where they are in memory (``addresses.py``), with 38 bytes per parameter moved
besides the products. An update is orthogonal whatever the order of its columns, so the memory of a convolution is its
matrix, with a row for each output channel, in either of torch's layouts.

Legend:  T tensors, P parts of tensors;  p weight, g gradient, b momentum, x update, o orthogonal update.
"""

from __future__ import annotations

# Triton's own types do not describe what its compiler accepts, so its names are Any here, also in annotations.
# pyright: basic, reportInvalidTypeForm=false
import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from siammm.learn.cuda import addresses
from siammm.learn.cuda.addresses import Triples, places_of, which_exist
from siammm.learn.cuda.triton_support import jit, tl


def supports(params: Sequence[Tensor], *lists: Sequence[Tensor]) -> bool:
    """Whether the kernels can work on these: as those of LARS, with rows after one another and whole eights."""
    return addresses.supports(params, *lists) and all(
        p.numel() % 8 == 0 and p.stride(0) * p.shape[0] == p.numel() for p in params
    )


class TurnKernels:
    """Muon on these matrices and their momenta; those of one shape must follow one another."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        device, sizes = params[0].device, [p.numel() for p in params]
        self._where = Triples(params)
        self._eighths_T = (torch.tensor([0, *sizes]).cumsum(0) // 8).to(device)
        # Products on a GPU are as good for this in bf16.
        self._x, self._o = (
            torch.zeros(sum(sizes), dtype=torch.bfloat16 if params[0].is_cuda else torch.float32, device=device)
            for _ in range(2)
        )
        self._length_P, self._products_P3 = (torch.zeros(self._where.parts.n, n, device=device) for n in (1, 3))
        self._scale_T, self._keep_T, self._move_T = (torch.zeros(len(params), device=device) for _ in range(3))
        self.stacks: list[tuple[Tensor, Tensor]] = []
        """Updates and room for the orthogonal ones, of all matrices of each shape."""
        begin = 0
        for (rows, columns), alike in itertools.groupby((p.shape[0], p.numel() // p.shape[0]) for p in params):
            shape = (len(list(alike)), rows, columns)
            end = begin + math.prod(shape)
            self.stacks.append((self._x[begin:end].view(shape), self._o[begin:end].view(shape)))
            begin = end

    def __call__(
        self,
        make_orthogonal: Callable[[Sequence[tuple[Tensor, Tensor]]], None],
        *tensors: Sequence[Tensor],
        lr: float | Tensor,
        momentum: float,
        reach: float,
        found_inf: Tensor | None,
    ) -> None:
        """One step by ``lr * reach`` of each matrix's size, unless ``found_inf`` holds something else than 0."""
        n, first_T, eighths_T = self._where.parts.n, self._where.parts.first_T, self._eighths_T
        (p_T, g_T, b_T), where, rate, failed, part, block = self._where.launch(tensors, lr, found_inf)
        each = (len(tensors[0]),)
        _lengths[(n,)](g_T, b_T, *where, self._length_P, momentum, **part)
        _scales[each](self._length_P, first_T, self._scale_T, **block)
        _gather[(n,)](g_T, b_T, *where, eighths_T, self._scale_T, self._x, failed, momentum, **part)
        make_orthogonal(self.stacks)
        _products[(n,)](p_T, *where, eighths_T, self._o, self._products_P3, **part)
        _turns[each](self._products_P3, first_T, self._keep_T, self._move_T, rate, reach, **block)
        _turn[(n,)](p_T, *where, eighths_T, self._o, self._keep_T, self._move_T, failed, **part)


@jit
def _work_places(work, eighths, tensor, number, PART: tl.constexpr):
    """Where the values of a part are among those of all matrices."""
    return work + tl.load(eighths + tensor) * 8 + number.to(tl.int64) * PART + tl.arange(0, PART)


@jit
def _lengths(g_table, b_table, tensors, numbers, fours, sums, momentum, PART: tl.constexpr):
    """The sum of squares of the update of one part: Nesterov's, the gradient once more than in the momentum."""
    part = tl.program_id(0)
    tensor, number = tl.load(tensors + part), tl.load(numbers + part)
    exists = which_exist(number, tl.load(fours + tensor), PART)
    g = tl.load(places_of(g_table, tensor, number, PART), mask=exists, other=0.0)
    b = tl.load(places_of(b_table, tensor, number, PART), mask=exists, other=0.0)
    x = g + momentum * (g + momentum * b)
    tl.store(sums + part, tl.sum(x * x, axis=0))


@jit
def _scales(sums, firsts, scales, BLOCK: tl.constexpr):
    """What makes the update of one tensor as long as 1; 0 stays 0."""
    tensor = tl.program_id(0)
    first, last = tl.load(firsts + tensor), tl.load(firsts + tensor + 1)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(first, last, BLOCK):
        part = start + tl.arange(0, BLOCK)
        squares += tl.load(sums + part, mask=part < last, other=0.0)
    length = tl.sqrt(tl.sum(squares, axis=0))
    tl.store(scales + tensor, tl.where(length > 0.0, 1.0 / tl.where(length > 0.0, length, 1.0), 0.0))


@jit
def _gather(
    g_table, b_table, tensors, numbers, fours, eighths, scales, work, failed, momentum, PART: tl.constexpr
):  # fmt: skip
    part = tl.program_id(0)
    tensor, number = tl.load(tensors + part), tl.load(numbers + part)
    count = tl.load(fours + tensor)
    exists = which_exist(number, count, PART)
    place = places_of(b_table, tensor, number, PART)
    g = tl.load(places_of(g_table, tensor, number, PART), mask=exists, other=0.0)
    b = g + momentum * tl.load(place, mask=exists, other=0.0)
    # A step that is called off leaves the momentum, too, as it is.
    tl.store(place, b, mask=which_exist(number, tl.where(tl.load(failed) == 0.0, count, 0), PART))
    x = (g + momentum * b) * tl.load(scales + tensor)
    tl.store(_work_places(work, eighths, tensor, number, PART), x.to(work.dtype.element_ty), mask=exists)


@jit
def _products(p_table, tensors, numbers, fours, eighths, work, sums, PART: tl.constexpr):
    """Of one part, the products of weight with itself, with the orthogonal update, and of that with itself."""
    part = tl.program_id(0)
    tensor, number = tl.load(tensors + part), tl.load(numbers + part)
    exists = which_exist(number, tl.load(fours + tensor), PART)
    p = tl.load(places_of(p_table, tensor, number, PART), mask=exists, other=0.0)
    o = tl.load(_work_places(work, eighths, tensor, number, PART), mask=exists, other=0.0).to(tl.float32)
    tl.store(sums + 3 * part, tl.sum(p * p, axis=0))
    tl.store(sums + 3 * part + 1, tl.sum(p * o, axis=0))
    tl.store(sums + 3 * part + 2, tl.sum(o * o, axis=0))


@jit
def _turns(sums, firsts, keeps, moves, rate, reach, BLOCK: tl.constexpr):
    """What weight and orthogonal update of one tensor are multiplied with: the size of the weight stays the same."""
    tensor = tl.program_id(0)
    first, last = tl.load(firsts + tensor), tl.load(firsts + tensor + 1)
    pp = tl.zeros((BLOCK,), dtype=tl.float32)
    po = tl.zeros((BLOCK,), dtype=tl.float32)
    oo = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(first, last, BLOCK):
        part = start + tl.arange(0, BLOCK)
        pp += tl.load(sums + 3 * part, mask=part < last, other=0.0)
        po += tl.load(sums + 3 * part + 1, mask=part < last, other=0.0)
        oo += tl.load(sums + 3 * part + 2, mask=part < last, other=0.0)
    square, overlap, length = tl.sum(pp, axis=0), tl.sum(po, axis=0), tl.sum(oo, axis=0)
    size = tl.sqrt(square)
    step = tl.load(rate) * reach * size / tl.sqrt(tl.where(length > 0.0, length, 1.0))
    moved = square - 2.0 * step * overlap + step * step * length
    keep = tl.where(moved > 0.0, size / tl.sqrt(tl.where(moved > 0.0, moved, 1.0)), 1.0)
    tl.store(keeps + tensor, keep)
    tl.store(moves + tensor, step * keep)


@jit
def _turn(p_table, tensors, numbers, fours, eighths, work, keeps, moves, failed, PART: tl.constexpr):
    part = tl.program_id(0)
    tensor, number = tl.load(tensors + part), tl.load(numbers + part)
    exists = which_exist(number, tl.where(tl.load(failed) == 0.0, tl.load(fours + tensor), 0), PART)
    place = places_of(p_table, tensor, number, PART)
    p = tl.load(place, mask=exists, other=0.0)
    o = tl.load(_work_places(work, eighths, tensor, number, PART), mask=exists, other=0.0).to(tl.float32)
    tl.store(place, tl.load(keeps + tensor) * p - tl.load(moves + tensor) * o, mask=exists)
