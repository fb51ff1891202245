"""Both views through a network in one batch, each with BatchNorm statistics of its own.

A convolutional network is a chain of layers that look at one image at a time, and of BatchNorm layers that look at a
batch. ``fused`` reads such a chain once and returns a function that runs it on several batches laid one after another:
other layers as they are, BatchNorm group by group, together with the ReLU and the residual that follow it. On a GPU
``norm_kernels`` does this in two passes over the activations; elsewhere torch's functions do the same slowly.

The parameters, the running statistics and the results are those of calling the network once for each batch. A network
with a part that is not known here is left alone. Layers that several processes share normalise by the statistics of all
of them here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from siammm.core import ranks
from siammm.learn.batchnorm import SynchronisedBatchNorm
from siammm.learn.cuda import norm_kernels, triton_support
from siammm.learn.networks import SiameseNetwork

Piece = Callable[[Tensor, int], Tensor]
"""Turns a batch of so many groups into its outputs."""
Block = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""The same with a shortcut beside it: of what either reads, and for what either of the next block reads."""

# They look at one image at a time, and remember nothing.
_INDEPENDENT = (nn.Conv2d, nn.Linear, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Flatten, nn.Identity)


# BatchNorm, and the layers that normalise together with those of other processes: on a GPU torch's, on a CPU ours.
_SHARED = (nn.SyncBatchNorm, SynchronisedBatchNorm)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, *_SHARED)
Norm = nn.BatchNorm1d | nn.BatchNorm2d | nn.SyncBatchNorm | SynchronisedBatchNorm


class _UnknownPartError(Exception):
    pass


def fused(module: nn.Module) -> Piece | None:
    """A function that does what the module does to each of several batches; None where a part of it is not known."""
    try:
        return _piece(module)
    except _UnknownPartError:
        return None


def fuse(network: SiameseNetwork) -> bool:
    """Make a network train on both views in one batch from now on, if all its parts are known; whether they are.

    Nothing else changes: each view keeps BatchNorm statistics of its own, and parameters keep their names.
    """
    parts = {name: getattr(network, name) for name in ("encoder", "predictor", "momentum_encoder")}
    try:
        network.fused = {name: _piece(part) for name, part in parts.items() if part is not None}
    except _UnknownPartError:
        return False
    return True


def normalised(
    x: Tensor, layer: Norm, groups: int, added: Tensor | None = None, *, relu: bool = False
) -> tuple[Tensor, Tensor]:
    """A BatchNorm layer on each group of a batch by itself, then a residual and a ReLU if wanted.

    Twice the same output: the gradients of two readers then need no addition of their own.
    """
    running, momentum = (layer.running_mean, layer.running_var), cast(float, layer.momentum)
    together = type(layer) in _SHARED and ranks.active()
    if not layer.training:
        y = layer(x)
    elif triton_support.available() and (x.is_cuda or triton_support.interpreted()):
        return cast(Any, _Normalised).apply(
            x, layer.weight, layer.bias, added, (*running, layer.num_batches_tracked), momentum, layer.eps, groups,
            relu, together,
        )  # fmt: skip
    elif together:
        y = torch.cat([layer(part) for part in x.chunk(groups)])
    else:
        assert layer.num_batches_tracked is not None
        layer.num_batches_tracked.add_(groups)
        settings = (*running, layer.weight, layer.bias, True, momentum, layer.eps)
        y = torch.cat([functional.batch_norm(part, *settings) for part in x.chunk(groups)])
    y = y if added is None else y + added
    y = functional.relu(y) if relu else y
    return y, y


class _Normalised(torch.autograd.Function):
    """``normalised`` by Triton kernels."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        running: tuple[Tensor, Tensor, Tensor],
        momentum: float,
        eps: float,
        groups: int,
        relu: bool,
        together: bool,
    ) -> tuple[Tensor, Tensor]:
        """The outputs; see ``norm_kernels.forward``."""
        rows = _rows(x)
        y, moments = norm_kernels.forward(
            rows, weight, bias, None if residual is None else _rows(residual), running,
            momentum=momentum, eps=eps, groups=groups, relu=relu, together=together,
        )  # fmt: skip
        ctx.save_for_backward(rows, y if relu and residual is not None else None, moments, weight, bias)
        ctx.relu, ctx.with_residual, ctx.together = relu, residual is not None, together
        ctx.set_materialize_grads(False)  # most have one reader
        shaped = _shaped(y, x)
        return shaped, shaped.detach()  # another tensor of the same values, with a gradient of its own

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The gradients; see ``norm_kernels.backward``."""
        x, y, moments, weight, bias = ctx.saved_tensors
        grad, *others = [grad for grad in grads if grad is not None]  # at least one: else nothing asks for it
        dx, d_weight, d_bias, d_residual = norm_kernels.backward(
            _rows(grad), _rows(others[0]) if others else None, x, y, moments, weight, bias, relu=ctx.relu,
            with_residual=ctx.with_residual, together=ctx.together,
        )  # fmt: skip
        return (
            _shaped(dx, grad),
            None if weight is None else d_weight.to(weight),
            None if bias is None else d_bias.to(bias),
            None if d_residual is None else _shaped(d_residual, grad),
            *[None] * 6,
        )


def _rows(x: Tensor) -> Tensor:
    """Pixels by channels: without a copy where channels are last in memory."""
    if x.ndim == 2:
        return x.contiguous()
    return x.permute(0, 2, 3, 1).contiguous().view(-1, x.shape[1])


def _shaped(rows: Tensor, like: Tensor) -> Tensor:
    """Rows in the shape of the tensor that they were made of."""
    if like.ndim == 2:
        return rows
    n, channels, height, width = like.shape
    return rows.view(n, height, width, channels).permute(0, 3, 1, 2)


# -- reading a network -------------------------------------------------------------------------------------------------


def _piece(module: nn.Module) -> Piece:
    kind = type(module)
    if kind in _NORMS:
        return _norm(cast(Norm, module), relu=False)
    if kind is nn.Sequential:
        return _chain(list(module.children()))
    if kind is nn.ReLU:
        # Never in place: what it reads may be what our kernels keep for the way back.
        return _plain(functional.relu)
    if kind in _INDEPENDENT or kind.__name__ == "SelectAdaptivePool2d":
        return lambda x, groups: module(x)
    parts = getattr(module, "parts_in_order", None)
    if parts is not None:
        return _chain(parts())
    if kind.__module__ == "timm.models.resnet":
        if kind.__name__ == "ResNet":
            return _resnet(cast(Any, module))
        block = _block(cast(Any, module))
        return lambda x, groups: block(x, x, groups)[0]
    raise _UnknownPartError(kind.__name__)


def _chain(modules: Sequence[nn.Module | Callable[[Tensor], Tensor]]) -> Piece:
    """Modules and plain functions one after another; a BatchNorm takes the ReLU behind it along."""
    pieces: list[Piece] = []
    for number, module in enumerate(modules):
        after = modules[number + 1] if number + 1 < len(modules) else None
        before = modules[number - 1] if number else None
        if type(module) is nn.ReLU and type(before) in _NORMS:
            continue
        if type(module) in _NORMS:
            pieces.append(_norm(cast(Norm, module), relu=type(after) is nn.ReLU))
        else:
            pieces.append(_piece(module) if isinstance(module, nn.Module) else _plain(module))

    def run(x: Tensor, groups: int) -> Tensor:
        for piece in pieces:
            x = piece(x, groups)
        return x

    return run


def _plain(function: Callable[[Tensor], Tensor]) -> Piece:
    return lambda x, groups: function(x)


def _norm(layer: Norm, *, relu: bool) -> Piece:
    if layer.momentum is None or not layer.track_running_stats:
        raise _UnknownPartError("a BatchNorm whose running statistics are not a moving average")
    if isinstance(layer, SynchronisedBatchNorm) and {type(layer.drop), type(layer.act)} != {nn.Identity}:
        raise _UnknownPartError("a BatchNorm with an activation of its own")
    if isinstance(layer, nn.SyncBatchNorm) and layer.process_group is not None:
        raise _UnknownPartError("a BatchNorm that some of the processes share")
    return lambda x, groups: normalised(x, layer, groups, relu=relu)[0]


def _resnet(model: Any) -> Piece:
    """timm's ResNet without its classifier."""
    if model.drop_rate or model.grad_checkpointing or not isinstance(model.fc, nn.Identity):
        raise _UnknownPartError("a ResNet with dropout, checkpointing or a classifier")
    layers = [block for layer in (model.layer1, model.layer2, model.layer3, model.layer4) for block in layer]
    if type(model.bn1) not in _NORMS or type(model.act1) is not nn.ReLU:
        raise _UnknownPartError("a first layer without BatchNorm and ReLU")
    _norm(model.bn1, relu=True)  # to refuse what it refuses
    stem, blocks, pool = _piece(model.conv1), [_block(layer) for layer in layers], _piece(model.global_pool)
    # Small images have no max-pooling.
    shrink = None if isinstance(model.maxpool, nn.Identity) else _piece(model.maxpool)

    def run(x: Tensor, groups: int) -> Tensor:
        x, kept = normalised(stem(x, groups), model.bn1, groups, relu=True)
        if shrink is not None:
            x = kept = shrink(x, groups)
        for block in blocks:
            x, kept = block(x, kept, groups)
        return pool(x, groups)

    return run


def _block(block: Any) -> Block:
    """timm's basic block or bottleneck: convolutions with BatchNorm; the last one adds the shortcut."""
    count = {"BasicBlock": 2, "Bottleneck": 3}.get(type(block).__name__, 0)
    extras = (block.se, block.drop_path, block.drop_block, block.aa) if count else ()
    if not count or any(extra is not None and type(extra) is not nn.Identity for extra in extras):
        raise _UnknownPartError(type(block).__name__)
    if any(type(getattr(block, f"act{number}")) is not nn.ReLU for number in range(1, count + 1)):
        raise _UnknownPartError("an activation other than ReLU")
    *pairs, (last, norm) = [(getattr(block, f"conv{i}"), getattr(block, f"bn{i}")) for i in range(1, count + 1)]
    inner = [_chain([*pair, nn.ReLU()]) for pair in pairs]
    _norm(norm, relu=True)  # to refuse what it refuses
    shortcut = None if block.downsample is None else _piece(block.downsample)

    def run(x: Tensor, kept: Tensor, groups: int) -> tuple[Tensor, Tensor]:
        kept = kept if shortcut is None else shortcut(kept, groups)
        for piece in inner:
            x = piece(x, groups)
        return normalised(last(x), norm, groups, kept, relu=True)

    return run
