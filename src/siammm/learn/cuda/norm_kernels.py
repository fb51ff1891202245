"""Triton kernels for BatchNorm while training, with the residual and the ReLU that follow it, on groups of a batch.

A step on small images spends as long on BatchNorm as on convolutions, nearly all of it moving activations. Here each
activation is read twice and written once in the forward pass, and the same in the backward pass, where the gradients of
a block and its shortcut are added up too. Several views go through in one batch, each a group with its own statistics.

Sums are taken of values less the group's first row, which makes the variance exact enough in float32, and are added up
in a fixed order, so that a step can be repeated bit for bit. Tests run them on a CPU with ``TRITON_INTERPRET=1``.

Several processes can normalise ``together``, by the statistics of their joint batch. Each way, between its two passes
over the activations, they then exchange two numbers for each channel and group.

Legend:  G groups, R rows of a group (samples x pixels), C channels, P programs that share a column of tiles;
W processes that normalise together; x input, y output, z = x standardised, dy, dx gradients.
"""

from __future__ import annotations

# Triton's own types do not describe what its compiler accepts, so its names are Any here, also in annotations.
# pyright: basic, reportInvalidTypeForm=false
import torch
from torch import Tensor

from siammm.core import ranks
from siammm.learn.cuda.triton_support import jit, tl, triton

# Values in a tile, 32 for each thread of four warps; and in one that is only read, changed and written. These and what
# follows were among the fastest on an H200 (benchmarks/norm_speed.py).
_TILE, _APPLIED_TILE = 4096, 2048
_WIDEST = 128
# A product and a sum in one rounding, said because Triton's default is changing: the way back must round a product as
# the way forward did, to find the ReLU open at the same places.
_USUAL = {"num_warps": 4, "enable_fp_fusion": True}
# Tiles that a program that sums up has loading at a time, at most.
_MOST_STAGES = 4
# Programs that sum up at once: about four for every multiprocessor of a large GPU. Each leaves a row of partial sums.
_PROGRAMS = 512
# Such rows, and channels of them, that are added up at a time: few channels, so that many programs share the work.
_ROWS_AT_ONCE, _FEW = 256, 16


def forward(
    x_NC: Tensor,
    weight_C: Tensor | None,
    bias_C: Tensor | None,
    residual_NC: Tensor | None,
    running: tuple[Tensor, Tensor, Tensor] | None,
    *,
    momentum: float,
    eps: float,
    groups: int,
    relu: bool,
    together: bool = False,
) -> tuple[Tensor, Tensor]:
    """y = relu(BatchNorm(x) + residual) of each group by itself, and what ``backward`` needs of the statistics.

    Rows are in the order of groups. ``running`` is the mean and variance, which move towards each group in turn, and
    the number of batches so far, all of which the kernels write: nothing is left for a kernel of a few bytes.
    ``together``: a group is that of all processes, which have the same number of rows.
    """
    n, channels = x_NC.shape
    rows = n // groups
    if rows < 2 or n % groups:
        raise ValueError(f"{n} rows are not {groups} equal groups of at least 2, which BatchNorm needs.")
    block_r, block_c, programs = _tiles(rows, channels, groups)
    columns = triton.cdiv(channels, block_c)
    partial = x_NC.new_empty((groups, programs, 2, channels), dtype=torch.float32)
    _sums[(columns, programs, groups)](
        x_NC, partial, rows, channels, programs,
        BLOCK_R=block_r, BLOCK_C=block_c, STAGES=_stages(x_NC, 1), **_USUAL,
    )  # fmt: skip
    moments_G2C = x_NC.new_empty((groups, 2, channels), dtype=torch.float32)
    mean_C, var_C, batches = running if running is not None else (moments_G2C,) * 3
    tracked = running is not None
    _moments[(triton.cdiv(channels, _FEW),)](
        x_NC, partial, moments_G2C, mean_C, var_C, batches, rows, channels, momentum, eps, programs,
        GROUPS=groups, TRACKED=tracked, OWN=together, BLOCK_C=_FEW, BLOCK_P=_ROWS_AT_ONCE, **_USUAL,
    )  # fmt: skip
    if together:
        every_WG2C = ranks.all_gather_batch(moments_G2C)
        _joint_moments[(triton.cdiv(channels, _FEW),)](
            every_WG2C, moments_G2C, mean_C, var_C, batches, rows, channels, momentum, eps, ranks.world_size(),
            GROUPS=groups, TRACKED=tracked, BLOCK_C=_FEW, **_USUAL,
        )  # fmt: skip
    y_NC = torch.empty_like(x_NC)
    block_r = _APPLIED_TILE // block_c
    _apply[(triton.cdiv(rows, block_r), columns, groups)](
        x_NC, y_NC, residual_NC if residual_NC is not None else x_NC, moments_G2C,
        weight_C if weight_C is not None else moments_G2C, bias_C if bias_C is not None else moments_G2C,
        rows, channels, AFFINE=weight_C is not None, RESIDUAL=residual_NC is not None, RELU=relu,
        BLOCK_R=block_r, BLOCK_C=block_c, **_USUAL,
    )  # fmt: skip
    return y_NC, moments_G2C


def backward(
    dy_NC: Tensor,
    second_NC: Tensor | None,
    x_NC: Tensor,
    y_NC: Tensor | None,
    moments_G2C: Tensor,
    weight_C: Tensor | None,
    bias_C: Tensor | None,
    *,
    relu: bool,
    with_residual: bool,
    together: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of x, of weight and bias (C), and of the residual if there was one.

    The gradient of y is dy, or the sum of dy and ``second_NC``. ``y_NC`` says where the ReLU was open, and is needed
    only if a residual went into it: else x says so too. ``together``: as in ``forward``; the gradients of weight and
    bias are those of this process's rows, for whoever averages gradients over the processes.
    """
    n, channels = x_NC.shape
    groups = moments_G2C.shape[0]
    rows = n // groups
    block_r, block_c, programs = _tiles(rows, channels, groups)
    columns = triton.cdiv(channels, block_c)
    seen_NC = y_NC if y_NC is not None else x_NC
    affine = weight_C is not None
    weight, bias = (v if v is not None else moments_G2C for v in (weight_C, bias_C))
    partial = x_NC.new_empty((groups, programs, 2, channels), dtype=torch.float32)
    # The gradient before the ReLU is that of the residual too. Written when sums are taken of it, it spares the last
    # pass all else that it is made of.
    keeps = second_NC is not None or (with_residual and relu)
    kept_NC = torch.empty_like(x_NC) if keeps else dy_NC
    _gradient_sums[(columns, programs, groups)](
        dy_NC, second_NC if second_NC is not None else dy_NC, x_NC, seen_NC, moments_G2C, weight, bias, kept_NC,
        partial, rows, channels, programs, AFFINE=affine, RELU=relu, LOOK=y_NC is not None,
        SECOND=second_NC is not None, KEEP=keeps, BLOCK_R=block_r, BLOCK_C=block_c,
        STAGES=_stages(x_NC, 2 + (second_NC is not None) + (y_NC is not None)), **_USUAL,
    )  # fmt: skip
    sums_G2C = torch.empty_like(moments_G2C)
    parameters_2C = x_NC.new_empty((2, channels), dtype=torch.float32)
    _gradient_totals[(triton.cdiv(channels, _FEW),)](
        partial, sums_G2C, parameters_2C, channels, programs, ranks.world_size() if together else 1,
        GROUPS=groups, BLOCK_C=_FEW, BLOCK_P=_ROWS_AT_ONCE, **_USUAL,
    )  # fmt: skip
    if together:
        ranks.all_reduce_sum(sums_G2C)
    dx_NC = torch.empty_like(x_NC)
    _gradient[(triton.cdiv(rows, block_r), columns, groups)](
        kept_NC, x_NC, moments_G2C, weight, bias, sums_G2C, dx_NC, rows, channels,
        AFFINE=affine, RELU=relu and not keeps, BLOCK_R=block_r, BLOCK_C=block_c, **_USUAL,
    )  # fmt: skip
    # Where nothing is cut off or added, the residual's gradient is the output's own.
    return dx_NC, parameters_2C[1], parameters_2C[0], kept_NC if with_residual else None


def _tiles(rows: int, channels: int, groups: int) -> tuple[int, int, int]:
    """Rows and channels of a tile, and how many programs share the rows of one column of tiles."""
    block_c = max(16, min(_WIDEST, triton.next_power_of_2(channels)))
    block_r = _TILE // block_c
    columns = triton.cdiv(channels, block_c)
    return block_r, block_c, max(1, min(triton.cdiv(rows, block_r), _PROGRAMS // (columns * groups)))


def _stages(x_NC: Tensor, operands: int) -> int:
    """Tiles of so many tensors that a program may have in work or loading, in half of a multiprocessor's memory."""
    if not x_NC.is_cuda:
        return 1
    properties = torch.cuda.get_device_properties(x_NC.device)
    room = getattr(properties, "shared_memory_per_block_optin", 0) // 2  # which torch for AMD's GPUs does not tell
    return max(1, min(_MOST_STAGES, 1 + room // (_TILE * x_NC.element_size() * operands)))


@jit
def _tile(first_row, group, rows, channels, column, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Where a tile lies in memory, and which of it exists."""
    row = first_row + tl.arange(0, BLOCK_R)
    channel = column * BLOCK_C + tl.arange(0, BLOCK_C)
    exists = (row < rows)[:, None] & (channel < channels)[None, :]
    offset = (group.to(tl.int64) * rows + row)[:, None] * channels + channel[None, :]
    return offset, exists


@jit
def _sums(
    x, partial, rows, channels, programs, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    column, program, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    channel = column * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    shift = tl.load(x + group.to(tl.int64) * rows * channels + channel, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    squares = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for first in tl.range(program * BLOCK_R, rows, programs * BLOCK_R, num_stages=STAGES):
        offset, exists = _tile(first, group, rows, channels, column, BLOCK_R, BLOCK_C)
        value = tl.load(x + offset, mask=exists, other=0.0).to(tl.float32)
        value = tl.where(exists, value - shift[None, :], 0.0)
        total += value
        squares += value * value
    place = partial + ((group * programs + program) * 2) * channels + channel
    tl.store(place, tl.sum(total, axis=0), mask=inside)
    tl.store(place + channels, tl.sum(squares, axis=0), mask=inside)


@jit
def _added(partial, group, programs, channels, channel, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """Both sums of all programs' partial sums, always in the same order."""
    first = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    second = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    for start in range(0, programs, BLOCK_P):
        program = start + tl.arange(0, BLOCK_P)
        place = (group * programs + program)[:, None] * 2 * channels + channel[None, :]
        exists = (program < programs)[:, None] & (channel < channels)[None, :]
        first += tl.load(partial + place, mask=exists, other=0.0)
        second += tl.load(partial + place + channels, mask=exists, other=0.0)
    return tl.sum(first, axis=0), tl.sum(second, axis=0)


@jit
def _moments(
    x, partial, moments, running_mean, running_var, batches, rows, channels, momentum, eps, programs,
    GROUPS: tl.constexpr, TRACKED: tl.constexpr, OWN: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Mean and 1 / deviation of each group; with OWN the mean and variance of this process's rows alone."""
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    if TRACKED and not OWN:
        slow_mean = tl.load(running_mean + channel, mask=inside, other=0.0)
        slow_var = tl.load(running_var + channel, mask=inside, other=0.0)
    for group in range(GROUPS):
        first = x + tl.cast(group, tl.int64) * rows * channels + channel
        shift = tl.load(first, mask=inside, other=0.0).to(tl.float32)
        total, squares = _added(partial, group, programs, channels, channel, BLOCK_P, BLOCK_C)
        mean = total / rows
        # Not a number stays so, here and below: what hides it hides that training has failed.
        var = tl.maximum(squares / rows - mean * mean, 0.0, propagate_nan=tl.PropagateNan.ALL)
        mean += shift
        place = moments + group * 2 * channels + channel
        tl.store(place, mean, mask=inside)
        tl.store(place + channels, var if OWN else 1.0 / tl.sqrt(var + eps), mask=inside)
        if TRACKED and not OWN:
            slow_mean += momentum * (mean - slow_mean)
            slow_var += momentum * (var * (rows / (rows - 1.0)) - slow_var)
    if TRACKED and not OWN:
        tl.store(running_mean + channel, slow_mean, mask=inside)
        tl.store(running_var + channel, slow_var, mask=inside)
        tl.store(batches, tl.load(batches) + GROUPS, mask=tl.program_id(0) == 0)


@jit
def _joint_moments(
    every, moments, running_mean, running_var, batches, rows, channels, momentum, eps, world,
    GROUPS: tl.constexpr, TRACKED: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """What ``_moments`` finds of all processes' rows, from the mean and variance of those of each."""
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    if TRACKED:
        slow_mean = tl.load(running_mean + channel, mask=inside, other=0.0)
        slow_var = tl.load(running_var + channel, mask=inside, other=0.0)
    for group in range(GROUPS):
        mean = tl.zeros((BLOCK_C,), dtype=tl.float32)
        for process in range(world):
            mean += tl.load(every + (process * GROUPS + group) * 2 * channels + channel, mask=inside, other=0.0)
        mean = mean / world
        var = tl.zeros((BLOCK_C,), dtype=tl.float32)
        for process in range(world):
            place = every + (process * GROUPS + group) * 2 * channels + channel
            distance = tl.load(place, mask=inside, other=0.0) - mean
            var += tl.load(place + channels, mask=inside, other=0.0) + distance * distance
        var = var / world
        place = moments + group * 2 * channels + channel
        tl.store(place, mean, mask=inside)
        tl.store(place + channels, 1.0 / tl.sqrt(var + eps), mask=inside)
        if TRACKED:
            slow_mean += momentum * (mean - slow_mean)
            slow_var += momentum * (var * (rows * world / (rows * world - 1.0)) - slow_var)
    if TRACKED:
        tl.store(running_mean + channel, slow_mean, mask=inside)
        tl.store(running_var + channel, slow_var, mask=inside)
        tl.store(batches, tl.load(batches) + GROUPS, mask=tl.program_id(0) == 0)


@jit
def _factors(moments, weight, bias, group, channels, channel, AFFINE: tl.constexpr):
    """What x is multiplied with and what is added, for each channel: y = (x - mean) * scale + shift."""
    inside = channel < channels
    place = moments + group * 2 * channels + channel
    mean = tl.load(place, mask=inside, other=0.0)
    deviation = tl.load(place + channels, mask=inside, other=0.0)
    scale, shift = deviation, tl.zeros_like(mean)
    if AFFINE:
        scale = deviation * tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
        shift = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    return mean, deviation, scale, shift


@jit
def _apply(
    x, y, residual, moments, weight, bias, rows, channels,
    AFFINE: tl.constexpr, RESIDUAL: tl.constexpr, RELU: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    column, group = tl.program_id(1), tl.program_id(2)
    channel = column * BLOCK_C + tl.arange(0, BLOCK_C)
    mean, _, scale, shift = _factors(moments, weight, bias, group, channels, channel, AFFINE)
    offset, exists = _tile(tl.program_id(0) * BLOCK_R, group, rows, channels, column, BLOCK_R, BLOCK_C)
    value = tl.load(x + offset, mask=exists, other=0.0).to(tl.float32)
    value = (value - mean[None, :]) * scale[None, :] + shift[None, :]
    if RESIDUAL:
        value += tl.load(residual + offset, mask=exists, other=0.0).to(tl.float32)
    if RELU:
        value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y + offset, value.to(y.dtype.element_ty), mask=exists)


@jit
def _passed(
    dy, second, x, seen, offset, exists, mean, deviation, scale, shift,
    RELU: tl.constexpr, LOOK: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """The gradient before the ReLU, and x standardised, of one tile."""
    gradient = tl.load(dy + offset, mask=exists, other=0.0).to(tl.float32)
    if SECOND:
        gradient += tl.load(second + offset, mask=exists, other=0.0).to(tl.float32)
    value = tl.load(x + offset, mask=exists, other=0.0).to(tl.float32) - mean[None, :]
    if RELU:
        if LOOK:
            is_open = tl.load(seen + offset, mask=exists, other=0.0).to(tl.float32) > 0.0
        else:
            is_open = value * scale[None, :] + shift[None, :] > 0.0
        gradient = tl.where(is_open, gradient, 0.0)
    return gradient, tl.where(exists, value * deviation[None, :], 0.0)


@jit
def _gradient_sums(
    dy, second, x, seen, moments, weight, bias, kept, partial, rows, channels, programs,
    AFFINE: tl.constexpr, RELU: tl.constexpr, LOOK: tl.constexpr, SECOND: tl.constexpr, KEEP: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column, program, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    channel = column * BLOCK_C + tl.arange(0, BLOCK_C)
    mean, deviation, scale, shift = _factors(moments, weight, bias, group, channels, channel, AFFINE)
    total = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    products = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for first in tl.range(program * BLOCK_R, rows, programs * BLOCK_R, num_stages=STAGES):
        offset, exists = _tile(first, group, rows, channels, column, BLOCK_R, BLOCK_C)
        gradient, z = _passed(dy, second, x, seen, offset, exists, mean, deviation, scale, shift, RELU, LOOK, SECOND)
        if KEEP:
            rounded = gradient.to(kept.dtype.element_ty)
            tl.store(kept + offset, rounded, mask=exists)
            gradient = rounded.to(tl.float32)  # the sums are of what is read again
        total += gradient
        products += gradient * z
    place = partial + ((group * programs + program) * 2) * channels + channel
    tl.store(place, tl.sum(total, axis=0), mask=channel < channels)
    tl.store(place + channels, tl.sum(products, axis=0), mask=channel < channels)


@jit
def _gradient_totals(
    partial, sums, parameters, channels, programs, world,
    GROUPS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Sums of each group, divided by ``world`` for their mean over the processes, and those of all groups."""
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    all_total = tl.zeros((BLOCK_C,), dtype=tl.float32)
    all_products = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for group in range(GROUPS):
        total, products = _added(partial, group, programs, channels, channel, BLOCK_P, BLOCK_C)
        place = sums + group * 2 * channels + channel
        tl.store(place, total / world, mask=inside)
        tl.store(place + channels, products / world, mask=inside)
        all_total += total
        all_products += products
    tl.store(parameters + channel, all_total, mask=inside)
    tl.store(parameters + channels + channel, all_products, mask=inside)


@jit
def _gradient(
    dy, x, moments, weight, bias, sums, dx, rows, channels,
    AFFINE: tl.constexpr, RELU: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    column, group = tl.program_id(1), tl.program_id(2)
    channel = column * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    mean, deviation, scale, shift = _factors(moments, weight, bias, group, channels, channel, AFFINE)
    place = sums + group * 2 * channels + channel
    mean_gradient = tl.load(place, mask=inside, other=0.0) / rows
    mean_product = tl.load(place + channels, mask=inside, other=0.0) / rows
    offset, exists = _tile(tl.program_id(0) * BLOCK_R, group, rows, channels, column, BLOCK_R, BLOCK_C)
    gradient, z = _passed(dy, dy, x, x, offset, exists, mean, deviation, scale, shift, RELU, False, False)
    value = (gradient - mean_gradient[None, :] - z * mean_product[None, :]) * scale[None, :]
    tl.store(dx + offset, value.to(dx.dtype.element_ty), mask=exists)
