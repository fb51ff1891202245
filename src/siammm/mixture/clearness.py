"""How clear groups are: the communities of samples beside those of one Gaussian, which has communities but no groups.

Legend:  N samples, D dimensions, R resolutions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from siammm.mixture.graph import Array, Graph, neighbour_graph, path

# More neighbours see coarser groups, if there are few rows; with many rows it makes little difference.
_NEIGHBOURS, _ROWS_PER_NEIGHBOUR = (8, 15), 200
_RESOLUTIONS = 0.12 * 1.3 ** np.arange(18)


@dataclass(frozen=True)
class Communities:
    """The communities at the resolution where they are furthest from those of one Gaussian."""

    label_N: Array
    ratio: float
    """1 - modularity, relative to that of the Gaussian; lower is clearer."""
    graph: Graph
    loss_of_gaussian_R: Array

    @classmethod
    def of(cls, x_ND: Array, *, unit: bool, seed: int) -> Communities:
        """Those of these rows; ``unit``: whether their length is 1, so that the Gaussian's is made so too."""
        neighbours, twin_ND = neighbours_of(len(x_ND)), gaussian_twin(x_ND, seed)
        graph = neighbour_graph(x_ND, neighbours)
        if unit:
            twin_ND = twin_ND / np.maximum(np.linalg.norm(twin_ND, axis=1, keepdims=True), 1e-12)
        null = path(neighbour_graph(twin_ND, neighbours), _RESOLUTIONS)
        loss_of_gaussian_R = np.array([max(loss, 1e-12) for _, loss in null])
        found = path(graph, _RESOLUTIONS)
        ratio_R = np.array([loss for _, loss in found]) / loss_of_gaussian_R
        best = int(np.argmin(ratio_R))
        return cls(found[best][0], float(ratio_R[best]), graph, loss_of_gaussian_R)

    def ratio_of(self, label_N: Array) -> float:
        """The same ratio for other groups of the samples, at the resolution that suits them best."""
        loss_R = np.array([self.graph.loss(label_N, float(resolution)) for resolution in _RESOLUTIONS])
        return float((loss_R / self.loss_of_gaussian_R).min())


def neighbours_of(n: int) -> int:
    """How many neighbours a sample has in a graph of so many."""
    fewest, most = _NEIGHBOURS
    return min(max(fewest, n // _ROWS_PER_NEIGHBOUR), most, n // 8)


def gaussian_twin(x_ND: Array, seed: int) -> Array:
    """As many rows from one Gaussian of the same mean and covariance: no groups, but the same shape."""
    n, mean_D = len(x_ND), x_ND.mean(axis=0)
    weight_NN = np.random.default_rng(seed).standard_normal((n, n), dtype=np.float32) / np.sqrt(n)
    return weight_NN @ (x_ND - mean_D) + mean_D
