"""Groups: how many kinds of samples there are, where components are finer or coarser than that.

Components answer "which peaks does the density have?". A kind of images may have ten peaks, or share a weak one with
another kind. Groups are looked for among the samples themselves:

1. The communities of their neighbour graph (``graph.py``), at a range of resolutions. A resolution is judged by how
   much smaller 1 - modularity is than that of *one Gaussian* of the same mean and covariance, which has communities
   too, but no groups. The smallest ratio says how many groups there are, and the same again in the space that is
   whitened by the covariance within these. If the ratio is above ``LARGEST_RATIO``, as for a single cloud, no groups
   are claimed.
2. Of more than a dozen kinds these are too few. So the elbows of the scatter that two halves of the directions share
   are looked for as well (``elbow.py``). Each gives a number, and this gives groups: the communities at the resolution
   that has so many, in the space that is whitened by the differences between neighbours. Of these the clearest by the
   ratio of step 1 are taken, if they are nearly as clear as the communities of step 1 (``_NEARLY_AS_CLEAR``). Where
   kinds have few samples there is no elbow, and the number is that of groups of alike samples (``small_kinds.py``).
3. Borders by a linear discriminant: one Gaussian per group, all with the same covariance. So a group is a linear score,
   and new samples get a group and a probability.

A sample of ``MOST_ROWS`` rows decides; all others get their group by step 3.

Where the components are as clear as the communities of step 1 and about as many as step 2 says, as in data that is a
mixture, they take their place, and groups are looked for among them: the *second* nearest component of a sample is hard
to tell from the first, and counted over all samples this gives a graph of components (``component_graph``). Its
communities are the groups if they are clearer than those of components that are placed at random.

If the number is given (``so_many``), there is nothing to judge: the groups are so many communities, found twice, the
second time in the space that is whitened by the covariance within the first, with the borders of step 3.

The figures, and the rules that were tried besides, are in ``docs/decisions/0027``, ``0035``, ``0037``, ``0041`` and
``0055``.

Legend:  N samples, M samples that decide, D dimensions, P principal directions, K components, G groups.
"""

from __future__ import annotations

# scikit-learn and scipy have no types.
# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from sklearn.utils.extmath import randomized_svd

from siammm.core.errors import InputError
from siammm.mixture import borders
from siammm.mixture.component_graph import of_components
from siammm.mixture.elbow import elbow, whitened_by_neighbours
from siammm.mixture.graph import Array, Graph, neighbour_graph, path, so_many_communities
from siammm.mixture.group_rule import Groups, as_rows, numbered, unit_rows
from siammm.mixture.shard import Shard
from siammm.mixture.small_kinds import effective_number

MOST_ROWS = 3000
# Single classes of images have ratios of .69 to .96 under encoders that were not trained on their clusters; sets of two
# and more classes have .19 to .6.
LARGEST_RATIO = 0.65
# A single cloud that is bent, so that one half of its directions does say something about the other, has a ratio of .81
# to 1. Sets of two and more classes have at most .78.
LARGEST_RATIO_AT_ELBOW = 0.8
# How much of the scatter must be between groups that the other half of the directions gave. Single clouds that are not
# bent have at most .05, sets to develop on at least .1.
LEAST_SHARED = 0.07
# With fewer samples nothing is claimed.
_LEAST_ROWS = 60
# Components whose ratio is at most so many times that of the communities are as clear as these. In synthetic mixtures,
# whose components merging finds, it is 1.01 to 1.14 times; under encoders of images, where it does not, 1.25 to 2.
_AS_CLEAR = 1.2
# Groups at the elbow count if their ratio is at most so many times that of the communities. On images under a
# pretrained encoder it is 1 to 1.5 times, more with more kinds; for pixels of digits, where the elbow sees ways of
# writing a digit (22 for ten), it is 2 to 3 times.
_NEARLY_AS_CLEAR = 1.7
# Components and an elbow whose numbers differ by no more than this share say the same.
_NEAR = 0.2
# More neighbours see coarser groups, if there are few rows; with many rows it makes little difference.
_NEIGHBOURS, _ROWS_PER_NEIGHBOUR = (8, 15), 200
_RESOLUTIONS = 0.12 * 1.3 ** np.arange(18)
_PRINCIPAL = 64
_BORDER_STEPS = 2
# Rows that decide, for each of a number of groups that was given.
_LEAST_PER_GROUP = 4


def found(
    X: Any,
    nearest_N2: Any,
    k: int,
    *,
    unit: bool,
    separate: bool,
    seed: int = 0,
    centre_KD: Any = None,
    together: bool = False,
    so_many: int | None = None,
) -> Groups:
    """The groups of the samples, given the nearest and second nearest of ``k`` components of each.

    ``unit``: whether only the direction of a row counts. ``separate``: whether the components were merged until they
    are separate, so that they may have groups of their own. ``centre_KD``: the centres of the components, by which
    those without samples get a group. ``together``: whether these rows are this rank's shard of all rows. Then every
    rank must call this, and each gets the groups that one process would find with all rows. ``so_many``: the number of
    groups, where it is known.
    """
    x_ND, nearest_N2 = as_rows(X), as_rows(nearest_N2)
    shard = Shard.of(len(x_ND), together=together)
    if so_many is not None:
        check_number(so_many, shard.n_total)
    elif shard.n_total < _LEAST_ROWS:
        return Groups.none(k)
    chosen = _drawn(shard.n_total, seed)
    some_MD = shard.taken(x_ND, chosen).astype(np.float64)
    centre_D, scale = np.zeros(some_MD.shape[1]), 1.0
    if unit:
        some_MD = unit_rows(some_MD)
    else:  # points may lie anywhere, at any scale
        centre_D = some_MD.mean(axis=0)
        scale = float(np.abs(some_MD - centre_D).max()) or 1.0
        some_MD = (some_MD - centre_D) / scale
    basis_DP = _principal(some_MD, seed)
    z_MP = some_MD @ basis_DP
    if so_many is not None:
        label_M, ratio = _so_many(some_MD, z_MP, so_many), 1.0
    else:
        first = _Communities.of(some_MD, unit=unit, seed=seed)
        component_M, ratio, label_M = shard.taken(nearest_N2[:, 0], chosen), first.ratio, None
        at_elbow_M = _at_elbow(some_MD, z_MP, first, seed) if ratio <= LARGEST_RATIO_AT_ELBOW else None
        says = k if at_elbow_M is None else int(at_elbow_M.max()) + 1
        if separate and first.ratio_of(component_M) <= _AS_CLEAR * ratio and _is_near(k, says):
            # The components are as clear as any communities. Perhaps they have groups.
            label_K = of_components(nearest_N2[:, 0], nearest_N2[:, -1], k, shard)
            # Without gaps: a group may have no row among those that decide.
            label_M = None if label_K is None else np.unique(label_K[component_M], return_inverse=True)[1]
        elif at_elbow_M is not None:
            label_M = at_elbow_M
        elif ratio <= LARGEST_RATIO and first.label_M.any():
            label_M = _of_small_kinds(some_MD, z_MP, first, seed)
    if label_M is None or not label_M.any():
        return replace(Groups.none(k), ratio=ratio)
    community_M = label_M
    for _ in range(_BORDER_STEPS):
        nearer_M = borders.assigned(z_MP, label_M)
        if so_many is None or nearer_M.max() == label_M.max():  # a number that was given stays
            label_M = nearer_M
    weight_GP, offset_G = borders.calibrated(z_MP, label_M, community_M, seed)
    weight_GD = weight_GP @ basis_DP.T / scale
    groups = Groups(np.arange(k), ratio, weight_GD, offset_G - weight_GD @ centre_D, unit)
    return numbered(groups, x_ND, nearest_N2[:, 0], centre_KD, shard)


def among_samples(X: Any, *, seed: int = 0) -> Groups:
    """The groups of rows of which only the direction counts, by the neighbour graph alone.

    For embeddings of an encoder that is being trained with clusters: its loss draws these together, so that components
    and the elbow would only see them again.
    """
    x_ND = as_rows(X)
    chosen = _drawn(len(x_ND), seed)
    some_MD = unit_rows(x_ND[chosen].astype(np.float64))
    if len(x_ND) < _LEAST_ROWS:
        return Groups.none(1)
    first = _Communities.of(some_MD, unit=True, seed=seed)
    if first.ratio > LARGEST_RATIO or not first.label_M.any():
        return replace(Groups.none(1), ratio=first.ratio)
    basis_DP = _principal(some_MD, seed)
    z_MP = some_MD @ basis_DP
    community_M = label_M = _second_pass(z_MP, first.label_M, seed)
    for _ in range(_BORDER_STEPS):
        label_M = borders.assigned(z_MP, label_M)
    weight_GP, offset_G = borders.calibrated(z_MP, label_M, community_M, seed)
    groups = Groups(np.zeros(1, dtype=np.int64), first.ratio, weight_GP @ basis_DP.T, offset_G, unit=True)
    return numbered(groups, x_ND, np.zeros(len(x_ND), dtype=np.int64), None, Shard(len(x_ND)))


def check_number(so_many: int, n_rows: int, *, name: str = "n_groups") -> None:
    """Refuse a number of groups that so many rows cannot have; ``name`` is what the user calls it."""
    most = min(n_rows, MOST_ROWS) // _LEAST_PER_GROUP
    if most < 2:
        raise InputError(
            f"{name} is {so_many:,}, but groups need at least {2 * _LEAST_PER_GROUP} samples, not {n_rows:,}."
        )
    if not 2 <= so_many <= most:
        raise InputError(
            f"{name} is {so_many:,}, but {n_rows:,} samples can have 2 to {most:,} groups; ask for a number in "
            "between, or for as many components without merging."
        )


def _is_near(k: int, other: int) -> bool:
    """Whether two numbers of groups are the same within a fifth, or one."""
    return abs(k - other) <= max(1.0, _NEAR * max(k, other))


# -- among samples ----------------------------------------------------------------------------------------------------


def _at_elbow(x_MD: Array, z_MP: Array, first: _Communities, seed: int) -> Array | None:
    """Groups at the elbow whose communities are the clearest, if they are nearly as clear as any."""
    bend = elbow(x_MD, seed)
    return _clearest(z_MP, first, [number for number in bend.levels if bend.shared(number) >= LEAST_SHARED])


def _of_small_kinds(x_MD: Array, z_MP: Array, first: _Communities, seed: int) -> Array:
    """Groups where there is no elbow: the communities, or as many groups as samples are alike if these are more."""
    label_M = _second_pass(z_MP, first.label_M, seed)
    number = effective_number(x_MD, seed)
    finer_M = _clearest(z_MP, first, [number]) if number > label_M.max() + 1 else None
    return label_M if finer_M is None else finer_M


def _clearest(z_MP: Array, first: _Communities, numbers: list[int]) -> Array | None:
    """So many communities in the whitened space, by the number with the clearest, if nearly as clear as the first."""
    if not numbers:
        return None
    space_MP = whitened_by_neighbours(z_MP - z_MP.mean(axis=0))
    graph = neighbour_graph(space_MP, _neighbours_of(len(space_MP)))
    found = [so_many_communities(graph, number) for number in numbers]
    ratios = [first.ratio_of(label_M) for label_M in found]
    best = int(np.argmin(ratios))
    return found[best] if ratios[best] <= _NEARLY_AS_CLEAR * first.ratio and found[best].any() else None


def _second_pass(z_MP: Array, label_M: Array, seed: int) -> Array:
    """The clearest communities where directions in which samples of one of these groups differ count less."""
    return _Communities.of(_whitened_within(z_MP, label_M), unit=True, seed=seed).label_M


def _so_many(x_MD: Array, z_MP: Array, so_many: int) -> Array:
    """So many communities, and the same again where directions in which samples of one of these differ count less."""
    neighbours = _neighbours_of(len(x_MD))
    space_MP = _whitened_within(z_MP, so_many_communities(neighbour_graph(x_MD, neighbours), so_many))
    label_M = so_many_communities(neighbour_graph(space_MP, neighbours), so_many)
    if int(label_M.max()) + 1 == so_many:
        return label_M
    # A graph whose parts have no links between them, or that goes from fewer communities to more at once.
    return np.unique(fcluster(linkage(space_MP, "ward"), so_many, "maxclust"), return_inverse=True)[1]


def _whitened_within(z_MP: Array, label_M: Array) -> Array:
    """The rows as directions, in the space that is whitened by the covariance within these groups."""
    whitening_PP = borders.within(z_MP, borders.assigned(z_MP, label_M))[1]
    return unit_rows((z_MP - z_MP.mean(axis=0)) @ whitening_PP)


def _neighbours_of(n: int) -> int:
    """How many neighbours a sample has in a graph of so many."""
    fewest, most = _NEIGHBOURS
    return min(max(fewest, n // _ROWS_PER_NEIGHBOUR), most, n // 8)


@dataclass(frozen=True)
class _Communities:
    """The communities at the resolution where they are furthest from those of one Gaussian."""

    label_M: Array
    ratio: float
    graph: Graph
    loss_of_gaussian: Array
    """At each resolution."""

    @classmethod
    def of(cls, x_MD: Array, *, unit: bool, seed: int) -> _Communities:
        neighbours, twin_MD = _neighbours_of(len(x_MD)), gaussian_twin(x_MD, seed)
        graph = neighbour_graph(x_MD, neighbours)
        null = path(neighbour_graph(unit_rows(twin_MD) if unit else twin_MD, neighbours), _RESOLUTIONS)
        loss_of_gaussian = np.array([max(loss, 1e-12) for _, loss in null])
        found = path(graph, _RESOLUTIONS)
        ratios = np.array([loss for _, loss in found]) / loss_of_gaussian
        best = int(np.argmin(ratios))
        return cls(found[best][0], float(ratios[best]), graph, loss_of_gaussian)

    def ratio_of(self, label_M: Array) -> float:
        """The same ratio for other groups of the samples, at the resolution that suits them best."""
        loss = np.array([self.graph.loss(label_M, float(resolution)) for resolution in _RESOLUTIONS])
        return float((loss / self.loss_of_gaussian).min())


def gaussian_twin(x_ND: Array, seed: int) -> Array:
    """As many rows from one Gaussian of the same mean and covariance: no groups, but the same shape."""
    n, mean_D = len(x_ND), x_ND.mean(axis=0)
    weight_NN = np.random.default_rng(seed).standard_normal((n, n), dtype=np.float32) / np.sqrt(n)
    return weight_NN @ (x_ND - mean_D) + mean_D


# -- rows -------------------------------------------------------------------------------------------------------------


def _drawn(n: int, seed: int) -> Array:
    """The rows that decide, in order."""
    random = np.random.default_rng(seed)
    if n > 2**24:  # where a permutation of all rows would take long
        return np.sort(random.choice(n, MOST_ROWS, replace=False, shuffle=False))
    return np.sort(random.permutation(n)[:MOST_ROWS])


def _principal(x_ND: Array, seed: int) -> Array:
    """An orthonormal basis of the mean and the first principal directions, (D, P)."""
    n, d = x_ND.shape
    mean_D, count = x_ND.mean(axis=0), min(_PRINCIPAL, d, n // 4)
    direction_PD = randomized_svd(x_ND - mean_D, count, random_state=seed)[2]
    return np.linalg.qr(np.concatenate([mean_D[:, None], direction_PD.T], axis=1))[0][:, : min(count + 1, d)]
