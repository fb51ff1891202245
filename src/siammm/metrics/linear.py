"""A linear classifier on frozen features: how much of the classes a straight cut can see.

Multinomial logistic regression on standardised features, fitted by L-BFGS on the features' device. The strength of its
penalty is chosen on training features that are held out in turn; test labels choose nothing. ``probe.linear_probe`` is
the slow protocol of the paper, which also augments the images; this one takes seconds and comes out close to it.

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

from siammm.core.errors import InputError
from siammm.metrics.clustering import label_codes

Features = Tensor | np.ndarray
Labels = Tensor | np.ndarray | Sequence[Any]

PENALTIES = (1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
"""What half the squared weights are multiplied with; those that are tried."""

FEWEST = 20
"""Features below which there is too little to train on and to hold out."""

# Few features are held out in turn, so that all of them judge the penalty; of many, a tenth is enough.
_FEW = 5000
_FOLDS = 5
_HELD_OUT = 10
_MOST_STEPS = 200
# Near enough to the least loss for telling penalties apart.
_ROUGHLY = 1e-6
# Up to this many numbers are fitted in double precision, in which L-BFGS gets to the bottom.
_IN_DOUBLE = 2**22


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """What a classifier that was trained on some images makes of others."""

    top1: float
    """Share of test images whose class came first, between 0 and 1."""
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

    def logits(self, features: Features) -> Tensor:
        """Scores (Q, C), on the classifier's device."""
        x_QD = _matrix("The features", features).to(self.weight_CD)
        if x_QD.shape[1] != self.weight_CD.shape[1]:
            raise InputError(
                f"The features have {x_QD.shape[1]} columns, but the classifier was fitted on "
                f"{self.weight_CD.shape[1]}; embed both with the same encoder."
            )
        with torch.autocast(x_QD.device.type, enabled=False):
            return (x_QD - self.mean_D) / self.deviation_D @ self.weight_CD.T + self.bias_C

    def probabilities(self, features: Features) -> Tensor:
        """How likely each class is, (Q, C)."""
        return self.logits(features).softmax(dim=1)

    def predict(self, features: Features) -> Tensor:
        """The likeliest class of each, (Q,)."""
        return self.logits(features).argmax(dim=1)


def fit_linear(
    features_ND: Features,
    labels_N: Labels,
    *,
    n_classes: int | None = None,
    penalties: Sequence[float] = PENALTIES,
    seed: int = 0,
) -> LinearClassifier:
    """The classifier of features whose labels are whole numbers from 0.

    Up to 5,000 features judge the penalties in turn, by the likelihood of their labels: among so few, one more or less
    that is right is luck. Of more, a tenth is held out and the penalty that gets most of it right is taken.
    ``n_classes`` is one more than the largest label if left out.
    """
    x_ND, y_N, n_classes = _checked(features_ND, labels_N, n_classes)
    _check_penalties(penalties)
    mean_D, deviation_D = _standardising(x_ND)
    x_ND = (x_ND - mean_D) / deviation_D
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
    train_ND: Features,
    train_labels_N: Labels | None,
    test_QD: Features,
    test_labels_Q: Labels | None,
    *,
    penalties: Sequence[float] = PENALTIES,
    seed: int = 0,
) -> ProbeResult:
    """How often a classifier of the training features finds the class of test features.

    Labels are numbers or names, the same for both. A class that only test features have cannot be found, which counts
    as an error.
    """
    x_ND, x_QD = _matrix("The training features", train_ND), _matrix("The test features", test_QD)
    if x_ND.shape[1] != x_QD.shape[1]:
        raise InputError(
            f"The features have the shapes {tuple(x_ND.shape)} and {tuple(x_QD.shape)}, but both must have the same "
            "number of columns; embed both with the same encoder."
        )
    y_N, y_Q, classes = numbered_together(train_labels_N, test_labels_Q, x_ND.shape[0], x_QD.shape[0])
    fitted = fit_linear(x_ND, y_N, n_classes=len(classes), penalties=penalties, seed=seed)
    top1, top5 = top_accuracies(fitted.logits(x_QD), torch.from_numpy(y_Q).to(x_ND.device))
    return ProbeResult(
        top1=top1,
        top5=top5,
        n_classes=len(classes),
        n_train=x_ND.shape[0],
        n_test=x_QD.shape[0],
        recipe={
            "protocol": "logistic regression on standardised features",
            "optimiser": "L-BFGS",
            "penalty": fitted.penalty,
            "penalties_tried": [float(penalty) for penalty in penalties],
            "augmentation": "none",
            "seed": seed,
        },
    )


def linear_accuracy(
    train_ND: Features,
    train_labels_N: Labels | None,
    test_QD: Features,
    test_labels_Q: Labels | None,
    *,
    penalties: Sequence[float] = PENALTIES,
    seed: int = 0,
) -> float:
    """The share of test features whose label the classifier finds, between 0 and 1."""
    return linear_scores(train_ND, train_labels_N, test_QD, test_labels_Q, penalties=penalties, seed=seed).top1


def out_of_fold_probabilities(
    features_ND: Features,
    labels_N: Labels,
    *,
    folds: int = 5,
    n_classes: int | None = None,
    penalties: Sequence[float] = PENALTIES,
    seed: int = 0,
) -> Tensor:
    """How likely each class is for each feature, (N, C), by a classifier that did not see it.

    The features are dealt into ``folds`` parts, every class evenly, and each part is judged by a classifier of the
    others. The penalty, one for all, is that with the best likelihood: probabilities are wanted here, not only their
    order. A class that has a single feature gets 0 where that feature is held out.
    """
    x_ND, y_N, n_classes = _checked(features_ND, labels_N, n_classes)
    _check_penalties(penalties)
    if not 2 <= folds <= x_ND.shape[0]:
        raise InputError(f"folds is {folds}, but it must be from 2 to the number of features, {x_ND.shape[0]}.")
    mean_D, deviation_D = _standardising(x_ND)
    x_ND = (x_ND - mean_D) / deviation_D
    return _chosen(x_ND, y_N, n_classes, penalties, even_folds(y_N, folds, seed), by_accuracy=False)[1].exp()


# -- labels ------------------------------------------------------------------------------------------------------------


def numbered_together(
    train_labels: Labels | None, test_labels: Labels | None, n_train: int, n_test: int
) -> tuple[np.ndarray, np.ndarray, list[Any]]:
    """Two sets' labels as int64 from 0, the same number for the same class, and the classes.

    Refuses what cannot be trained on: labels that are missing, a single class, fewer training images than classes.
    """
    values: list[np.ndarray] = []
    for name, labels, n in (("training", train_labels, n_train), ("test", test_labels, n_test)):
        if labels is None:
            raise InputError(f"The {name} images have no labels; give one for each of the {n} images.")
        array = labels_as_array(labels)
        if array.shape != (n,):
            raise InputError(
                f"There are {array.shape[0] if array.ndim else 0} labels for {n} {name} images; give one for each."
            )
        values.append(array)
    codes, classes = label_codes(_joined(values))
    missing = (codes < 0) | np.concatenate([below_zero(array) for array in values])
    for name, absent, n in (("training", missing[:n_train], n_train), ("test", missing[n_train:], n_test)):
        if absent.any():
            raise InputError(
                f"{int(absent.sum())} of the {n} {name} images have no label; label them or leave them out."
            )
    train, test = codes[:n_train].astype(np.int64), codes[n_train:].astype(np.int64)
    check_classes(train, len(classes))
    return train, test, classes


def check_classes(train_labels: np.ndarray, n_classes: int) -> None:
    """Refuse training labels of one class, or fewer of them than there are classes."""
    n = len(train_labels)
    if n < n_classes:
        raise InputError(
            f"There are {n} training images for {n_classes} classes, but a classifier needs one of each at the least; "
            "add images or leave classes out."
        )
    if len(np.unique(train_labels)) < 2:
        raise InputError(
            f"All {n} training images are of one class, but a classifier needs two or more; check the labels."
        )


def even_folds(labels_N: Tensor | np.ndarray, folds: int, seed: int) -> Tensor:
    """The fold of each sample, 0 to folds - 1: dealt out at random, each class evenly and the folds evenly, on the CPU.

    The dealing goes on where the last class ended, so that many small classes do not all begin with fold 0.
    """
    labels_N = torch.as_tensor(labels_N).cpu()
    n = labels_N.shape[0]
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    order = order[labels_N[order].argsort(stable=True)]
    fold_N = torch.empty(n, dtype=torch.int64)
    fold_N[order] = torch.arange(n) % folds
    return fold_N


def top_accuracies(logits_QC: Tensor, labels_Q: Tensor) -> tuple[float, float | None]:
    """Top-1 and, where there are more than five classes, top-5 accuracy."""
    n_classes = logits_QC.shape[1]
    best = logits_QC.topk(min(5, n_classes), dim=1).indices == labels_Q[:, None]
    top1 = float(best[:, 0].double().mean())
    return top1, float(best.any(dim=1).double().mean()) if n_classes > 5 else None


def labels_as_array(labels: Labels) -> np.ndarray:
    """Labels of any form as an array: of whole numbers where they are such, else of what they are."""
    if isinstance(labels, Tensor):
        return labels.detach().cpu().numpy()
    if isinstance(labels, np.ndarray):
        return labels
    values = np.empty(len(labels), dtype=object)
    values[:] = list(labels)
    kinds = {type(value) for value in values}
    return values.astype(np.int64) if kinds and kinds <= {int, np.int64, np.int32} else values


def below_zero(labels: np.ndarray) -> np.ndarray:
    """Which labels are negative numbers: the sources' and many tables' way of saying that there is none."""
    if labels.dtype.kind in "iufb":
        return labels < 0
    return np.fromiter((isinstance(v, int | float | np.number) and bool(v < 0) for v in labels), bool, len(labels))


def _joined(values: list[np.ndarray]) -> np.ndarray:
    if all(array.dtype.kind in "iub" for array in values):
        return np.concatenate(values)
    return np.concatenate([array.astype(object) for array in values])


# -- the fit -----------------------------------------------------------------------------------------------------------


def _matrix(name: str, features: Features) -> Tensor:
    # torch warns of arrays that it may not write to, such as those that are mapped from a file.
    x_ND = torch.as_tensor(np.require(features, requirements="W") if isinstance(features, np.ndarray) else features)
    x_ND = x_ND.detach()
    if x_ND.ndim != 2 or 0 in x_ND.shape:
        raise InputError(f"{name} have the shape {tuple(x_ND.shape)}, but one row of numbers for each image is needed.")
    x_ND = x_ND.float()
    bad = int((~x_ND.isfinite()).any(dim=1).sum())
    if bad:
        raise InputError(f"{bad} of the {x_ND.shape[0]} rows of {name.lower()} hold NaN or infinity; leave them out.")
    return x_ND


def _checked(features: Features, labels: Labels, n_classes: int | None) -> tuple[Tensor, Tensor, int]:
    x_ND = _matrix("The features", features)
    values = labels_as_array(labels)
    if values.shape != (x_ND.shape[0],):
        raise InputError(f"There are {values.shape[0]} labels for {x_ND.shape[0]} features; give one for each.")
    if values.dtype.kind not in "iu":
        raise InputError(f"The labels are {values.dtype}, but whole numbers from 0 are needed; number the classes.")
    values = values.astype(np.int64)
    absent = int((values < 0).sum())
    if absent:
        raise InputError(f"{absent} of the {len(values)} features have no label (below 0); leave them out.")
    if x_ND.shape[0] < FEWEST:
        raise InputError(f"There are {x_ND.shape[0]} training features, but a probe needs {FEWEST} or more.")
    largest = int(values.max())
    if n_classes is None:
        n_classes = largest + 1
    if largest >= n_classes:
        raise InputError(f"The labels hold {largest}, but with {n_classes} classes the largest is {n_classes - 1}.")
    if len(np.unique(values)) < 2:
        raise InputError(
            f"All {len(values)} training features are of one class, but a classifier needs two or more; "
            "check the labels."
        )
    if x_ND.numel() <= _IN_DOUBLE and x_ND.device.type != "mps":
        x_ND = x_ND.double()
    return x_ND, torch.from_numpy(values).to(x_ND.device), n_classes


def _check_penalties(penalties: Sequence[float]) -> None:
    if not penalties or not all(0 < penalty < math.inf for penalty in penalties):
        raise InputError(f"The penalties are {tuple(penalties)}, but there must be one or more, all above 0.")


def _standardising(x_ND: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of each column and its deviation; a constant column is divided by 1."""
    mean_D, deviation_D = x_ND.mean(dim=0), x_ND.std(dim=0, correction=0)
    # A constant column's rounding errors must not be blown up to a deviation of 1.
    constant_D = deviation_D <= 1e-6 * mean_D.abs().clamp_min(1e-6)
    return mean_D, torch.where(constant_D, 1.0, deviation_D)


def _chosen(
    x_ND: Tensor, y_N: Tensor, n_classes: int, penalties: Sequence[float], fold_N: Tensor, *, by_accuracy: bool
) -> tuple[float, Tensor]:
    """The best penalty, and the log-probabilities (N, C) that it gives to what is held out.

    The features of each fold, 0 and up, are judged by a classifier of all others; those of fold -1 are never judged.
    From the strongest penalty down, each fit begins where the one before ended; two worse ones in a row end the search,
    since weak penalties take the longest.
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
        # Of a class that could not be learned no worse than 1e-9, or one image would decide.
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
    """Classifiers of the chosen rows, for one penalty after another: least cross entropy, plus half the penalty times
    the squared weights.

    Biases are not penalised. A class without a chosen row would drive its bias down for ever, so it is left out, with a
    bias of minus infinity.
    """

    def __init__(self, x_ND: Tensor, y_N: Tensor, chosen_N: Tensor) -> None:
        self._x_ND = x_ND
        # By weights of 0 and not by a copy of the rows: five copies of a million features would not fit.
        self._share_N = chosen_N.to(x_ND.dtype) / chosen_N.sum()
        self._present_K, code_M = y_N[chosen_N].unique(return_inverse=True)
        self._code_N = torch.zeros_like(y_N)
        self._code_N[chosen_N] = code_M
        self._weight_KD = x_ND.new_zeros(len(self._present_K), x_ND.shape[1]).requires_grad_()
        self._bias_K = x_ND.new_zeros(len(self._present_K)).requires_grad_()

    def fit(self, penalty: float, n_classes: int, *, tolerance: float = 1e-9) -> tuple[Tensor, Tensor]:
        """Weights (C, D) and biases (C,); the search ends when the loss falls by less than the tolerance."""
        weight_KD, bias_K = self._weight_KD, self._bias_K
        optimiser = torch.optim.LBFGS(
            [weight_KD, bias_K],
            max_iter=_MOST_STEPS,
            tolerance_change=tolerance,
            history_size=20,
            line_search_fn="strong_wolfe",
        )

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
