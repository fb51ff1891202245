"""The acceptance test behind ``merge="auto"``: are two components one, and does a component stand alone?

k-means cuts one cluster in two as readily as it separates two clusters, and the halves look separate *because* they
were cut. So a sample is never compared with a mean it is part of: its own component is taken without it (*left out*).
Two tests build on this.

- **The pair.** On the axis t(x) = similarity to i - similarity to j, two groups must describe the members better than
  a *flat* density cut in half would. In nats per sample, with p the share of i, Delta the difference of the two means
  and s^2 the variance within,

      gain = 1/2 ln(1 + p (1 - p) Delta^2 / s^2) - Hb(p),

  where the entropy Hb(p) is the cost of saying which group a sample is in. A flat density cut in half gains exactly 0
  (Delta / s = sqrt 12), a bell cut in half less, two separate bells more. The pair is *kept apart* if
  n (gain - MARGIN) > NATS.
- **The component.** A *stray* is a member that is nearer to its second component than to its own, once left out of it.
  A component *stands alone* if (strays + 1) / n <= STRAYS: scattered outliers and fewer than 1 / STRAYS samples do not.

Every component proposes to merge with the neighbour of least gain. The proposal is accepted if the pair is not kept
apart, or if the proposer does not stand alone. When no proposal is accepted, every component is offered a split along
its main axis, which corrects components that merged too early: halves that are kept apart stay two, and go through the
same rounds again.

The constants were chosen on twelve synthetic families and tested on eleven others and scikit-learn's digits
(``benchmarks/merge_families.py``, ``docs/decisions/0003-when-to-stop-merging.md``).

Legend:  N samples, K components, P pairs, D dimensions, F length of the statistic.
"""

from __future__ import annotations

# torch is only partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from siammm.core import ranks
from siammm.mixture import em
from siammm.mixture.components import Components
from siammm.mixture.em import Assignment, Statistics
from siammm.mixture.samples import Samples
from siammm.mixture.search import neighbours

MARGIN = 0.05
NATS = 8.0
STRAYS = 0.05
# How many of its nearest components each one is tested against.
PARTNERS = 3
_AXIS_STEPS = 8
# Entries (sample, partner) processed at once.
_ENTRIES = 2**15
_GPU_ENTRIES = 2**20
# Up to so many components, a CPU is quicker to multiply all samples by all of them than to gather the rows of the
# pairs.
_FEW_COMPONENTS = 1024


@dataclass(frozen=True)
class Members:
    """The samples by their nearest and second component, and the sums of those nearest to each."""

    first_N: Tensor
    second_N: Tensor
    statistics: Statistics


@dataclass(frozen=True)
class Evidence:
    """The result of the tests: the gain of each pair, which are kept apart, and which components stand alone."""

    pair_P2: Tensor
    gain_P: Tensor
    apart_P: Tensor
    alone_K: Tensor


def members(samples: Samples, components: Components, assignment: Assignment) -> Members:
    """One pass: the two nearest components of every sample, and the sums of the samples nearest to each."""
    k = int(components.weight_K.shape[0])
    first_N = torch.empty(samples.n_rows, dtype=torch.int64, device=samples.device)
    second_N = torch.empty_like(first_N)
    count_K, total_KF = torch.zeros_like(components.weight_K), em.empty_totals(components)
    two = Assignment(n_neighbours=2, backend=assignment.backend)
    for start, x_ND in samples.chunks(em.pass_rows(samples, k, two)):
        index_NH = em.nearest_components(components, two, x_ND)[1]
        piece = slice(start, start + x_ND.shape[0])
        first_N[piece], second_N[piece] = index_NH[:, 0], index_NH[:, -1]
        own = index_NH[:, :1].contiguous()
        chunk_K, chunk_KF = em.sums_by_component(components.statistic(x_ND), own, torch.ones_like(x_ND[:, :1]), k)
        count_K += chunk_K.to(count_K)
        total_KF += chunk_KF.to(count_K)
    ranks.all_reduce_sum(count_K, total_KF)
    return Members(first_N, second_N, Statistics(count_K, total_KF, math.nan, count_K))


def evidence(samples: Samples, found: Members, pair_P2: Tensor, *, unit: bool) -> Evidence:
    """One more pass: every member on the axes of its component's pairs, and the strays."""
    count_K = found.statistics.count_K
    k, d = count_K.shape[0], samples.n_columns
    mean_KD = found.statistics.mean_KF[:, :d]
    centre_KD = _directions(mean_KD) if unit else mean_KD
    resultant_K = _length(found.statistics.total_KF[:, :d])[:, 0]
    pairs = _DirectedPairs.of(pair_P2, k)
    moment_S3 = torch.zeros(2 * pair_P2.shape[0], 3, dtype=torch.float64, device=count_K.device)
    strays_K = torch.zeros_like(count_K)
    budget = _GPU_ENTRIES if samples.device.type == "cuda" else _ENTRIES
    rows = max(1, budget // max(1, int(pairs.degree_K.max())))
    local = pairs.to(samples.device)
    for start, x_ND in samples.chunks(rows):
        piece = slice(start, start + x_ND.shape[0])
        first, second = found.first_N[piece], found.second_N[piece]
        alike = _Similarities.of(x_ND, centre_KD.to(x_ND), unit=unit)
        every = torch.arange(x_ND.shape[0], device=x_ND.device)
        own = _left_out(alike.between(every, first), count_K.to(x_ND)[first], resultant_K.to(x_ND)[first], unit=unit)
        stray = own < alike.between(every, second)
        strays_K += torch.bincount(first[stray], minlength=k).to(strays_K)
        # One entry for each sample and each pair its component is in.
        degree = local.degree_K[first]
        sample = every.repeat_interleave(degree)
        before = (degree.cumsum(0) - degree).repeat_interleave(degree)
        entry = local.begin_K[first[sample]] + torch.arange(sample.shape[0], device=x_ND.device) - before
        t = own[sample] - alike.between(sample, local.other_S[entry])
        slot = local.slot_S[entry]
        t = torch.where(slot % 2 == 0, t, -t).to(moment_S3)
        moment_S3.index_add_(0, slot.to(moment_S3.device), torch.stack([torch.ones_like(t), t, t * t], dim=1))
    ranks.all_reduce_sum(moment_S3, strays_K)
    gain_P, apart_P = pair_gain(moment_S3.view(-1, 2, 3))
    return Evidence(pair_P2, gain_P, apart_P, (strays_K + 1) <= STRAYS * count_K)


def pair_gain(moment_P23: Tensor) -> tuple[Tensor, Tensor]:
    """The gain of two groups over one, in nats per sample, and whether the two are kept apart.

    The moments are count, sum and sum of squares of t(x) on each side of a pair.
    """
    count_P2, sum_P2, square_P2 = moment_P23.unbind(dim=-1)
    total_P = count_P2.sum(dim=1).clamp_min(1)
    mean_P2 = sum_P2 / count_P2.clamp_min(1)
    apart_P = mean_P2[:, 0] - mean_P2[:, 1]
    within_P = (square_P2 - sum_P2 * mean_P2).sum(dim=1) / total_P
    # Above zero, relative to the distance: samples may have any unit.
    within_P = torch.maximum(within_P, 1e-12 * apart_P**2).clamp_min(1e-300)
    share_P = (count_P2[:, 0] / total_P).clamp(1e-12, 1 - 1e-12)
    entropy_P = -(share_P * share_P.log() + (1 - share_P) * (1 - share_P).log())
    gain_P = 0.5 * torch.log1p(share_P * (1 - share_P) * apart_P**2 / within_P) - entropy_P
    # Sides that overlap once left out, and sides of one sample, are no evidence.
    gain_P = torch.where((apart_P > 0) & (count_P2.amin(dim=1) > 1), gain_P, torch.full_like(gain_P, -1.0))
    return gain_P, total_P * (gain_P - MARGIN) > NATS


def proposals(found: Evidence, most: int) -> list[tuple[int, int]]:
    """The pairs to merge, least gain first, at most ``most``; no component is in two of them."""
    order = found.gain_P.argsort(stable=True)
    pair_P2, apart_P = found.pair_P2[order], found.apart_P[order]
    # A component proposes once, to the partner of least gain.
    place_P = torch.arange(pair_P2.shape[0], device=pair_P2.device)
    first_K = torch.full_like(found.alone_K, pair_P2.shape[0], dtype=torch.int64)
    first_K.scatter_reduce_(0, pair_P2.T.reshape(-1), place_P.repeat(2), "amin")
    proposes_P2 = first_K[pair_P2] == place_P[:, None]
    # Pairs that are kept apart merge only if a proposer does not stand alone.
    proposes_P2 &= ~(apart_P[:, None] & found.alone_K[pair_P2])
    used: set[int] = set()
    chosen: list[tuple[int, int]] = []
    for i, j in pair_P2[proposes_P2.any(dim=1)].tolist():
        if len(chosen) == most:
            break
        if i not in used and j not in used:
            used |= {i, j}
            chosen.append((i, j))
    return chosen


def nearby_pairs(centre_KD: Tensor, *, unit: bool) -> Tensor:
    """Each component with its nearest few, pair_P2 with i < j, each pair once."""
    k = centre_KD.shape[0]
    index = neighbours.nearest_centres(centre_KD, min(PARTNERS, k - 1) + 1, unit=unit)
    itself = torch.arange(k, device=index.device)[:, None].expand_as(index)
    low, high = torch.minimum(index, itself), torch.maximum(index, itself)
    code = (low * k + high)[low != high].unique()
    return torch.stack([code // k, code % k], dim=1).to(centre_KD.device)


def halves(samples: Samples, components: Components, assignment: Assignment, *, unit: bool) -> tuple[Tensor, Tensor]:
    """Two centres for every component, on either side of its main axis, and which two belong together, pair_P2.

    Empty sides are left out. The axis comes from power iteration on the covariance of the component's own samples.
    """
    k, d = components.centre_KD.shape
    found = members(samples, components, assignment)
    mean_KD = found.statistics.mean_KF[:, :d]
    axis_KD = torch.randn(k, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(mean_KD.device)
    rows = em.pass_rows(samples, k, Assignment())
    for _ in range(_AXIS_STEPS):
        axis_KD = _directions(axis_KD)
        total_KD = torch.zeros_like(mean_KD)
        for start, x_ND in samples.chunks(rows):
            first = found.first_N[start : start + x_ND.shape[0]]
            offset_ND = x_ND - mean_KD.to(x_ND)[first]
            along_N = (offset_ND * axis_KD.to(x_ND)[first]).sum(dim=1, keepdim=True)
            total_KD += _sums(offset_ND * along_N, first, k).to(total_KD)
        ranks.all_reduce_sum(total_KD)
        axis_KD = total_KD
    count_2K = torch.zeros(2 * k, dtype=torch.float64, device=mean_KD.device)
    total_2KD = torch.zeros(2 * k, d, dtype=torch.float64, device=mean_KD.device)
    for start, x_ND in samples.chunks(rows):
        first = found.first_N[start : start + x_ND.shape[0]]
        along_N = ((x_ND - mean_KD.to(x_ND)[first]) * axis_KD.to(x_ND)[first]).sum(dim=1)
        side = 2 * first + (along_N > 0)
        count_2K += torch.bincount(side, minlength=2 * k).to(count_2K)
        total_2KD += _sums(x_ND, side, 2 * k).to(total_2KD)
    ranks.all_reduce_sum(count_2K, total_2KD)
    filled = count_2K > 0
    centre_SD = total_2KD[filled] / count_2K[filled, None]
    pair_P2 = (filled.cumsum(0) - 1).view(k, 2)[filled.view(k, 2).all(dim=1)]
    return (_directions(centre_SD) if unit else centre_SD), pair_P2


@dataclass(frozen=True)
class _DirectedPairs:
    """For every component, the slice of (other component, slot of the moments) of the pairs it is in."""

    degree_K: Tensor
    begin_K: Tensor
    other_S: Tensor
    slot_S: Tensor

    @classmethod
    def of(cls, pair_P2: Tensor, k: int) -> _DirectedPairs:
        slot_P = 2 * torch.arange(pair_P2.shape[0], device=pair_P2.device)
        source, other = pair_P2.T.reshape(-1), pair_P2.flip(1).T.reshape(-1)
        slot = torch.cat([slot_P, slot_P + 1])
        order = source.argsort(stable=True)
        degree_K = torch.bincount(source, minlength=k)
        return cls(degree_K, degree_K.cumsum(0) - degree_K, other[order], slot[order])

    def to(self, device: torch.device) -> _DirectedPairs:
        return _DirectedPairs(*(t.to(device) for t in (self.degree_K, self.begin_K, self.other_S, self.slot_S)))


@dataclass(frozen=True)
class _Similarities:
    """The similarity of samples to components: the cosine, or minus half the squared distance."""

    x_ND: Tensor
    centre_KD: Tensor
    unit: bool
    cosine_NK: Tensor | None
    """All of them, where that is quicker than to take the rows of each pair."""

    @classmethod
    def of(cls, x_ND: Tensor, centre_KD: Tensor, *, unit: bool) -> _Similarities:
        has_all = unit and x_ND.device.type == "cpu" and centre_KD.shape[0] <= _FEW_COMPONENTS
        return cls(x_ND, centre_KD, unit, x_ND @ centre_KD.T if has_all else None)

    def between(self, sample_E: Tensor, component_E: Tensor) -> Tensor:
        """Of each sample to the component beside it."""
        if self.cosine_NK is not None:
            return self.cosine_NK[sample_E, component_E]
        x_ED, centre_ED = self.x_ND[sample_E], self.centre_KD[component_E]
        return (x_ED * centre_ED).sum(dim=1) if self.unit else -0.5 * ((x_ED - centre_ED) ** 2).sum(dim=1)


def _left_out(similarity_N: Tensor, count_N: Tensor, resultant_N: Tensor, *, unit: bool) -> Tensor:
    """Each sample's similarity to its own component without it; 0 where it is the only one.

    It is given that to its component with it. For directions, with S the sum over the component: cos(x, S - x) =
    (x.S - 1) / |S - x|. Otherwise the distance from the mean of the others is n / (n - 1) times that from the mean of
    all.
    """
    if not unit:
        return similarity_N * (count_N / (count_N - 1).clamp_min(1e-3)) ** 2
    dot_N = similarity_N * resultant_N
    rest_N = (resultant_N**2 - 2 * dot_N + 1).clamp_min(0).sqrt()
    return torch.where(count_N > 1, (dot_N - 1) / rest_N.clamp_min(1e-6), torch.zeros_like(dot_N))


def _sums(rows_ND: Tensor, group_N: Tensor, k: int) -> Tensor:
    return em.sums_by_component(rows_ND, group_N[:, None], torch.ones_like(rows_ND[:, :1]), k)[1]


def _length(rows: Tensor) -> Tensor:
    return (rows * rows).sum(dim=1, keepdim=True).sqrt()


def _directions(rows: Tensor) -> Tensor:
    return rows / _length(rows).clamp_min(1e-300)
