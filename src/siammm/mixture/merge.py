"""Which components to merge, and when to stop.

Legend:  K components, D dimensions, z the standardised distance of Eq. 11, zeta its threshold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from siammm.mixture import em, kernels, neighbours, ranks
from siammm.mixture.components import Components
from siammm.mixture.em import Assignment, Statistics
from siammm.mixture.samples import Samples

MergeRule = Literal["paper", "auto"]
MERGE_RULES: tuple[MergeRule, ...] = ("paper", "auto")


# E and M steps before each round, as in the measurements of the paper's pace.
_STEPS_PER_ROUND = 3


@dataclass(frozen=True, kw_only=True)
class MergeSettings:
    """How a round of merging chooses its pairs."""

    rule: MergeRule
    threshold: float = -1.2
    """zeta of Eq. 11, for the paper's rule."""
    floor: int = 2
    """Never fewer components than this."""
    share: float = 0.05
    """At most this share of the components disappears in one round, at least one."""
    unit: bool = True
    """Whether the centres are directions."""


def merged(
    samples: Samples,
    components: Components,
    assignment: Assignment,
    settings: MergeSettings,
    *,
    on_round: Callable[[int, int], None] | None = None,
) -> tuple[Components, MergeHistory]:
    """Alternate a few EM steps and a round of merging until a round finds nothing to merge."""
    history = MergeHistory(int(components.weight_K.shape[0]))
    while True:
        for _ in range(_STEPS_PER_ROUND):
            statistics = em.e_step(samples, components, assignment)
            components = components.estimated(statistics.count_K, statistics.mean_KF)
        components, changed = merge_round(samples, components, statistics, assignment, settings, history)
        if on_round is not None:
            on_round(len(history.n_components) - 1, history.n_components[-1])
        if not changed:
            return components, history


def merge_round(
    samples: Samples,
    components: Components,
    statistics: Statistics,
    assignment: Assignment,
    settings: MergeSettings,
    history: MergeHistory,
) -> tuple[Components, bool]:
    """One round: drop what is empty, merge what may be merged, and say whether anything changed.

    ``statistics`` are those that the components were estimated from; a merged component is estimated from their sums.
    """
    k = int(components.weight_K.shape[0])
    if k <= max(1, settings.floor):
        return components, False
    nearest_K, distance_K = nearest_others(components.centre_KD, unit=settings.unit)
    group_K = torch.arange(k, device=nearest_K.device)
    empty = (statistics.count_K <= 0).nonzero()[:, 0]
    if empty.numel() and k - empty.numel() >= settings.floor:
        full = (statistics.count_K > 0).nonzero()[:, 0]
        group_K[empty] = full[_nearest_among(components.centre_KD, empty, full)]
    else:
        pair_P2 = _chosen_pairs(samples, components, statistics, settings, nearest_K, distance_K)
        pair_P2 = pair_P2[: min(share_of(k, settings.share), k - settings.floor)]
        if not pair_P2.shape[0]:
            return components, False
        group_K[pair_P2[:, 1]] = pair_P2[:, 0]
    keep, number_K = group_K.unique(return_inverse=True)
    gap_K = torch.linalg.vector_norm(components.centre_KD - components.centre_KD[group_K], dim=1)
    history.record_round(number_K, gap_K)
    count = statistics.count_K.new_zeros(keep.shape[0]).index_add_(0, number_K, statistics.count_K)
    total = statistics.total_KF.new_zeros(keep.shape[0], statistics.total_KF.shape[1])
    total.index_add_(0, number_K, statistics.total_KF)
    return components.taken(keep).estimated(count, total / count.clamp_min(1e-300)[:, None]), True


def _chosen_pairs(
    samples: Samples,
    components: Components,
    statistics: Statistics,
    settings: MergeSettings,
    nearest_K: Tensor,
    distance_K: Tensor,
) -> Tensor:
    """The pairs that may merge, best first, pair_P2."""
    pair_P2, distance_P = mutual_pairs(nearest_K, distance_K)
    if settings.rule == "paper":
        mean, deviation = pair_moments(components.centre_KD, unit=settings.unit)
        return pair_P2[(distance_P - mean) < settings.threshold * deviation]
    evidence_P = separation(samples, components, pair_P2)
    order = evidence_P.argsort(stable=True)
    return pair_P2[order[evidence_P[order] <= 0]]


def separation(samples: Samples, components: Components, pair_P2: Tensor) -> Tensor:
    """How much better two groups explain the members of a pair than one, on the axis between the two; evidence_P."""
    centre_KD = components.centre_KD
    k, d = centre_KD.shape
    axis_PD = centre_KD[pair_P2[:, 0]] - centre_KD[pair_P2[:, 1]]
    axis_KD = torch.zeros_like(centre_KD)
    axis_KD[pair_P2[:, 0]] = axis_PD
    axis_KD[pair_P2[:, 1]] = axis_PD
    moment_K3 = torch.zeros(k, 3, dtype=torch.float64, device=centre_KD.device)
    hard = Assignment(n_neighbours=1)
    for _, x_ND in samples.chunks(em.pass_rows(samples, k, hard)):
        index = em.weigh(components, hard, x_ND)[0][:, 0]
        t = (x_ND * axis_KD.to(x_ND)[index]).sum(dim=1)
        powers = torch.stack([torch.ones_like(t), t, t * t], dim=1)
        moment_K3.index_add_(0, index.to(moment_K3.device), powers.to(moment_K3))
    ranks.all_reduce_sum(moment_K3)
    a, b = moment_K3[pair_P2[:, 0]], moment_K3[pair_P2[:, 1]]
    both = a + b
    n = both[:, 0].clamp_min(1)

    def scatter(m: Tensor) -> Tensor:
        return (m[:, 2] - m[:, 1] ** 2 / m[:, 0].clamp_min(1)).clamp_min(1e-12)

    share = (a[:, 0] / n).clamp(1e-12, 1 - 1e-12)
    entropy = -(share * share.log() + (1 - share) * (1 - share).log())
    gain = 0.5 * n * (scatter(both) / (scatter(a) + scatter(b))).log() - n * entropy
    return gain - (d + 0.1 * n)


def _nearest_among(centre_KD: Tensor, of: Tensor, among: Tensor) -> Tensor:
    """For some centres the position, in ``among``, of the nearest of some others."""
    w = centre_KD[among].float()
    return neighbours.nearest(centre_KD[of].float(), w, -0.5 * (w**2).sum(dim=1), 1)[1][:, 0]


@dataclass(frozen=True)
class PairStatistics:
    """The distances between all pairs of centres: their mean and deviation, and each centre's nearest other."""

    mean: float
    deviation: float
    nearest_K: Tensor
    distance_K: Tensor


def pair_statistics(centre_KD: Tensor, *, unit: bool) -> PairStatistics:
    """All that Eq. 11 asks of the K (K - 1) / 2 distances; K x K is never stored."""
    mean, deviation = pair_moments(centre_KD, unit=unit)
    nearest_K, distance_K = nearest_others(centre_KD, unit=unit)
    return PairStatistics(mean, deviation, nearest_K, distance_K)


def pair_moments(centre_KD: Tensor, *, unit: bool) -> tuple[float, float]:
    """E and SE of Eq. 11, exact over all pairs.

    The mean of the squared distances has a closed form; the mean of the distances needs the one pass over all pairs.
    """
    k = centre_KD.shape[0]
    double_KD = centre_KD.double()
    n_pairs = k * (k - 1) / 2
    squares = k * (double_KD**2).sum() - (double_KD.sum(dim=0) ** 2).sum()
    mean = float(_sum_of_distances(centre_KD, unit=unit)) / n_pairs
    return mean, max(float(squares) / n_pairs - mean**2, 0.0) ** 0.5


def nearest_others(centre_KD: Tensor, *, unit: bool) -> tuple[Tensor, Tensor]:
    """The nearest other centre of each, nearest_K, and its distance, distance_K float64."""
    single_KD = centre_KD.float()
    k, d = single_KD.shape
    bias_K = None if unit else -0.5 * (single_KD**2).sum(dim=1)
    backend = neighbours.choose_backend("auto", single_KD.device, torch.float32, d=d, k=k, n_neighbours=2)
    _, index = neighbours.nearest(single_KD, single_KD, bias_K, 2, backend=backend)
    itself = torch.arange(k, device=index.device)
    # Of two identical centres either may come first.
    nearest_K = torch.where(index[:, 0] == itself, index[:, 1], index[:, 0])
    double_KD = centre_KD.double()
    return nearest_K, torch.linalg.vector_norm(double_KD - double_KD[nearest_K], dim=1)


def _sum_of_distances(centre_KD: Tensor, *, unit: bool) -> Tensor:
    k, d = centre_KD.shape
    if unit and centre_KD.is_cuda and kernels.available() and kernels.supports(d, 2):
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
    order = distance_K[first].argsort(stable=True)
    first = first[order]
    return torch.stack([first, nearest_K[first]], dim=1), distance_K[first]


def share_of(k: int, share: float) -> int:
    """How many pairs may merge in one round: this share of the components, at least one."""
    return max(1, int(share * k))


@dataclass(frozen=True)
class Merges:
    """What merging did, as a tree that ``scipy.cluster.hierarchy`` draws and cuts, and as K after each round."""

    linkage: np.ndarray[Any, np.dtype[np.float64]]
    """scipy's (K_start - 1) x 4 matrix. Leaves are the components at the start. The first ``n_merges`` rows are the merges
    that were made, at the distance of the two centres; the others join what is left, so that the tree can be cut at any K.
    Heights never fall on the way up, as scipy wants it."""
    n_components: list[int]
    """K at the start and after each round."""
    n_merges: int
    """How many of the tree's rows were made."""


@dataclass
class MergeHistory:
    """Builds the tree of merges, round by round."""

    n_start: int
    n_components: list[int] = field(default_factory=list[int])
    """K at the start and after each round."""
    _rows: list[tuple[int, int, float, int]] = field(default_factory=list[tuple[int, int, float, int]])
    _node: list[int] = field(default_factory=list[int])
    _leaves: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        if not self._node:
            self._node, self._leaves = list(range(self.n_start)), [1] * self.n_start
            self.n_components = self.n_components or [self.n_start]

    def record_round(self, group_K: Tensor, distance_K: Tensor) -> None:
        """Add one round: each current component's new number, and its distance to the one that took it in."""
        group, distance = group_K.tolist(), distance_K.tolist()
        node: dict[int, int] = {}
        leaves: dict[int, int] = {}
        for old, new in enumerate(group):
            if new not in node:
                node[new], leaves[new] = self._node[old], self._leaves[old]
                continue
            leaves[new] += self._leaves[old]
            self._rows.append((node[new], self._node[old], float(distance[old]), leaves[new]))
            node[new] = self.n_start + len(self._rows) - 1
        count = max(group) + 1
        self._node, self._leaves = [node[i] for i in range(count)], [leaves[i] for i in range(count)]
        self.n_components.append(count)

    def finished(self, centre_KD: Tensor) -> Merges:
        """The history as it is kept with a fit, the tree completed by what would merge next."""
        return Merges(linkage=self._linkage(centre_KD), n_components=list(self.n_components), n_merges=len(self._rows))

    def _linkage(self, centre_KD: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The whole tree as scipy's (n_start - 1) x 4 linkage matrix; heights never fall on the way up."""
        rows = list(self._rows)
        node, leaves = list(self._node), list(self._leaves)
        for i, j, height in _remaining_merges(centre_KD):
            leaves[i] += leaves[j]
            rows.append((node[i], node[j], height, leaves[i]))
            node[i] = self.n_start + len(rows) - 1
        tree = np.array(rows, dtype=np.float64).reshape(-1, 4)
        tree[:, 2] = np.maximum.accumulate(tree[:, 2])
        return tree


def _remaining_merges(centre_KD: Tensor) -> list[tuple[int, int, float]]:
    """Average linkage of the centres that are left, as (kept, absorbed, height)."""
    k = centre_KD.shape[0]
    if k < 2:
        return []
    from scipy.cluster.hierarchy import linkage

    tree: np.ndarray[Any, Any] = linkage(centre_KD.double().cpu().numpy(), method="average")
    representative = {i: i for i in range(k)}
    merges: list[tuple[int, int, float]] = []
    for step, (a, b, height, _) in enumerate(tree.tolist()):
        i, j = representative[int(a)], representative[int(b)]
        representative[k + step] = i
        merges.append((i, j, float(height)))
    return merges
