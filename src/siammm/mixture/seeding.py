"""Where the components start: k-means++ on a draw of the samples, or random samples.

k-means++ misses clusters: in high dimensions all distances are nearly equal, so its draw is hardly better than uniform,
and EM cannot move a component from a cluster that has two to one that has none. So three times as many seeds are drawn
as needed, improved by a few steps of k-means, and joined in pairs of least cost (Ward's criterion) until the number is
right; the paper also notes that overseeding helps. Above ``_OVERSEED_LIMIT`` components the draw itself is used.

Legend:  S drawn samples, M seeds, K components, D dimensions.
"""

from __future__ import annotations

# torch is only partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
import math
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from siammm.mixture.samples import Samples
from siammm.mixture.search import neighbours

Init = Literal["k-means++", "random"]
INITS: tuple[Init, ...] = ("k-means++", "random")

_OVERSEED = 3
_OVERSEED_LIMIT = 1024
_SETTLING_STEPS = 5
# Rows drawn per seed, and the least in all.
_DRAW_PER_SEED = 25
_DRAW_LEAST = 10_000
# Rounds of drawing: exact k-means++ for at most as many seeds, several seeds per round (k-means||) for more.
_ROUNDS = 256
# With more seeds than this, 256 rounds would take longer than the fit.
_ROUNDS_LIMIT = 4096
_FEW_ROUNDS = 32


def default_n_components(n_samples: int) -> int:
    """The default number of components to start merging from: more than there are clusters, but not many times more.

    The paper starts from 8 % of its samples. This is at most 1,000, or 4 sqrt(n_samples) if that is more (4,500 for
    ImageNet): a million samples do not need 80,000 components to find a few hundred clusters.
    """
    start = min(0.08 * n_samples, max(1000.0, 4 * math.sqrt(n_samples)))
    return min(n_samples, max(2, round(start)))


def seeds(samples: Samples, k: int, init: Init, generator: torch.Generator, *, overseed: bool = True) -> Tensor:
    """K starting centres from the samples, centre_KD, the same on every rank."""
    if init == "random":
        return samples.draw(k, generator)[:k]
    overseed = overseed and k <= _OVERSEED_LIMIT and _OVERSEED * k * 4 <= samples.n_total and k > 1
    m = _OVERSEED * k if overseed else k
    x_SD = samples.draw(max(_DRAW_LEAST, _DRAW_PER_SEED * m), generator)
    centre_MD = _spread_out(x_SD, m, generator)
    return _joined(*_settled(x_SD, centre_MD), k) if overseed else centre_MD


def _spread_out(x_SD: Tensor, m: int, generator: torch.Generator) -> Tensor:
    """Draw seeds with probability proportional to the squared distance from those drawn before: k-means++."""
    s = x_SD.shape[0]
    half_square_S = 0.5 * (x_SD**2).sum(dim=1)
    rounds = min(m, _ROUNDS if m <= _ROUNDS_LIMIT else _FEW_ROUNDS)
    chosen = new = torch.randint(s, (1,), generator=generator)
    squared_S = torch.full((s,), torch.inf, dtype=x_SD.dtype, device=x_SD.device)
    for done in range(1, rounds + 1):
        c_MD = x_SD[new.to(x_SD.device)]
        rows = neighbours.score_chunk_rows(x_SD.device, x_SD.dtype, c_MD.shape[0])
        for start in range(0, s, rows):
            piece = slice(start, start + rows)
            score = torch.addmm(-0.5 * (c_MD**2).sum(dim=1), x_SD[piece], c_MD.T).amax(dim=1)
            squared_S[piece] = torch.minimum(squared_S[piece], 2 * (half_square_S[piece] - score))
        squared_S[chosen.to(x_SD.device)] = 0
        wanted = (m * done) // rounds if done < rounds else m
        if wanted <= chosen.numel():
            continue
        new = _weighted_draw(squared_S, wanted - chosen.numel(), chosen, generator)
        chosen = torch.cat([chosen, new])
    return x_SD[chosen.to(x_SD.device)]


def _weighted_draw(weight_S: Tensor, count: int, taken: Tensor, generator: torch.Generator) -> Tensor:
    """Draw without replacement, by adding Gumbel noise to the log weights; rows of weight 0 come last."""
    log_weight = weight_S.detach().cpu().double().clamp_min(1e-300).log()
    log_weight[taken] = -torch.inf
    uniform = torch.rand(log_weight.shape[0], generator=generator, dtype=torch.float64).clamp_min(1e-300)
    return (log_weight - (-uniform.log()).log()).topk(count).indices


def _settled(x_SD: Tensor, centre_MD: Tensor) -> tuple[Tensor, Tensor]:
    """A few steps of k-means; seeds that lose all their samples are left out."""
    count_M = torch.ones(centre_MD.shape[0], dtype=x_SD.dtype, device=x_SD.device)
    for _ in range(_SETTLING_STEPS):
        index_S = neighbours.search(x_SD, centre_MD, -0.5 * (centre_MD**2).sum(dim=1), 1)[1][:, 0]
        count_M = torch.bincount(index_S, minlength=centre_MD.shape[0]).to(x_SD.dtype)
        total_MD = torch.zeros_like(centre_MD).index_add_(0, index_S, x_SD)
        alive = count_M > 0
        centre_MD, count_M = total_MD[alive] / count_M[alive, None], count_M[alive]
    return centre_MD, count_M


def _joined(centre_MD: Tensor, count_M: Tensor, k: int) -> Tensor:
    """Join the pair of centres that adds the least squared distance, until K are left."""
    centre: np.ndarray[Any, Any] = centre_MD.cpu().double().numpy()
    count: np.ndarray[Any, Any] = count_M.cpu().double().numpy()
    m = centre.shape[0]
    if m <= k:  # the data has fewer different rows than components: repeat centres
        return centre_MD.repeat(-(-k // m), 1)[:k]
    square = (centre**2).sum(axis=1)
    distance = np.maximum(square[:, None] + square[None, :] - 2 * centre @ centre.T, 0)
    cost = distance * (count[:, None] * count[None, :] / (count[:, None] + count[None, :]))
    np.fill_diagonal(cost, np.inf)
    nearest = cost.argmin(axis=1)
    least = cost[np.arange(m), nearest]
    alive = np.ones(m, dtype=bool)
    for _ in range(m - k):
        i = int(least.argmin())
        j = int(nearest[i])
        total = count[i] + count[j]
        centre[i] = (count[i] * centre[i] + count[j] * centre[j]) / total
        count[i], alive[j] = total, False
        row = ((centre[i] - centre) ** 2).sum(axis=1) * (total * count / (total + count))
        row[~alive] = row[i] = np.inf
        cost[i, :] = cost[:, i] = row
        cost[j, :] = cost[:, j] = least[j] = np.inf
        for other in np.flatnonzero(alive & ((nearest == i) | (nearest == j))):
            nearest[other] = cost[other].argmin()
            least[other] = cost[other, nearest[other]]
        nearest[i] = row.argmin()
        least[i] = row[nearest[i]]
        closer = row < least
        nearest[closer], least[closer] = i, row[closer]
    return torch.from_numpy(centre[alive]).to(centre_MD.device, centre_MD.dtype)
