"""Weighted kNN on frozen embeddings: the quickest honest look at what an encoder has learned.

The k embeddings of the bank with the highest cosine each vote for their label with exp(cosine / temperature). Nothing
is trained. Papers use k = 200 or 20 and a temperature of 0.1 or 0.07; several such rules share one search, because the
time goes into finding the neighbours and not into the votes.

Legend:  Q queries, B embeddings of the bank, D dimensions, C classes, k neighbours, R queries of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from siammm.core.checks import check_at_least, check_positive
from siammm.core.device import widest_float
from siammm.core.errors import InputError
from siammm.metrics.labels import Array, matrix
from siammm.mixture.search.neighbours import score_chunk_rows

Rule = tuple[int, float]
"""How many neighbours vote, and the temperature of their votes."""

RULES: tuple[Rule, ...] = ((200, 0.1), (200, 0.07), (20, 0.1), (20, 0.07))
"""What papers report."""

# Bytes of scores held at once. A CPU reads the whole bank for every chunk of queries, so chunks that stay in cache, as
# in the mixture, cost more than they save; on a GPU the mixture's chunks are right.
_CPU_SCORE_BYTES = 64 * 2**20


def knn_predict(
    query: Array,
    bank: Array,
    bank_labels: Array,
    *,
    k: int = 200,
    temperature: float = 0.1,
    leave_one_out: bool = False,
) -> Tensor:
    """The label of each query by weighted vote of its k nearest neighbours in the bank.

    Shapes: query (Q, D), bank (B, D), bank_labels (B,) whole numbers from 0; returns (Q,) int64. Embeddings of any
    floating type are accepted and need not have unit length; a row of zeros is equally far from everything. Everything
    is computed on the bank's device, in float32, or in float64 where both are float64.

    If k is larger than the bank, all of the bank votes. ``leave_one_out``: query and bank are the same embeddings in
    the same order, and none votes for itself. Of labels with equal votes the smallest wins.
    """
    return knn_predictions(query, bank, bank_labels, ((k, temperature),), leave_one_out=leave_one_out)[0]


def knn_predictions(
    query: Array, bank: Array, bank_labels: Array, rules: Sequence[Rule] = RULES, *, leave_one_out: bool = False
) -> list[Tensor]:
    """``knn_predict`` for several pairs of k and temperature, with one search for the largest k: a list of (Q,)."""
    bank_BD, query_QD = _embeddings("The bank embeddings", bank), _embeddings("The query embeddings", query)
    dtype = torch.float64 if bank_BD.dtype == query_QD.dtype == torch.float64 else torch.float32
    if bank_BD.shape[1] != query_QD.shape[1]:
        raise InputError(
            f"The queries have {query_QD.shape[1]} dimensions and the bank {bank_BD.shape[1]}; "
            "embed both with the same encoder."
        )
    n_queries, n_bank = query_QD.shape[0], bank_BD.shape[0]
    labels_B = _labels("bank_labels", bank_labels, n_bank).to(bank_BD.device)
    n_classes = int(labels_B.max()) + 1
    for k, temperature in rules:
        check_at_least("k", k, 1)
        check_positive("temperature", temperature)
    if leave_one_out and (n_queries != n_bank or n_bank < 2):
        raise InputError(
            f"leave_one_out has {n_queries} queries for a bank of {n_bank}, but both must be the same embeddings, at "
            "least two."
        )
    widest = min(max((k for k, _ in rules), default=1), n_bank - leave_one_out)
    rows = chunk_rows(bank_BD.device, dtype, n_bank)
    bank_BD = normalize(bank_BD.to(dtype), dim=1)
    predicted = [torch.empty(n_queries, dtype=torch.int64, device=bank_BD.device) for _ in rules]
    with torch.no_grad(), torch.autocast(bank_BD.device.type, enabled=False):
        for start in range(0, n_queries, rows):
            q_RD = normalize(query_QD[start : start + rows].to(bank_BD.device, dtype), dim=1)
            cosine_RB = q_RD @ bank_BD.T
            if leave_one_out:
                cosine_RB.diagonal(start).fill_(-math.inf)
            # Sorted, so that the nearest 20 are the first of the nearest 200.
            cosine_Rk, index_Rk = cosine_RB.topk(widest, dim=1)
            label_Rk = labels_B[index_Rk]
            for predicted_Q, (k, temperature) in zip(predicted, rules, strict=True):
                # Relative to the nearest, so that a low temperature does not overflow; the order of the votes stays.
                # float64 where there is: a GPU adds votes in no fixed order, and this must not show.
                nearness_Rk = (cosine_Rk[:, :k] - cosine_Rk[:, :1]) / temperature
                vote_Rk = nearness_Rk.to(widest_float(nearness_Rk.device)).exp()
                votes_RC = vote_Rk.new_zeros(q_RD.shape[0], n_classes).scatter_add_(1, label_Rk[:, :k], vote_Rk)
                predicted_Q[start : start + rows] = votes_RC.argmax(dim=1)
    return predicted


def knn_accuracy(
    query: Array,
    query_labels: Array,
    bank: Array,
    bank_labels: Array,
    *,
    k: int = 200,
    temperature: float = 0.1,
    leave_one_out: bool = False,
) -> float:
    """The share of queries whose label ``knn_predict`` finds, from 0 to 1."""
    return knn_accuracies(query, query_labels, bank, bank_labels, ((k, temperature),), leave_one_out)[0]


def knn_accuracies(
    query: Array,
    query_labels: Array,
    bank: Array,
    bank_labels: Array,
    rules: Sequence[Rule] = RULES,
    leave_one_out: bool = False,
) -> list[float]:
    """``knn_accuracy`` for several pairs of k and temperature, with one search."""
    predicted = knn_predictions(query, bank, bank_labels, rules, leave_one_out=leave_one_out)
    labels_Q = _labels("query_labels", query_labels, len(query)).to(torch.as_tensor(bank).device)
    return [float((predicted_Q == labels_Q).sum()) / len(labels_Q) for predicted_Q in predicted]


def chunk_rows(device: torch.device, dtype: torch.dtype, n_bank: int) -> int:
    """How many queries to score against the whole bank at once."""
    if device.type == "cpu":
        return max(16, _CPU_SCORE_BYTES // (dtype.itemsize * n_bank))
    return score_chunk_rows(device, dtype, n_bank)


def _embeddings(name: str, x: Array) -> Tensor:
    x_ND = matrix(name, x)
    if not x_ND.is_floating_point():
        raise InputError(f"{name} are {x_ND.dtype}, but floating-point numbers are needed; convert them first.")
    return x_ND


def _labels(name: str, labels: Array, n: int) -> Tensor:
    labels_N = torch.as_tensor(labels)
    if labels_N.shape != (n,):
        raise InputError(f"{name} has the shape {tuple(labels_N.shape)}, but there are {n} embeddings; give one each.")
    if labels_N.is_floating_point() or labels_N.is_complex():
        raise InputError(f"{name} holds {labels_N.dtype}, but labels are whole numbers from 0; number the classes.")
    if int(labels_N.min()) < 0:
        raise InputError(f"{name} holds {int(labels_N.min())}, but labels start at 0; leave out what has no label.")
    return labels_N.to(torch.int64)
