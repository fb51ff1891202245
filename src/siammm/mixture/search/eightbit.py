"""The H nearest components on a CPU with int8 instructions (VNNI, AMX): int8 finds candidates, float32 ranks them.

An int8 matrix product is four times as fast as one in float32. Rows are rounded to 255 steps, and the components with
the highest int8 products are a row's candidates. float32 scores these. If a component that is no candidate could still
beat the H-th best of them, float32 searches the whole row.

How much a score can exceed its int8 product is bounded by the rounding error dx.w + x'.dw, for x = x' + dx and
w = w' + dw. Rounding is stochastic, so this error is a sum of independent terms with mean 0 whatever the data. For rows
of unit length it exceeds c sqrt(step_x^2 |w|^2 + step_w^2) with a probability of at most exp(-2 c^2) (Hoeffding), 5e-8
for the c used here.

There are two implementations with the same result: compiled code in one pass, where available and worthwhile
(``cpu_kernels.py``), with as many candidates as a row needs; and torch operations with a fixed number of candidates.

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

from siammm.mixture.search import cpu_kernels

_REACH = 2.9  # c above
# Steps from 0 to the largest number of a row; a little below 127, because 127 could be rounded up to 128.
_STEPS = 126.99
# Components whose mean has a squared length above this lie in a cone.
_CONE = 0.25
# Candidates beyond H, in the first attempt and in the second.
_SPARE = 3
_SECOND_SPARE = 9
_ROWS = 4096
# Scores held at once for rows that are searched in full: 128 MB.
_SCORES_AT_ONCE = 2**25
_LEAST = torch.iinfo(torch.int32).min

_asking = threading.Lock()
_sampled_product_works: bool | None = None

_int_mm = cast(Any, getattr(torch, "_int_mm", None))


def available() -> bool:
    """Whether this CPU has int8 instructions, and this torch can use them."""
    probes = ("_is_vnni_supported", "_is_avx512_vnni_supported", "_is_amx_tile_supported")
    return _int_mm is not None and any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


@dataclass(frozen=True)
class Bytes:
    """Rows rounded to multiples of a step: int8 codes, and the steps."""

    code_ND: Tensor
    step_N: Tensor

    @classmethod
    def of(cls, x_ND: Tensor, *, common_step: bool = False) -> Bytes:
        """Round rows, each with its own step, or all with one step so that their products can be compared."""
        code_ND = torch.empty(x_ND.shape, dtype=torch.int8)
        step_N = torch.empty(x_ND.shape[0])
        largest = x_ND.abs().amax().clamp_min(1e-30) if common_step else None
        # Different seeds, so that the errors of samples and components are independent.
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

    ``x_bytes`` are the rounded rows, for a caller who searches the same rows repeatedly.
    """
    k, d = w_KD.shape
    if k <= 4 * (n_neighbours + _SECOND_SPARE):  # too few for candidates to pay
        return _searched(x_ND, w_KD, n_neighbours)
    components = _Rounded.of(w_KD)
    fits = d <= cpu_kernels.MAX_DIMENSIONS and n_neighbours <= cpu_kernels.MAX_NEIGHBOURS
    if fits and cpu_kernels.worthwhile(x_ND, k, d) and cpu_kernels.multiplies_bytes():
        found = _compiled(x_ND, components, n_neighbours, Bytes.of(x_ND) if x_bytes is None else x_bytes)
        if found is not None:
            return found
    return _by_operations(x_ND, components, n_neighbours, x_bytes)


@dataclass(frozen=True)
class _Rounded:
    """Components as int8 codes, and the bound on their error."""

    w_KD: Tensor
    bytes: Bytes
    step: float
    longest: float
    mean_D: Tensor | None
    """Subtracted from components in a narrow cone: their order stays the same for every row, with far finer steps."""

    @classmethod
    def of(cls, w_KD: Tensor) -> _Rounded:
        mean_D = w_KD.mean(dim=0)
        cone = float(mean_D.square().sum()) > _CONE
        apart_KD = w_KD - mean_D if cone else w_KD
        low = Bytes.of(apart_KD, common_step=True)
        longest = float(apart_KD.square().sum(dim=1).amax()) ** 0.5
        return cls(w_KD, low, float(low.step_N[0]), longest, mean_D if cone else None)

    def error(self, x_step_N: Tensor) -> Tensor:
        """How much a score can exceed its scaled int8 product, without the mean's part."""
        return _REACH * ((x_step_N * self.longest) ** 2 + self.step**2).sqrt()

    def reach(self, x_ND: Tensor, x_step_N: Tensor) -> Tensor:
        """How much a score can exceed its scaled int8 product."""
        error_N = self.error(x_step_N)
        return error_N if self.mean_D is None else error_N + x_ND @ self.mean_D


def _compiled(x_ND: Tensor, components: _Rounded, n_neighbours: int, low: Bytes) -> tuple[Tensor, Tensor] | None:
    """All in one pass, except rows in which too many components lie too close together."""
    scale_N = low.step_N * components.step
    # Scores differ from their products by at most the error, so a component whose product is more than twice that below
    # the H-th highest cannot be among the H best. The compiled code notices where the bound did not hold.
    slack_N = (2 * components.error(low.step_N) / scale_N + 1).clamp_max(cpu_kernels.MAX_SLACK).int()
    bounds = {"scale_N": scale_N, "reach_N": components.reach(x_ND, low.step_N), "slack_N": slack_N}
    codes = components.bytes.code_ND
    found = cpu_kernels.nearest_by_bytes(x_ND, low.code_ND, components.w_KD, codes, n_neighbours, **bounds)
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
    """The same by torch operations, in chunks of rows."""
    n, w_KD = x_ND.shape[0], components.w_KD
    k = w_KD.shape[0]
    n_scored = 1 if n_neighbours == 1 else n_neighbours + _SPARE
    # As many groups as there are components in the best groups: both are then searched in equal time.
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
            # Fewer and fewer rows: more candidates first, then the whole row.
            search = search.of(doubtful)
            doubtful += start
            score_NH[doubtful], index_NH[doubtful], left = search.decided(n_neighbours, n_neighbours + _SECOND_SPARE)
            if left.numel():
                rows = doubtful[left]
                score_NH[rows], index_NH[rows] = _searched(x_ND[rows], w_KD, n_neighbours)
    return score_NH, index_NH


@dataclass(frozen=True)
class _Search:
    """Some rows, their int8 products with all components, and the bounds on their scores."""

    x_ND: Tensor
    w_KD: Tensor
    product_NK: Tensor
    n_groups: int
    scale_N: Tensor
    reach_N: Tensor

    def of(self, rows: Tensor) -> _Search:
        """The search of some of the rows."""
        bounds = self.scale_N[rows], self.reach_N[rows]
        return _Search(self.x_ND[rows], self.w_KD, self.product_NK[rows], self.n_groups, *bounds)

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
    """Random numbers between 0 and 1, the same for every chunk of rows."""
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
    """The columns of the highest products of each row in any order, and an upper bound on the other products.

    Column k is in group k mod G. The highest ``count`` products lie in the ``count`` groups with the highest maxima, so
    two short rows are searched instead of a long one.
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
    """The same for one: the best, and the second best as the bound."""
    n, each, n_groups = member.shape
    group = member.amax(dim=1)
    where = group.argmax(dim=1, keepdim=True)
    rivals = member.gather(2, where[:, None, :].expand(n, each, 1))[:, :, 0]
    row = rivals.argmax(dim=1, keepdim=True)
    elsewhere = group.scatter_(1, where, _LEAST).amax(dim=1)
    beside = rivals.scatter_(1, row, _LEAST).amax(dim=1)
    return row * n_groups + where, torch.maximum(elsewhere, beside)


def _scores(x_ND: Tensor, w_KD: Tensor, index_NC: Tensor) -> Tensor:
    """The scores of chosen components, score_NC: a product that is sampled at these entries."""
    if not _has_sampled_product():
        return torch.stack([(w_KD[index_NC[:, i]] * x_ND).sum(dim=1) for i in range(index_NC.shape[1])], dim=1)
    return _sampled_product(x_ND, w_KD, index_NC)


def _sampled_product(x_ND: Tensor, w_KD: Tensor, index_NC: Tensor) -> Tensor:
    n, c = index_NC.shape
    entries = (torch.arange(0, n * c + 1, c), index_NC.reshape(-1), x_ND.new_zeros(n * c))
    mask = torch.sparse_csr_tensor(*entries, (n, w_KD.shape[0]), check_invariants=False)
    return cast(Tensor, torch.sparse.sampled_addmm(mask, x_ND, w_KD.T, beta=0.0)).values().view(n, c)


def _has_sampled_product() -> bool:
    """Whether this torch has ``sampled_addmm``; a build without MKL does not.

    The trial also uses up torch's warning that sparse tensors are in beta, which comes once per process. Filters of
    warnings hold for all threads, so this happens once, behind a lock.
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
