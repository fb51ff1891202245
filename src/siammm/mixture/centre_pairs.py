"""Distances between centres: those of all pairs, of which Eq. 11 needs two moments, and of each centre's nearest other.

Legend:  K centres, D dimensions, P pairs, E and SE the mean and the deviation of all distances in Eq. 11.
"""

from __future__ import annotations

# torch and scipy are only partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
from dataclasses import dataclass

import torch
from torch import Tensor

from siammm.mixture.search import kernels, neighbours


@dataclass(frozen=True)
class PairStatistics:
    """The distances between all pairs of centres: their mean and deviation, and each centre's nearest other."""

    mean: float
    deviation: float
    nearest_K: Tensor
    distance_K: Tensor


def pair_statistics(centre_KD: Tensor, *, unit: bool) -> PairStatistics:
    """What Eq. 11 needs of the K (K - 1) / 2 distances; K x K is never stored."""
    return PairStatistics(*pair_moments(centre_KD, unit=unit), *nearest_others(centre_KD, unit=unit))


def pair_moments(centre_KD: Tensor, *, unit: bool) -> tuple[float, float]:
    """E and SE of Eq. 11, exact over all pairs."""
    k = centre_KD.shape[0]
    double_KD = centre_KD.double()
    n_pairs = k * (k - 1) / 2
    # The sum of squared distances has a closed form; the sum of distances needs a pass over all pairs.
    squares = k * (double_KD**2).sum() - (double_KD.sum(dim=0) ** 2).sum()
    mean = float(_sum_of_distances(centre_KD, unit=unit)) / n_pairs
    return mean, max(float(squares) / n_pairs - mean**2, 0.0) ** 0.5


def nearest_others(centre_KD: Tensor, *, unit: bool) -> tuple[Tensor, Tensor]:
    """The nearest other centre of each, nearest_K, and its distance, distance_K float64."""
    index = neighbours.nearest_centres(centre_KD, 2, unit=unit)
    itself = torch.arange(centre_KD.shape[0], device=index.device)
    nearest_K = torch.where(index[:, 0] == itself, index[:, 1], index[:, 0])  # of two equal centres either may be first
    double_KD = centre_KD.double()
    return nearest_K, torch.linalg.vector_norm(double_KD - double_KD[nearest_K], dim=1)


def _sum_of_distances(centre_KD: Tensor, *, unit: bool) -> Tensor:
    k, d = centre_KD.shape
    if unit and centre_KD.is_cuda and kernels.supports(d, 2, centre_KD.device):
        return kernels.sum_of_distances(centre_KD)
    dtype = torch.float32 if centre_KD.device.type == "mps" or k > 4096 else torch.float64
    x_KD = centre_KD.to(dtype)
    square_K = (x_KD**2).sum(dim=1)
    total = torch.zeros((), dtype=torch.float64, device=centre_KD.device)
    rows = neighbours.score_chunk_rows(x_KD.device, dtype, k)
    for start in range(0, k, rows):
        block = x_KD[start : start + rows]
        # Every pair once: the block against itself and all that follows; its own pairs are halved.
        squared = square_K[start:] + square_K[start : start + rows, None] - 2 * block @ x_KD[start:].T
        distance = squared.clamp_min_(0).sqrt_()
        own = distance[:, : block.shape[0]]
        own.fill_diagonal_(0)
        total += distance.sum(dtype=torch.float64) - 0.5 * own.sum(dtype=torch.float64)
    return total


def mutual_pairs(nearest_K: Tensor, distance_K: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs that are each other's nearest, closest pair first: pair_P2 with i < j, and their distances."""
    itself = torch.arange(nearest_K.shape[0], device=nearest_K.device)
    first = ((nearest_K[nearest_K] == itself) & (itself < nearest_K)).nonzero()[:, 0]
    first = first[distance_K[first].argsort(stable=True)]
    return torch.stack([first, nearest_K[first]], dim=1), distance_K[first]
