"""The H nearest components on a CPU with eight-bit matrix units: bytes propose, float32 decides.

A product of int8 matrices runs four times as fast as one of float32 on CPUs with VNNI or AMX. Rows are rounded to 255
steps. The highest few products of a row are its candidates; float32 scores these, and unless the H-th best of them is
beyond the reach of everything that is not a candidate, float32 searches the whole row.

What is not a candidate can exceed the last candidate's product by the error of rounding. With residuals dx and dw of
lengths |dx| and |dw|, x.w - x'.w' = dx.w + x'.dw, which for residuals that point nowhere in particular has a deviation
of at most sqrt((|dx|^2 + |dw|^2) / D). Five of these are allowed for.

Legend:  N samples, K components, D dimensions, H neighbours, C candidates, G groups;  x samples, w components.
"""

from __future__ import annotations

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
import math
import warnings
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as functional
from torch import Tensor

_DEVIATIONS = 5.0
# Candidates beyond H that are scored: each costs a score, and saves a search of the rows where it settles the matter.
_SPARE_OF_ONE = 0
_SPARE = 2
_SECOND_SPARE = 9
_ROWS = 4096
_LEAST = torch.iinfo(torch.int32).min

_int_mm = cast(Any, getattr(torch, "_int_mm", None))


def available() -> bool:
    """Whether this CPU multiplies bytes in hardware, and this torch knows how to ask it."""
    if _int_mm is None:
        return False
    probes = ("_is_vnni_supported", "_is_avx512_vnni_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


@dataclass(frozen=True)
class Bytes:
    """Rows rounded to whole multiples of a step: int8 codes, the steps, and the length of what was rounded away."""

    code_ND: Tensor
    step_N: Tensor
    residual_N: Tensor

    @classmethod
    def of(cls, x_ND: Tensor, *, common_step: bool = False) -> Bytes:
        """Round rows, each with a step of its own, or all with one so that their products can be compared."""
        code_ND = torch.empty(x_ND.shape, dtype=torch.int8)
        step_N, residual_N = torch.empty(x_ND.shape[0]), torch.empty(x_ND.shape[0])
        largest = x_ND.abs().amax().clamp_min(1e-30) if common_step else None
        for start in range(0, x_ND.shape[0], _ROWS):
            piece = slice(start, start + _ROWS)
            x = x_ND[piece]
            step = (x.abs().amax(dim=1).clamp_min(1e-30) if largest is None else largest.expand(x.shape[0])) / 127
            rounded = (x / step[:, None]).round_()
            code_ND[piece] = rounded.to(torch.int8)
            step_N[piece] = step
            residual_N[piece] = (rounded.mul_(step[:, None]) - x).square_().sum(dim=1).sqrt_()
        return cls(code_ND, step_N, residual_N)

    def __getitem__(self, rows: slice) -> Bytes:
        return Bytes(self.code_ND[rows], self.step_N[rows], self.residual_N[rows])

    def without_codes(self, index: Tensor) -> Bytes:
        """The steps and residuals of some rows."""
        return Bytes(self.code_ND[:0], self.step_N[index], self.residual_N[index])


def nearest(x_ND: Tensor, w_KD: Tensor, n_neighbours: int, x_bytes: Bytes | None = None) -> tuple[Tensor, Tensor]:
    """The scores and numbers of the H components with the highest x.w, best first.

    ``x_bytes`` are the rows rounded, for a caller who searches the same rows again and again.
    """
    n, k = x_ND.shape[0], w_KD.shape[0]
    n_spare = _SPARE_OF_ONE if n_neighbours == 1 else _SPARE
    if k <= 4 * (n_neighbours + _SECOND_SPARE):  # nothing to be won
        return _searched(x_ND, w_KD, n_neighbours)
    # As many numbers to look at in the groups' maxima as then within the best groups.
    n_groups = 8 * math.ceil(math.sqrt((n_neighbours + n_spare + 1) * k) / 8)
    w_bytes = Bytes.of(functional.pad(w_KD, (0, 0, 0, -k % n_groups)), common_step=True)
    score_NH = x_ND.new_empty(n, n_neighbours)
    index_NH = torch.empty(n, n_neighbours, dtype=torch.int64)
    buffer = torch.empty(min(n, _ROWS), w_bytes.code_ND.shape[0], dtype=torch.int32)
    for start in range(0, n, _ROWS):
        piece = slice(start, start + _ROWS)
        x = x_ND[piece]
        low = Bytes.of(x) if x_bytes is None else x_bytes[piece]
        product_NK = _int_mm(low.code_ND, w_bytes.code_ND.T, out=buffer[: x.shape[0]])
        product_NK[:, k:] = _LEAST
        score, index, doubtful = _decided(x, w_KD, low, w_bytes, product_NK, n_groups, n_neighbours, n_spare)
        if doubtful.numel():
            # Ever fewer rows: more candidates first, then the whole row.
            few, bytes_few = x[doubtful], low.without_codes(doubtful)
            score_few, index_few, left = _decided(
                few, w_KD, bytes_few, w_bytes, product_NK[doubtful], n_groups, n_neighbours, _SECOND_SPARE
            )
            if left.numel():
                score_few[left], index_few[left] = _searched(few[left], w_KD, n_neighbours)
            score[doubtful], index[doubtful] = score_few, index_few
        score_NH[piece], index_NH[piece] = score, index
    return score_NH, index_NH


def _decided(
    x_ND: Tensor,
    w_KD: Tensor,
    x: Bytes,
    w: Bytes,
    product_NK: Tensor,
    n_groups: int,
    n_neighbours: int,
    n_spare: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Score the candidates; also the rows in which something that was not scored might still be among the H nearest."""
    product_NC, candidate_NC = _top(product_NK, n_neighbours + n_spare + 1, n_groups)
    scored_NC = candidate_NC[:, :-1]
    score_NC = _scores(x_ND, w_KD, scored_NC)
    if score_NC.shape[1] > 1:
        score_NC, order = score_NC.sort(dim=1, descending=True)
        scored_NC = scored_NC.gather(1, order)
    error_N = _DEVIATIONS * ((x.residual_N**2 + w.residual_N.max() ** 2) / x_ND.shape[1]).sqrt()
    bound_N = product_NC[:, -1] * (x.step_N * w.step_N[0]) + error_N
    doubtful = (score_NC[:, n_neighbours - 1] <= bound_N).nonzero()[:, 0]
    return score_NC[:, :n_neighbours].contiguous(), scored_NC[:, :n_neighbours].contiguous(), doubtful


def _searched(x_ND: Tensor, w_KD: Tensor, n_neighbours: int) -> tuple[Tensor, Tensor]:
    top = (x_ND @ w_KD.T).topk(n_neighbours, dim=1)
    return top.values, top.indices


def _top(product_NK: Tensor, count: int, n_groups: int) -> tuple[Tensor, Tensor]:
    """The highest products of each row and their columns, highest first.

    Column k is in group k mod G. The highest ``count`` products lie in the ``count`` groups with the highest maxima, so
    two short rows are searched in place of a long one.
    """
    n, k = product_NK.shape
    member = product_NK.view(n, k // n_groups, n_groups)
    if count == 2:
        return _top_two(member)
    best_group = member.amax(dim=1).topk(min(count, n_groups), dim=1, sorted=False).indices
    few = member.gather(2, best_group[:, None, :].expand(n, k // n_groups, best_group.shape[1])).view(n, -1)
    top = few.topk(count, dim=1)
    width = best_group.shape[1]
    column = top.indices // width * n_groups + best_group.gather(1, top.indices % width)
    return top.values, column


def _top_two(member: Tensor) -> tuple[Tensor, Tensor]:
    """The same for two, by maxima alone; of the second only the product is right, which is all that is asked of it."""
    n, each, width = member.shape
    group = member.amax(dim=1)
    best, where = group.max(dim=1, keepdim=True)
    rivals = member.gather(2, where[:, None, :].expand(n, each, 1))[:, :, 0]
    row = rivals.argmax(dim=1, keepdim=True)
    elsewhere = group.scatter_(1, where, _LEAST).amax(dim=1, keepdim=True)
    beside = rivals.scatter_(1, row, _LEAST).amax(dim=1, keepdim=True)
    column = row * width + where
    return torch.cat([best, torch.maximum(elsewhere, beside)], dim=1), column.expand(n, 2)


def _scores(x_ND: Tensor, w_KD: Tensor, index_NC: Tensor) -> Tensor:
    """The scores of chosen components, score_NC: the product of the rows and the components where a mask says so."""
    n, c = index_NC.shape
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that torch's sparse tensors are new
        bounds = torch.arange(0, n * c + 1, c)
        mask = torch.sparse_csr_tensor(
            bounds, index_NC.reshape(-1), x_ND.new_zeros(n * c), (n, w_KD.shape[0]), check_invariants=False
        )
        try:
            return cast(Tensor, torch.sparse.sampled_addmm(mask, x_ND, w_KD.T, beta=0.0)).values().view(n, c)
        except RuntimeError:  # a torch without MKL
            return torch.stack([(w_KD[index_NC[:, i]] * x_ND).sum(dim=1) for i in range(c)], dim=1)
