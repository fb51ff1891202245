"""The tree of merges: recorded round by round, and completed so that scipy can draw it and cut it at any number.

Legend:  K components, D dimensions, P pairs.
"""

from __future__ import annotations

# torch and scipy are only partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from siammm.mixture.centre_pairs import mutual_pairs, nearest_others

# Beyond so many centres a table of all their distances is too large.
_LINKAGE_LIMIT = 8192


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
