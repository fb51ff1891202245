"""Labels as numbers, and features as tensors: the checks that all metrics share.

Legend:  N samples, D dimensions, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from siammm.core.errors import InputError

Array = Tensor | np.ndarray
Labels = Tensor | np.ndarray | Sequence[Any]


def matrix(name: str, values: Array, dtype: torch.dtype | None = None) -> Tensor:
    """Features as a tensor (N, D) of finite numbers, on the device they are on."""
    # torch warns about arrays it may not write to, such as those mapped from a file.
    values = np.require(values, requirements="W") if isinstance(values, np.ndarray) else values
    x_ND = torch.as_tensor(values).detach()
    if x_ND.ndim != 2 or 0 in x_ND.shape:
        raise InputError(f"{name} have the shape {tuple(x_ND.shape)}, but one row of numbers per image is needed.")
    x_ND = x_ND if dtype is None else x_ND.to(dtype)
    if bad := int((~x_ND.isfinite()).any(dim=1).sum()):
        raise InputError(f"{bad} of the {x_ND.shape[0]} rows of {name.lower()} hold NaN or infinity; leave them out.")
    return x_ND


def same_width(train_ND: Tensor, test_ND: Tensor) -> None:
    """Refuse two sets of features with different numbers of columns."""
    if train_ND.shape[1] != test_ND.shape[1]:
        raise InputError(
            f"The training features have {train_ND.shape[1]} columns and the test features {test_ND.shape[1]}; embed "
            "both with the same encoder."
        )


def label_codes(labels: Sequence[Any] | np.ndarray) -> tuple[np.ndarray, list[Any]]:
    """Labels as integers from 0, with -1 for a missing one, and the list of labels that they stand for."""
    values = labels if isinstance(labels, np.ndarray) else _objects(labels)
    if values.ndim != 1:
        raise InputError(f"The labels have {values.ndim} dimensions, but one label per sample is needed; flatten them.")
    if values.dtype.kind in "iub":
        classes, codes = np.unique(values, return_inverse=True)
        return codes, classes.tolist()
    # A dictionary is several times faster than sorting strings, and takes any mixture of types.
    found: dict[Any, int] = {}
    try:
        codes = np.fromiter(
            (-1 if v is None or v == "" or v != v else found.setdefault(v, len(found)) for v in values.tolist()),
            dtype=np.int64,
            count=len(values),
        )
    except TypeError as error:  # lists and the like
        raise InputError(f"The labels cannot be told apart ({error}); give one number or name for each.") from error
    endless = next((v for v in found if isinstance(v, float | np.floating) and np.isinf(v)), None)
    if endless is not None:
        row = int(np.argmax(codes == found[endless]))
        raise InputError(f"The label of row {row} is {endless}, but a label is a name or a finite number; correct it.")
    return codes, list(found)


def labels_as_array(labels: Labels) -> np.ndarray:
    """Labels as an array: of whole numbers where all are, otherwise of the values as they are."""
    if isinstance(labels, Tensor):
        return labels.detach().cpu().numpy()
    if isinstance(labels, np.ndarray):
        return labels
    values = _objects(labels)
    kinds = {type(value) for value in values}
    return values.astype(np.int64) if kinds and kinds <= {int, np.int64, np.int32} else values


def below_zero(labels: np.ndarray) -> np.ndarray:
    """Which labels are negative numbers; image sources and many tables mark a missing label that way."""
    if labels.dtype.kind in "iufb":
        return labels < 0
    return np.fromiter((isinstance(v, int | float | np.number) and bool(v < 0) for v in labels), bool, len(labels))


def numbered_together(
    train_labels: Labels | None, test_labels: Labels | None, n_train: int, n_test: int
) -> tuple[np.ndarray, np.ndarray, list[Any]]:
    """Labels of two sets as int64 from 0, with the same number for the same class, and the classes.

    Refuses what cannot be trained on: missing labels, a single class, fewer training images than classes.
    """
    values: list[np.ndarray] = []
    for name, labels, n in (("training", train_labels, n_train), ("test", test_labels, n_test)):
        if labels is None:
            raise InputError(f"The {name} images have no labels; give one for each of the {n} images.")
        array = labels_as_array(labels)
        if array.shape != (n,):
            given = array.shape[0] if array.ndim else 0
            raise InputError(f"There are {given} labels for {n} {name} images; give one for each.")
        values.append(array)
    numbers = all(array.dtype.kind in "iub" for array in values)
    codes, classes = label_codes(np.concatenate(values if numbers else [array.astype(object) for array in values]))
    missing = (codes < 0) | np.concatenate([below_zero(array) for array in values])
    for name, absent, n in (("training", missing[:n_train], n_train), ("test", missing[n_train:], n_test)):
        if absent.any():
            missed = int(absent.sum())
            raise InputError(f"{missed} of the {n} {name} images have no label; label them or leave them out.")
    train, test = codes[:n_train].astype(np.int64), codes[n_train:].astype(np.int64)
    check_classes(train, len(classes))
    return train, test, classes


def check_classes(train_labels: np.ndarray, n_classes: int) -> None:
    """Refuse training labels of one class, or fewer labels than classes."""
    n = len(train_labels)
    if n < n_classes:
        raise InputError(
            f"There are {n} training images for {n_classes} classes, but a classifier needs at least one of each; add "
            "images or leave classes out."
        )
    if len(np.unique(train_labels)) < 2:
        raise InputError(
            f"All {n} training images are of one class, but a classifier needs two or more; check the labels."
        )


def even_folds(labels_N: Array, folds: int, seed: int) -> Tensor:
    """A random fold for each sample, from 0 to folds - 1: even over each class and over all samples; on the CPU.

    Each class starts with the fold after the last one of the class before, so that many small classes do not all begin
    with fold 0.
    """
    labels_N = torch.as_tensor(labels_N).cpu()
    n = labels_N.shape[0]
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    order = order[labels_N[order].argsort(stable=True)]
    return torch.empty(n, dtype=torch.int64).scatter_(0, order, torch.arange(n) % folds)


def _objects(labels: Sequence[Any]) -> np.ndarray:
    values = np.empty(len(labels), dtype=object)
    values[:] = list(labels)
    return values
