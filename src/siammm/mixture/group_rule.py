"""The groups that were found, as a rule: a linear score for each, by which any rows get a group and a probability.

It is part of a mixture's file and needs neither the rows nor the search that found it (``groups.py``).

Legend:  N samples, D dimensions, K components, G groups.
"""

from __future__ import annotations

# pyright: reportUnknownMemberType=false
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from siammm.mixture.graph import Array
from siammm.mixture.shard import Shard

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
            return self.label_K[as_rows(component_N)]
        x_ND = as_rows(X)
        group_N = np.empty(len(x_ND), dtype=np.int64)
        for start, part in parts_of(x_ND, unit=self.unit):
            group_N[start : start + len(part)] = (part @ self.weight_GD.T + self.offset_G).argmax(axis=1)
        return group_N

    def assign(self, X: Any, component_N: Any, share_N: Any) -> tuple[Array, Array]:
        """The group of each row and its probability, given its component and the share of the row that this has."""
        if self.weight_GD is None or self.offset_G is None:
            return self.label_K[as_rows(component_N)], np.asarray(as_rows(share_N), dtype=np.float32)
        x_ND = as_rows(X)
        group_N, probability_N = np.empty(len(x_ND), dtype=np.int64), np.empty(len(x_ND), dtype=np.float32)
        for start, part in parts_of(x_ND, unit=self.unit):
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
        parts = parts_of(as_rows(X), unit=self.unit)
        score_NG = np.concatenate([part @ self.weight_GD.T + self.offset_G for _, part in parts])
        share_NG = np.exp(score_NG - score_NG.max(axis=1, keepdims=True))
        return share_NG / share_NG.sum(axis=1, keepdims=True)


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
    x_ND, component_N = as_rows(X), as_rows(component_N)
    shard = Shard.of(len(x_ND), together=together)
    if groups.weight_GD is None or groups.offset_G is None:
        return replace(Groups.none(k), ratio=groups.ratio)
    weight_GD, offset_G = groups.weight_GD, groups.offset_G
    while True:  # rows of a group that is left out go to others, which may change who has most
        groups = replace(groups, label_K=np.arange(k), weight_GD=weight_GD, offset_G=offset_G)
        present_G = np.unique(_table(groups, x_ND, component_N, k, shard).argmax(axis=1))
        if keeps_all or len(present_G) == len(offset_G):
            return numbered(groups, x_ND, component_N, centre_KD, shard)
        weight_GD, offset_G = weight_GD[present_G], offset_G[present_G]


def numbered(groups: Groups, x_ND: Array, component_N: Array, centre_KD: Any, shard: Shard) -> Groups:
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
        label_K[empty] = groups.predict(as_rows(centre_KD)[empty], None)
    return groups


def _table(groups: Groups, x_ND: Array, component_N: Array, k: int, shard: Shard) -> Array:
    """How many rows of each component are in each group, (K, G), of all ranks."""
    table_KG = np.zeros((k, groups.n_groups), dtype=np.int64)
    np.add.at(table_KG, (component_N, groups.predict(x_ND, component_N)), 1)
    return shard.summed(table_KG)


# -- rows -------------------------------------------------------------------------------------------------------------


def as_rows(X: Any) -> Array:
    """The rows as an array, which may be memory-mapped."""
    if not isinstance(X, torch.Tensor):
        return np.asanyarray(X)
    rows = X.detach().cpu()
    return (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()  # numpy has no bfloat16


def parts_of(x_ND: Array, *, unit: bool) -> Iterator[tuple[int, Array]]:
    """The rows a few at a time, each part with the number of its first row."""
    step = max(1, _VALUES_AT_ONCE // max(1, x_ND.shape[1]))
    for start in range(0, len(x_ND), step):
        part = np.asarray(x_ND[start : start + step], dtype=np.float64)
        yield start, unit_rows(part) if unit else part


def unit_rows(x_ND: Array) -> Array:
    """Rows of unit length; rows of zeros stay."""
    x_ND = x_ND / np.maximum(np.abs(x_ND).max(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    return x_ND / np.maximum(np.linalg.norm(x_ND, axis=1, keepdims=True), 1e-12)
