"""Merging: which components become one, in which order, and when it stops.

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
8. ``MergeHistory`` (``merge_tree.py``) records each round; ``merges_`` of the estimator is its tree.

On ``merge="paper"`` step 4 is Eq. 11 instead: merge two components that are each other's nearest if their distance is
far below the mean distance of all pairs. That merges at the paper's rate but never stops by itself, so ``merge_floor``
is the stop, and there is no step 7. (Read as "merge every pair that close", Eq. 11 joins everything in one round.)

Training (``learn/clustering.py``) calls ``merge_round`` once per epoch, after two EM steps that refill empty components
in place of dropping them, and ``merged`` without splits at the end.

After ``merge="auto"``, ``siammm cluster`` and ``siammm train`` look for groups among the samples (``groups.py``), whose
number may differ from that of the components. Where ``siammm cluster`` finds more groups than components are left, it
fits the mixture again without merging, with up to eight components per group (``cluster/find_clusters.py``); training
leaves its clusters as they are.

Legend:  K components, D dimensions, P pairs, G groups, zeta the threshold of Eq. 11.
"""

from __future__ import annotations

# torch and scipy are only partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from siammm.mixture import acceptance, em
from siammm.mixture.centre_pairs import mutual_pairs, pair_statistics
from siammm.mixture.components import Components
from siammm.mixture.em import Assignment, Statistics
from siammm.mixture.merge_tree import MergeHistory
from siammm.mixture.samples import Samples
from siammm.mixture.search import neighbours

MergeRule = Literal["paper", "auto"]
MERGE_RULES: tuple[MergeRule, ...] = ("paper", "auto")

# E and M steps before each round, as in the measurements of the paper's pace.
_STEPS_PER_ROUND = 3
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


def share_of(k: int, share: float) -> int:
    """How many pairs may merge in one round: this share of the components, at least one."""
    return max(1, int(share * k))
