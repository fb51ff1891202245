"""How training and test images are chosen, and how the two sets are related.

Legend:  N images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from siammm.core.errors import InputError
from siammm.data.decode import BadImage
from siammm.data.source import Source

HELD_OUT = 10
"""One image in this many is held out where there is no test set."""

# Sets of more images than this are not compared image by image: it would take another pass over all files.
_COMPARED = 200_000


def held_out(labels_N: np.ndarray, *, seed: int = 0, flag: str = "--test") -> tuple[np.ndarray, np.ndarray]:
    """Positions of training and test images: a random tenth is for testing, even over the classes.

    Both are in the order of the source. Every class of the test images has a training image. ``flag`` is what a user
    can give instead.
    """
    n = len(labels_N)
    if n < 2 * HELD_OUT:
        raise InputError(
            f"There are {n} images, but {2 * HELD_OUT} or more are needed to hold a tenth out; give a set with {flag}."
        )
    drawn = np.random.default_rng(seed).permutation(n)
    # Sorted by class, in random order within each, so that every tenth position falls evenly on all classes.
    order = drawn[np.argsort(labels_N[drawn], kind="stable")]
    places = np.arange(n) % HELD_OUT == HELD_OUT // 2
    tests = np.zeros(n, dtype=bool)
    tests[order[places]] = True
    # A class without a training image cannot be tested.
    tests &= np.isin(labels_N, labels_N[~tests])
    if not tests.any():
        raise InputError(
            f"There are {n} images of {len(np.unique(labels_N))} classes, too few to hold some out; give {flag}."
        )
    return np.flatnonzero(~tests), np.flatnonzero(tests)


def aligned_labels(
    train_labels: np.ndarray,
    train_names: Sequence[Any] | None,
    test_labels: np.ndarray,
    test_names: Sequence[Any] | None,
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Labels of two sets as whole numbers from 0 that mean the same in both, and what they are called.

    Where both sets name their classes the names decide, since two sets may number them differently; otherwise the
    numbers do.
    """
    named = train_names is not None and test_names is not None
    train, test = (
        np.array([str(names[code]) for code in range(len(names))], dtype=object)[labels]
        if named and names is not None
        else labels
        for labels, names in ((train_labels, train_names), (test_labels, test_names))
    )
    classes, codes = np.unique(train, return_inverse=True)
    found = {value: number for number, value in enumerate(classes.tolist())}
    unknown = sorted({str(value) for value in test.tolist() if value not in found})
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise InputError(
            f"The test set has the class {unknown[0]!r}{more}, which the training set lacks; give sets of the same "
            "classes."
        )
    names = [str(train_names[value]) if train_names is not None and not named else str(value) for value in classes]
    return codes.astype(np.int64), np.array([found[value] for value in test.tolist()], dtype=np.int64), names


def n_shared(first: Source, second: Source) -> int | None:
    """How many images of the second set are also in the first, byte for byte; None where the sets are too large."""
    if len(first) + len(second) > _COMPARED:
        return None
    known = {digest for i in range(len(first)) if (digest := _digest(first, i)) is not None}
    return sum(_digest(second, i) in known for i in range(len(second)))


def _digest(source: Source, i: int) -> bytes | None:
    try:
        return hashlib.sha256(source.content(i)).digest()
    except BadImage:
        return None
