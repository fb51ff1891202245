"""Which images look mislabelled: neighbours and classifiers predict every label without having seen it.

Three witnesses say how likely each class is for an image, none of which has seen that image's own label:

- *neighbours*: the weighted vote of its nearest neighbours;
- *linear*: a logistic regression fitted on other images;
- *kernel*: a kernel regression with the image left out.

They are combined by log p(c) = sum_s w_s log p_s(c) + const with w_s >= 0. Labels are sometimes wrong: with probability
1 - e a label was drawn from p, with probability e at random from r. The weights and e maximise the likelihood of the
given labels, so that nobody has to say which are wrong, or how many. Bayes' rule then gives the probability that a
label is right, and images are ranked by it:

    P(right | image, label y) = p_y (1 - e + e r_y) / ((1 - e) p_y + e r_y)

Legend:  N labelled images, D dimensions, C classes, k neighbours, S witnesses, R rows of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from siammm.audit import kernel
from siammm.core.checks import check_at_least, check_number
from siammm.core.device import widest_float
from siammm.core.errors import InputError
from siammm.metrics.knn import chunk_rows
from siammm.metrics.labels import Array, matrix
from siammm.metrics.linear import out_of_fold_probabilities

Progress = Callable[[str], None]

# Added to the votes, distributed as the labels are: the weight of one image, so that no class is ever impossible.
_SMOOTHING = 1.0
_TEMPERATURE = 0.1
_LEAST_PROBABILITY = 1e-6
# Where a regression's scores bend to stay above 0: the best of 0.01 to 0.3 on development data (docs/audit.md).
_BEND = 0.3
# The combination has a handful of parameters: more numbers than these would not make it better.
_NUMBERS_FOR_WEIGHTS = 2**24
_MOST_STEPS = 200
_FEWEST = 20


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What an audit found of every labelled image; arrays are in the order of the input, without the unlabelled."""

    image_N: np.ndarray
    """The row of each labelled image in the input."""
    label_N: np.ndarray
    """The given label, as a position in ``classes``."""
    suggested_N: np.ndarray
    """The likeliest other label where the given one is less likely than the threshold, and the given one elsewhere."""
    probability_N: np.ndarray
    """The probability that the given label is right."""
    score_N: np.ndarray
    """The log odds that it is wrong; images are ranked by it."""
    rank_N: np.ndarray
    """1 for the image that looks mislabelled most."""
    witness_N: Mapping[str, np.ndarray]
    """The probability of the given label by each witness alone."""
    weights: Mapping[str, float]
    """How much each witness counts in the combination."""
    classes: tuple[Any, ...]
    """The name of every class that some image has."""
    noise: float
    """The estimated share of labels that were drawn at random, by chance also the right one."""
    error_rate_C: np.ndarray
    """The estimated share of wrong labels among those of each class."""
    threshold: float
    """Labels with a lower probability are suspects."""
    n_unlabelled: int
    """Images that took no part because they have no label."""

    @property
    def order(self) -> np.ndarray:
        """Positions from the worst suspect to the surest label."""
        return np.argsort(self.rank_N, kind="stable")

    @property
    def n_suspects(self) -> int:
        """Labels that are less likely right than the threshold."""
        return int((self.probability_N < self.threshold).sum())

    @property
    def count_C(self) -> np.ndarray:
        """Labels of each class."""
        return np.bincount(self.label_N, minlength=len(self.classes))

    @property
    def suspects_C(self) -> np.ndarray:
        """Suspects among the labels of each class."""
        return np.bincount(self.label_N[self.probability_N < self.threshold], minlength=len(self.classes))

    @property
    def error_rate(self) -> float:
        """The estimated share of wrong labels."""
        return float(1 - self.probability_N.mean())


def audit(
    features_ND: Array,
    labels_N: Array,
    *,
    class_names: Sequence[Any] | None = None,
    n_neighbours: int | None = None,
    threshold: float = 0.5,
    rounds: int = 1,
    seed: int = 0,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> Audit:
    """Rank images by how likely their labels are wrong.

    Shapes: features (N, D); labels (N,) whole numbers, negative for none. ``class_names[c]`` is the name of label c;
    by default the numbers are the names. ``n_neighbours`` is by default 200, or a twentieth of the images if that is
    fewer. In each of ``rounds`` after the first, the labels of suspects count less as votes. Everything is computed on
    ``device`` (by default that of the features), in chunks: nothing of N x N is ever held, N x C once per witness.
    """
    if n_neighbours is not None:
        check_at_least("n_neighbours", n_neighbours, 1)
    check_at_least("rounds", rounds, 1)
    check_number("threshold", threshold, lambda value: 0 < value < 1, "it must be a probability between 0 and 1")
    say = progress or (lambda _: None)
    x_ND, label_N, image_N, classes, n_unlabelled = _checked(features_ND, labels_N, class_names, device)
    n, n_classes = x_ND.shape[0], len(classes)

    say("nearest neighbours")
    unit_ND = functional.normalize(x_ND, dim=1)
    # As many as papers use for kNN, but not most of a small set.
    default = min(200, max(5, n // 20))
    voter_Nk, vote_Nk = _nearest(unit_ND, min(n_neighbours or default, n - 1))
    say("linear classifier")
    linear_NC = _linear(x_ND, label_N, seed)

    def heard(trust_N: Tensor) -> dict[str, Tensor]:
        """The witnesses' log p, with each image's label weighted by how far it is trusted."""
        score_NC = kernel.left_out_scores(x_ND, label_N, n_classes, weight_N=trust_N, seed=seed)
        votes_NC = _votes(voter_Nk, vote_Nk, label_N, n_classes, trust_N)
        return {"neighbours": votes_NC, "linear": linear_NC, "kernel": _log_of_scores(score_NC)}

    say("kernel regression")
    witness = heard(torch.ones(n, device=x_ND.device))
    found = _combined(witness, label_N, n_classes, seed)
    for number in range(1, rounds):
        say(f"round {number + 1} of {rounds}")
        witness = heard(found.right_N)
        found = _combined(witness, label_N, n_classes, seed)
    suggested_N = torch.where(found.right_N < threshold, found.other_N, label_N)
    labels, right_N, log_odds_N = (part.cpu().numpy() for part in (label_N, found.right_N, found.log_odds_N))
    rank_N = np.empty(n, dtype=np.int64)
    rank_N[np.argsort(-log_odds_N, kind="stable")] = np.arange(1, n + 1)

    def given(log_p_NC: Tensor) -> np.ndarray:
        return log_p_NC.gather(1, label_N[:, None])[:, 0].exp().float().cpu().numpy()

    return Audit(
        image_N=image_N, label_N=labels, suggested_N=suggested_N.cpu().numpy(), probability_N=right_N,
        score_N=log_odds_N.astype(np.float32), rank_N=rank_N,
        witness_N={name: given(log_p_NC) for name, log_p_NC in witness.items()},
        weights={name: float(weight) for name, weight in zip(witness, found.weight_S, strict=True)},
        classes=classes, noise=found.noise, threshold=threshold, n_unlabelled=n_unlabelled,
        error_rate_C=np.bincount(labels, weights=1.0 - right_N) / np.bincount(labels),
    )  # fmt: skip


def plant_errors(labels_N: np.ndarray, share: float, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Make a share of the labels wrong, to see what an audit finds: the new labels, and which of them were changed.

    Labels are whole numbers, negative for none. Each changed label becomes any other class with equal probability; at
    least one label is changed.
    """
    check_number("share", share, lambda value: 0 < value < 1, "it must be above 0 and below 1")
    labels_N = np.asarray(labels_N)
    labelled = np.flatnonzero(labels_N >= 0)
    present, code = np.unique(labels_N[labelled], return_inverse=True)
    if len(present) < 2:
        raise InputError(f"There are {len(present)} classes, but a wrong label needs another one; give two or more.")
    random = np.random.default_rng(seed)
    chosen = random.choice(len(labelled), max(1, round(share * len(labelled))), replace=False)
    wrong = (code[chosen] + random.integers(1, len(present), len(chosen))) % len(present)
    planted_N, is_planted_N = labels_N.copy(), np.zeros(len(labels_N), dtype=bool)
    planted_N[labelled[chosen]] = present[wrong]
    is_planted_N[labelled[chosen]] = True
    return planted_N, is_planted_N


# ------------------------------------------------------------------------------------------------------- the witnesses


def _nearest(unit_ND: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k nearest others of every image and the weight of their votes, both (N, k)."""
    n = unit_ND.shape[0]
    index_Nk = torch.empty(n, k, dtype=torch.int64, device=unit_ND.device)
    vote_Nk = unit_ND.new_empty(n, k)
    rows = chunk_rows(unit_ND.device, unit_ND.dtype, n)
    for start in range(0, n, rows):
        piece = slice(start, start + rows)
        cosine_RN = unit_ND[piece] @ unit_ND.T
        cosine_RN.diagonal(start).fill_(-math.inf)
        cosine_Rk, index_Nk[piece] = cosine_RN.topk(k, dim=1)
        vote_Nk[piece] = ((cosine_Rk - cosine_Rk[:, :1]) / _TEMPERATURE).exp()
    return index_Nk, vote_Nk


def _votes(voter_Nk: Tensor, vote_Nk: Tensor, label_N: Tensor, n_classes: int, trust_N: Tensor) -> Tensor:
    """log p of every class by vote of the neighbours, weighted by how near they are and how far they are trusted."""
    vote_Nk = vote_Nk * trust_N[voter_Nk]
    votes_NC = vote_Nk.new_zeros(vote_Nk.shape[0], n_classes).scatter_add_(1, label_N[voter_Nk], vote_Nk)
    prior_C = _share_of_labels(label_N, n_classes)
    return ((votes_NC + _SMOOTHING * prior_C) / (votes_NC.sum(dim=1, keepdim=True) + _SMOOTHING)).log()


def _linear(x_ND: Tensor, label_N: Tensor, seed: int) -> Tensor:
    """log p of every class by logistic regression fitted on the other folds."""
    probability_NC = out_of_fold_probabilities(x_ND, label_N, seed=seed)
    return probability_NC.to(x_ND.device).float().clamp_min(_LEAST_PROBABILITY).log()


def _log_of_scores(score_NC: Tensor) -> Tensor:
    """log p of every class from a regression's scores, smoothly raised above 0 where they are near or below it."""
    positive_NC = (score_NC + (score_NC.square() + _BEND**2).sqrt()) / 2
    return (positive_NC / positive_NC.sum(dim=1, keepdim=True)).log()


def _share_of_labels(label_N: Tensor, n_classes: int) -> Tensor:
    """The frequency of each class, with one image added to each."""
    count_C = torch.bincount(label_N, minlength=n_classes).float() + 1
    return count_C / count_C.sum()


# ----------------------------------------------------------------------------------------------------- the combination


@dataclass(frozen=True, kw_only=True)
class _Combination:
    weight_S: Tensor
    noise: float
    other_N: Tensor
    """The likeliest other class."""
    right_N: Tensor
    """The probability that the given label is right."""
    log_odds_N: Tensor
    """The log odds that it is wrong."""


def _combined(witness: Mapping[str, Tensor], label_N: Tensor, n_classes: int, seed: int) -> _Combination:
    """Weight the witnesses so that they explain the labels best, some of which are noise, and score each label."""
    scores = list(witness.values())
    n, device = label_N.shape[0], label_N.device
    random_C = _share_of_labels(label_N, n_classes)
    weight_S, noise = _fitted(scores, label_N, random_C, seed)
    log_p_N, log_not_p_N = (torch.empty(n, device=device, dtype=weight_S.dtype) for _ in range(2))
    other_N = torch.empty_like(label_N)
    for start in range(0, n, rows := max(1, 2**22 // n_classes)):
        piece = slice(start, start + rows)
        log_p_RC = _mixed([score_NC[piece] for score_NC in scores], weight_S)
        given_R1 = label_N[piece, None]
        log_p_N[piece] = log_p_RC.gather(1, given_R1)[:, 0]
        log_p_RC.scatter_(1, given_R1, -math.inf)
        log_not_p_N[piece] = log_p_RC.logsumexp(dim=1)
        other_N[piece] = log_p_RC.argmax(dim=1)
    random_N = random_C.to(weight_S.dtype)[label_N]
    # Without any noise every label would be right; a floor of one label keeps the order.
    noise = min(max(noise, 1 / n), 1 - 1 / n)
    log_odds_N = (noise * random_N).log() + log_not_p_N - log_p_N - (1 - noise + noise * random_N).log()
    right_N = torch.sigmoid(-log_odds_N).float()
    return _Combination(weight_S=weight_S, noise=noise, other_N=other_N, right_N=right_N, log_odds_N=log_odds_N)


def _fitted(scores: Sequence[Tensor], label_N: Tensor, random_C: Tensor, seed: int) -> tuple[Tensor, float]:
    """The weights of the witnesses and the share of noise that maximise the likelihood of the given labels."""
    n, n_classes = scores[0].shape
    rows = min(n, max(1000, _NUMBERS_FOR_WEIGHTS // (n_classes * len(scores))))
    chosen_R = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:rows].to(label_N.device)
    dtype = widest_float(label_N.device)
    score_SRC = [score_NC[chosen_R].to(dtype) for score_NC in scores]
    label_R1 = label_N[chosen_R, None]
    log_random_R = random_C.to(dtype)[label_R1[:, 0]].log()
    # Softplus keeps the weights above 0: the difference of two witnesses that left the same label out would reveal it.
    raw_S = torch.full((len(scores),), -1.0, dtype=dtype, device=label_N.device, requires_grad=True)
    raw_noise = torch.tensor(-3.0, dtype=dtype, device=label_N.device, requires_grad=True)
    optimiser = torch.optim.LBFGS([raw_S, raw_noise], max_iter=_MOST_STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        log_p_R = _mixed(score_SRC, functional.softplus(raw_S)).gather(1, label_R1)[:, 0]
        honest_R = functional.logsigmoid(-raw_noise) + log_p_R
        loss = -torch.logaddexp(honest_R, functional.logsigmoid(raw_noise) + log_random_R).mean()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimiser.step(closure)  # pyright: ignore[reportArgumentType]
    return functional.softplus(raw_S).detach(), float(raw_noise.detach().sigmoid())


def _mixed(scores: Sequence[Tensor], weight_S: Tensor) -> Tensor:
    total = weight_S[0] * scores[0]
    for weight, score in zip(weight_S[1:], scores[1:], strict=True):
        total = total + weight * score
    return total.log_softmax(dim=1)


# -------------------------------------------------------------------------------------------------------------- checks


def _checked(
    features: Array, labels: Array, class_names: Sequence[Any] | None, device: torch.device | str | None
) -> tuple[Tensor, Tensor, np.ndarray, tuple[Any, ...], int]:
    """Features and labels of the labelled images, on the device, classes numbered without gaps."""
    shape = tuple(features.shape)
    label_N = torch.as_tensor(labels).detach().cpu()
    if len(shape) != 2 or 0 in shape:
        raise InputError(f"The features have the shape {shape}, but one row of numbers per image is needed.")
    if label_N.shape != (shape[0],):
        given = tuple(label_N.shape)
        raise InputError(f"The labels have the shape {given}, but there are {shape[0]} images; give one each.")
    if label_N.is_floating_point() or label_N.is_complex():
        raise InputError(f"The labels hold {label_N.dtype}, but they are whole numbers; number the classes from 0.")
    image_N = np.flatnonzero(label_N.numpy() >= 0)
    if not len(image_N):
        raise InputError(f"None of the {len(label_N)} images has a label; there is nothing to audit without labels.")
    present, numbered = np.unique(label_N.numpy()[image_N], return_inverse=True)
    if class_names is not None and present[-1] >= len(class_names):
        raise InputError(f"A label is {present[-1]}, but there are {len(class_names)} class names; name every class.")
    classes = tuple(int(c) if class_names is None else class_names[c] for c in present.tolist())
    check_classes(numbered, classes)
    rows = torch.from_numpy(image_N).to(features.device) if isinstance(features, Tensor) else image_N
    x_ND = matrix("The features", features[rows], torch.float32)
    device = torch.device(device) if device is not None else x_ND.device
    x_ND = x_ND.to(device)
    return x_ND, torch.from_numpy(numbered).to(device), image_N, classes, len(label_N) - len(image_N)


def check_classes(label_N: np.ndarray, classes: Sequence[Any]) -> None:
    """Refuse labels that cannot be audited: of one class, or of too few images. All of them are 0 or more."""
    n, n_classes = len(label_N), len(np.unique(label_N))
    if n_classes < 2:
        raise InputError(f"All {n} labels are {classes[label_N[0]]!r}, but an audit compares classes; it needs two.")
    if n < max(_FEWEST, 2 * n_classes):
        raise InputError(
            f"There are {n} labelled images of {n_classes} classes, but an audit needs at least {_FEWEST}, and 2 for "
            "each class; label more, or join classes."
        )
