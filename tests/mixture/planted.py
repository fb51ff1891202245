"""First and second choices of samples among components in planted groups."""

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
