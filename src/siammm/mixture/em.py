"""Expectation maximisation over streamed samples: E step, M step, sufficient statistics, all-reduce.

One E step is one pass over the samples. From each chunk it keeps only what the M step needs: how much of the chunk each
component took, and the sum of the statistics t(x) it took. N x K never exists, and under ``torch.distributed`` only
these sums travel.

Legend:  N samples, K components, D dimensions, F length of the statistic, H neighbours;
         alpha a component's size in Eq. 10, tau the temperature.
"""

from __future__ import annotations

# torch is only partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as functional
from torch import Tensor

from siammm.core import ranks
from siammm.mixture.components import Components
from siammm.mixture.samples import Samples
from siammm.mixture.search import cpu_kernels, kernels, neighbours
from siammm.mixture.search.eightbit import Bytes
from siammm.mixture.search.neighbours import Backend

AssignmentRule = Literal["nearest", "posterior"]
ASSIGNMENT_RULES: tuple[AssignmentRule, ...] = ("nearest", "posterior")

# Rows whose H neighbours are found at once: bounds what a pass holds besides the samples.
_CPU_ROWS = 2**16
_GPU_ROWS = 2**21

# Neighbours that a density is measured with, also where samples are assigned to fewer.
_CALIBRATION_NEIGHBOURS = 5
# One step is enough for components that are apart; a narrow one within a wide one takes a few.
_CALIBRATION_STEPS = 6
_CALIBRATION_TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """How samples are shared among components."""

    rule: AssignmentRule = "nearest"
    """The paper's H nearest with weights of Eq. 10, or the posterior of textbook EM over all components."""
    n_neighbours: int = 5
    """H of Eq. 8 and 10."""
    temperature: float = 0.02
    """tau of Eq. 10."""
    size_weighting: bool = False
    """Whether alpha of Eq. 10 is the component's weight, or 1 as in the paper."""
    by_density: bool = False
    """Weigh the H nearest by their posterior in place of Eq. 10."""
    backend: Backend = "auto"


@dataclass(frozen=True)
class Statistics:
    """What one E step leaves, summed over all ranks."""

    count_K: Tensor
    total_KF: Tensor
    log_likelihood: float
    """Mean over the samples; under the nearest rule a lower bound, from the H nearest components alone."""
    nearest_K: Tensor
    """How many samples each component is the first choice of; 0 is possible where ``count_K`` is above 0."""

    @property
    def mean_KF(self) -> Tensor:
        """Mean statistic of each component: r of Eq. 5 for directions."""
        return self.total_KF / self.count_K.clamp_min(1e-300)[:, None]


def weigh(
    components: Components, assignment: Assignment, x_ND: Tensor, x_bytes: Bytes | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The H nearest components of each sample, their weights, and the samples' log likelihood under these alone.

    Eq. 8 for H = 1, Eq. 10 above. Shapes: index_NH int64, weight_NH with rows that sum to 1, log_likelihood_N.
    """
    score_NH, index_NH = nearest_components(components, assignment, x_ND, x_bytes)
    log_joint_NH = components.log_joint_of(x_ND, score_NH, index_NH)
    if index_NH.shape[1] == 1:
        return index_NH, torch.ones_like(score_NH), log_joint_NH[:, 0]
    k, d = components.centre_KD.shape
    share_NH, log_sum_N = _shares(log_joint_NH, k, d)
    if assignment.by_density:
        return index_NH, share_NH, log_sum_N
    logit_NH = components.similarity(score_NH, x_ND) / assignment.temperature
    if assignment.size_weighting:
        logit_NH = logit_NH + components.weight_K.clamp_min(1e-300).log().to(logit_NH)[index_NH]
    return index_NH, _shares(logit_NH, k, d)[0], log_sum_N


def nearest_components(
    components: Components, assignment: Assignment, x_ND: Tensor, x_bytes: Bytes | None = None
) -> tuple[Tensor, Tensor]:
    """The scores and numbers of the H nearest components of each sample, nearest first: score_NH, index_NH int64."""
    w_KD, b_K = components.ranking(x_ND)
    k, d = w_KD.shape
    h = min(assignment.n_neighbours, k)
    backend = neighbours.choose_backend(assignment.backend, x_ND.device, x_ND.dtype, d=d, k=k, n_neighbours=h)
    return neighbours.search(x_ND, w_KD, b_K, h, backend=backend, x_bytes=x_bytes)


def _shares(logit_NH: Tensor, k: int, d: int) -> tuple[Tensor, Tensor]:
    """The softmax and the logsumexp of every row."""
    found = cpu_kernels.shares(logit_NH) if cpu_kernels.worthwhile(logit_NH, k, d) else None
    return found or (logit_NH.softmax(dim=1), logit_NH.logsumexp(dim=1))


def e_step(samples: Samples, components: Components, assignment: Assignment) -> Statistics:
    """Share every sample among the components, and sum up what each component got: one pass."""
    k = components.weight_K.shape[0]
    count_K, nearest_K = torch.zeros_like(components.weight_K), torch.zeros_like(components.weight_K)
    total_KF = empty_totals(components)
    log_likelihood = torch.zeros_like(count_K[0])
    sizes = {"d": samples.n_columns, "k": k, "n_neighbours": assignment.n_neighbours}
    backend = neighbours.choose_backend(assignment.backend, samples.device, samples.dtype, **sizes)
    for start, x_ND in samples.chunks(pass_rows(samples, k, assignment)):
        t_NF = components.statistic(x_ND)
        if assignment.rule == "posterior":
            log_joint_NK = components.log_joint(x_ND)
            log_likelihood_N = log_joint_NK.logsumexp(dim=1)
            posterior_NK = (log_joint_NK - log_likelihood_N[:, None]).exp()
            chunk_count_K, chunk_KF = posterior_NK.sum(dim=0), posterior_NK.T @ t_NF
            first_N = posterior_NK.argmax(dim=1)
        else:
            x_bytes = samples.low_precision(start, x_ND.shape[0]) if backend == "low-precision" else None
            index_NH, weight_NH, log_likelihood_N = weigh(components, assignment, x_ND, x_bytes)
            chunk_count_K, chunk_KF = sums_by_component(t_NF, index_NH, weight_NH, k)
            first_N = index_NH[:, 0]
        count_K += chunk_count_K.to(count_K)
        nearest_K += torch.bincount(first_N, minlength=k).to(nearest_K)
        total_KF += chunk_KF.to(count_K)
        log_likelihood += log_likelihood_N.to(count_K).sum()
    ranks.all_reduce_sum(count_K, total_KF, log_likelihood, nearest_K)
    return Statistics(count_K, total_KF, float(log_likelihood) / samples.n_total, nearest_K)


def empty_totals(components: Components) -> Tensor:
    """Zeros for the sums of the components' statistics, total_KF float64."""
    width = components.statistic(components.centre_KD[:1]).shape[1]
    return components.weight_K.new_zeros(components.weight_K.shape[0], width)


def sums_by_component(t_NF: Tensor, index_NH: Tensor, weight_NH: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """How much each component was given, count_K, and the weighted sum of the statistics it was given, total_KF."""
    if t_NF.is_cuda and kernels.available() and t_NF.dtype == torch.float32:
        return kernels.sums_by_component(t_NF, index_NH, weight_NH, k)
    if cpu_kernels.worthwhile(t_NF, k, t_NF.shape[1]):
        found = cpu_kernels.sums_by_component(t_NF, index_NH, weight_NH, k)
        if found is not None:
            return found
    flat, weight = index_NH.reshape(-1), weight_NH.reshape(-1)
    count_K = torch.bincount(flat, weights=weight if weight.device.type == "mps" else weight.double(), minlength=k)
    if index_NH.shape[1] == 1:
        return count_K, t_NF.new_zeros(k, t_NF.shape[1]).index_add_(0, flat, t_NF)
    # Every component gathers its own samples: a bag of rows with weights, which torch sums in parallel.
    order = flat.argsort(stable=True)
    rows, starts = order // index_NH.shape[1], functional.pad(torch.bincount(flat, minlength=k).cumsum(0)[:-1], (1, 0))
    return count_K, functional.embedding_bag(rows, t_NF, starts, mode="sum", per_sample_weights=weight[order])


def maximise(
    samples: Samples,
    components: Components,
    assignment: Assignment,
    max_iter: int,
    tol: float,
    generator: torch.Generator,
    *,
    on_step: Callable[[int, int, float], None] | None = None,
) -> tuple[Components, list[float], bool]:
    """Alternate E and M steps until the log likelihood moves by less than ``tol``.

    Returns the components, the log likelihood before each M step, and whether they converged. Components that lost all
    their samples are seeded anew by splitting the largest.
    """
    history: list[float] = []
    for step in range(max_iter):
        statistics = e_step(samples, components, assignment)
        history.append(statistics.log_likelihood)
        components = components.estimated(*refilled(statistics, generator, samples.n_columns))
        if on_step is not None:
            on_step(step + 1, max_iter, history[-1])
        if len(history) > 1 and abs(history[-1] - history[-2]) < tol:
            return components, history, True
    return components, history, False


def calibrated(samples: Samples, components: Components, assignment: Assignment) -> Components:
    """The same centres with the weights and spreads of a density: EM with the posterior of the nearest few.

    Eq. 10 ignores the spreads, so it assigns samples of a wide component to a narrow one nearby. This does not matter
    for assigning samples, but makes weights and concentrations wrong by some percent, and likelihoods, samples and
    outlier scores depend on these. A posterior fit needs no calibration.
    """
    if assignment.rule == "posterior":
        return components
    nearby = replace(assignment, n_neighbours=max(assignment.n_neighbours, _CALIBRATION_NEIGHBOURS), by_density=True)
    before = -math.inf
    for _ in range(_CALIBRATION_STEPS):
        statistics = e_step(samples, components, nearby)
        components = components.respread(statistics.count_K, statistics.mean_KF)
        if statistics.log_likelihood - before < _CALIBRATION_TOLERANCE:
            break
        before = statistics.log_likelihood
    return components


def refilled(
    statistics: Statistics, generator: torch.Generator, d: int, *, empty_K: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Counts and mean statistics in which each empty component has become half of a large one.

    The two halves differ by a small random step, which the next E step turns into a real split. ``empty_K`` says which
    components are empty; by default those that got no part of any sample.
    """
    count_K, mean_KF = statistics.count_K, statistics.mean_KF
    empty_K = count_K <= 0 if empty_K is None else empty_K
    empty = empty_K.nonzero()[:, 0]
    if not empty.numel():
        return count_K, mean_KF
    count_K, mean_KF = count_K.clone(), mean_KF.clone()
    # The largest components, each split once; if more are empty than full, the rest wait for the next round.
    n_donors = min(empty.numel(), count_K.numel() - empty.numel())
    donors = count_K.masked_fill(empty_K, -1).argsort(descending=True, stable=True)[:n_donors]
    receivers = empty[:n_donors]
    # Only the centre moves, by a hundredth of the spread of centres; a square that is part of the statistic stays.
    spread = mean_KF[count_K > 0, :d].std(dim=0, correction=0).clamp_min(1e-12)
    noise = torch.randn(donors.numel(), d, generator=generator, dtype=torch.float64)
    count_K[donors] /= 2
    count_K[receivers] = count_K[donors]
    mean_KF[receivers] = mean_KF[donors]
    mean_KF[receivers, :d] += 0.01 * spread * noise.to(mean_KF.device)
    return count_K, mean_KF


def log_likelihoods(samples: Samples, components: Components) -> Tensor:
    """The log density of every sample under the whole mixture, float64."""
    k = components.weight_K.shape[0]
    result = torch.empty(samples.n_rows, dtype=torch.float64, device=components.weight_K.device)
    for start, x_ND in samples.chunks(neighbours.score_chunk_rows(samples.device, samples.dtype, k)):
        result[start : start + x_ND.shape[0]] = components.log_joint(x_ND).logsumexp(dim=1).to(result)
    return result


def assignments(samples: Samples, components: Components, assignment: Assignment) -> tuple[Tensor, Tensor, Tensor]:
    """The H components with the largest weights of each sample, heaviest first: index_NH int64, weight_NH.

    Under the posterior rule the weights are the H largest of the posterior. The last result is the sum of the log
    likelihoods that an E step would find, over this rank's samples.
    """
    k = components.weight_K.shape[0]
    n_neighbours = min(assignment.n_neighbours, k)
    index_NH = torch.empty(samples.n_rows, n_neighbours, dtype=torch.int64, device=samples.device)
    weight_NH = torch.empty(samples.n_rows, n_neighbours, dtype=samples.dtype, device=samples.device)
    log_likelihood = torch.zeros_like(components.weight_K[0])
    for start, x_ND in samples.chunks(pass_rows(samples, k, assignment)):
        if assignment.rule == "posterior":
            log_joint_NK = components.log_joint(x_ND)
            log_likelihood_N = log_joint_NK.logsumexp(dim=1)
            weight, index = log_joint_NK.softmax(dim=1).topk(n_neighbours, dim=1)
        else:
            index, weight, log_likelihood_N = weigh(components, assignment, x_ND)
            if assignment.size_weighting:  # the nearest component need not be the heaviest
                weight, order = weight.sort(dim=1, descending=True)
                index = index.gather(1, order)
        index_NH[start : start + x_ND.shape[0]], weight_NH[start : start + x_ND.shape[0]] = index, weight
        log_likelihood += log_likelihood_N.to(log_likelihood).sum()
    return index_NH, weight_NH, log_likelihood


def pass_rows(samples: Samples, k: int, assignment: Assignment) -> int:
    """How many rows of a pass are worked on at once."""
    if assignment.rule == "posterior":
        return neighbours.score_chunk_rows(samples.device, samples.dtype, k)
    return _GPU_ROWS if samples.device.type == "cuda" else _CPU_ROWS


def second_moments(samples: Samples) -> Tensor:
    """The mean of x x^T over all samples, moment_DD float64."""
    d = samples.n_columns
    moment_DD = torch.zeros(d, d, dtype=torch.float64, device=samples.parameter_device)
    for _, x_ND in samples.chunks(_CPU_ROWS):
        moment_DD += (x_ND.T @ x_ND).to(moment_DD)
    ranks.all_reduce_sum(moment_DD)
    return moment_DD / samples.n_total


def principal_directions(samples: Samples, dims: int) -> tuple[Tensor, float]:
    """The directions with most of the samples' squared length, basis_DP, and how much of it they have (appendix C)."""
    # About the origin, not the mean, because the length of r itself is measured.
    values, vectors = torch.linalg.eigh(second_moments(samples))
    return vectors[:, -dims:].contiguous(), float(values[-dims:].sum())


def mean_and_variance(samples: Samples) -> tuple[Tensor, float]:
    """The mean of all samples, mean_D float64, and the mean variance of a dimension."""
    total_D = torch.zeros(samples.n_columns, dtype=torch.float64, device=samples.parameter_device)
    for _, x_ND in samples.chunks(_CPU_ROWS):
        total_D += x_ND.sum(dim=0).to(total_D)
    ranks.all_reduce_sum(total_D)
    mean_D = total_D / samples.n_total
    square_D = torch.zeros_like(mean_D)
    for _, x_ND in samples.chunks(_CPU_ROWS):
        square_D += ((x_ND - mean_D.to(x_ND)) ** 2).sum(dim=0).to(square_D)
    ranks.all_reduce_sum(square_D)
    return mean_D, float(square_D.mean()) / samples.n_total
