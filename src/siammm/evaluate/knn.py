"""Labels by vote of the nearest labelled embeddings: the quickest honest look at what an encoder has learned.

The usual weighted vote on frozen embeddings: the k of the bank with the highest cosine each vote for their label with
exp(cosine / temperature), and the label with the most votes wins. Nothing is trained, so there is nothing to tune
besides k and the temperature, and these are by custom 200 and 0.1 (0.07 in some papers).

Legend:  Q queries, B embeddings of the bank, D dimensions, C classes, k neighbours.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from siammm.errors import InputError
from siammm.mixture.neighbours import score_chunk_rows

Embeddings = Tensor | np.ndarray


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
    k = min(k, n_bank - leave_one_out)
    rows = chunk or score_chunk_rows(bank_BD.device, dtype, n_bank)
    bank_BD = _unit(bank_BD, dtype)
    predicted_Q = torch.empty(n_queries, dtype=torch.int64, device=bank_BD.device)
    with torch.no_grad(), torch.autocast(bank_BD.device.type, enabled=False):
        for start in range(0, n_queries, rows):
            q_RD = _unit(query_QD[start : start + rows].to(bank_BD.device), dtype)
            cosine_RB = q_RD @ bank_BD.T
            if leave_one_out:
                cosine_RB.diagonal(start).fill_(-math.inf)
            cosine_Rk, index_Rk = cosine_RB.topk(k, dim=1)
            # Relative to the nearest, so that a low temperature does not overflow; the order of the votes stays.
            vote_Rk = _widest((cosine_Rk - cosine_Rk[:, :1]) / temperature).exp()
            votes_RC = vote_Rk.new_zeros(q_RD.shape[0], n_classes).scatter_add_(1, labels_B[index_Rk], vote_Rk)
            predicted_Q[start : start + rows] = votes_RC.argmax(dim=1)
    return predicted_Q


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
    predicted_Q = knn_predict(
        query,
        bank,
        bank_labels,
        n_classes=n_classes,
        k=k,
        temperature=temperature,
        leave_one_out=leave_one_out,
        chunk=chunk,
    )
    labels_Q = _labels("query_labels", query_labels, predicted_Q.shape[0]).to(predicted_Q.device)
    return float((predicted_Q == labels_Q).double().mean())


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
