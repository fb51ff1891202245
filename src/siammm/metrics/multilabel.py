"""Images with several labels each: one linear SVM per class on frozen features, scored by average precision.

The recipe for VOC07 of Goyal et al. (2019) and VISSL, which the paper takes over from PIRL: features of unit length, a
squared hinge loss that counts a positive twice, and for each class the cost with the best average precision in
three-fold cross-validation on the training images. Test images choose nothing.

Targets are 1 for a class that is there, 0 for one that is not, and -1 for one that is ignored in training and scoring,
such as VOC's *difficult* objects.

Legend:  N images, D dimensions, C classes, T different scores.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import average_precision_score, precision_recall_curve
from torch import Tensor

from siammm.core.checks import check_at_least, check_positive
from siammm.core.errors import InputError
from siammm.metrics.labels import Array, even_folds, matrix, same_width

if TYPE_CHECKING:
    from sklearn.svm import LinearSVC

POSITIVE, NEGATIVE, IGNORED = 1, 0, -1
VOC07_POINTS = 11


@dataclass(frozen=True, kw_only=True)
class SvmSettings:
    """How the SVMs are trained; the defaults are VISSL's for VOC07."""

    costs: tuple[float, ...] = (0.01, 0.1, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 50.0, 100.0, 1000.0)
    """Values of the SVM's C to choose from, for each class by itself."""
    folds: int = 3
    """Folds of the cross-validation that chooses."""
    positive_weight: float = 2.0
    """The weight of a positive image."""
    normalise: bool = True
    """Whether features are scaled to unit length."""
    max_iter: int = 2000
    """Steps of the solver."""

    def __post_init__(self) -> None:
        """Refuse what cannot be fitted."""
        if not self.costs or not all(0 < cost < np.inf for cost in self.costs):
            raise InputError(f"costs is {self.costs}, but there must be one or more, all above 0.")
        check_at_least("folds", self.folds, 2)
        check_positive("positive_weight", self.positive_weight)
        check_at_least("max_iter", self.max_iter, 1)


VOC07 = SvmSettings()
"""VISSL's settings for VOC07. It lets liblinear solve the dual problem, which has the same solution as the primal one
that is solved here: the primal converges where the dual is stopped, and draws no numbers from a generator that all
threads share."""


@dataclass(frozen=True, kw_only=True)
class MultiLabelResult:
    """Average precision of every class and their mean, between 0 and 1."""

    mean_average_precision: float
    """The mean over the classes of the area under precision and recall, as scikit-learn computes it."""
    mean_average_precision_11: float
    """The same by VOC07's rule: the mean of the best precision at 11 levels of recall."""
    average_precision: dict[str, float]
    """By class."""
    average_precision_11: dict[str, float]
    """By class, with VOC07's rule."""
    costs: dict[str, float]
    """Chosen by cross-validation, by class."""
    n_unconverged: int
    """Classes whose solver was stopped by max_iter."""
    n_train: int
    """Images that were trained on."""
    n_test: int
    """Images that were judged."""
    recipe: dict[str, Any]
    """How the SVMs were trained, in plain values."""


def average_precision(scores: Array, targets: Array, *, points: int | None = None) -> float:
    """How well the scores of one class rank the images that have it before those that do not.

    The area under precision and recall as ``sklearn.metrics.average_precision_score`` sums it. With ``points``, the
    mean of the best precision at or beyond that many levels of recall from 0 to 1: 11 is VOC07's rule. Images whose
    target is -1 are ignored.
    """
    score_N, target_N = _numbers(scores).astype(np.float64), check_targets(targets, ndim=1)
    if score_N.shape != target_N.shape:
        raise InputError(f"There are {len(score_N)} scores for {len(target_N)} targets; give one for each.")
    if not np.isfinite(score_N).all():
        raise InputError(f"{int((~np.isfinite(score_N)).sum())} of the {len(score_N)} scores are NaN or infinite.")
    counted = target_N != IGNORED
    score_N, positive_N = score_N[counted], target_N[counted] == POSITIVE
    if not positive_N.any():
        raise InputError(f"None of the {len(score_N)} images has the class, so its average precision is not defined.")
    if points is None:
        return float(average_precision_score(positive_N, score_N))
    precision_T, recall_T, _ = precision_recall_curve(positive_N, score_N)
    # Without scikit-learn's last point, which is at recall 0 and no image's; recall 3 / 10 counts as the level 0.3.
    at_TP = recall_T[:-1, None] >= np.linspace(0, 1, points) - 1e-9
    return float(np.where(at_TP, precision_T[:-1, None], 0).max(axis=0).mean())


def svm_map(
    train_features: Array,
    train_targets: Array,
    test_features: Array,
    test_targets: Array,
    settings: SvmSettings = VOC07,
    *,
    class_names: Sequence[str] | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> MultiLabelResult:
    """Train one SVM per class on features (N, D) and targets (N, C), and score them on test features.

    ``progress`` is called with the number of classes done and their total. Classes are fitted in threads.
    """
    # liblinear computes in double precision: converted once, and not for every fit.
    train, test = (
        matrix(f"The {part} features", features, torch.float64).cpu()
        for part, features in (("training", train_features), ("test", test_features))
    )
    same_width(train, test)
    train_ND, test_ND = train.numpy(), test.numpy()
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
    with warnings.catch_warnings(), ThreadPoolExecutor(torch.get_num_threads()) as pool:
        # It is counted instead. liblinear releases the interpreter lock while it solves, so threads are enough.
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
    recipe = {"protocol": "one linear SVM a class on frozen features", "loss": "squared hinge"}
    return MultiLabelResult(
        mean_average_precision=float(np.mean(list(whole.values()))),
        mean_average_precision_11=float(np.mean(list(at_11.values()))),
        average_precision=whole, average_precision_11=at_11,
        costs={name: cost for name, (cost, _, _) in zip(names, fitted, strict=True)},
        n_unconverged=sum(not converged for _, converged, _ in fitted),
        n_train=len(train_ND), n_test=len(test_ND), recipe=recipe | asdict(settings) | {"seed": seed},
    )  # fmt: skip


def check_targets(targets: Array, *, ndim: int) -> np.ndarray:
    """Targets as int8 with 1, 0 and -1 alone; booleans are 1 and 0."""
    values = _numbers(targets)
    if values.ndim != ndim:
        shape = "a row for each image and a column for each class" if ndim == 2 else "one per image"
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

    def precision(cost: float, held: np.ndarray) -> float:
        svm = _svm(cost, settings).fit(x_ND[~held], positive_N[~held])
        return average_precision(svm.decision_function(x_ND[held]), positive_N[held])

    return max(sorted(settings.costs), key=lambda cost: np.mean([precision(cost, held) for held in folds]))


def _svm(cost: float, settings: SvmSettings) -> LinearSVC:
    from sklearn.svm import LinearSVC

    return LinearSVC(
        C=cost,
        class_weight={True: settings.positive_weight, False: 1.0},
        dual=False,  # pyright: ignore[reportArgumentType] - the stubs know only "auto"
        max_iter=settings.max_iter,
    )


def _numbers(values: Array) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _unit(x_ND: np.ndarray) -> np.ndarray:
    return x_ND / np.maximum(np.linalg.norm(x_ND, axis=1, keepdims=True), 1e-12)
