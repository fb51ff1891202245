"""Which images look mislabelled: clusters, neighbours and classifiers asked about every label, with itself left out.

The paper ends with this claim for its clusters: they resemble the labels that training never saw, so an image whose
label is rare in its cluster may be mislabelled. Here five witnesses say how likely each class is for an image, none of
which has seen that image's own label:

- *component*: the class shares of its component;
- *assignment*: the same of all components it belongs to in part, by its own soft assignment;
- *neighbours*: the weighted vote of its nearest;
- *linear*: a logistic regression fitted on other images;
- *kernel*: a kernel regression, the image left out.

They are combined by log p(c) = sum_s w_s log p_s(c) + const with w_s >= 0, and the labels are taken for what they are,
sometimes wrong: with probability 1 - e a label was given by p, with probability e it was drawn at random from r. The
weights and e maximise the likelihood of the given labels, so that nobody has to say which are wrong, or how many.
Bayes' rule then gives the probability that a label is right, and images are ranked by it:

    P(right | image, label y) = p_y (1 - e + e r_y) / ((1 - e) p_y + e r_y)

Legend:  N labelled images, D dimensions, C classes, H components of an image, K components, k neighbours, S witnesses,
R rows of a chunk.
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
from siammm.core.errors import InputError
from siammm.metrics.knn import chunk_rows
from siammm.metrics.linear import out_of_fold_probabilities

Array = Tensor | np.ndarray
Progress = Callable[[str], None]

WITNESSES = ("component", "assignment", "neighbours", "linear", "kernel")

# Added to the votes, spread as the labels are: one image's worth, so that no class is ever impossible.
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
    """What is known of every labelled image; all arrays are in the order of the input, without the unlabelled."""

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
    """How likely each witness alone finds the given label."""
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
    def error_rate(self) -> float:
        """The estimated share of wrong labels."""
        return float(1 - self.probability_N.mean())


def audit(
    features_ND: Array,
    labels_N: Array,
    *,
    clusters: tuple[Array, Array] | None = None,
    class_names: Sequence[Any] | None = None,
    n_neighbours: int | None = None,
    threshold: float = 0.5,
    rounds: int = 1,
    seed: int = 0,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> Audit:
    """Rank images by how likely their labels are wrong.

    Shapes: features (N, D); labels (N,) whole numbers, negative for none; ``clusters`` are the soft assignments
    (index_NH, weight_NH) that a mixture made of the same images, without which the two witnesses of clusters are
    missing. ``class_names[c]`` is the name of label c; without it the numbers are the names. ``n_neighbours`` is by
    default 200, or a twentieth of few images. In each of ``rounds`` after the first, the labels of suspects count less
    as votes. Everything is computed on ``device`` (that of a tensor of features, otherwise the CPU), in chunks:
    nothing of N x N is ever held; N x C is, once for each witness.
    """
    if n_neighbours is not None:
        check_at_least("n_neighbours", n_neighbours, 1)
    check_at_least("rounds", rounds, 1)
    check_number("threshold", threshold, lambda value: 0 < value < 1, "it is a probability between 0 and 1")
    say = progress or (lambda _: None)
    x_ND, label_N, image_N, classes, n_unlabelled = _checked(features_ND, labels_N, class_names, device)
    n, n_classes = x_ND.shape[0], len(classes)
    assigned = None if clusters is None else _checked_clusters(clusters, n_unlabelled + len(image_N), image_N, x_ND)

    say("nearest neighbours")
    unit_ND = functional.normalize(x_ND, dim=1)
    voter_Nk, vote_Nk = _nearest(unit_ND, min(n_neighbours or default_n_neighbours(n), n - 1))
    say("linear classifier")
    linear_NC = _linear(x_ND, label_N, n_classes, seed)

    def heard(trust_N: Tensor) -> dict[str, Tensor]:
        """What the witnesses say where each image's label counts as much as it is trusted."""
        witness = {} if assigned is None else _clusters(assigned, label_N, n_classes, trust_N)
        witness["neighbours"] = _votes(voter_Nk, vote_Nk, label_N, n_classes, trust_N)
        witness["linear"] = linear_NC
        score_NC = kernel.left_out_scores(x_ND, label_N, n_classes, weight_N=trust_N, seed=seed)
        witness["kernel"] = _log_of_scores(score_NC)
        return witness

    say("kernel regression")
    witness = heard(torch.ones(n, device=x_ND.device))
    found = _combined(witness, label_N, n_classes, seed)
    for number in range(1, rounds):
        say(f"round {number + 1} of {rounds}")
        witness = heard(found.right_N)
        found = _combined(witness, label_N, n_classes, seed)
    return _audit(found, witness, label_N, image_N, classes, threshold, n_unlabelled)


def default_n_neighbours(n_images: int) -> int:
    """Neighbours that vote when nobody said: as many as the literature has for kNN, but not most of a small set."""
    return min(200, max(5, n_images // 20))


def plant_errors(labels_N: np.ndarray, share: float, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Labels of which a share has been made wrong, each any other class alike, and which: to see what an audit finds.

    Labels are whole numbers, negative for none; of those that are there, the nearest whole number to ``share`` of them
    change, at least one.
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
    """log p of every class by vote of the neighbours, each as loud as it is near and as its own label is trusted."""
    vote_Nk = vote_Nk * trust_N[voter_Nk]
    votes_NC = vote_Nk.new_zeros(vote_Nk.shape[0], n_classes).scatter_add_(1, label_N[voter_Nk], vote_Nk)
    return _log_shares(votes_NC, _share_of_labels(label_N, n_classes))


def _clusters(assigned: tuple[Tensor, Tensor], label_N: Tensor, n_classes: int, trust_N: Tensor) -> dict[str, Tensor]:
    """log p of every class by the nearest component, and by the mixture of all components of an image."""
    index_NH, weight_NH = assigned
    counted_NH = weight_NH * trust_N[:, None]
    n_components = int(index_NH.max()) + 1
    count_KC = torch.zeros(n_components * n_classes, device=label_N.device, dtype=_widest(label_N.device))
    count_KC.index_add_(0, (index_NH * n_classes + label_N[:, None]).reshape(-1), counted_NH.reshape(-1).to(count_KC))
    count_KC = count_KC.view(n_components, n_classes)
    prior_C = _share_of_labels(label_N, n_classes)
    own_NC = functional.one_hot(label_N, n_classes)
    nearest_NC = mixed_NC = torch.zeros(0)
    for h in range(index_NH.shape[1]):
        others_NC = (count_KC[index_NH[:, h]] - counted_NH[:, h, None] * own_NC).clamp_min(0).float()
        log_NC = _log_shares(others_NC, prior_C)
        if h == 0:
            nearest_NC, mixed_NC = log_NC, weight_NH[:, 0, None] * log_NC.exp()
        else:
            mixed_NC = mixed_NC + weight_NH[:, h, None] * log_NC.exp()
    return {"component": nearest_NC, "assignment": (mixed_NC / weight_NH.sum(dim=1, keepdim=True)).log()}


def _linear(x_ND: Tensor, label_N: Tensor, n_classes: int, seed: int) -> Tensor:
    """log p of every class by logistic regression fitted on the other folds."""
    probability_NC = out_of_fold_probabilities(x_ND, label_N, n_classes=n_classes, seed=seed)
    return probability_NC.to(x_ND.device).float().clamp_min(_LEAST_PROBABILITY).log()


def _log_of_scores(score_NC: Tensor) -> Tensor:
    """log p of every class from a regression's scores, which are near 0 to 1 but may lie outside.

    A smooth way to raise what is near or below 0 to something positive.
    """
    positive_NC = (score_NC + (score_NC.square() + _BEND**2).sqrt()) / 2
    return (positive_NC / positive_NC.sum(dim=1, keepdim=True)).log()


def _log_shares(votes_NC: Tensor, prior_C: Tensor) -> Tensor:
    total_N1 = votes_NC.sum(dim=1, keepdim=True)
    return ((votes_NC + _SMOOTHING * prior_C) / (total_N1 + _SMOOTHING)).log()


def _share_of_labels(label_N: Tensor, n_classes: int) -> Tensor:
    """How common each class is, as if each had one image more."""
    count_C = torch.bincount(label_N, minlength=n_classes).float() + 1
    return count_C / count_C.sum()


# ----------------------------------------------------------------------------------------------------- the combination


@dataclass(frozen=True, kw_only=True)
class _Combination:
    weight_S: Tensor
    noise: float
    log_p_N: Tensor
    """log p of the given label."""
    log_not_p_N: Tensor
    """log of 1 minus that."""
    other_N: Tensor
    """The likeliest other class."""
    right_N: Tensor
    """The probability that the given label is right."""
    log_odds_N: Tensor
    """The log odds that it is wrong."""


def _combined(witness: Mapping[str, Tensor], label_N: Tensor, n_classes: int, seed: int) -> _Combination:
    """Weigh the witnesses so that they explain the given labels best, some of which are noise, and judge each label."""
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
    # With a noise of nothing at all every label would be right; a floor of one label in all keeps the order.
    noise = min(max(noise, 1 / n), 1 - 1 / n)
    log_odds_N = (noise * random_N).log() + log_not_p_N - log_p_N - (1 - noise + noise * random_N).log()
    return _Combination(
        weight_S=weight_S,
        noise=noise,
        log_p_N=log_p_N,
        log_not_p_N=log_not_p_N,
        other_N=other_N,
        right_N=torch.sigmoid(-log_odds_N).float(),
        log_odds_N=log_odds_N,
    )


def _fitted(scores: Sequence[Tensor], label_N: Tensor, random_C: Tensor, seed: int) -> tuple[Tensor, float]:
    """The weights of the witnesses and the share of noise that make the given labels likeliest."""
    n, n_classes = scores[0].shape
    rows = min(n, max(1000, _NUMBERS_FOR_WEIGHTS // (n_classes * len(scores))))
    chosen_R = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:rows].to(label_N.device)
    dtype = _widest(label_N.device)
    score_SRC = [score_NC[chosen_R].to(dtype) for score_NC in scores]
    label_R1 = label_N[chosen_R, None]
    log_random_R = random_C.to(dtype)[label_R1[:, 0]].log()
    # Weights through softplus, which keeps them from becoming negative: a difference of two witnesses that left the
    # same label out would know that label.
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


def _audit(
    found: _Combination,
    witness: Mapping[str, Tensor],
    label_N: Tensor,
    image_N: np.ndarray,
    classes: tuple[Any, ...],
    threshold: float,
    n_unlabelled: int,
) -> Audit:
    suggested_N = torch.where(found.right_N < threshold, found.other_N, label_N)
    wrong_N = (1 - found.right_N).double() if label_N.device.type != "mps" else 1 - found.right_N
    count_C = torch.bincount(label_N, minlength=len(classes))
    error_rate_C = torch.bincount(label_N, weights=wrong_N, minlength=len(classes)) / count_C
    score_N = found.log_odds_N.cpu().numpy().astype(np.float32)
    rank_N = np.empty(len(score_N), dtype=np.int64)
    rank_N[np.argsort(-found.log_odds_N.cpu().numpy(), kind="stable")] = np.arange(1, len(score_N) + 1)

    def given(log_p_NC: Tensor) -> np.ndarray:
        return log_p_NC.gather(1, label_N[:, None])[:, 0].exp().float().cpu().numpy()

    return Audit(
        image_N=image_N,
        label_N=label_N.cpu().numpy(),
        suggested_N=suggested_N.cpu().numpy(),
        probability_N=found.right_N.cpu().numpy(),
        score_N=score_N,
        rank_N=rank_N,
        witness_N={name: given(log_p_NC) for name, log_p_NC in witness.items()},
        weights={name: float(weight) for name, weight in zip(witness, found.weight_S, strict=True)},
        classes=classes,
        noise=found.noise,
        error_rate_C=error_rate_C.cpu().numpy().astype(np.float64),
        threshold=threshold,
        n_unlabelled=n_unlabelled,
    )


# -------------------------------------------------------------------------------------------------------------- checks


def _checked(
    features: Array, labels: Array, class_names: Sequence[Any] | None, device: torch.device | str | None
) -> tuple[Tensor, Tensor, np.ndarray, tuple[Any, ...], int]:
    """Features and labels of the labelled images, on the device, classes numbered without gaps."""
    shape = tuple(features.shape)
    label_N = torch.as_tensor(labels).detach().cpu()
    if len(shape) != 2 or 0 in shape:
        raise InputError(f"The features have the shape {shape}, but each image needs one row of numbers.")
    if label_N.shape != (shape[0],):
        raise InputError(
            f"The labels have the shape {tuple(label_N.shape)}, but there are {shape[0]} images; give one each."
        )
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
    if isinstance(features, Tensor):
        x_ND = features.detach()[torch.from_numpy(image_N).to(features.device)]
    else:
        x_ND = torch.from_numpy(np.asarray(features[image_N]))
    device = torch.device(device) if device is not None else x_ND.device
    x_ND = x_ND.to(device).float()
    bad = int((~x_ND.isfinite()).any(dim=1).sum())
    if bad:
        raise InputError(
            f"The features of {bad} of {len(image_N)} images hold NaN or infinity; leave these images out."
        )
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


def _checked_clusters(
    clusters: tuple[Array, Array], n_images: int, image_N: np.ndarray, like: Tensor
) -> tuple[Tensor, Tensor]:
    """The soft assignments of the labelled images, the nearest component first."""
    index_NH, weight_NH = (torch.as_tensor(part).detach().cpu() for part in clusters)
    if index_NH.ndim != 2 or index_NH.shape != weight_NH.shape or index_NH.shape[0] != n_images:
        raise InputError(
            f"The clusters have the shapes {tuple(index_NH.shape)} and {tuple(weight_NH.shape)}, but both must have "
            f"one row for each of {n_images} images, with the same number of columns."
        )
    if index_NH.is_floating_point() or int(index_NH.min()) < 0:
        raise InputError("The numbers of the clusters must be whole and 0 or more; give index_NH before weight_NH.")
    chosen = torch.from_numpy(image_N)
    index_NH, weight_NH = index_NH[chosen].long().to(like.device), weight_NH[chosen].float().to(like.device)
    if not bool((weight_NH >= 0).all()) or not bool((weight_NH.sum(dim=1) > 0).all()):
        raise InputError("The weights of an image's clusters must be 0 or more, and some must be above 0; check them.")
    order_NH = weight_NH.argsort(dim=1, descending=True, stable=True)
    return index_NH.gather(1, order_NH), weight_NH.gather(1, order_NH)


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
