"""Triton kernels for CUDA: the H nearest components in one pass, sums by component, and the distances of all pairs.

Each kernel is one loop over tiles in shared memory; neither N x K nor K x K is ever stored. They also run under
Triton's interpreter (``TRITON_INTERPRET=1``) on a CPU, which is how they are tested without a GPU.

**The H nearest.** A tile of scores is BLOCK_N samples by BLOCK_K components. A top-H insertion for each score would
cost far more than the matrix product. Instead each column of the tile is a *bucket*: over all tiles, bucket c sees the
components c, c + BLOCK_K, c + 2 BLOCK_K, ..., and keeps its best three scores in registers, without any exchange
between threads. The low bits of a score hold the number of its tile, so a score carries its component. After the last
tile ``_rescore`` ranks the best candidates of all buckets in float32. A neighbour is lost only if four of the H best
fall into one bucket: one row in 50,000 for H = 5 and 64 buckets, and only its last neighbour. H = 1 needs the best two.

Legend:  N samples, K components, D dimensions, H neighbours;  x samples, w and b the affine score of a component.
"""

from __future__ import annotations

# Triton's own types do not describe what its compiler accepts, so its names are Any here, also in annotations.
# pyright: basic, reportInvalidTypeForm=false
import importlib
import os
from typing import Any

import torch
from torch import Tensor

triton: Any
tl: Any
TensorDescriptor: Any
try:
    triton = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")
    TensorDescriptor = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor
except ImportError:  # pragma: no cover - Triton comes with torch on Linux; elsewhere the torch backend serves
    triton = None

# Rows are padded to one of these widths.
_WIDTHS = (16, 32, 64, 128, 256, 512, 1024)
MAX_DIMENSIONS = _WIDTHS[-1]
# Beyond this, four of a row's H best share a bucket too often.
MAX_NEIGHBOURS = 8

# How many candidates reach the float32 re-rank beyond the H asked for.
_SPARE_CANDIDATES = 3
# Low bits of a float32 score that hold the number of its tile; the other 12 bits of mantissa are as fine as float16's.
_TILE_BITS = 11
_LEAST = -3.0e38


def available() -> bool:
    """Whether the kernels can run in this process; AMD's GPUs, which torch calls cuda too, have not been tried."""
    return triton is not None and torch.version.hip is None and (torch.cuda.is_available() or _interpreted())


def most_dimensions(device: torch.device) -> int:
    """How many dimensions the kernels take on this device; 0 where they do not run."""
    if not available():
        return 0
    if device.type != "cuda":
        return MAX_DIMENSIONS
    return max((d for d in _WIDTHS if nearest_tiles(d, *_chip(device)) is not None), default=0)


def supports(d: int, n_neighbours: int, device: torch.device) -> bool:
    """Whether the kernels are exact, and fit on this device's chip, for these sizes."""
    return _WIDTHS[0] <= d <= most_dimensions(device) and n_neighbours <= MAX_NEIGHBOURS


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def search_on_gpu(x_ND: Tensor, w_KD: Tensor, b_K: Tensor | None, n_neighbours: int) -> tuple[Tensor, Tensor]:
    """The scores and numbers of the H components with the highest scores, best first; float32 and int64."""
    n, d = x_ND.shape
    k = w_KD.shape[0]
    x_ND, w_KD = x_ND.float().contiguous(), w_KD.float().contiguous()
    settings = _INTERPRETED_NEAREST if _interpreted() else nearest_tiles(d, *_chip(x_ND.device))
    assert settings is not None, "supports() was not asked"
    block_n, block_k = settings["BLOCK_N"], settings["BLOCK_K"]
    block_d = triton.next_power_of_2(d)
    sizes = {"D": d, "BLOCK_D": block_d, "HAS_BIAS": b_K is not None, "LEAST": _LEAST}
    # The GPU copies whole tiles by itself (Hopper and later), which frees the threads for the scores.
    bulk_copy = x_ND.is_cuda and _chip(x_ND.device)[0] >= 9 and d % 16 == 0
    per_launch = block_k * 2**_TILE_BITS
    n_candidates = min(n_neighbours + _SPARE_CANDIDATES, 3 * block_k)
    unit = b_K is None
    # Without their mean the components keep their order for every row, and have more digits where they lie close.
    low_x, low_w = _low_precision(x_ND, unit), _padded(_low_precision(w_KD - w_KD.mean(dim=0), unit), block_k)
    bias = low_w if b_K is None else _padded(b_K.float(), block_k)
    parts = []
    for first in range(0, k, per_launch):
        part = torch.empty(n, n_candidates, dtype=torch.int32, device=x_ND.device)
        w_part = low_w[first : first + per_launch]
        w_tiles = TensorDescriptor.from_tensor(w_part, [block_k, block_d]) if bulk_copy else w_part
        _propose[(triton.cdiv(n, block_n),)](
            low_x, w_tiles, bias[first:], part, n, min(per_launch, k - first), first, EVEN_D=block_d == d,
            BULK_COPY=bulk_copy, CANDIDATES=n_candidates, DEPTH=2 if n_neighbours == 1 else 3, TILE_BITS=_TILE_BITS,
            **sizes, **settings,
        )  # fmt: skip
        parts.append(part)
    candidate_NC = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
    n_candidates = candidate_NC.shape[1]
    score_NH = torch.empty(n, n_neighbours, dtype=torch.float32, device=x_ND.device)
    index_NH = torch.empty(n, n_neighbours, dtype=torch.int64, device=x_ND.device)
    _rescore[(triton.cdiv(n, 16),)](
        x_ND, w_KD, x_ND if b_K is None else b_K.float(), candidate_NC, score_NH, index_NH, n, BLOCK_N=16,
        CANDIDATES=n_candidates, WIDTH=triton.next_power_of_2(n_candidates), H=n_neighbours, num_warps=4, **sizes,
    )  # fmt: skip
    return score_NH, index_NH


def sums_by_component(t_NF: Tensor, index_NH: Tensor, weight_NH: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """sum_i weight_ih, count_K, and sum_i weight_ih t_i, total_KF, for every component, float32.

    Each component gathers its own samples in their order; no atomics, so the same input gives the same bits.
    """
    f = t_NF.shape[1]
    flat = index_NH.reshape(-1).to(torch.int32)
    sorted_component, order = flat.sort(stable=True)
    bounds = torch.searchsorted(sorted_component, torch.arange(k + 1, dtype=torch.int32, device=flat.device))
    total_KF = torch.empty(k, f, dtype=torch.float32, device=t_NF.device)
    count_K = torch.empty(k, dtype=torch.float32, device=t_NF.device)
    _gather_sum[(k,)](
        t_NF.contiguous(), order, weight_NH.reshape(-1).float(), bounds, count_K, total_KF, F=f,
        BLOCK_F=triton.next_power_of_2(f), H=index_NH.shape[1], BLOCK_R=16, num_warps=4,
    )  # fmt: skip
    return count_K, total_KF


def sum_of_distances(mu_KD: Tensor) -> Tensor:
    """The sum of |mu_i - mu_j| over all pairs i < j of unit vectors, float64 scalar."""
    k, d = mu_KD.shape
    low = _low_precision(mu_KD)
    settings = _INTERPRETED_DISTANCES if _interpreted() else distance_tiles(d, *_chip(mu_KD.device))
    assert settings is not None, "supports() was not asked"
    n_tiles = triton.cdiv(k, settings["BLOCK"])
    partial = torch.empty(n_tiles, dtype=torch.float64, device=mu_KD.device)
    _distance_sums[(n_tiles,)](low, partial, k, n_tiles, D=d, BLOCK_D=triton.next_power_of_2(d), **settings)
    return partial.sum()


def _low_precision(x: Tensor, unit: bool = True) -> Tensor:
    """16 bits for the tensor cores: float16 for rows of unit length, else bfloat16; float32 under the interpreter."""
    if _interpreted():
        return x.float()
    return x.half() if unit else x.bfloat16()


def _padded(rows: Tensor, block: int) -> Tensor:
    """Add rows of zeros up to whole tiles."""
    missing = -rows.shape[0] % block
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows.contiguous()


# -- what fits on a chip -----------------------------------------------------------------------------------------------

# Rows of a tile, warps, and pipeline stages; the first that fits is used. The order is that of speed on an H200.
# The columns stay 64: with fewer buckets more neighbours would be lost.
_BUCKETS = 64
_NEAREST_TILES = ((128, 8, 3), (64, 4, 3), (64, 4, 2), (32, 4, 2), (32, 4, 1), (16, 4, 1))
_DISTANCE_TILES = ((128, 8, 2), (64, 4, 2), (32, 4, 2), (16, 4, 2))
_INTERPRETED_NEAREST: dict[str, Any] = {"BLOCK_N": 32, "BLOCK_K": 16, "num_warps": 4, "num_stages": 1}
_INTERPRETED_DISTANCES: dict[str, Any] = {"BLOCK": 16, "num_warps": 8, "num_stages": 2}


def nearest_tiles(d: int, generation: int, room: int) -> dict[str, Any] | None:
    """Tiles of ``search_on_gpu`` that fit ``room`` bytes of shared memory; None if there are none."""
    for rows, warps, stages in _NEAREST_TILES:
        if _shared_bytes(d, rows, _BUCKETS, stages, generation) <= room:
            return {"BLOCK_N": rows, "BLOCK_K": _BUCKETS, "num_warps": warps, "num_stages": stages}
    return None


def distance_tiles(d: int, generation: int, room: int) -> dict[str, Any] | None:
    """Tiles of ``sum_of_distances`` that fit ``room`` bytes of shared memory; None if there are none."""
    for side, warps, stages in _DISTANCE_TILES:
        if _shared_bytes(d, side, side, stages, generation) <= room:
            return {"BLOCK": side, "num_warps": warps, "num_stages": stages}
    return None


def _shared_bytes(d: int, rows: int, columns: int, stages: int, generation: int) -> int:
    """The shared memory that Triton needs at most: 16-bit rows, and tiles of columns, of which Ampere has one fewer."""
    tiles = stages if generation >= 9 else max(1, stages - 1)
    return 2 * min(width for width in _WIDTHS if width >= d) * (rows + tiles * columns) + 1024


def _chip(device: torch.device) -> tuple[int, int]:
    """The generation of a GPU (8 is Ampere, 9 Hopper), and the shared memory per block; 0 before Ampere: too slow."""
    generation = torch.cuda.get_device_capability(device)[0]
    room = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return generation, room if generation >= 8 else 0


if triton is not None:
    # Merging changes K from round to round. Without do_not_specialize Triton would compile again for a K that 16 does
    # not divide.

    @triton.jit(do_not_specialize=["n", "k", "first_component"])
    def _propose(
        x_ptr, w_tiles, b_ptr, candidate_ptr, n, k, first_component, D: tl.constexpr, BLOCK_D: tl.constexpr,
        EVEN_D: tl.constexpr, BULK_COPY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
        CANDIDATES: tl.constexpr, DEPTH: tl.constexpr, HAS_BIAS: tl.constexpr, TILE_BITS: tl.constexpr,
        LEAST: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        column = tl.arange(0, BLOCK_K)
        dim = tl.arange(0, BLOCK_D)
        inside = (row[:, None] < n) & (dim[None, :] < D)
        x = tl.load(x_ptr + row[:, None].to(tl.int64) * D + dim[None, :], mask=inside, other=0.0)
        best = tl.full((BLOCK_N, BLOCK_K), LEAST, tl.float32)
        second = tl.full((BLOCK_N, BLOCK_K), LEAST, tl.float32)
        third = tl.full((BLOCK_N, BLOCK_K), LEAST, tl.float32)
        keep: tl.constexpr = -(2**TILE_BITS)  # a mask: all bits but the lowest
        for tile in range(0, tl.cdiv(k, BLOCK_K)):
            # The components are padded to whole tiles: masks here would cost as much as the rest of the loop.
            if BULK_COPY:
                w = w_tiles.load([tile * BLOCK_K, 0]).T
            else:
                w_ptrs = w_tiles + (tile * BLOCK_K + column[None, :]).to(tl.int64) * D + dim[:, None]
                if EVEN_D:  # noqa: SIM108 - decided when compiled
                    w = tl.load(w_ptrs)
                else:
                    w = tl.load(w_ptrs, mask=dim[:, None] < D, other=0.0)
            score = tl.dot(x, w, input_precision="ieee")
            if HAS_BIAS:
                score += tl.load(b_ptr + tile * BLOCK_K + column)[None, :]
            tagged = ((score.to(tl.int32, bitcast=True) & keep) | tile).to(tl.float32, bitcast=True)
            if (tile + 1) * BLOCK_K > k:
                tagged = tl.where(tile * BLOCK_K + column[None, :] < k, tagged, LEAST)
            lower = tl.minimum(best, tagged)
            best = tl.maximum(best, tagged)
            if DEPTH == 3:
                third = tl.maximum(third, tl.minimum(second, lower))
            second = tl.maximum(second, lower)
        for c in tl.static_range(CANDIDATES):
            value, bucket = tl.max(best, axis=1, return_indices=True)
            tile_of = value.to(tl.int32, bitcast=True) & (2**TILE_BITS - 1)
            found = tl.where(value > LEAST, first_component + tile_of * BLOCK_K + bucket, -1)
            tl.store(candidate_ptr + row.to(tl.int64) * CANDIDATES + c, found, mask=row < n)
            taken = column[None, :] == bucket[:, None]
            best = tl.where(taken, second, best)
            second = tl.where(taken, third, second)
            third = tl.where(taken, LEAST, third)

    @triton.jit(do_not_specialize=["n"])
    def _rescore(
        x_ptr, w_ptr, b_ptr, candidate_ptr, score_ptr, index_ptr, n, D: tl.constexpr, BLOCK_D: tl.constexpr,
        BLOCK_N: tl.constexpr, CANDIDATES: tl.constexpr, WIDTH: tl.constexpr, H: tl.constexpr, HAS_BIAS: tl.constexpr,
        LEAST: tl.constexpr,
    ):  # fmt: skip
        # The best H of each row's candidates by their float32 scores; candidates below 0 stand for none.
        row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        dim = tl.arange(0, BLOCK_D)
        slot = tl.arange(0, WIDTH)
        inside = (row[:, None] < n) & (dim[None, :] < D)
        x = tl.load(x_ptr + row[:, None].to(tl.int64) * D + dim[None, :], mask=inside, other=0.0)
        scores = tl.full((BLOCK_N, WIDTH), LEAST, tl.float32)
        components = tl.full((BLOCK_N, WIDTH), -1, tl.int32)
        for c in range(CANDIDATES):
            candidate = tl.load(candidate_ptr + row.to(tl.int64) * CANDIDATES + c, mask=row < n, other=-1)
            real = candidate >= 0
            w_ptrs = w_ptr + candidate[:, None].to(tl.int64) * D + dim[None, :]
            w = tl.load(w_ptrs, mask=inside & real[:, None], other=0.0)
            score = tl.sum(x * w, axis=1)
            if HAS_BIAS:
                score += tl.load(b_ptr + candidate, mask=real, other=0.0)
            here = slot[None, :] == c
            scores = tl.where(here & real[:, None], score[:, None], scores)
            components = tl.where(here, candidate[:, None], components)
        for h in tl.static_range(H):
            value, position = tl.max(scores, axis=1, return_indices=True)
            taken = slot[None, :] == position[:, None]
            component = tl.max(tl.where(taken, components, -1), axis=1)
            tl.store(score_ptr + row.to(tl.int64) * H + h, value, mask=row < n)
            tl.store(index_ptr + row.to(tl.int64) * H + h, component.to(tl.int64), mask=row < n)
            scores = tl.where(taken, LEAST, scores)

    @triton.jit
    def _gather_sum(
        t_ptr, order_ptr, weight_ptr, bounds_ptr, count_ptr, total_ptr, F: tl.constexpr, BLOCK_F: tl.constexpr,
        H: tl.constexpr, BLOCK_R: tl.constexpr,
    ):  # fmt: skip
        component = tl.program_id(0).to(tl.int64)
        feature = tl.arange(0, BLOCK_F)
        lane = tl.arange(0, BLOCK_R)
        start = tl.load(bounds_ptr + component)
        stop = tl.load(bounds_ptr + component + 1)
        total = tl.zeros((BLOCK_F,), tl.float32)
        count = tl.zeros((BLOCK_R,), tl.float32)
        for first in range(start, stop, BLOCK_R):
            position = first + lane
            valid = position < stop
            entry = tl.load(order_ptr + position, mask=valid, other=0)
            weight = tl.load(weight_ptr + entry, mask=valid, other=0.0)
            sample = (entry // H).to(tl.int64)
            inside = valid[:, None] & (feature[None, :] < F)
            t = tl.load(t_ptr + sample[:, None] * F + feature[None, :], mask=inside, other=0.0)
            total += tl.sum(t.to(tl.float32) * weight[:, None], axis=0)
            count += weight
        tl.store(count_ptr + component, tl.sum(count, axis=0))
        tl.store(total_ptr + component * F + feature, total, mask=feature < F)

    @triton.jit(do_not_specialize=["k", "n_tiles"])
    def _distance_sums(mu_ptr, partial_ptr, k, n_tiles, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr):
        # Tile row i meets the tiles i, i + 1, ... half-way round the circle: every pair of tiles meets once, and every
        # program does the same work.
        i = tl.program_id(0)
        lane = tl.arange(0, BLOCK)
        dim = tl.arange(0, BLOCK_D)
        row = i * BLOCK + lane
        inside_a = (row[:, None] < k) & (dim[None, :] < D)
        a = tl.load(mu_ptr + row[:, None].to(tl.int64) * D + dim[None, :], mask=inside_a, other=0.0)
        total = tl.zeros((BLOCK,), tl.float64)
        for step in range(0, n_tiles // 2 + 1):
            column = ((i + step) % n_tiles) * BLOCK + lane
            inside_b = (column[None, :] < k) & (dim[:, None] < D)
            b = tl.load(mu_ptr + column[None, :].to(tl.int64) * D + dim[:, None], mask=inside_b, other=0.0)
            cosine = tl.dot(a, b, input_precision="ieee")
            distance = tl.sqrt(tl.maximum(2.0 - 2.0 * cosine, 0.0))
            counted = (row[:, None] < k) & (column[None, :] < k) & ((step > 0) | (row[:, None] < column[None, :]))
            half_way = (step * 2 == n_tiles) & (i >= n_tiles // 2)  # these pairs of tiles meet twice; count them once
            distance = tl.where(counted & (half_way == 0), distance, 0.0)
            total += tl.sum(distance, axis=1).to(tl.float64)
        tl.store(partial_ptr + i, tl.sum(total, axis=0))
