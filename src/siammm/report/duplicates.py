"""Near duplicates: images that both their embeddings and their perceptual hashes find to be almost the same.

Embeddings alone would join different images of one thing, hashes alone images that share a layout, such as a horizon.

Legend:  N images, D dimensions, B rows of a block, H neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

# Neighbours of each image that are compared, and which of them tells how far neighbours are in this set.
_NEIGHBOURS, _TYPICAL = 10, 5
# Bits of 64 that may differ, and the cosine distance as a share of the typical one: any pair of limits is enough.
_RULES = ((4, 1.0), (10, 0.5), (14, 0.2))
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Pairs of near duplicates, each once."""

    first: np.ndarray
    second: np.ndarray
    cosine: np.ndarray
    bits: np.ndarray
    """How many of the 64 bits of the hashes differ, of the better of the image and its mirror image."""


def near_duplicates(embedding_ND: np.ndarray, hash_N: np.ndarray, mirrored_N: np.ndarray, part_N: np.ndarray) -> Pairs:
    """All pairs of near duplicates.

    ``embedding_ND`` has unit rows; ``hash_N`` and ``mirrored_N`` are uint64, 0 for images that have none. Neighbours
    are looked for within each part (a cluster), so that time grows with its size and not with that of the set; images
    whose hashes are equal are compared wherever they are.
    """
    near = [_nearest(embedding_ND, np.flatnonzero(part_N == part)) for part in np.unique(part_N)]
    typical = _typical_distance([distance_BH for _, _, distance_BH in near])
    candidates = [(np.repeat(row_B, other_BH.shape[1]), other_BH.ravel()) for row_B, other_BH, _ in near]
    candidates += [_equal(hash_N, hash_N), _equal(hash_N, mirrored_N)]
    first, second = (np.concatenate(side) for side in zip(*candidates, strict=True))
    first, second = np.minimum(first, second), np.maximum(first, second)
    has_hashes = (hash_N[first] != 0) & (hash_N[second] != 0) & (first != second)
    pairs = np.unique(np.stack([first[has_hashes], second[has_hashes]]), axis=1)
    first, second = pairs
    bits = np.minimum(
        np.bitwise_count(hash_N[first] ^ hash_N[second]), np.bitwise_count(hash_N[first] ^ mirrored_N[second])
    ).astype(np.int64)
    cosine = np.einsum("pd,pd->p", embedding_ND[first], embedding_ND[second]) if len(first) else np.zeros(0)
    distance = 1.0 - cosine
    is_one = np.zeros(len(first), dtype=bool)
    for most_bits, share in _RULES:
        is_one |= (bits <= most_bits) & (distance <= share * typical + 1e-3)
    return Pairs(first=first[is_one], second=second[is_one], cosine=cosine[is_one], bits=bits[is_one])


def duplicate_sets(pairs: Pairs, n: int) -> list[np.ndarray]:
    """The sets of images that are joined by pairs, the largest first."""
    graph = coo_array((np.ones(len(pairs.first)), (pairs.first, pairs.second)), shape=(n, n))
    _, set_N = connected_components(graph, directed=False)
    order = np.argsort(set_N, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(set_N[order])) + 1)
    return sorted((part for part in parts if len(part) > 1), key=lambda part: (-len(part), int(part[0])))


def _nearest(embedding_ND: np.ndarray, row_B: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """These rows, the nearest others among them and their cosine distances, nearest first."""
    x_BD = embedding_ND[row_B]
    count = min(_NEIGHBOURS, len(row_B) - 1)
    other_BH = np.zeros((len(row_B), count), dtype=np.int64)
    distance_BH = np.zeros((len(row_B), count), dtype=np.float32)
    if not count:
        return row_B, other_BH, distance_BH
    for start in range(0, len(row_B), _ROWS_AT_ONCE):
        cosine_RB = x_BD[start : start + _ROWS_AT_ONCE] @ x_BD.T
        own = np.arange(len(cosine_RB))
        cosine_RB[own, start + own] = -np.inf
        top_RH = np.argpartition(-cosine_RB, count - 1, axis=1)[:, :count]
        value_RH = np.take_along_axis(cosine_RB, top_RH, axis=1)
        order_RH = np.argsort(-value_RH, axis=1, kind="stable")
        stop = start + len(cosine_RB)
        other_BH[start:stop] = row_B[np.take_along_axis(top_RH, order_RH, axis=1)]
        distance_BH[start:stop] = 1.0 - np.take_along_axis(value_RH, order_RH, axis=1)
    return row_B, other_BH, distance_BH


def _typical_distance(distances: list[np.ndarray]) -> float:
    """The median distance to a neighbour that is not the nearest: an image may have a copy or two."""
    column = [each[:, min(_TYPICAL, each.shape[1]) - 1] for each in distances if each.shape[1]]
    return float(np.median(np.concatenate(column))) if column else 0.0


def _equal(left_N: np.ndarray, right_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Images whose value on the left equals that of another one on the right, and one such other for each."""
    order = np.argsort(right_N, kind="stable")
    at_N = np.searchsorted(right_N[order], left_N)
    # The next of those that are equal, where the first is the image itself.
    place = order[np.minimum(at_N, len(order) - 1)]
    after = order[np.minimum(at_N + 1, len(order) - 1)]
    other = np.where((place == np.arange(len(left_N))), after, place)
    is_equal = right_N[other] == left_N
    return np.flatnonzero(is_equal), other[is_equal]
