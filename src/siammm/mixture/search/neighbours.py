"""The H nearest components of every sample: the matrix product that takes most of the time of an E step.

Components are ranked by ``x . w_k + b_k``: the cosine for directions, minus half the squared distance (up to a constant
per sample) for Gaussian components. N x K scores are never stored. Three backends give the same result:

- *torch*, any device: product and top-k in chunks that stay in the cache, or in one pass of compiled code on a CPU with
  AVX2 or AVX-512 (``cpu_kernels.py``).
- *low precision*, CPUs with int8 instructions: int8 finds candidates, float32 ranks them (``eightbit.py``).
- *triton*, CUDA: one kernel that fuses product and top H, then a re-rank in float32 (``kernels.py``).

Legend:  N samples, K components, D dimensions, H neighbours;  x samples, w and b the affine score of a component.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from siammm.core.errors import InputError
from siammm.mixture.search import cpu_kernels, eightbit, kernels

Backend = Literal["auto", "torch", "low-precision", "triton"]
BACKENDS: tuple[Backend, ...] = ("auto", "torch", "low-precision", "triton")

# Bytes of scores held at once: a part of a CPU's cache; enough to fill a GPU.
_CPU_SCORE_BYTES = 8 * 2**20
_GPU_SCORE_BYTES = 512 * 2**20


def choose_backend(
    requested: Backend, device: torch.device, dtype: torch.dtype, *, d: int, k: int, n_neighbours: int
) -> Backend:
    """The fastest backend for this device and these sizes, or the requested one if it can run here."""
    fits = kernels.supports(d, n_neighbours, device)
    if requested == "auto":
        if device.type == "cuda" and dtype == torch.float32 and fits:
            return "triton"
        if device.type == "cpu" and dtype == torch.float32 and eightbit.available() and d >= 64 and k >= 256:
            return "low-precision"
        return "torch"
    if requested == "triton" and not kernels.available():
        raise InputError("backend='triton' needs Triton and a CUDA device (or TRITON_INTERPRET=1); use backend='auto'.")
    if requested == "triton" and not fits:
        most = kernels.most_dimensions(device)
        if not most:
            raise InputError("backend='triton' needs a GPU of NVIDIA's Ampere generation or later; use backend='auto'.")
        raise InputError(
            f"backend='triton' takes 16 to {most} features here and at most {kernels.MAX_NEIGHBOURS} neighbours, but X "
            f"has {d} features and n_neighbours is {n_neighbours}; use backend='auto'."
        )
    return requested


def score_chunk_rows(device: torch.device, dtype: torch.dtype, k: int) -> int:
    """How many rows of K scores to hold at once."""
    budget = _CPU_SCORE_BYTES if device.type == "cpu" else _GPU_SCORE_BYTES
    return max(16, budget // (dtype.itemsize * max(1, k)))


def search(
    x_ND: Tensor,
    w_KD: Tensor,
    b_K: Tensor | None,
    n_neighbours: int,
    *,
    backend: Backend = "torch",
    x_bytes: eightbit.Bytes | None = None,
) -> tuple[Tensor, Tensor]:
    """The scores and numbers of the H components with the highest scores, best first.

    Shapes: score_NH in x's type, index_NH int64. ``x_bytes``: the rows in low precision, where the caller keeps them.
    """
    if backend == "triton":
        return kernels.search_on_gpu(x_ND, w_KD, b_K, n_neighbours)
    if backend == "low-precision" and b_K is None:  # int8 has no room for a bias
        return eightbit.search_by_bytes(x_ND, w_KD, n_neighbours, x_bytes)
    if cpu_kernels.floats_pay(x_ND, *w_KD.shape):
        found = cpu_kernels.nearest_by_floats(x_ND, w_KD, b_K, n_neighbours)
        if found is not None:
            return found
    score_NH = x_ND.new_empty(x_ND.shape[0], n_neighbours)
    index_NH = torch.empty(x_ND.shape[0], n_neighbours, dtype=torch.int64, device=x_ND.device)
    rows = score_chunk_rows(x_ND.device, x_ND.dtype, w_KD.shape[0])
    for start in range(0, x_ND.shape[0], rows):
        piece = slice(start, start + rows)
        score_NK = x_ND[piece] @ w_KD.T if b_K is None else torch.addmm(b_K, x_ND[piece], w_KD.T)
        score_NH[piece], index_NH[piece] = _top(score_NK, n_neighbours)
    return score_NH, index_NH


def nearest_centres(centre_KD: Tensor, count: int, *, unit: bool) -> Tensor:
    """The nearest centres of each centre, index_KH, nearest first; usually the first is the centre itself."""
    w_KD = centre_KD.float()
    k, d = w_KD.shape
    bias_K = None if unit else -0.5 * (w_KD**2).sum(dim=1)
    backend = choose_backend("auto", w_KD.device, torch.float32, d=d, k=k, n_neighbours=count)
    return search(w_KD, w_KD, bias_K, count, backend=backend)[1]


def _top(score_NK: Tensor, n_neighbours: int) -> tuple[Tensor, Tensor]:
    if n_neighbours == 1:
        score_N, index_N = score_NK.max(dim=1)
        return score_N[:, None], index_N[:, None]
    top = score_NK.topk(n_neighbours, dim=1)
    return top.values, top.indices
