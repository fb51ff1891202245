"""What the tests of merging share."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from scipy.cluster import hierarchy
from torch import Tensor

from siammm.mixture import merge
from siammm.mixture.components import ConcentrationSettings, VonMisesFisherComponents
from siammm.mixture.em import Assignment
from siammm.mixture.gaussian import GaussianComponents
from siammm.mixture.merge_tree import Merges
from siammm.mixture.samples import Samples

CPU = torch.device("cpu")
HARD = Assignment(n_neighbours=1)


def centres(k: int, d: int, *, unit: bool, seed: int = 0) -> Tensor:
    rows = torch.randn(k, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.nn.functional.normalize(rows, dim=1) if unit else 3 * rows + 1


def components_at(samples: Samples, centre_KD: Tensor, *, unit: bool) -> Any:
    start: Any
    if unit:
        start = VonMisesFisherComponents.started(centre_KD, ConcentrationSettings())
    else:
        start = GaussianComponents.started(centre_KD, "spherical", 1.0)
    return merge.restarted(samples, start, centre_KD, HARD)


def leaf_groups(merges: Merges, n_merges: int) -> np.ndarray:
    """Which leaves are together after the first so many rows of the tree, by following the rows."""
    leaves = len(merges.linkage) + 1
    members = {i: [i] for i in range(leaves)}
    for row, (a, b, _, count) in enumerate(merges.linkage[:n_merges]):
        members[leaves + row] = members.pop(int(a)) + members.pop(int(b))
        assert len(members[leaves + row]) == count
    group = np.empty(leaves, dtype=int)
    for number, mine in enumerate(members.values()):
        group[mine] = number
    return group


def same_groups(one: np.ndarray, other: np.ndarray) -> bool:
    pairs = set(zip(one.tolist(), other.tolist(), strict=True))
    return len(pairs) == len(set(one.tolist())) == len(set(other.tolist()))


def check_history(mixture: Any, *, start: int) -> None:
    """What must hold of every history of merging."""
    merges, k = mixture.merges_, mixture.n_components_
    counts = merges.n_components
    assert counts[0] == start
    assert counts[-1] == k == len(mixture.weights_)
    rises = [b for a, b in pairwise(counts) if b > a]
    leaves = rises[-1] if rises else start  # a split that was kept begins a tree of its own
    assert merges.linkage.shape == (leaves - 1, 4)
    assert merges.n_merges == leaves - k
    if leaves == 1:
        return
    assert hierarchy.is_valid_linkage(merges.linkage)
    assert hierarchy.is_monotonic(merges.linkage)
    assert merges.linkage[-1, 3] == leaves
    assert len(hierarchy.dendrogram(merges.linkage, no_plot=True)["leaves"]) == leaves
    cut = hierarchy.fcluster(merges.linkage, k, criterion="maxclust")
    assert len(np.unique(cut)) == k
    assert same_groups(cut, leaf_groups(merges, merges.n_merges))
