"""The H nearest components of every sample: the matrix product at the heart of every E step.

What is ranked is an affine score ``x . w_k + b_k``: the cosine for directions, the negative half squared distance (but
for a constant of the sample) for Gaussian components. N x K scores never exist at once. Three ways to the same answer:

- *torch*, any device: product and top-k in chunks that stay in cache.
- *low precision*, CPUs with bfloat16 units: the product in bfloat16 proposes, and float32 decides wherever the proposal
  is not beyond doubt. Equal to *torch* but for rounding, in about two thirds of the time.
- *triton*, CUDA: one kernel that fuses product and top H, then a re-rank in float32 (``kernels.py``).

Legend:  N samples, K components, D dimensions, H neighbours;  x samples, w and b the affine score of a component.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor

from siammm.errors import InputError
from siammm.mixture import kernels

Backend = Literal["auto", "torch", "low-precision", "triton"]
BACKENDS: tuple[Backend, ...] = ("auto", "torch", "low-precision", "triton")

# Bytes of scores held at once: a CPU's share of cache; enough to fill a GPU.
_CPU_SCORE_BYTES = 8 * 2**20
_GPU_SCORE_BYTES = 512 * 2**20


def choose_backend(
    requested: Backend, device: torch.device, dtype: torch.dtype, *, d: int, k: int, n_neighbours: int
) -> Backend:
    """The fastest way that is exact on this device for these sizes, or the one asked for if it can run here."""
    fits = kernels.supports(d, n_neighbours)
    if requested == "auto":
        if device.type == "cuda" and kernels.available() and dtype == torch.float32 and fits:
            return "triton"
        if device.type == "cpu" and dtype == torch.float32 and _cpu_has_bfloat16() and d >= 64 and k >= 64:
            return "low-precision"
        return "torch"
    if requested == "triton" and not kernels.available():
        raise InputError("backend='triton' needs Triton and a CUDA device (or TRITON_INTERPRET=1); use backend='auto'.")
    if requested == "triton" and not fits:
        raise InputError(
            f"backend='triton' takes 16 to {kernels.MAX_DIMENSIONS} features and at most {kernels.MAX_NEIGHBOURS} "
            f"neighbours, but X has {d} features and n_neighbours is {n_neighbours}; use backend='auto'."
        )
    return requested


def score_chunk_rows(device: torch.device, dtype: torch.dtype, k: int) -> int:
    """How many rows of K scores to hold at once."""
    budget = _CPU_SCORE_BYTES if device.type == "cpu" else _GPU_SCORE_BYTES
    return max(16, budget // (dtype.itemsize * max(1, k)))


def nearest(
    x_ND: Tensor, w_KD: Tensor, b_K: Tensor | None, n_neighbours: int, *, backend: Backend = "torch"
) -> tuple[Tensor, Tensor]:
    """The scores and numbers of the H components with the highest scores, best first.

    Shapes: score_NH in x's type, index_NH int64.
    """
    if backend == "triton":
        return kernels.nearest(x_ND, w_KD, b_K, n_neighbours)
    x_ND = x_ND.contiguous()
    score_NH = x_ND.new_empty(x_ND.shape[0], n_neighbours)
    index_NH = torch.empty(x_ND.shape[0], n_neighbours, dtype=torch.int64, device=x_ND.device)
    # A proposal needs one component more than it returns, and a bias of unknown size has no place in bfloat16.
    propose = backend == "low-precision" and b_K is None and n_neighbours < w_KD.shape[0]
    low_KD = w_KD.bfloat16() if propose else None
    rows = score_chunk_rows(x_ND.device, x_ND.dtype, w_KD.shape[0])
    for start in range(0, x_ND.shape[0], rows):
        piece = slice(start, start + rows)
        if low_KD is not None:
            score_NH[piece], index_NH[piece] = _proposed_chunk(x_ND[piece], w_KD, low_KD, n_neighbours)
        else:
            score_NH[piece], index_NH[piece] = _exact_chunk(x_ND[piece], w_KD, b_K, n_neighbours)
    return score_NH, index_NH


def scores_of(x_ND: Tensor, w_KD: Tensor, b_K: Tensor | None, index_NH: Tensor) -> Tensor:
    """The scores of chosen components, score_NH; a gather and a sum, no N x K."""
    score_NH = torch.empty(index_NH.shape, dtype=x_ND.dtype, device=x_ND.device)
    rows = max(16, _CPU_SCORE_BYTES // (x_ND.element_size() * index_NH.shape[1] * x_ND.shape[1]))
    for start in range(0, x_ND.shape[0], rows):
        piece = slice(start, start + rows)
        score_NH[piece] = (w_KD[index_NH[piece]] * x_ND[piece, None, :]).sum(dim=2)
    return score_NH if b_K is None else score_NH + b_K[index_NH]


def _exact_chunk(x_ND: Tensor, w_KD: Tensor, b_K: Tensor | None, n_neighbours: int) -> tuple[Tensor, Tensor]:
    score_NK = x_ND @ w_KD.T if b_K is None else torch.addmm(b_K, x_ND, w_KD.T)
    return _top(score_NK, n_neighbours)


def _proposed_chunk(x_ND: Tensor, w_KD: Tensor, low_KD: Tensor, n_neighbours: int) -> tuple[Tensor, Tensor]:
    """bfloat16 proposes the H nearest; float32 scores them, and decides alone where the proposal is in doubt.

    A proposal is in doubt when the last component in and the first one out are closer than the error of both. That error
    is the rounding of the factors, whose deviation is at most 2^-9 sqrt(2/3) max|x| for rows w of unit length (four of
    these are allowed for), and the rounding of the product to bfloat16, half of 2^-8 of its size.
    """
    top = (x_ND.bfloat16() @ low_KD.T).topk(n_neighbours + 1, dim=1)
    last_in, first_out = top.values[:, -2].float(), top.values[:, -1].float()
    error = 4 * 2**-9 * 0.8165 * x_ND.abs().amax(dim=1) + 2**-9 * torch.maximum(last_in.abs(), first_out.abs())
    doubtful = (last_in - first_out < 2 * error).nonzero()[:, 0]
    index_NH = top.indices[:, :n_neighbours].contiguous()
    score_NH = scores_of(x_ND, w_KD, None, index_NH)
    if n_neighbours > 1:
        score_NH, order = score_NH.sort(dim=1, descending=True)
        index_NH = index_NH.gather(1, order)
    if doubtful.numel():
        score_NH[doubtful], index_NH[doubtful] = _exact_chunk(x_ND[doubtful], w_KD, None, n_neighbours)
    return score_NH, index_NH


def _top(score_NK: Tensor, n_neighbours: int) -> tuple[Tensor, Tensor]:
    if n_neighbours == 1:
        score_N, index_N = score_NK.max(dim=1)
        return score_N[:, None], index_N[:, None]
    top = score_NK.topk(n_neighbours, dim=1)
    return top.values, top.indices


def _cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware (AMX, or AVX-512's bf16 extension)."""
    cpu = cast(Any, torch.cpu)
    probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(cpu, probe, lambda: False)() for probe in probes)
