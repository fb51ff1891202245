"""Rules that say how many groups there are: ours, what was tried, and what people use instead.

Every rule takes embeddings of unit length, x_ND, and a seed, and returns a label for each row. Those of ``TOLD`` also
get the number of groups. A rule that people would have to set has one entry for each setting.

The rules of the graph work on the neighbour graph of the samples. A sample is linked to its nearest by weights that
fall from 1 at the first to a fixed sum over all (each sample has a scale of its own, as in UMAP), and links are made
mutual by a + b - ab. Louvain's communities at a resolution g maximise the share of links inside, e, minus g times what
random links of the same degrees would have there, a.

Legend:  N samples, D dimensions, E edges, K clusters, H neighbours.
"""

from __future__ import annotations

# scikit-learn's parameters have types that are guessed from their defaults.
# pyright: reportArgumentType=false
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from unittest import mock

import numpy as np
from sklearn.cluster import HDBSCAN, KMeans
from sklearn.decomposition import PCA
from sklearn.metrics import silhouette_score
from sklearn.mixture import GaussianMixture

import elbow_rules
from siammm import VonMisesFisherMixture
from siammm.metrics import clustering_scores
from siammm.mixture import groups as mixture_groups
from siammm.mixture.graph import communities

Labels = np.ndarray
RESOLUTIONS = 0.15 * 1.35 ** np.arange(14)
TRIED_K = (2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 65, 80, 100, 130, 160, 200, 250)


@dataclass(frozen=True)
class Graph:
    """Links between samples, each once."""

    low_E: np.ndarray
    high_E: np.ndarray
    weight_E: np.ndarray
    n: int

    def communities(self, resolution: float) -> Labels:
        return communities(self.low_E, self.high_E, self.weight_E, self.n, resolution)[0]

    def degree_N(self) -> np.ndarray:
        return np.bincount(self.low_E, self.weight_E, self.n) + np.bincount(self.high_E, self.weight_E, self.n)

    def loss(self, label_N: Labels, resolution: float) -> float:
        """1 - modularity: the share of links between communities, plus what chance puts inside."""
        inside = float(self.weight_E[label_N[self.low_E] == label_N[self.high_E]].sum() / self.weight_E.sum())
        share_K = np.bincount(label_N, self.degree_N()) / (2 * self.weight_E.sum())
        return 1 - inside + resolution * float((share_K**2).sum())


def nearest(x_ND: np.ndarray, y_MD: np.ndarray, count: int, *, same: bool) -> tuple[np.ndarray, np.ndarray]:
    """The nearest rows of y to each of x, and their distances; without the row itself where both are the same."""
    index, distance = [], []
    for start in range(0, len(x_ND), 1000):
        cosine = x_ND[start : start + 1000] @ y_MD.T
        if same:
            cosine[np.arange(len(cosine)), start + np.arange(len(cosine))] = -2
        found = np.argpartition(-cosine, count, axis=1)[:, :count]
        value = np.take_along_axis(cosine, found, axis=1)
        order = np.argsort(-value, axis=1)
        index.append(np.take_along_axis(found, order, axis=1))
        distance.append(np.sqrt(np.clip(2 - 2 * np.take_along_axis(value, order, axis=1), 0, None)))
    return np.concatenate(index), np.concatenate(distance)


def neighbour_graph(x_ND: np.ndarray, count: int = 15) -> Graph:
    n = len(x_ND)
    index_NH, distance_NH = nearest(x_ND, x_ND, count, same=True)
    beyond_NH = distance_NH - distance_NH[:, :1]
    low_N1, high_N1 = np.full((n, 1), 1e-6), np.full((n, 1), 10.0)
    for _ in range(40):  # the scale at which the weights sum to log2 of their number
        scale_N1 = (low_N1 + high_N1) / 2
        above = np.exp(-beyond_NH / scale_N1).sum(axis=1, keepdims=True) > np.log2(count)
        low_N1, high_N1 = np.where(above, low_N1, scale_N1), np.where(above, scale_N1, high_N1)
    weight = np.exp(-beyond_NH / high_N1).ravel()
    source, other = np.repeat(np.arange(n), count), index_NH.ravel()
    code, place = np.unique(np.minimum(source, other) * n + np.maximum(source, other), return_inverse=True)
    # Of two weights a and b, a + b - ab is 1 - (1 - a) (1 - b), also where b is 0.
    left_E = np.ones(len(code))
    np.multiply.at(left_E, place, 1 - np.minimum(weight, 1 - 1e-9))
    return Graph(code // n, code % n, 1 - left_E, n)


def unimodal(x_ND: np.ndarray, seed: int) -> np.ndarray:
    """As many rows from one Gaussian of the same mean and covariance: no groups, but the same shape."""
    n, mean_D = len(x_ND), x_ND.mean(axis=0)
    weight_NN = np.random.default_rng(seed).standard_normal((n, n), dtype=np.float32) / np.sqrt(n)
    rows_ND = weight_NN @ (x_ND - mean_D) + mean_D
    return rows_ND / np.linalg.norm(rows_ND, axis=1, keepdims=True)


def by_modularity(x_ND: np.ndarray, seed: int, *, count: int = 15) -> Labels:
    return neighbour_graph(x_ND, count).communities(1.0)


def by_comparison(x_ND: np.ndarray, seed: int) -> Labels:
    """The resolution at which 1 - modularity is the smallest part of that of a single Gaussian."""
    graph, null = neighbour_graph(x_ND), neighbour_graph(unimodal(x_ND, seed))
    found = [graph.communities(g) for g in RESOLUTIONS]
    ratio = [
        graph.loss(label_N, g) / null.loss(null.communities(g), g)
        for g, label_N in zip(RESOLUTIONS, found, strict=True)
    ]
    return found[int(np.argmin(ratio))]


def reproducibility(x_ND: np.ndarray, resolution: float, seed: int, *, halvings: int = 2) -> float:
    """Agreement (AMI) of the communities of one half of the samples with those of the other, carried over by votes."""
    agreement = []
    for number in range(halvings):
        order = np.random.default_rng([seed, number]).permutation(len(x_ND))
        halves = [x_ND[part] for part in np.array_split(order, 2)]
        labels = [neighbour_graph(half, 8).communities(resolution) for half in halves]
        for own, other in ((0, 1), (1, 0)):
            carried = voted(labels[other], nearest(halves[own], halves[other], 5, same=False)[0])
            agreement.append(clustering_scores(labels[own], carried).ami)
    return float(np.mean(agreement))


def by_reproducibility(x_ND: np.ndarray, seed: int) -> Labels:
    """The resolution whose communities are found again, times the chance that two samples are in different ones."""
    graph = neighbour_graph(x_ND)
    found = [graph.communities(g) for g in RESOLUTIONS]
    diversity = [1 - float(((np.bincount(label_N) / len(label_N)) ** 2).sum()) for label_N in found]
    score = [reproducibility(x_ND, g, seed) * d for g, d in zip(RESOLUTIONS, diversity, strict=True)]
    return found[int(np.argmax(score))]


@dataclass(frozen=True)
class Coarse:
    """A graph whose nodes are communities at a high resolution, so that those at lower ones are found quickly."""

    label_N: Labels
    graph: Graph
    degree_K: np.ndarray

    @classmethod
    def of(cls, graph: Graph) -> Coarse:
        label_N = graph.communities(_FINEST)
        k, low_E, high_E = int(label_N.max()) + 1, label_N[graph.low_E], label_N[graph.high_E]
        low_E, high_E = np.minimum(low_E, high_E), np.maximum(low_E, high_E)
        code, place = np.unique((low_E * k + high_E)[low_E != high_E], return_inverse=True)
        weight = np.bincount(place, graph.weight_E[low_E != high_E], len(code))
        return cls(label_N, Graph(code // k, code % k, weight, k), np.bincount(label_N, graph.degree_N(), k))

    def communities(self, resolution: float) -> tuple[Labels, float]:
        """A label for every sample, and 1 - modularity."""
        graph, total = self.graph, float(self.degree_K.sum())
        label_K, _ = communities(graph.low_E, graph.high_E, graph.weight_E, graph.n, resolution, self.degree_K)
        cut = float(graph.weight_E[label_K[graph.low_E] != label_K[graph.high_E]].sum())
        share = np.bincount(label_K, self.degree_K) / total
        return label_K[self.label_N], 2 * cut / total + resolution * float((share**2).sum())


_FINEST = 12.0
_DIVIDING = 0.12 * 1.3 ** np.arange(14)
# The most that 1 - modularity of a division may be, relative to that of one Gaussian, by the number of parts. Chosen on
# single classes, which are not to be divided, and on pairs of classes of the sets to develop on.
_LIMIT = {2: 0.75, 3: 0.75, 4: 0.7, 5: 0.7, 6: 0.7}
_LIMIT_OF_MANY = 0.65
_SMALLEST, _MOST = 32, 1500


def by_division(x_ND: np.ndarray, seed: int, *, count: int = 8) -> Labels:
    """Divide the samples as long as a part divides better than one Gaussian of its own mean and covariance would.

    The coarsest division that is good enough is taken, and each part is tried again: so a part is a group if it looks
    like a single cloud, whatever the others are like.
    """
    label_N = np.zeros(len(x_ND), int)
    part_N = _division(x_ND, seed, count) if len(x_ND) >= _SMALLEST else None
    if part_N is None:
        return label_N
    for part in np.unique(part_N):
        row = np.flatnonzero(part_N == part)
        label_N[row] = label_N.max() + 1 + by_division(x_ND[row], seed, count=count)
    return np.unique(label_N, return_inverse=True)[1]


def _division(x_ND: np.ndarray, seed: int, count: int) -> Labels | None:
    """The parts of the samples, or None if they are one."""
    drawn = np.random.default_rng(seed).permutation(len(x_ND))[:_MOST]
    some_ND = x_ND[drawn]
    count = min(count, len(some_ND) // 4)
    graph, null = (Coarse.of(neighbour_graph(rows, count)) for rows in (some_ND, unimodal(some_ND, seed)))
    good: list[tuple[int, float, Labels]] = []
    for resolution in _DIVIDING:
        label_N, loss = graph.communities(resolution)
        parts, ratio = int(label_N.max()) + 1, loss / null.communities(resolution)[1]
        if parts > 1 and ratio < _LIMIT.get(parts, _LIMIT_OF_MANY):
            good.append((parts, ratio, label_N))
    if not good:
        return None
    fewest = max(3, min(parts for parts, _, _ in good))
    _, _, label_N = min((found for found in good if found[0] <= fewest), key=lambda found: found[1])
    if len(some_ND) == len(x_ND):
        return label_N[np.argsort(drawn)]
    return voted(label_N, nearest(x_ND, some_ND, 5, same=False)[0])


def voted(label_M: Labels, index_NH: np.ndarray) -> Labels:
    """The label that most of the neighbours have."""
    return np.array([np.bincount(row).argmax() for row in label_M[index_NH]])


def by_eigengap(x_ND: np.ndarray, seed: int) -> Labels:
    """Spectral clustering: the largest relative gap of the Laplacian's eigenvalues, then the mixture in their space."""
    import scipy.sparse as sparse
    import scipy.sparse.linalg as linalg

    graph = neighbour_graph(x_ND)
    half = sparse.csr_matrix((graph.weight_E, (graph.low_E, graph.high_E)), shape=(graph.n, graph.n))
    links = half + half.T
    scale = sparse.diags(1 / np.sqrt(np.asarray(links.sum(axis=1)).ravel()))
    value, vector = linalg.eigsh(
        scale @ links @ scale, k=min(101, graph.n - 2), which="LA", v0=np.ones(graph.n), tol=1e-4
    )
    order = np.argsort(-value)
    cut = np.clip(1 - value[order], 1e-6, None)
    k = int(np.argmax(cut[2:] / cut[1:-1])) + 2  # of 2 and more
    rows = vector[:, order[:k]]
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return VonMisesFisherMixture(k, n_init=3, random_state=seed).fit_predict(rows)


def by_merging(x_ND: np.ndarray, seed: int, *, start: int = 100, groups: bool) -> Labels:
    """What ``merge="auto"`` ends with, or its groups."""
    mixture = _merged(x_ND.tobytes(), len(x_ND), seed, min(start, len(x_ND) // 4))
    return mixture.groups(x_ND).predict(x_ND, mixture.labels_) if groups else mixture.labels_


@lru_cache(maxsize=1)  # rules share the clusters of a set
def _merged(x: bytes, n: int, seed: int, start: int) -> VonMisesFisherMixture:
    x_ND = np.frombuffer(x, np.float32).reshape(n, -1)
    return VonMisesFisherMixture(start, merge="auto", random_state=seed).fit(x_ND)


def by_elbow_or_communities(x_ND: np.ndarray, seed: int) -> Labels:
    """The rule of the package without that for small kinds: where there is no elbow, the communities."""
    with mock.patch.object(mixture_groups, "effective_number", return_value=0):
        return by_merging(x_ND, seed, groups=True)


def by_communities(x_ND: np.ndarray, seed: int) -> Labels:
    """What ``groups`` finds without the elbow (decision 0035 alone)."""
    with mock.patch.object(mixture_groups, "LEAST_SHARED", np.inf):
        return by_elbow_or_communities(x_ND, seed)


def by_silhouette(x_ND: np.ndarray, seed: int) -> Labels:
    rows = PCA(min(50, x_ND.shape[1]), random_state=seed).fit_transform(x_ND)
    tried = [KMeans(k, n_init=1, random_state=seed).fit_predict(rows) for k in TRIED_K if k < len(rows) // 4]
    return max(tried, key=lambda label_N: silhouette_score(rows, label_N, sample_size=2000, random_state=seed))


def by_bic(x_ND: np.ndarray, seed: int) -> Labels:
    rows = PCA(min(50, x_ND.shape[1]), random_state=seed).fit_transform(x_ND).astype(np.float64)
    best, lowest = np.zeros(len(rows), int), np.inf
    for k in TRIED_K:
        if k >= len(rows) // 20:
            break
        mixture = GaussianMixture(k, covariance_type="diag", random_state=seed, reg_covar=1e-5).fit(rows)
        if mixture.bic(rows) < lowest:
            best, lowest = mixture.predict(rows), mixture.bic(rows)
    return best


def by_umap(x_ND: np.ndarray, seed: int, *, smallest: int) -> Labels:
    """HDBSCAN of UMAP's map; what it calls noise is one more cluster."""
    rows = _map(x_ND.tobytes(), len(x_ND), seed)
    return HDBSCAN(min_cluster_size=min(smallest, len(rows) // 2), copy=True).fit_predict(rows) + 1


@lru_cache(maxsize=1)  # its settings share a map
def _map(x: bytes, n: int, seed: int) -> np.ndarray:
    import umap  # pyright: ignore[reportMissingImports] - pip install 'siammm[viz]'

    rows = np.frombuffer(x, np.float32).reshape(n, -1)
    return umap.UMAP(n_neighbors=15, min_dist=0.0, metric="cosine", random_state=seed).fit_transform(rows)


def told(x_ND: np.ndarray, seed: int, *, k: int) -> Labels:
    return KMeans(k, n_init=3, random_state=seed).fit_predict(x_ND)


def told_groups(x_ND: np.ndarray, seed: int, *, k: int) -> Labels:
    """As ``siammm cluster --n-groups``; so many groups do not depend on the components."""
    nearest_N2 = np.zeros((len(x_ND), 2), dtype=np.int64)
    found = mixture_groups.found(x_ND, nearest_N2, 1, unit=True, separate=False, seed=seed, so_many=k)
    return found.predict(x_ND, nearest_N2[:, 0])


RULES: dict[str, Callable[[np.ndarray, int], Labels]] = {
    "merge=auto": partial(by_merging, groups=False),
    "siammm, groups": partial(by_merging, groups=True),
    "siammm, without small kinds": by_elbow_or_communities,
    "siammm, without the elbow": by_communities,
    **elbow_rules.RULES,
    "graph, modularity": by_modularity,
    "graph, 30 neighbours": partial(by_modularity, count=30),
    "graph, against one Gaussian": by_comparison,
    "graph, found again": by_reproducibility,
    "graph, divided": by_division,
    "graph, eigengap": by_eigengap,
    "k-means, silhouette": by_silhouette,
    "Gaussian mixture, BIC": by_bic,
    "UMAP, HDBSCAN 5": partial(by_umap, smallest=5),
    "UMAP, HDBSCAN 15": partial(by_umap, smallest=15),
    "UMAP, HDBSCAN 50": partial(by_umap, smallest=50),
    "UMAP, HDBSCAN 100": partial(by_umap, smallest=100),
}
TOLD: dict[str, Callable[..., Labels]] = {"k-means, told K": told, "siammm, told K": told_groups}


def labels_of(rule: str, x_ND: np.ndarray, seed: int, true_k: int) -> Labels:
    """The groups by a rule; only those of ``TOLD`` look at the true number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TOLD[rule](x_ND, seed, k=true_k) if rule in TOLD else RULES[rule](x_ND, seed)
