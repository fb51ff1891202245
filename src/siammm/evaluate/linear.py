"""A linear classifier on frozen features: how much of the classes a straight cut can see.

Multinomial logistic regression on standardised features, fitted by L-BFGS on the features' device. The strength of its
penalty is chosen on a tenth of the training features that are held out; test labels choose nothing.

Legend:  N training features, Q test features, D dimensions, C classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from siammm.errors import InputError

PENALTIES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
_HELD_OUT = 10
_MOST_STEPS = 200


def linear_accuracy(
    train_ND: Tensor,
    train_labels_N: Tensor,
    test_QD: Tensor,
    test_labels_Q: Tensor,
    *,
    penalties: tuple[float, ...] = PENALTIES,
    seed: int = 0,
) -> float:
    """The share of test features whose label the classifier finds, between 0 and 1."""
    train_ND, test_QD = train_ND.detach().float(), test_QD.detach().to(train_ND.device).float()
    train_labels_N, test_labels_Q = (labels.to(train_ND.device).long() for labels in (train_labels_N, test_labels_Q))
    if train_ND.ndim != 2 or test_QD.ndim != 2 or train_ND.shape[1] != test_QD.shape[1]:
        raise InputError(
            f"The features have the shapes {tuple(train_ND.shape)} and {tuple(test_QD.shape)}, but both must be "
            "matrices with the same number of columns; embed both with the same encoder."
        )
    if train_ND.shape[0] < 2 * _HELD_OUT:
        raise InputError(f"There are {train_ND.shape[0]} training features, but a probe needs {2 * _HELD_OUT} or more.")
    n_classes = int(train_labels_N.max()) + 1
    mean_D, deviation_D = train_ND.mean(dim=0), train_ND.std(dim=0).clamp_min(1e-6)
    train_ND, test_QD = (train_ND - mean_D) / deviation_D, (test_QD - mean_D) / deviation_D
    order = torch.randperm(train_ND.shape[0], generator=torch.Generator().manual_seed(seed)).to(train_ND.device)
    held, rest = order[::_HELD_OUT], order[torch.arange(len(order), device=order.device) % _HELD_OUT != 0]
    best: tuple[float, float] = (-1.0, penalties[0])
    for penalty in penalties:
        weights = _fitted(train_ND[rest], train_labels_N[rest], n_classes, penalty)
        found = _accuracy(weights, train_ND[held], train_labels_N[held])
        best = max(best, (found, penalty))
    return _accuracy(_fitted(train_ND, train_labels_N, n_classes, best[1]), test_QD, test_labels_Q)


def _fitted(x_ND: Tensor, labels_N: Tensor, n_classes: int, penalty: float) -> tuple[Tensor, Tensor]:
    """Weights (C, D) and biases (C,) that minimise cross entropy plus half the penalty times the squared weights."""
    weight_CD = torch.zeros(n_classes, x_ND.shape[1], device=x_ND.device, requires_grad=True)
    bias_C = torch.zeros(n_classes, device=x_ND.device, requires_grad=True)
    optimiser = torch.optim.LBFGS([weight_CD, bias_C], max_iter=_MOST_STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = functional.cross_entropy(x_ND @ weight_CD.T + bias_C, labels_N)
        loss = loss + 0.5 * penalty * weight_CD.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimiser.step(closure)  # pyright: ignore[reportArgumentType]
    return weight_CD.detach(), bias_C.detach()


def _accuracy(weights: tuple[Tensor, Tensor], x_ND: Tensor, labels_N: Tensor) -> float:
    return float(((x_ND @ weights[0].T + weights[1]).argmax(dim=1) == labels_N).double().mean())
