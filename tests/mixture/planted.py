"""Planted groups: choices of samples among components, and rows around random directions."""

from __future__ import annotations

import numpy as np


def planted(rng: np.random.Generator, sizes: list[int], inside: float, n: int) -> tuple[np.ndarray, np.ndarray]:
    """First and second choices; the second is in the group of the first with this probability."""
    group_K = np.repeat(np.arange(len(sizes)), sizes)
    k = len(group_K)
    first = rng.integers(k, size=n)
    second = rng.integers(k, size=n)
    for i in np.flatnonzero(rng.random(n) < inside):
        own = np.flatnonzero(group_K == group_K[first[i]])
        second[i] = rng.choice(own)
    return first, second


def edges(first: np.ndarray, second: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    low, high = np.minimum(first, second), np.maximum(first, second)
    code, count = np.unique((low * k + high)[low != high], return_counts=True)
    return code // k, code % k, count.astype(float)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def kinds(
    k: int, *, n: int = 1500, spread: float = 1.0, stretched: float = 1.0, dims: int = 24, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Rows around k random directions; one direction that has nothing to do with the kinds may be stretched."""
    rng = np.random.default_rng(seed)
    y = rng.integers(k, size=n)
    noise = spread * rng.normal(size=(n, dims)) / np.sqrt(dims)
    noise[:, 0] *= stretched
    centre = rng.normal(size=(k, dims))
    centre[:, 0] = 0
    return unit(unit(centre)[y] + noise), y
