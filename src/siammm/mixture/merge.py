"""Merging: which components become one, in which order, when it stops, and the tree that this makes.

What happens on ``merge="auto"`` (``Mixture.fit`` calls ``merged`` after seeding and before its EM steps):

1. Start from ``n_components`` small components, several times as many as expected.
2. Run three EM steps (``_settled``), then one round of merging (``merge_round``).
3. A round first drops components that no sample is nearest to.
4. Each component is compared with its three nearest (``acceptance.nearby_pairs``). ``acceptance.evidence`` tests
   whether two groups describe the members of a pair better than one, and whether each component stands alone.
5. ``acceptance.proposals`` picks the pairs to merge: those that are not clearly two, or where one does not stand alone,
   because too many members are closer to another component once they are left out of its mean. At most ``merge_share``
   of the components disappears in a round, and never below ``merge_floor``.
6. Repeat from 2 until a round changes nothing.
7. Offer every component a split along its main axis (``_split``). Halves that pass the same test start from 2 again, at
   most four times; a split that does not raise the number of components ends the search.
8. ``MergeHistory`` records each round; ``merges_`` of the estimator is its tree.

On ``merge="paper"`` step 4 is Eq. 11 instead: merge two components that are each other's nearest if their distance is
far below the mean distance of all pairs. That merges at the paper's rate but never stops by itself, so ``merge_floor``
is the stop, and there is no step 7. (Read as "merge every pair that close", Eq. 11 joins everything in one round.)

Training (``learn/clustering.py``) calls ``merge_round`` once per epoch, after two EM steps that refill empty components
in place of dropping them, and ``merged`` without splits at the end.

Legend:  K components, D dimensions, P pairs, z the standardised distance of Eq. 11, zeta its threshold.
"""

from __future__ import annotations

# torch and scipy are only partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from siammm.mixture import acceptance, em, kernels, neighbours
from siammm.mixture.components import Components
from siammm.mixture.em import Assignment, Statistics
from siammm.mixture.samples import Samples

MergeRule = Literal["paper", "auto"]
MERGE_RULES: tuple[MergeRule, ...] = ("paper", "auto")

# E and M steps before each round, as in the measurements of the paper's pace.
_STEPS_PER_ROUND = 3
# Beyond so many centres a table of all their distances is too large.
_LINKAGE_LIMIT = 8192
# At most so many times is every component offered a split.
_SPLIT_CYCLES = 4


@dataclass(frozen=True, kw_only=True)
class MergeSettings:
    """How a round of merging chooses its pairs."""

    rule: MergeRule
    threshold: float = -1.2
    """zeta of Eq. 11, for the paper's rule."""
    floor: int = 1
    """Never fewer components than this."""
    share: float = 0.1
    """At most this share of the components disappears in one round, at least one."""
    unit: bool = True
    """Whether the centres are directions."""
    drop_empty: bool = True
    """Drop components that no sample is nearest to at once, in addition to the share."""
    within_GD: Tensor | None = None
    """Directions of groups of samples: components that are nearest to different ones of them are not merged."""


def merged(
    samples: Samples,
    components: Components,
    assignment: Assignment,
    settings: MergeSettings,
    *,
    history: MergeHistory | None = None,
    splits: bool = True,
    on_round: Callable[[int, int], None] | None = None,
) -> tuple[Components, MergeHistory]:
    """Merge until a round changes nothing, then try splits, unless ``splits`` is False or the rule is the paper's.

    ``history`` has the earlier rounds, if there were any. A split that is kept starts a new tree.
    """
    history = history or MergeHistory(int(components.weight_K.shape[0]))
    components = _rounds(samples, components, assignment, settings, history, on_round)
    if settings.rule == "paper" or not splits:
        return components, history
    for _ in range(_SPLIT_CYCLES):
        split = _split(samples, components, assignment, settings)
        if split is None:
            break
        offered = MergeHistory(int(split.weight_K.shape[0]), before=history.n_components)
        split = _rounds(samples, split, assignment, settings, offered, on_round)
        if split.weight_K.shape[0] <= components.weight_K.shape[0]:
            break
        components, history = split, offered
    return components, history


def _split(
    samples: Samples, components: Components, assignment: Assignment, settings: MergeSettings
) -> Components | None:
    """Split the components whose halves pass the test, and leave the others whole; None if no halves pass.

    Halves are compared with each other alone: compared with all, they would also merge across components.
    """
    centre_SD, pair_P2 = acceptance.halves(samples, components, assignment, unit=settings.unit)
    split = _settled(samples, restarted(samples, components, centre_SD, assignment), assignment)
    found = acceptance.members(samples, split, assignment)
    apart_P = acceptance.evidence(samples, found, pair_P2, unit=settings.unit).apart_P
    if not bool(apart_P.any()):
        return None
    return _joined_pairs(split, found.statistics, pair_P2[~apart_P], MergeHistory(int(centre_SD.shape[0])))


def restarted(samples: Samples, components: Components, centre_KD: Tensor, assignment: Assignment) -> Components:
    """Components of the same kind at other centres, with spreads from one hard assignment."""
    start = components.placed(centre_KD)
    statistics = em.e_step(samples, start, Assignment(n_neighbours=1, backend=assignment.backend))
    return start.estimated(statistics.count_K, statistics.mean_KF)


def _rounds(
    samples: Samples,
    components: Components,
    assignment: Assignment,
    settings: MergeSettings,
    history: MergeHistory,
    on_round: Callable[[int, int], None] | None,
) -> Components:
    """Alternate a few EM steps and a round of merging until a round changes nothing."""
    while True:
        components = _settled(samples, components, assignment)
        components, changed = merge_round(samples, components, assignment, settings, history)
        if not changed:
            return components
        if on_round is not None:
            on_round(len(history.n_components) - 1, history.n_components[-1])


def _settled(samples: Samples, components: Components, assignment: Assignment) -> Components:
    """A few EM steps later."""
    for _ in range(_STEPS_PER_ROUND):
        statistics = em.e_step(samples, components, assignment)
        components = components.estimated(statistics.count_K, statistics.mean_KF)
    return components


def merge_round(
    samples: Samples, components: Components, assignment: Assignment, settings: MergeSettings, history: MergeHistory
) -> tuple[Components, bool]:
    """One round: drop components that no sample is nearest to, then merge pairs; also whether anything changed."""
    found = acceptance.members(samples, components, assignment)
    # Those with samples first, so that the floor keeps an empty one only if too few have any.
    order = (found.statistics.count_K <= 0).to(torch.int8).argsort(stable=True)
    kept = order[: max(int((found.statistics.count_K > 0).sum()), settings.floor)].sort().values
    dropped = settings.drop_empty and kept.shape[0] < components.weight_K.shape[0]
    if dropped:
        components = _without_empty(components, found.statistics, kept, settings, history)
        found = acceptance.members(samples, components, assignment)
    k = int(components.weight_K.shape[0])
    allowed = min(share_of(k, settings.share), k - settings.floor)
    if allowed < 1:
        return components, dropped
    pair_P2 = _chosen_pairs(samples, components, found, settings, allowed)
    if not pair_P2.shape[0]:
        return components, dropped
    return _joined_pairs(components, found.statistics, pair_P2, history), True


def _chosen_pairs(
    samples: Samples, components: Components, found: acceptance.Members, settings: MergeSettings, most: int
) -> Tensor:
    """The pairs to merge, pair_P2, best first, at most ``most``; no component is in two of them."""
    if settings.rule == "auto":
        pair_P2 = acceptance.nearby_pairs(components.centre_KD, unit=settings.unit)
        pair_P2 = pair_P2[_in_one_group(components, pair_P2, settings)]
        pairs = acceptance.proposals(acceptance.evidence(samples, found, pair_P2, unit=settings.unit), most)
        return torch.tensor(pairs, dtype=torch.int64, device=components.weight_K.device).reshape(-1, 2)
    statistics = pair_statistics(components.centre_KD, unit=settings.unit)
    pair_P2, distance_P = mutual_pairs(statistics.nearest_K, statistics.distance_K)
    is_close_P = distance_P - statistics.mean < settings.threshold * statistics.deviation
    return pair_P2[is_close_P & _in_one_group(components, pair_P2, settings)][:most]


def _in_one_group(components: Components, pair_P2: Tensor, settings: MergeSettings) -> Tensor:
    """Whether both of each pair are nearest to the same group; without groups, all are."""
    if settings.within_GD is None:
        return torch.ones(pair_P2.shape[0], dtype=torch.bool, device=pair_P2.device)
    group_K = (components.centre_KD @ settings.within_GD.to(components.centre_KD).T).argmax(dim=1)
    return group_K[pair_P2[:, 0]] == group_K[pair_P2[:, 1]]


def _without_empty(
    components: Components, statistics: Statistics, kept: Tensor, settings: MergeSettings, history: MergeHistory
) -> Components:
    """Join each component that no sample is nearest to with the nearest of those that are kept."""
    w_KD = components.centre_KD[kept].float()
    bias_K = None if settings.unit else -0.5 * (w_KD**2).sum(dim=1)
    group_K = kept[neighbours.search(components.centre_KD.float(), w_KD, bias_K, 1)[1][:, 0]]
    group_K[kept] = kept
    return _joined(components, statistics, group_K, history)


def _joined_pairs(components: Components, statistics: Statistics, pair_P2: Tensor, history: MergeHistory) -> Components:
    group_K = torch.arange(components.weight_K.shape[0], device=pair_P2.device)
    group_K[pair_P2[:, 1]] = pair_P2[:, 0]
    return _joined(components, statistics, group_K, history)


def _joined(components: Components, statistics: Statistics, group_K: Tensor, history: MergeHistory) -> Components:
    """Components estimated from the sums of those that share a group; adds a round to the history."""
    gap_K = (components.centre_KD - components.centre_KD[group_K]).square().sum(dim=1).sqrt()
    keep, number_K = torch.unique(group_K, return_inverse=True)
    history.record_round(number_K, gap_K)
    count = statistics.count_K.new_zeros(keep.shape[0]).index_add_(0, number_K, statistics.count_K)
    total = statistics.total_KF.new_zeros(keep.shape[0], statistics.total_KF.shape[1])
    total.index_add_(0, number_K, statistics.total_KF)
    return components.taken(keep).estimated(count, total / count.clamp_min(1e-300)[:, None])


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


def share_of(k: int, share: float) -> int:
    """How many pairs may merge in one round: this share of the components, at least one."""
    return max(1, int(share * k))


@dataclass(frozen=True)
class Merges:
    """What merging did, as a tree that ``scipy.cluster.hierarchy`` draws and cuts, and as K after each round."""

    linkage: np.ndarray[Any, np.dtype[np.float64]]
    """scipy's (K_start - 1) x 4 matrix. Leaves are the components at the start, or after the last split that was kept.
    The first ``n_merges`` rows are the merges that were made, at the distance of the two centres; the others join the
    final components, so that the tree can be cut at any K. Heights are raised to increase from row to row, so that
    scipy's cut into K clusters undoes the last merges."""
    n_components: list[int]
    """K at the start and after each round; it rises where a split was kept."""
    n_merges: int
    """How many of the tree's rows were made."""


@dataclass
class MergeHistory:
    """Builds the tree of merges, round by round."""

    n_start: int
    before: list[int] = field(default_factory=list[int])
    """K through the rounds before a split, which this tree does not hold."""

    def __post_init__(self) -> None:
        self.n_components = [*self.before, self.n_start]  # and after each round
        self._rows: list[tuple[int, int, float, int]] = []
        # Each current component's node in the tree, and how many of the components at the start it holds.
        self._node_K, self._leaves_K = np.arange(self.n_start), np.ones(self.n_start, np.int64)

    def record_round(self, group_K: Tensor, distance_K: Tensor) -> None:
        """Add one round: each current component's new number, and its distance to the one that took it in."""
        group, distance = group_K.cpu().numpy(), distance_K.cpu().numpy()
        _, first = np.unique(group, return_index=True)
        node, leaves = self._node_K[first], self._leaves_K[first]
        height = distance[first]  # not always 0: the component that the others join need not come first
        for old in np.setdiff1d(np.arange(group.shape[0]), first):  # the few that join another
            new = group[old]
            leaves[new] += self._leaves_K[old]
            height[new] = max(height[new], distance[old])
            self._rows.append((int(node[new]), int(self._node_K[old]), float(height[new]), int(leaves[new])))
            node[new] = self.n_start + len(self._rows) - 1
        self._node_K, self._leaves_K = node, leaves
        self.n_components.append(first.shape[0])

    def as_tensors(self) -> dict[str, Tensor]:
        """All of it, for a checkpoint."""
        return {
            "n_start": torch.tensor(self.n_start),
            "before": torch.tensor(self.before, dtype=torch.int64),
            "n_components": torch.tensor(self.n_components, dtype=torch.int64),
            "rows": torch.tensor(self._rows, dtype=torch.float64).reshape(-1, 4),
            "node": torch.from_numpy(self._node_K.copy()),
            "leaves": torch.from_numpy(self._leaves_K.copy()),
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> MergeHistory:
        """Restore what ``as_tensors`` returned."""
        history = cls(int(tensors["n_start"]), before=tensors["before"].tolist())
        history.n_components = tensors["n_components"].tolist()
        history._rows = [(int(i), int(j), height, int(leaves)) for i, j, height, leaves in tensors["rows"].tolist()]
        history._node_K = tensors["node"].cpu().numpy().copy()
        history._leaves_K = tensors["leaves"].cpu().numpy().copy()
        return history

    def finished(self, centre_KD: Tensor) -> Merges:
        """The history as it is kept with a fit, the tree completed by what would merge next."""
        return Merges(linkage=self._linkage(centre_KD), n_components=list(self.n_components), n_merges=len(self._rows))

    def _linkage(self, centre_KD: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The whole tree as scipy's (n_start - 1) x 4 linkage matrix; heights rise from row to row."""
        rows = list(self._rows)
        node, leaves = self._node_K.tolist(), self._leaves_K.tolist()
        for i, j, height in _remaining_merges(centre_KD):
            leaves[i] += leaves[j]
            rows.append((node[i], node[j], height, leaves[i]))
            node[i] = self.n_start + len(rows) - 1
        tree = np.array(rows, dtype=np.float64).reshape(-1, 4)
        # Equal heights would be cut together: a cut at K would then give fewer clusters than K.
        for row in range(1, tree.shape[0]):
            tree[row, 2] = max(tree[row, 2], np.nextafter(tree[row - 1, 2], np.inf))
        return tree


def _remaining_merges(centre_KD: Tensor) -> list[tuple[int, int, float]]:
    """How the final centres would join, as (kept, absorbed, height): average linkage.

    Too many centres for scipy's table of distances first join as mutual nearest neighbours.
    """
    merges: list[tuple[int, int, float]] = []
    number_K = torch.arange(centre_KD.shape[0], device=centre_KD.device)
    while centre_KD.shape[0] > _LINKAGE_LIMIT:
        pair_P2, distance_P = mutual_pairs(*nearest_others(centre_KD, unit=False))
        kept, absorbed = pair_P2.T
        merges += zip(number_K[kept].tolist(), number_K[absorbed].tolist(), distance_P.tolist(), strict=True)
        centre_KD = centre_KD.index_copy(0, kept, (centre_KD[kept] + centre_KD[absorbed]) / 2)
        left = torch.ones_like(number_K, dtype=torch.bool).index_fill_(0, absorbed, False)
        centre_KD, number_K = centre_KD[left], number_K[left]
    if centre_KD.shape[0] < 2:
        return merges
    from scipy.cluster.hierarchy import linkage

    tree: np.ndarray[Any, Any] = linkage(centre_KD.double().cpu().numpy(), method="average")
    representative = dict(enumerate(number_K.tolist()))
    for step, (a, b, height, _) in enumerate(tree.tolist()):
        i, j = representative[int(a)], representative[int(b)]
        representative[len(number_K) + step] = i
        merges.append((i, j, float(height)))
    return merges
