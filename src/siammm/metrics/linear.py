"""A linear classifier on frozen features.

Multinomial logistic regression on standardised features, fitted by L-BFGS on the features' device. The penalty is
chosen by cross-validation on the training features; test labels choose nothing. ``evaluate.linear_probe`` is the
paper's slow protocol, which also augments the images; this one takes seconds and comes out close to it.

Legend:  N training features, M those of them that are fitted, Q test features, D dimensions, C classes, K classes that
have a feature.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from siammm.core.device import widest_float
from siammm.core.errors import InputError
from siammm.metrics.labels import (
    Array,
    Labels,
    check_classes,
    even_folds,
    labels_as_array,
    matrix,
    numbered_together,
    same_width,
)  # fmt: skip

PENALTIES = (1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
"""The factors on half the squared weights that are tried."""

# The fewest features that can be trained on and held out.
_FEWEST = 20
# Up to so many features all of them judge the penalty, in folds; beyond, a held-out tenth is enough.
_FEW = 5000
_FOLDS = 5
_HELD_OUT = 10
_MOST_STEPS = 200
# Close enough to the minimum to tell penalties apart.
_ROUGHLY = 1e-6
# Up to this many numbers are fitted in double precision, in which L-BFGS converges fully.
_IN_DOUBLE = 2**22


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """The accuracy of a classifier on test images, and how it was trained."""

    top1: float
    """Share of test images whose class was predicted first, from 0 to 1."""
    top5: float | None
    """Share of test images whose class was among the first five; None where there are five classes or fewer."""
    n_classes: int
    """Classes of the training images and the test images together."""
    n_train: int
    """Images that were trained on."""
    n_test: int
    """Images that were judged."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """How the classifier was trained, in plain values."""


@dataclass(frozen=True, kw_only=True)
class LinearClassifier:
    """Weights on standardised features; a class without a training feature has a probability of 0."""

    mean_D: Tensor
    """Taken off the features."""
    deviation_D: Tensor
    """What the features are then divided by."""
    weight_CD: Tensor
    bias_C: Tensor
    penalty: float
    """The strength that was chosen."""

    def logits(self, features: Array) -> Tensor:
        """Scores (Q, C), on the classifier's device."""
        x_QD = matrix("The features", features, torch.float32).to(self.weight_CD)
        if x_QD.shape[1] != self.weight_CD.shape[1]:
            raise InputError(
                f"The features have {x_QD.shape[1]} columns, but the classifier was fitted on "
                f"{self.weight_CD.shape[1]}; embed both with the same encoder."
            )
        with torch.autocast(x_QD.device.type, enabled=False):
            return (x_QD - self.mean_D) / self.deviation_D @ self.weight_CD.T + self.bias_C


def fit_linear(
    features_ND: Array,
    labels_N: Labels,
    *,
    n_classes: int | None = None,
    penalties: Sequence[float] = PENALTIES,
    seed: int = 0,
) -> LinearClassifier:
    """Fit a classifier on features (N, D) whose labels are whole numbers from 0.

    The penalty is chosen by the likelihood in five-fold cross-validation; with more than 5,000 features, by the
    accuracy on a held-out tenth. ``n_classes`` is one more than the largest label by default.
    """
    x_ND, y_N, n_classes, mean_D, deviation_D = _standardised(features_ND, labels_N, n_classes, penalties)
    penalty = float(penalties[0])
    if len(penalties) > 1:
        many = x_ND.shape[0] > _FEW
        fold_N = even_folds(y_N, _HELD_OUT if many else _FOLDS, seed)
        if many:
            fold_N = torch.where(fold_N == 0, 0, -1)
        penalty, _ = _chosen(x_ND, y_N, n_classes, penalties, fold_N, by_accuracy=many)
    weight_CD, bias_C = _Path(x_ND, y_N, torch.ones_like(y_N, dtype=torch.bool)).fit(penalty, n_classes)
    return LinearClassifier(mean_D=mean_D, deviation_D=deviation_D, weight_CD=weight_CD, bias_C=bias_C, penalty=penalty)


def linear_scores(
    train: Array,
    train_labels: Labels | None,
    test: Array,
    test_labels: Labels | None,
    *,
    penalties: Sequence[float] = PENALTIES,
    seed: int = 0,
) -> ProbeResult:
    """Fit a classifier on training features (N, D) and score it on test features (Q, D).

    Labels are numbers or names, the same in both sets. A class that only the test set has counts as an error.
    """
    x_ND = matrix("The training features", train, torch.float32)
    x_QD = matrix("The test features", test, torch.float32)
    same_width(x_ND, x_QD)
    y_N, y_Q, classes = numbered_together(train_labels, test_labels, x_ND.shape[0], x_QD.shape[0])
    fitted = fit_linear(x_ND, y_N, n_classes=len(classes), penalties=penalties, seed=seed)
    top1, top5 = top_accuracies(fitted.logits(x_QD), torch.from_numpy(y_Q).to(x_ND.device))
    recipe = {
        "protocol": "logistic regression on standardised features", "optimiser": "L-BFGS", "penalty": fitted.penalty,
        "penalties_tried": [float(penalty) for penalty in penalties], "augmentation": "none", "seed": seed,
    }  # fmt: skip
    n, n_test = x_ND.shape[0], x_QD.shape[0]
    return ProbeResult(top1=top1, top5=top5, n_classes=len(classes), n_train=n, n_test=n_test, recipe=recipe)


def linear_accuracy(train: Array, train_labels: Labels, test: Array, test_labels: Labels, *, seed: int = 0) -> float:
    """The share of test features whose label the classifier finds, from 0 to 1."""
    return linear_scores(train, train_labels, test, test_labels, seed=seed).top1


def out_of_fold_probabilities(
    features_ND: Array, labels_N: Labels, *, penalties: Sequence[float] = PENALTIES, seed: int = 0
) -> Tensor:
    """The probability of each class for each feature, (N, C), by a classifier that did not see it.

    Five folds, even over the classes. All folds share one penalty, the one with the best likelihood, because
    probabilities are wanted here and not only their order. A class with a single feature gets 0 where that feature is
    held out.
    """
    x_ND, y_N, n_classes, _, _ = _standardised(features_ND, labels_N, None, penalties)
    return _chosen(x_ND, y_N, n_classes, penalties, even_folds(y_N, _FOLDS, seed), by_accuracy=False)[1].exp()


def top_accuracies(logits_QC: Tensor, labels_Q: Tensor) -> tuple[float, float | None]:
    """Top-1 and, where there are more than five classes, top-5 accuracy."""
    n_classes = logits_QC.shape[1]
    best = logits_QC.topk(min(5, n_classes), dim=1).indices == labels_Q[:, None]
    top1 = float(best[:, 0].double().mean())
    return top1, float(best.any(dim=1).double().mean()) if n_classes > 5 else None


def _standardised(
    features: Array, labels: Labels, n_classes: int | None, penalties: Sequence[float]
) -> tuple[Tensor, Tensor, int, Tensor, Tensor]:
    """Features and labels that can be fitted, the number of classes, and the mean and deviation of each feature."""
    x_ND = matrix("The features", features, torch.float32)
    values = labels_as_array(labels)
    if values.shape != (x_ND.shape[0],):
        raise InputError(f"There are {values.shape[0]} labels for {x_ND.shape[0]} features; give one for each.")
    if values.dtype.kind not in "iu":
        raise InputError(f"The labels are {values.dtype}, but whole numbers from 0 are needed; number the classes.")
    values = values.astype(np.int64)
    if absent := int((values < 0).sum()):
        raise InputError(f"{absent} of the {len(values)} features have no label (below 0); leave them out.")
    if x_ND.shape[0] < _FEWEST:
        raise InputError(f"There are {x_ND.shape[0]} training features, but a probe needs {_FEWEST} or more.")
    largest = int(values.max())
    n_classes = largest + 1 if n_classes is None else n_classes
    if largest >= n_classes:
        raise InputError(f"The labels hold {largest}, but with {n_classes} classes the largest is {n_classes - 1}.")
    check_classes(values, 2)
    if not penalties or not all(0 < penalty < math.inf for penalty in penalties):
        raise InputError(f"The penalties are {tuple(penalties)}, but there must be one or more, all above 0.")
    if x_ND.numel() <= _IN_DOUBLE:
        x_ND = x_ND.to(widest_float(x_ND.device))
    mean_D, deviation_D = x_ND.mean(dim=0), x_ND.std(dim=0, correction=0)
    # A constant column is divided by 1: its rounding errors must not be blown up to a deviation of 1.
    deviation_D = torch.where(deviation_D <= 1e-6 * mean_D.abs().clamp_min(1e-6), 1.0, deviation_D)
    x_ND = (x_ND - mean_D) / deviation_D
    return x_ND, torch.from_numpy(values).to(x_ND.device), n_classes, mean_D, deviation_D


def _chosen(
    x_ND: Tensor, y_N: Tensor, n_classes: int, penalties: Sequence[float], fold_N: Tensor, *, by_accuracy: bool
) -> tuple[float, Tensor]:
    """The best penalty, and the log-probabilities (N, C) that it gives to the held-out features.

    The features of each fold, 0 and up, are scored by a classifier of all others; those of fold -1 are never scored.
    The search starts with the strongest penalty, each fit starts from the one before, and two worse ones in a row end
    it, since weak penalties take the longest.
    """
    fold_N = fold_N.to(x_ND.device)
    paths = [_Path(x_ND, y_N, fold_N != fold) for fold in range(int(fold_N.max()) + 1)]
    judged_N = fold_N >= 0
    best: tuple[tuple[float, float], float, Tensor] | None = None
    worse = 0
    for penalty in sorted(penalties, reverse=True):
        log_NC = x_ND.new_zeros(x_ND.shape[0], n_classes)
        for fold, path in enumerate(paths):
            weight_CD, bias_C = path.fit(penalty, n_classes, tolerance=_ROUGHLY)
            held_N = fold_N == fold
            log_NC[held_N] = (x_ND[held_N] @ weight_CD.T + bias_C).log_softmax(dim=1)
        judged_NC, labels_N = log_NC[judged_N], y_N[judged_N]
        # At least 1e-9, or a single image of a class that could not be learned would decide.
        likelihood = float(judged_NC.gather(1, labels_N[:, None]).clamp_min(math.log(1e-9)).double().mean())
        accuracy = float((judged_NC.argmax(dim=1) == labels_N).double().mean()) if by_accuracy else 0.0
        if best is None or (accuracy, likelihood) > best[0]:
            best, worse = ((accuracy, likelihood), float(penalty), log_NC), 0
        else:
            worse += 1
            if worse == 2:
                break
    assert best is not None, "there is a penalty"
    return best[1], best[2]


class _Path:
    """Classifiers of the chosen rows for one penalty after another.

    They minimise cross entropy plus half the penalty times the squared weights; biases are not penalised. A class
    without a chosen row gets a bias of minus infinity.
    """

    def __init__(self, x_ND: Tensor, y_N: Tensor, chosen_N: Tensor) -> None:
        self._x_ND = x_ND
        # Rows are left out by a weight of 0 rather than by a copy: five copies of a million features would not fit.
        self._share_N = chosen_N.to(x_ND.dtype) / chosen_N.sum()
        self._present_K, code_M = y_N[chosen_N].unique(return_inverse=True)
        self._code_N = torch.zeros_like(y_N)
        self._code_N[chosen_N] = code_M
        self._weight_KD = x_ND.new_zeros(len(self._present_K), x_ND.shape[1]).requires_grad_()
        self._bias_K = x_ND.new_zeros(len(self._present_K)).requires_grad_()

    def fit(self, penalty: float, n_classes: int, *, tolerance: float = 1e-9) -> tuple[Tensor, Tensor]:
        """Weights (C, D) and biases (C,); the search ends when the loss falls by less than the tolerance."""
        weight_KD, bias_K = self._weight_KD, self._bias_K
        how: dict[str, Any] = {"max_iter": _MOST_STEPS, "tolerance_change": tolerance, "history_size": 20}
        optimiser = torch.optim.LBFGS([weight_KD, bias_K], **how, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimiser.zero_grad()
            loss_N = functional.cross_entropy(self._x_ND @ weight_KD.T + bias_K, self._code_N, reduction="none")
            loss = loss_N @ self._share_N + 0.5 * penalty * weight_KD.square().sum()
            loss.backward()
            return loss

        with torch.enable_grad(), torch.autocast(self._x_ND.device.type, enabled=False):
            optimiser.step(closure)  # pyright: ignore[reportArgumentType]
        weight_CD = weight_KD.new_zeros(n_classes, weight_KD.shape[1])
        bias_C = bias_K.new_full((n_classes,), -math.inf)
        weight_CD[self._present_K], bias_C[self._present_K] = weight_KD.detach(), bias_K.detach()
        return weight_CD, bias_C
