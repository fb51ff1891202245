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
   ratio of step 1 are taken, if they are nearly as clear as the communities of step 1 (``_NEARLY_AS_CLEAR``).
3. Borders by a linear discriminant: one Gaussian per group, all with the same covariance. So a group is a linear score,
   and new samples get a group and a probability.

A sample of ``MOST_ROWS`` rows decides; all others get their group by step 3.

Where the components are as clear as the communities of step 1 and about as many as step 2 says, as in data that is a
mixture, they take their place, and groups are looked for among them: the *second* nearest component of a sample is hard
to tell from the first, and counted over all samples this gives a graph of components (``of_components``). Its
communities are the groups if they are clearer than those of components that are placed at random.

If the number is given (``so_many``), there is nothing to judge: the groups are so many communities, found twice, the
second time in the space that is whitened by the covariance within the first, with the borders of step 3.

The figures, and the rules that were tried besides, are in ``docs/decisions/0027``, ``0035``, ``0037`` and ``0041``.

Legend:  N samples, M samples that decide, D dimensions, P principal directions, K components, G groups, E edges.
"""

from __future__ import annotations

# scikit-learn and scipy have no types.
# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from sklearn.utils.extmath import randomized_svd

from siammm.core.errors import InputError
from siammm.mixture import borders
from siammm.mixture.elbow import elbow, whitened_by_neighbours
from siammm.mixture.graph import Array, Graph, communities, neighbour_graph, path, so_many_communities
from siammm.mixture.shard import Shard

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
# Neighbours that a component must have on average: the graph of nearest neighbours alone falls apart by itself.
LEAST_NEIGHBOURS = 3.0
# Components and groups that share this many of the samples are the same: there is one level.
_SAME = 0.9
_VALUES_AT_ONCE = 2**23


@dataclass(frozen=True)
class Groups:
    """The groups, a rule that gives samples theirs, and the group that most samples of each component are in."""

    label_K: Array
    """The group of every component, by most of its samples. Groups are numbered by size, the largest first."""
    ratio: float = 1.0
    """1 - modularity of the groups, relative to that of one Gaussian; lower is clearer. 1 without groups."""
    weight_GD: Array | None = None
    """With ``offset_G``: the linear score of each group. None if no groups were found: then components are groups."""
    offset_G: Array | None = None
    unit: bool = False
    """Whether rows are scaled to unit length before they are scored."""

    @classmethod
    def none(cls, k: int) -> Groups:
        """Each of ``k`` components as its own group."""
        return cls(np.arange(k))

    @property
    def is_found(self) -> bool:
        """Whether there are groups that are not simply the components."""
        return self.weight_GD is not None

    @property
    def n_groups(self) -> int:
        """How many there are; without groups, the number of components."""
        return len(self.label_K) if self.weight_GD is None else len(self.weight_GD)

    def predict(self, X: Any, component_N: Any) -> Array:
        """The group of each row, given its component, which is its group where no groups were found."""
        if self.weight_GD is None or self.offset_G is None:
            return self.label_K[_rows(component_N)]
        x_ND = _rows(X)
        group_N = np.empty(len(x_ND), dtype=np.int64)
        for start, part in _parts(x_ND, unit=self.unit):
            group_N[start : start + len(part)] = (part @ self.weight_GD.T + self.offset_G).argmax(axis=1)
        return group_N

    def assign(self, X: Any, component_N: Any, share_N: Any) -> tuple[Array, Array]:
        """The group of each row and its probability, given its component and the share of the row that this has."""
        if self.weight_GD is None or self.offset_G is None:
            return self.label_K[_rows(component_N)], np.asarray(_rows(share_N), dtype=np.float32)
        x_ND = _rows(X)
        group_N, probability_N = np.empty(len(x_ND), dtype=np.int64), np.empty(len(x_ND), dtype=np.float32)
        for start, part in _parts(x_ND, unit=self.unit):
            score_BG = part @ self.weight_GD.T + self.offset_G
            rows, best_B = slice(start, start + len(part)), score_BG.argmax(axis=1)
            group_N[rows] = best_B
            highest_B1 = np.take_along_axis(score_BG, best_B[:, None], axis=1)
            probability_N[rows] = 1 / np.exp(score_BG - highest_B1).sum(axis=1)
        return group_N, probability_N

    def predict_proba(self, X: Any) -> Array:
        """The probability of each group for each row, shape (N, G); only where groups were found."""
        assert self.weight_GD is not None, "no groups were found"
        assert self.offset_G is not None
        parts = _parts(_rows(X), unit=self.unit)
        score_NG = np.concatenate([part @ self.weight_GD.T + self.offset_G for _, part in parts])
        share_NG = np.exp(score_NG - score_NG.max(axis=1, keepdims=True))
        return share_NG / share_NG.sum(axis=1, keepdims=True)


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
    x_ND, nearest_N2 = _rows(X), _rows(nearest_N2)
    shard = Shard.of(len(x_ND), together=together)
    if so_many is not None:
        check_number(so_many, shard.n_total)
    elif shard.n_total < _LEAST_ROWS:
        return Groups.none(k)
    chosen = _drawn(shard.n_total, seed)
    some_MD = shard.taken(x_ND, chosen).astype(np.float64)
    centre_D, scale = np.zeros(some_MD.shape[1]), 1.0
    if unit:
        some_MD = _unit(some_MD)
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
            label_M = _second_pass(z_MP, first.label_M, seed)
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
    return _numbered(groups, x_ND, nearest_N2[:, 0], centre_KD, shard)


def among_samples(X: Any, *, seed: int = 0) -> Groups:
    """The groups of rows of which only the direction counts, by the neighbour graph alone.

    For embeddings of an encoder that is being trained with clusters: its loss draws these together, so that components
    and the elbow would only see them again.
    """
    x_ND = _rows(X)
    chosen = _drawn(len(x_ND), seed)
    some_MD = _unit(x_ND[chosen].astype(np.float64))
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
    return _numbered(groups, x_ND, np.zeros(len(x_ND), dtype=np.int64), None, Shard(len(x_ND)))


def of_directions(weight_GD: Array, ratio: float) -> Groups:
    """Groups by the scores of directions, as training leaves them."""
    return Groups(np.zeros(1, dtype=np.int64), ratio, weight_GD, np.zeros(len(weight_GD)), unit=True)


def of_these_components(
    groups: Groups,
    X: Any,
    component_N: Any,
    k: int,
    centre_KD: Any = None,
    *,
    together: bool = False,
    keeps_all: bool = False,
) -> Groups:
    """The same groups for other components: those in which no component has most of its rows are left out.

    Not with ``keeps_all``, for a number that was given. ``together`` as in ``found``.
    """
    x_ND, component_N = _rows(X), _rows(component_N)
    shard = Shard.of(len(x_ND), together=together)
    if groups.weight_GD is None or groups.offset_G is None:
        return replace(Groups.none(k), ratio=groups.ratio)
    weight_GD, offset_G = groups.weight_GD, groups.offset_G
    while True:  # rows of a group that is left out go to others, which may change who has most
        groups = replace(groups, label_K=np.arange(k), weight_GD=weight_GD, offset_G=offset_G)
        present_G = np.unique(_table(groups, x_ND, component_N, k, shard).argmax(axis=1))
        if keeps_all or len(present_G) == len(offset_G):
            return _numbered(groups, x_ND, component_N, centre_KD, shard)
        weight_GD, offset_G = weight_GD[present_G], offset_G[present_G]


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


def _numbered(groups: Groups, x_ND: Array, component_N: Array, centre_KD: Any, shard: Shard) -> Groups:
    """These groups by size, with the group of every component; none, if they are the components."""
    assert groups.weight_GD is not None
    assert groups.offset_G is not None
    k = len(groups.label_K)
    table_KG = _table(groups, x_ND, component_N, k, shard)
    size_G = table_KG.sum(axis=0)
    order = np.argsort(-size_G, kind="stable")[: np.count_nonzero(size_G)]
    label_K = table_KG[:, order].argmax(axis=1)
    is_same = len(order) == k == len(np.unique(label_K)) and table_KG.max(axis=1).sum() >= _SAME * shard.n_total
    if is_same or len(order) < 2:
        return replace(Groups.none(k), ratio=groups.ratio)
    groups = replace(groups, label_K=label_K, weight_GD=groups.weight_GD[order], offset_G=groups.offset_G[order])
    empty = np.flatnonzero(~table_KG.any(axis=1))
    if centre_KD is not None and len(empty):
        label_K[empty] = groups.predict(_rows(centre_KD)[empty], None)
    return groups


def _table(groups: Groups, x_ND: Array, component_N: Array, k: int, shard: Shard) -> Array:
    """How many rows of each component are in each group, (K, G), of all ranks."""
    table_KG = np.zeros((k, groups.n_groups), dtype=np.int64)
    np.add.at(table_KG, (component_N, groups.predict(x_ND, component_N)), 1)
    return shard.summed(table_KG)


# -- among samples ----------------------------------------------------------------------------------------------------


def _at_elbow(x_MD: Array, z_MP: Array, first: _Communities, seed: int) -> Array | None:
    """Groups at the elbow whose communities are the clearest, if they are nearly as clear as any."""
    bend = elbow(x_MD, seed)
    numbers = [number for number in bend.levels if bend.shared(number) >= LEAST_SHARED]
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
    return _unit((z_MP - z_MP.mean(axis=0)) @ whitening_PP)


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
        null = path(neighbour_graph(_unit(twin_MD) if unit else twin_MD, neighbours), _RESOLUTIONS)
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


# -- among components -------------------------------------------------------------------------------------------------


def of_components(first_N: Array, second_N: Array, k: int, shard: Shard | None = None) -> Array | None:
    """The group of each of ``k`` components, from the nearest and second nearest of every sample, or None.

    Random graphs have communities too, and the fewer neighbours a component has, the higher their modularity. So it is
    compared with ``chance``. The components must have been merged until they are separate, because the parts of a
    single cluster have groups too.
    """
    low_N, high_N = np.minimum(first_N, second_N), np.maximum(first_N, second_N)
    shard = Shard(len(first_N)) if shard is None else shard
    code_E, count_E = shard.counted((low_N.astype(np.int64) * k + high_N)[low_N != high_N])
    if k < 3 or not len(code_E):
        return None
    low_E, high_E, weight_E = code_E // k, code_E % k, count_E.astype(np.float64)
    label_K, modularity = communities(low_E, high_E, weight_E, k)
    neighbours = _neighbours(low_E, high_E, weight_E, k)
    is_clear = neighbours >= LEAST_NEIGHBOURS and modularity >= chance(neighbours, k)
    return label_K if is_clear and 0 < label_K.max() < k - 1 else None


def chance(neighbours: float, k: int) -> float:
    """The modularity that ``k`` random components stay below, fitted for 20 to 1,500 in 2 to 256 dimensions."""
    return (1.05 + 0.3 * max(0.0, math.log10(k / 30))) * neighbours**-0.36


def _neighbours(low_E: Array, high_E: Array, weight_E: Array, k: int) -> float:
    """How many others a component has as neighbours: exp of the entropy of its edges, averaged by what they weigh."""
    end, weight = np.concatenate([low_E, high_E]), np.concatenate([weight_E, weight_E])
    degree_K = np.bincount(end, weights=weight, minlength=k)
    return math.exp(float(-(weight * np.log(weight / degree_K[end])).sum() / weight.sum()))


# -- rows -------------------------------------------------------------------------------------------------------------


def _rows(X: Any) -> Array:
    """The rows as an array, which may be memory-mapped."""
    if not isinstance(X, torch.Tensor):
        return np.asanyarray(X)
    rows = X.detach().cpu()
    return (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()  # numpy has no bfloat16


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


def _parts(x_ND: Array, *, unit: bool) -> Iterator[tuple[int, Array]]:
    """The rows a few at a time, each part with the number of its first row."""
    step = max(1, _VALUES_AT_ONCE // max(1, x_ND.shape[1]))
    for start in range(0, len(x_ND), step):
        part = np.asarray(x_ND[start : start + step], dtype=np.float64)
        yield start, _unit(part) if unit else part


def _unit(x_ND: Array) -> Array:
    """Rows of unit length; rows of zeros stay."""
    x_ND = x_ND / np.maximum(np.abs(x_ND).max(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    return x_ND / np.maximum(np.linalg.norm(x_ND, axis=1, keepdims=True), 1e-12)
