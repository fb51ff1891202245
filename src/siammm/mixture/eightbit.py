"""The H nearest components on a CPU with eight-bit matrix units: bytes propose, float32 decides.

A product of int8 matrices runs four times as fast as one of float32 on CPUs with VNNI or AMX. Rows are rounded to 255
steps. The highest few products of a row are its candidates; float32 scores these, and unless the H-th best of them is
beyond the reach of everything that is not a candidate, float32 searches the whole row.

What is not a candidate can exceed the lowest candidate's product only by the error of rounding, dx.w + x'.dw for
x = x' + dx and w = w' + dw. Numbers are rounded up or down at random, so that this error is a sum of independent terms
with mean 0 whatever the data: rounded to the nearest, rows of few different values would be off in step. For rows of
unit length it then exceeds c sqrt(step_x^2 |w|^2 + step_w^2) with a probability of at most exp(-2 c^2) (Hoeffding),
5e-8 for the c used here.

Two ways to the same answer: in one pass of compiled code where that can be had and pays (``cpu_kernels.py``), and by
torch's operations. The first picks out as many candidates as a row needs, the second a fixed number, then some more.

Legend:  N samples, K components, D dimensions, H neighbours, C candidates, G groups;  x samples, w components.
"""

from __future__ import annotations

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
import math
import threading
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as functional
from torch import Tensor

from siammm.mixture import cpu_kernels

_REACH = 2.9
# Steps to the largest number of a row. A little below 127: rounded up, that would be 128, which is no byte.
_STEPS = 126.99
# Components whose mean has a squared length above this lie in a cone.
_CONE = 0.25
# Candidates beyond H: each costs a score, and saves a search of the rows where it settles the matter.
_SPARE = 3
_SECOND_SPARE = 9
_ROWS = 4096
# Scores of rows that are searched in full: 128 MB, where there are very many components.
_SCORES_AT_ONCE = 2**25
_LEAST = torch.iinfo(torch.int32).min

_asking = threading.Lock()
_sampled_product_works: bool | None = None

_int_mm = cast(Any, getattr(torch, "_int_mm", None))


def available() -> bool:
    """Whether this CPU multiplies bytes in hardware, and this torch knows how to ask it."""
    if _int_mm is None:
        return False
    probes = ("_is_vnni_supported", "_is_avx512_vnni_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


@dataclass(frozen=True)
class Bytes:
    """Rows rounded to whole multiples of a step: int8 codes, and the steps."""

    code_ND: Tensor
    step_N: Tensor

    @classmethod
    def of(cls, x_ND: Tensor, *, common_step: bool = False) -> Bytes:
        """Round rows, each with a step of its own, or all with one so that their products can be compared.

        The two kinds are rounded by different draws, since their errors must not go together.
        """
        code_ND = torch.empty(x_ND.shape, dtype=torch.int8)
        step_N = torch.empty(x_ND.shape[0])
        largest = x_ND.abs().amax().clamp_min(1e-30) if common_step else None
        dither_ND = _dither(x_ND.shape[1], seed=int(common_step))
        for start in range(0, x_ND.shape[0], _ROWS):
            piece = slice(start, start + _ROWS)
            x = x_ND[piece]
            step = (x.abs().amax(dim=1).clamp_min(1e-30) if largest is None else largest.expand(x.shape[0])) / _STEPS
            code_ND[piece] = (x / step[:, None]).add_(dither_ND[: x.shape[0]]).floor_().to(torch.int8)
            step_N[piece] = step
        return cls(code_ND, step_N)

    def __getitem__(self, rows: slice) -> Bytes:
        return Bytes(self.code_ND[rows], self.step_N[rows])


def search_by_bytes(
    x_ND: Tensor, w_KD: Tensor, n_neighbours: int, x_bytes: Bytes | None = None
) -> tuple[Tensor, Tensor]:
    """The scores and numbers of the H components with the highest x.w, best first.

    ``x_bytes`` are the rows rounded, for a caller who searches the same rows again and again.
    """
    k = w_KD.shape[0]
    if k <= 4 * (n_neighbours + _SECOND_SPARE):  # nothing to be won
        return _searched(x_ND, w_KD, n_neighbours)
    components = _Rounded.of(w_KD)
    if (
        cpu_kernels.worthwhile(x_ND, k, x_ND.shape[1])
        and x_ND.shape[1] <= cpu_kernels.MAX_DIMENSIONS
        and n_neighbours <= cpu_kernels.MAX_NEIGHBOURS
        and cpu_kernels.multiplies_bytes()
    ):
        found = _compiled(x_ND, components, n_neighbours, Bytes.of(x_ND) if x_bytes is None else x_bytes)
        if found is not None:
            return found
    return _by_operations(x_ND, components, n_neighbours, x_bytes)


@dataclass(frozen=True)
class _Rounded:
    """Components as bytes, and how far these may be off."""

    w_KD: Tensor
    bytes: Bytes
    step: float
    longest: float
    mean_D: Tensor | None
    """What was taken off: without their mean the components have the same order for every row, and in a narrow cone
    far finer steps; elsewhere it would only cost a product."""

    @classmethod
    def of(cls, w_KD: Tensor) -> _Rounded:
        mean_D = w_KD.mean(dim=0)
        cone = float(mean_D.square().sum()) > _CONE
        apart_KD = w_KD - mean_D if cone else w_KD
        low = Bytes.of(apart_KD, common_step=True)
        longest = float(apart_KD.square().sum(dim=1).amax()) ** 0.5
        return cls(w_KD, low, float(low.step_N[0]), longest, mean_D if cone else None)

    def hidden(self, x_step_N: Tensor) -> Tensor:
        """How much more a score can be than its product in bytes is worth, but for the mean's part."""
        return _REACH * ((x_step_N * self.longest) ** 2 + self.step**2).sqrt()

    def reach(self, x_ND: Tensor, x_step_N: Tensor) -> Tensor:
        """How much more a score can be than its product in bytes is worth."""
        hidden_N = self.hidden(x_step_N)
        return hidden_N if self.mean_D is None else hidden_N + x_ND @ self.mean_D


def _compiled(x_ND: Tensor, components: _Rounded, n_neighbours: int, low: Bytes) -> tuple[Tensor, Tensor] | None:
    """All in one pass, but for rows in which too many components lie too close together."""
    scale_N = low.step_N * components.step
    # The H-th best score is at least the H-th highest product's worth less what is hidden, so a component takes part
    # only if its product is less by no more than twice that; the pass notices where chance would have it otherwise.
    slack_N = (2 * components.hidden(low.step_N) / scale_N + 1).clamp_max(cpu_kernels.MAX_SLACK).int()
    found = cpu_kernels.nearest_by_bytes(
        x_ND,
        low.code_ND,
        components.w_KD,
        components.bytes.code_ND,
        n_neighbours,
        scale_N=scale_N,
        reach_N=components.reach(x_ND, low.step_N),
        slack_N=slack_N,
    )
    if found is None:
        return None
    score_NH, index_NH, doubtful_N = found
    at_once = max(1, min(_ROWS, _SCORES_AT_ONCE // components.w_KD.shape[0]))
    for rows in doubtful_N.nonzero()[:, 0].split(at_once):
        score_NH[rows], index_NH[rows] = _searched(x_ND[rows], components.w_KD, n_neighbours)
    return score_NH, index_NH


def _by_operations(
    x_ND: Tensor, components: _Rounded, n_neighbours: int, x_bytes: Bytes | None
) -> tuple[Tensor, Tensor]:
    """The products of a chunk by one operation of torch, and a few more to find the highest."""
    n, w_KD = x_ND.shape[0], components.w_KD
    k = w_KD.shape[0]
    n_scored = 1 if n_neighbours == 1 else n_neighbours + _SPARE
    # As many numbers to look at in the groups' maxima as then within the best groups.
    n_groups = 8 * math.ceil(math.sqrt((n_scored + 1) * k) / 8)
    w_code_KD = functional.pad(components.bytes.code_ND, (0, 0, 0, -k % n_groups))
    score_NH = x_ND.new_empty(n, n_neighbours)
    index_NH = torch.empty(n, n_neighbours, dtype=torch.int64)
    buffer = torch.empty(min(n, _ROWS), w_code_KD.shape[0], dtype=torch.int32)
    for start in range(0, n, _ROWS):
        piece = slice(start, start + _ROWS)
        x = x_ND[piece]
        low = Bytes.of(x) if x_bytes is None else x_bytes[piece]
        product_NK = _int_mm(low.code_ND, w_code_KD.T, out=buffer[: x.shape[0]])
        product_NK[:, k:] = _LEAST
        reach_N = components.reach(x, low.step_N)
        search = _Search(x, w_KD, product_NK, n_groups, low.step_N * components.step, reach_N)
        score_NH[piece], index_NH[piece], doubtful = search.decided(n_neighbours, n_scored)
        if doubtful.numel():
            # Ever fewer rows: more candidates first, then the whole row.
            search = search.of(doubtful)
            doubtful += start
            score_NH[doubtful], index_NH[doubtful], left = search.decided(n_neighbours, n_neighbours + _SECOND_SPARE)
            if left.numel():
                rows = doubtful[left]
                score_NH[rows], index_NH[rows] = _searched(x_ND[rows], w_KD, n_neighbours)
    return score_NH, index_NH


@dataclass(frozen=True)
class _Search:
    """Some rows, their products with all components in bytes, and what these are worth."""

    x_ND: Tensor
    w_KD: Tensor
    product_NK: Tensor
    n_groups: int
    scale_N: Tensor
    reach_N: Tensor

    def of(self, rows: Tensor) -> _Search:
        """The search of some of the rows."""
        return _Search(
            self.x_ND[rows], self.w_KD, self.product_NK[rows], self.n_groups, self.scale_N[rows], self.reach_N[rows]
        )

    def decided(self, n_neighbours: int, n_candidates: int) -> tuple[Tensor, Tensor, Tensor]:
        """The H best of the candidates, and which rows might hold a better one that is not a candidate."""
        candidate_NC, rest_N = _top(self.product_NK, n_candidates, self.n_groups)
        score_NH, index_NH = _scores(self.x_ND, self.w_KD, candidate_NC), candidate_NC
        if n_candidates > 1:
            score_NC, order = score_NH.sort(dim=1, descending=True)
            score_NH, index_NH = score_NC[:, :n_neighbours], candidate_NC.gather(1, order[:, :n_neighbours])
        doubtful = (score_NH[:, -1] <= rest_N * self.scale_N + self.reach_N).nonzero()[:, 0]
        return score_NH, index_NH, doubtful


@cache
def _dither(d: int, *, seed: int) -> Tensor:
    """One block of numbers between 0 and 1 for all blocks of rows."""
    return torch.rand(_ROWS, d, generator=torch.Generator().manual_seed(seed))


def _searched(x_ND: Tensor, w_KD: Tensor, n_neighbours: int) -> tuple[Tensor, Tensor]:
    """All rows in full, in float32."""
    if cpu_kernels.floats_pay(x_ND, *w_KD.shape):
        found = cpu_kernels.nearest_by_floats(x_ND, w_KD, None, n_neighbours)
        if found is not None:
            return found
    top = (x_ND @ w_KD.T).topk(n_neighbours, dim=1)
    return top.values, top.indices


def _top(product_NK: Tensor, count: int, n_groups: int) -> tuple[Tensor, Tensor]:
    """The columns of the highest products of each row in any order, and a product that no other exceeds.

    Column k is in group k mod G. The highest ``count`` products lie in the ``count`` groups with the highest maxima, so
    two short rows are searched in place of a long one.
    """
    n, k = product_NK.shape
    member = product_NK.view(n, k // n_groups, n_groups)
    if count == 1:
        return _top_one(member)
    best_group = member.amax(dim=1).topk(min(count, n_groups), dim=1, sorted=False).indices
    width = best_group.shape[1]
    few = member.gather(2, best_group[:, None, :].expand(n, k // n_groups, width)).view(n, -1)
    top = few.topk(count, dim=1, sorted=False)
    column = top.indices // width * n_groups + best_group.gather(1, top.indices % width)
    return column, top.values.amin(dim=1)


def _top_one(member: Tensor) -> tuple[Tensor, Tensor]:
    """The same for one, by maxima alone: the best, and what is best without it."""
    n, each, n_groups = member.shape
    group = member.amax(dim=1)
    where = group.argmax(dim=1, keepdim=True)
    rivals = member.gather(2, where[:, None, :].expand(n, each, 1))[:, :, 0]
    row = rivals.argmax(dim=1, keepdim=True)
    elsewhere = group.scatter_(1, where, _LEAST).amax(dim=1)
    beside = rivals.scatter_(1, row, _LEAST).amax(dim=1)
    return row * n_groups + where, torch.maximum(elsewhere, beside)


def _scores(x_ND: Tensor, w_KD: Tensor, index_NC: Tensor) -> Tensor:
    """The scores of chosen components, score_NC: the product of the rows and the components where a mask says so."""
    if not _has_sampled_product():
        return torch.stack([(w_KD[index_NC[:, i]] * x_ND).sum(dim=1) for i in range(index_NC.shape[1])], dim=1)
    return _sampled_product(x_ND, w_KD, index_NC)


def _sampled_product(x_ND: Tensor, w_KD: Tensor, index_NC: Tensor) -> Tensor:
    n, c = index_NC.shape
    bounds = torch.arange(0, n * c + 1, c)
    mask = torch.sparse_csr_tensor(
        bounds, index_NC.reshape(-1), x_ND.new_zeros(n * c), (n, w_KD.shape[0]), check_invariants=False
    )
    return cast(Tensor, torch.sparse.sampled_addmm(mask, x_ND, w_KD.T, beta=0.0)).values().view(n, c)


def _has_sampled_product() -> bool:
    """Whether this torch can; a build without MKL cannot.

    Asking also takes the message that sparse tensors are new, which torch gives once in a process, out of the way.
    Warnings are filtered for all threads, so this happens once, behind a lock, not with every product.
    """
    global _sampled_product_works
    with _asking:
        if _sampled_product_works is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                try:
                    _sampled_product(torch.ones(1, 1), torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64))
                    _sampled_product_works = True
                except RuntimeError:
                    _sampled_product_works = False
        return _sampled_product_works
