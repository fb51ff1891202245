"""Labels as the formats store them, made into numbers with names. They judge a result and never train one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

LABEL_KEYS = ("label", "labels", "y", "target", "targets", "class", "cls", "fine_label")
"""The names that are looked for, the first that exists wins."""
NAME_KEYS = ("names", "label_names", "class_names", "classes")

# Names of folders that hold parts of a data set, not classes.
SPLITS = frozenset({"train", "training", "val", "valid", "validation", "dev", "test", "testing"})

# Integers from here on are codes of something, not numbers of classes, and are renumbered.
_LARGEST_NUMBER = 2**20

Labels = tuple[np.ndarray | None, list[str] | None]


def from_values(values: Sequence[Any] | np.ndarray, names: Sequence[str] | None = None) -> Labels:
    """Labels and their names from integers or strings; (None, None) where one is missing (None, "" or -1).

    Small integers stay what they are, so that two sources agree; strings are numbered in sorted order.
    """
    values = np.asarray(values, dtype=object) if not isinstance(values, np.ndarray) else values
    if values.dtype.kind == "S":
        values = np.char.decode(values, "utf-8", "backslashreplace")
    if values.dtype.kind == "O":
        if any(value is None for value in values):
            return None, None
        are_numbers = all(isinstance(value, int | np.integer) for value in values)
        values = values.astype(np.int64) if are_numbers else np.array([str(value) for value in values])
    if values.dtype.kind in "iub":
        values = values.astype(np.int64)
        if len(values) == 0 or (values == -1).any():
            return None, None
        known = None if names is None else [str(name) for name in names]
        if values.min() >= 0 and values.max() < (_LARGEST_NUMBER if known is None else len(known)):
            return values, known
    elif len(values) == 0 or (values == "").any():
        return None, None
    found, numbers = np.unique(values, return_inverse=True)
    return numbers.astype(np.int64), [str(value) for value in found]


def from_paths(paths: Sequence[str]) -> Labels:
    """Labels from folders: the first level at which there is more than one folder, where every image is in one.

    A level of nothing but parts of a data set (train, val, test) is passed over: below it, folders of one name are one
    class. Images that lie beside the folders of classes leave the labels unknown.
    """
    rows = [path.split("/")[:-1] for path in paths]
    depth = min((len(row) for row in rows), default=0)
    for level in range(depth):
        folders = {row[level] for row in rows}
        if len(folders) > 1 and not folders <= SPLITS:
            return from_values(np.array([row[level] for row in rows]))
    return None, None
