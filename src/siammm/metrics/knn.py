"""Labels by vote of the nearest labelled embeddings: the quickest honest look at what an encoder has learned.

The usual weighted vote on frozen embeddings: the k of the bank with the highest cosine each vote for their label with
exp(cosine / temperature), and the label with the most votes wins. Nothing is trained, so there is nothing to tune
besides k and the temperature, and these are by custom 200 and 0.1 (0.07 in some papers), or 20. Several such rules
share one search: its cost is the product of queries and bank and the choice of the nearest, not the votes.

Legend:  Q queries, B embeddings of the bank, D dimensions, C classes, k neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from siammm.core.errors import InputError
from siammm.mixture.neighbours import score_chunk_rows

Embeddings = Tensor | np.ndarray
Rule = tuple[int, float]
"""How many neighbours vote, and the temperature of their votes."""

RULES: tuple[Rule, ...] = ((200, 0.1), (200, 0.07), (20, 0.1), (20, 0.07))
"""What papers report."""

# Bytes of scores held at once. A CPU reads the whole bank for every chunk of queries, so chunks that stay in cache, as
# the mixture has them, cost more than they save; a GPU is filled by the mixture's.
_CPU_SCORE_BYTES = 64 * 2**20


def knn_predict(
    query: Embeddings,
    bank: Embeddings,
    bank_labels: Embeddings,
    *,
    n_classes: int | None = None,
    k: int = 200,
    temperature: float = 0.1,
    leave_one_out: bool = False,
    chunk: int | None = None,
) -> Tensor:
    """The label of each query by weighted vote of its k nearest in the bank.

    Shapes: query (Q, D), bank (B, D), bank_labels (B,) whole numbers from 0; returns (Q,) int64. Arrays and tensors of
    any floating type are taken and need not have unit length; a row of zeros is equally far from everything. All is
    done, and the result lies, on the bank's device, in float32 or, where both are, float64.

    ``n_classes`` is one more than the largest label if left out. A k above the size of the bank means all of it.
    ``leave_one_out``: query and bank are the same embeddings in the same order, and none votes for itself. ``chunk``
    queries are scored at once, which changes the memory used and not the result; the default bounds it.

    Of equal votes the smallest label wins; which of equally near neighbours is the k-th is up to torch.
    """
    return knn_predictions(
        query,
        bank,
        bank_labels,
        ((k, temperature),),
        n_classes=n_classes,
        leave_one_out=leave_one_out,
        chunk=chunk,
    )[0]


def knn_predictions(
    query: Embeddings,
    bank: Embeddings,
    bank_labels: Embeddings,
    rules: Sequence[Rule] = RULES,
    *,
    n_classes: int | None = None,
    leave_one_out: bool = False,
    chunk: int | None = None,
) -> list[Tensor]:
    """``knn_predict`` for several pairs of k and temperature, by one search for the largest k: a list of (Q,)."""
    bank_BD, query_QD = _embeddings("bank", bank), _embeddings("query", query)
    dtype = torch.float64 if bank_BD.dtype == query_QD.dtype == torch.float64 else torch.float32
    if bank_BD.shape[1] != query_QD.shape[1]:
        raise InputError(
            f"The queries have {query_QD.shape[1]} dimensions and the bank {bank_BD.shape[1]}; "
            "embed both with the same encoder."
        )
    n_queries, n_bank = query_QD.shape[0], bank_BD.shape[0]
    labels_B = _labels("bank_labels", bank_labels, n_bank).to(bank_BD.device)
    n_classes = _n_classes(n_classes, labels_B)
    for k, temperature in rules:
        if k < 1:
            raise InputError(f"k is {k}, but at least 1 neighbour must vote.")
        if not (temperature > 0 and math.isfinite(temperature)):
            raise InputError(f"temperature is {temperature!r}, but it must be a number above 0.")
    if chunk is not None and chunk < 1:
        raise InputError(f"chunk is {chunk}, but at least 1 query must be scored at once.")
    if leave_one_out and (n_queries != n_bank or n_bank < 2):
        raise InputError(
            f"leave_one_out has {n_queries} queries for a bank of {n_bank}, but both must be the same embeddings, "
            "two at least."
        )
    widest = min(max((k for k, _ in rules), default=1), n_bank - leave_one_out)
    rows = chunk or chunk_rows(bank_BD.device, dtype, n_bank)
    bank_BD = _unit(bank_BD, dtype)
    predicted = [torch.empty(n_queries, dtype=torch.int64, device=bank_BD.device) for _ in rules]
    with torch.no_grad(), torch.autocast(bank_BD.device.type, enabled=False):
        for start in range(0, n_queries, rows):
            q_RD = _unit(query_QD[start : start + rows].to(bank_BD.device), dtype)
            cosine_RB = q_RD @ bank_BD.T
            if leave_one_out:
                cosine_RB.diagonal(start).fill_(-math.inf)
            # Best first, so that the nearest 20 are the first of the nearest 200.
            cosine_Rk, index_Rk = cosine_RB.topk(widest, dim=1)
            label_Rk = labels_B[index_Rk]
            for predicted_Q, (k, temperature) in zip(predicted, rules, strict=True):
                # Relative to the nearest, so that a low temperature does not overflow; the order of the votes stays.
                vote_Rk = _widest((cosine_Rk[:, :k] - cosine_Rk[:, :1]) / temperature).exp()
                votes_RC = vote_Rk.new_zeros(q_RD.shape[0], n_classes).scatter_add_(1, label_Rk[:, :k], vote_Rk)
                predicted_Q[start : start + rows] = votes_RC.argmax(dim=1)
    return predicted


def knn_accuracy(
    query: Embeddings,
    query_labels: Embeddings,
    bank: Embeddings,
    bank_labels: Embeddings,
    *,
    n_classes: int | None = None,
    k: int = 200,
    temperature: float = 0.1,
    leave_one_out: bool = False,
    chunk: int | None = None,
) -> float:
    """The share of queries whose label ``knn_predict`` finds, between 0 and 1."""
    return knn_accuracies(
        query,
        query_labels,
        bank,
        bank_labels,
        ((k, temperature),),
        n_classes=n_classes,
        leave_one_out=leave_one_out,
        chunk=chunk,
    )[0]


def knn_accuracies(
    query: Embeddings,
    query_labels: Embeddings,
    bank: Embeddings,
    bank_labels: Embeddings,
    rules: Sequence[Rule] = RULES,
    *,
    n_classes: int | None = None,
    leave_one_out: bool = False,
    chunk: int | None = None,
) -> list[float]:
    """``knn_accuracy`` for several pairs of k and temperature, by one search."""
    predicted = knn_predictions(
        query, bank, bank_labels, rules, n_classes=n_classes, leave_one_out=leave_one_out, chunk=chunk
    )
    if not predicted:
        return []
    labels_Q = _labels("query_labels", query_labels, predicted[0].shape[0]).to(predicted[0].device)
    right = torch.stack([(predicted_Q == labels_Q).sum() for predicted_Q in predicted])
    return [count / labels_Q.shape[0] for count in right.tolist()]


def chunk_rows(device: torch.device, dtype: torch.dtype, n_bank: int) -> int:
    """Queries to score against the whole bank at once."""
    if device.type == "cpu":
        return max(16, _CPU_SCORE_BYTES // (dtype.itemsize * n_bank))
    return score_chunk_rows(device, dtype, n_bank)


def _embeddings(name: str, x: Embeddings) -> Tensor:
    x_ND = torch.as_tensor(x).detach()
    if x_ND.ndim != 2 or 0 in x_ND.shape:
        raise InputError(f"{name} has the shape {tuple(x_ND.shape)}, but it must be one row of numbers for each image.")
    if not x_ND.is_floating_point():
        raise InputError(f"{name} holds {x_ND.dtype}, but embeddings are floating-point numbers; convert it first.")
    bad = int((~x_ND.isfinite()).any(dim=1).sum())
    if bad:
        raise InputError(f"{bad} of the {x_ND.shape[0]} rows of {name} hold NaN or infinity; leave them out.")
    return x_ND


def _labels(name: str, labels: Embeddings, n: int) -> Tensor:
    labels_N = torch.as_tensor(labels)
    if labels_N.shape != (n,):
        raise InputError(f"{name} has the shape {tuple(labels_N.shape)}, but there are {n} embeddings; give one each.")
    if labels_N.is_floating_point() or labels_N.is_complex():
        raise InputError(f"{name} holds {labels_N.dtype}, but labels are whole numbers from 0; number the classes.")
    labels_N = labels_N.to(torch.int64)
    if int(labels_N.min()) < 0:
        raise InputError(f"{name} holds {int(labels_N.min())}, but labels start at 0; leave out what has no label.")
    return labels_N


def _n_classes(n_classes: int | None, labels_B: Tensor) -> int:
    largest = int(labels_B.max())
    if n_classes is None:
        return largest + 1
    if largest >= n_classes:
        raise InputError(f"bank_labels holds {largest}, but with {n_classes} classes the largest is {n_classes - 1}.")
    return n_classes


def _unit(x_ND: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.nn.functional.normalize(x_ND.to(dtype), dim=1)


def _widest(x: Tensor) -> Tensor:
    """float64 where the device has it: votes are added in no fixed order on a GPU, which must not show."""
    return x if x.device.type == "mps" else x.double()
