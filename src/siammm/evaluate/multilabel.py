"""Images with several labels each: one linear SVM a class on frozen features, judged by average precision.

The recipe for VOC07 of Goyal et al. (2019) and VISSL, which the paper takes over from PIRL: features of unit length, a
squared hinge loss that counts a positive twice, and for each class the cost with the best average precision in
three-fold cross-validation on the training images. Test images choose nothing.

Targets are 1 for a class that is there, 0 for one that is not, and -1 for one that is neither: VOC's *difficult*
objects, which are left out of training and of judging.

Legend:  N images, D dimensions, C classes, T different scores.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.svm import LinearSVC
from torch import Tensor

from siammm.core.errors import InputError
from siammm.data.decode import default_threads
from siammm.data.loader import Progress
from siammm.metrics.linear import even_folds

Array = Tensor | np.ndarray

POSITIVE, NEGATIVE, IGNORED = 1, 0, -1
VOC07_POINTS = 11


@dataclass(frozen=True, kw_only=True)
class SvmSettings:
    """How the SVMs are trained; the defaults are VISSL's for VOC07."""

    costs: tuple[float, ...] = (0.01, 0.1, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 50.0, 100.0, 1000.0)
    """What errors cost against the size of the weights; each class takes the best. A single one is taken as it is."""
    folds: int = 3
    """Parts of the training images that judge a cost in turn."""
    positive_weight: float = 2.0
    """How often a positive image counts."""
    normalise: bool = True
    """Whether features are brought to unit length."""
    max_iter: int = 2000
    """Steps of the solver."""

    def __post_init__(self) -> None:
        """Refuse what cannot be fitted."""
        if not self.costs or not all(0 < cost < np.inf for cost in self.costs):
            raise InputError(f"costs is {self.costs}, but there must be one or more, all above 0.")
        if self.folds < 2:
            raise InputError(f"folds is {self.folds}, but it must be at least 2.")
        if not 0 < self.positive_weight < np.inf:
            raise InputError(f"positive_weight is {self.positive_weight!r}, but it must be above 0.")
        if self.max_iter < 1:
            raise InputError(f"max_iter is {self.max_iter}, but it must be at least 1.")


VOC07 = SvmSettings()
"""VISSL's settings for VOC07. It lets liblinear solve the dual problem, which has the same solution as the primal one
that is solved here: the primal converges where the dual is stopped, and draws no numbers from a generator that all
threads share."""


@dataclass(frozen=True, kw_only=True)
class MultiLabelResult:
    """Average precision of every class and their mean, between 0 and 1."""

    mean_average_precision: float
    """The mean over the classes of the whole area under precision and recall, as scikit-learn computes it."""
    mean_average_precision_11: float
    """The same by VOC07's own rule, the mean of the best precision at 11 levels of recall."""
    average_precision: dict[str, float]
    """By class."""
    average_precision_11: dict[str, float]
    """By class, with VOC07's rule."""
    costs: dict[str, float]
    """What cross-validation chose for each class."""
    n_unconverged: int
    """Classes whose solver was stopped by max_iter."""
    n_train: int
    """Images that were trained on."""
    n_test: int
    """Images that were judged."""
    recipe: dict[str, Any]
    """How the SVMs were trained, in plain values."""


def average_precision(scores: Array, targets: Array, *, points: int | None = None) -> float:
    """How well the scores of one class put the images that have it before those that have it not.

    The area under precision and recall as ``sklearn.metrics.average_precision_score`` sums it. With ``points``, the
    mean of the best precision at or beyond that many levels of recall from 0 to 1: 11 is VOC07's rule. Images of equal
    score are taken together, and those whose target is -1 not at all.
    """
    score_N, target_N = _numbers(scores).astype(np.float64), check_targets(targets, ndim=1)
    if score_N.shape != target_N.shape:
        raise InputError(f"There are {len(score_N)} scores for {len(target_N)} targets; give one for each.")
    if points is not None and points < 2:
        raise InputError(f"points is {points}, but recall has 2 levels or more; VOC07 has 11.")
    if not np.isfinite(score_N).all():
        raise InputError(f"{int((~np.isfinite(score_N)).sum())} of the {len(score_N)} scores are NaN or infinite.")
    counted = target_N != IGNORED
    score_N, positive_N = score_N[counted], target_N[counted] == POSITIVE
    n_positive = int(positive_N.sum())
    if n_positive == 0:
        raise InputError(f"None of the {len(score_N)} images has the class, so its average precision is not defined.")
    order = np.argsort(-score_N, kind="stable")
    last_T = np.append(np.flatnonzero(np.diff(score_N[order])), len(order) - 1)
    found_T = np.cumsum(positive_N[order])[last_T]
    precision_T = found_T / (last_T + 1)
    if points is None:
        return float(np.diff(found_T, prepend=0) @ precision_T / n_positive)
    best_T = np.maximum.accumulate(precision_T[::-1])[::-1]
    # In whole numbers: a recall of 3 in 10 is the level 0.3, whatever the two look like in floating point.
    first = [np.searchsorted(found_T * (points - 1), level * n_positive) for level in range(points)]
    return float(best_T[first].mean())


def svm_map(
    train_features: Array,
    train_targets: Array,
    test_features: Array,
    test_targets: Array,
    settings: SvmSettings = VOC07,
    *,
    class_names: Sequence[str] | None = None,
    seed: int = 0,
    threads: int | None = None,
    progress: Progress | None = None,
) -> MultiLabelResult:
    """Train one SVM a class on features (N, D) and targets (N, C), and judge them on others.

    ``progress`` is told the classes done and to be done. Classes are fitted side by side, on ``threads`` threads.
    """
    train_ND, test_ND = _features("training", train_features), _features("test", test_features)
    if train_ND.shape[1] != test_ND.shape[1]:
        raise InputError(
            f"The training features have {train_ND.shape[1]} columns and the test features {test_ND.shape[1]}; embed "
            "both with the same encoder."
        )
    train_NC, test_NC = check_targets(train_targets, ndim=2), check_targets(test_targets, ndim=2)
    for part, targets_NC, rows_ND in (("training", train_NC, train_ND), ("test", test_NC, test_ND)):
        if len(targets_NC) != len(rows_ND):
            raise InputError(
                f"There are {len(targets_NC)} rows of {part} targets for {len(rows_ND)} features; give one for each."
            )
    names = check_classes(train_NC, test_NC, class_names=class_names)
    if settings.normalise:
        train_ND, test_ND = _unit(train_ND), _unit(test_ND)

    def one(column: int) -> tuple[float, bool, np.ndarray]:
        counted = train_NC[:, column] != IGNORED
        x_ND, positive_N = train_ND[counted], train_NC[counted, column] == POSITIVE
        cost = _best_cost(x_ND, positive_N, settings, seed)
        svm = _svm(cost, settings).fit(x_ND, positive_N)
        return cost, bool(np.max(svm.n_iter_) < settings.max_iter), svm.decision_function(test_ND)

    fitted: list[tuple[float, bool, np.ndarray]] = []
    with warnings.catch_warnings(), ThreadPoolExecutor(threads or default_threads()) as pool:
        # It is counted instead. liblinear lets go of the interpreter while it solves, so threads are enough.
        warnings.simplefilter("ignore", ConvergenceWarning)
        for found in pool.map(one, range(len(names))):
            fitted.append(found)
            if progress is not None:
                progress(len(fitted), len(names))
    whole, at_11 = (
        {
            name: average_precision(scores, test_NC[:, column], points=points)
            for column, (name, (_, _, scores)) in enumerate(zip(names, fitted, strict=True))
        }
        for points in (None, VOC07_POINTS)
    )
    return MultiLabelResult(
        mean_average_precision=float(np.mean(list(whole.values()))),
        mean_average_precision_11=float(np.mean(list(at_11.values()))),
        average_precision=whole,
        average_precision_11=at_11,
        costs={name: cost for name, (cost, _, _) in zip(names, fitted, strict=True)},
        n_unconverged=sum(not converged for _, converged, _ in fitted),
        n_train=len(train_ND),
        n_test=len(test_ND),
        recipe={"protocol": "one linear SVM a class on frozen features", "loss": "squared hinge"}
        | asdict(settings)
        | {"seed": seed},
    )


def check_targets(targets: Array, *, ndim: int) -> np.ndarray:
    """Targets as int8 with 1, 0 and -1 alone; booleans are 1 and 0."""
    values = _numbers(targets)
    if values.ndim != ndim:
        shape = "one row for each image and a column for each class" if ndim == 2 else "one for each image"
        raise InputError(f"The targets have the shape {values.shape}, but {shape} is needed.")
    known = np.isin(values, (POSITIVE, NEGATIVE, IGNORED))
    if not known.all():
        raise InputError(
            f"The targets hold {values[~known].flat[0]!r}, but they are 1 (there), 0 (not there) or -1 (ignored)."
        )
    return values.astype(np.int8)


def check_classes(train_NC: np.ndarray, test_NC: np.ndarray, *, class_names: Sequence[str] | None = None) -> list[str]:
    """The names of the classes; refuses any that has nothing to be learned or judged by."""
    n_classes = train_NC.shape[1]
    if n_classes != test_NC.shape[1] or n_classes == 0:
        raise InputError(
            f"The training targets have {n_classes} classes and the test targets {test_NC.shape[1]}, but both must "
            "have the same, and at least one."
        )
    names = [str(number) for number in range(n_classes)] if class_names is None else [str(n) for n in class_names]
    if len(names) != n_classes or len(set(names)) != n_classes:
        raise InputError(f"There are {len(set(names))} names for {n_classes} classes; give a different one for each.")
    for part, targets_NC in (("training", train_NC), ("test", test_NC)):
        for value, what in ((POSITIVE, "shows"), (NEGATIVE, "is without")):
            lacking = np.flatnonzero(~(targets_NC == value).any(axis=0))
            if len(lacking) and (part == "training" or value == POSITIVE):
                more = f" (nor {len(lacking) - 1} others)" if len(lacking) > 1 else ""
                raise InputError(
                    f"No {part} image {what} the class {names[int(lacking[0])]!r}{more}, so it cannot be "
                    f"{'learned' if part == 'training' else 'judged'}; leave the class out."
                )
    return names


def _best_cost(x_ND: np.ndarray, positive_N: np.ndarray, settings: SvmSettings, seed: int) -> float:
    """The cost with the best mean average precision over the folds; of equals the smallest.

    A fold counts if it holds a positive and leaves both kinds to learn from. A class with a single positive has no such
    fold: it takes the cost nearest to 1.
    """
    if len(settings.costs) == 1:
        return settings.costs[0]
    fold_N = even_folds(positive_N.astype(np.int64), settings.folds, seed).numpy()
    folds = [
        fold_N == fold
        for fold in range(settings.folds)
        if positive_N[fold_N == fold].any() and len(np.unique(positive_N[fold_N != fold])) == 2
    ]
    if not folds:
        return min(settings.costs, key=lambda cost: abs(np.log(cost)))
    precision = {
        cost: np.mean(
            [
                average_precision(
                    _svm(cost, settings).fit(x_ND[~held], positive_N[~held]).decision_function(x_ND[held]),
                    positive_N[held],
                )
                for held in folds
            ]
        )
        for cost in settings.costs
    }
    return max(sorted(precision), key=lambda cost: precision[cost])


def _svm(cost: float, settings: SvmSettings) -> LinearSVC:
    return LinearSVC(
        C=cost,
        class_weight={True: settings.positive_weight, False: 1.0},
        dual=False,  # pyright: ignore[reportArgumentType] - the stubs know only "auto"
        max_iter=settings.max_iter,
    )


def _numbers(values: Array) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _features(part: str, features: Array) -> np.ndarray:
    values = _numbers(features.float() if isinstance(features, Tensor) else features)
    if values.ndim != 2 or 0 in values.shape:
        raise InputError(f"The {part} features have the shape {values.shape}, but one row for each image is needed.")
    # liblinear computes in double precision: converted once, and not for every fit.
    values = np.ascontiguousarray(values, dtype=np.float64)
    bad = int((~np.isfinite(values)).any(axis=1).sum())
    if bad:
        raise InputError(f"{bad} of the {len(values)} rows of {part} features hold NaN or infinity; leave them out.")
    return values


def _unit(x_ND: np.ndarray) -> np.ndarray:
    return x_ND / np.maximum(np.linalg.norm(x_ND, axis=1, keepdims=True), 1e-12)
