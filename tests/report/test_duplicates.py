"""Near duplicates: both witnesses must agree."""

from __future__ import annotations

import numpy as np
import pytest

from siammm.report.duplicates import Pairs, duplicate_sets, near_duplicates

N, D = 120, 16


@pytest.fixture
def rows() -> np.ndarray:
    x_ND = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
    return x_ND / np.linalg.norm(x_ND, axis=1, keepdims=True)


@pytest.fixture
def hashes() -> np.ndarray:
    return np.random.default_rng(1).integers(1, 2**63, N).astype(np.uint64)


def near(row: np.ndarray, distance: float = 0.01) -> np.ndarray:
    other = row + distance * np.random.default_rng(2).normal(size=D)
    return (other / np.linalg.norm(other)).astype(np.float32)


def found(rows: np.ndarray, hashes: np.ndarray, mirrored: np.ndarray | None = None, parts: int = 1) -> set:
    mirrored = hashes[::-1].copy() ^ np.uint64(0xFFFF0000FFFF0000) if mirrored is None else mirrored
    pairs = near_duplicates(rows, hashes, mirrored, np.arange(len(rows)) % parts)
    assert (pairs.first < pairs.second).all()
    return set(zip(pairs.first.tolist(), pairs.second.tolist(), strict=True))


def flipped(value: np.uint64, bits: int) -> np.uint64:
    return value ^ np.uint64((1 << bits) - 1)


def test_nothing_is_found_among_strangers(rows: np.ndarray, hashes: np.ndarray) -> None:
    assert found(rows, hashes) == set()


@pytest.mark.parametrize(("bits", "is_found"), [(0, True), (4, True), (10, True), (14, True), (24, False)])
def test_hashes_must_agree(bits: int, is_found: bool, rows: np.ndarray, hashes: np.ndarray) -> None:
    rows[40], hashes[40] = near(rows[7]), flipped(hashes[7], bits)
    assert found(rows, hashes) == ({(7, 40)} if is_found else set())


def test_embeddings_must_agree(rows: np.ndarray, hashes: np.ndarray) -> None:
    hashes[40] = hashes[7]
    assert found(rows, hashes) == set()
    rows[40] = near(rows[7])
    assert found(rows, hashes) == {(7, 40)}


def test_a_mirror_image_is_a_duplicate(rows: np.ndarray, hashes: np.ndarray) -> None:
    mirrored = np.random.default_rng(3).integers(1, 2**63, N).astype(np.uint64)
    rows[40], hashes[40], mirrored[40] = near(rows[7]), mirrored[7], hashes[7]
    assert found(rows, hashes, mirrored) == {(7, 40)}


def test_images_without_a_hash_are_no_duplicates(rows: np.ndarray, hashes: np.ndarray) -> None:
    rows[40], hashes[40], hashes[7] = rows[7], 0, 0
    assert found(rows, hashes) == set()


def test_copies_are_found_across_clusters(rows: np.ndarray, hashes: np.ndarray) -> None:
    """Where only the hashes lead from one to the other."""
    for at in (41, 80, 99):
        rows[at], hashes[at] = near(rows[6]), hashes[6]
    pairs = near_duplicates(rows, hashes, hashes ^ np.uint64(2**40 - 1), np.arange(N) % 2)
    assert [part.tolist() for part in duplicate_sets(pairs, N)] == [[6, 41, 80, 99]]


def test_the_order_of_images_does_not_matter(rows: np.ndarray, hashes: np.ndarray) -> None:
    for first, second in ((3, 50), (50, 51), (20, 90)):
        rows[second], hashes[second] = near(rows[first]), flipped(hashes[first], 2)
    order = np.random.default_rng(4).permutation(N)
    straight, turned = (
        found(rows, hashes),
        found(rows[order], hashes[order], hashes[::-1][order] ^ np.uint64(2**20 - 1)),
    )
    assert {frozenset(pair) for pair in straight} == {frozenset(order[list(pair)].tolist()) for pair in turned}


def test_sets_are_joined_by_pairs() -> None:
    pairs = Pairs(
        first=np.array([0, 1, 5]), second=np.array([1, 4, 6]), cosine=np.ones(3), bits=np.zeros(3, dtype=np.int64)
    )
    assert [part.tolist() for part in duplicate_sets(pairs, 8)] == [[0, 1, 4], [5, 6]]
    none = Pairs(**dict.fromkeys(("first", "second", "cosine", "bits"), np.zeros(0, dtype=np.int64)))
    assert duplicate_sets(none, 3) == []


@pytest.mark.parametrize("n", [1, 2, 3])
def test_few_images(n: int) -> None:
    rows = np.tile(np.eye(1, 4, dtype=np.float32), (n, 1))
    hashes = np.full(n, 99, dtype=np.uint64)
    assert len(duplicate_sets(near_duplicates(rows, hashes, hashes, np.zeros(n, int)), n)) == (n > 1)
