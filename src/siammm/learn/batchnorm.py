"""BatchNorm over the joint batch of all ranks: what makes several processes train as one.

On CUDA this is ``torch.nn.SyncBatchNorm``, which torch has for GPUs alone. On the CPU it is the small layer below; it
lets two processes on a laptop find what one finds, which is how the tests check the distributed loop.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from siammm.core import ranks
from siammm.core.errors import InputError


def synchronised(module: nn.Module) -> nn.Module:
    """Every BatchNorm of a module made to share its statistics among the ranks; the module itself when there is one.

    Parameters and buffers are taken over, not copied, and keep their names: an optimiser or a checkpoint made before
    fits after. Call it once the module is on its device, and before it is wrapped or compiled.
    """
    if not ranks.active():
        return module
    if not _on_cuda(module):
        return _replaced(module)
    # timm's layer that is BatchNorm and activation in one would lose its activation to torch's conversion.
    if any(type(part).__name__ == "BatchNormAct2d" for part in module.modules()):
        from timm.layers import norm_act

        return norm_act.convert_sync_batchnorm(module)
    return nn.SyncBatchNorm.convert_sync_batchnorm(module)


class SynchronisedBatchNorm(_BatchNorm):
    """BatchNorm whose mean and variance are those of all ranks' samples together, on the CPU.

    Ranks may hold different numbers of samples, or none. All must go through the layer, and through its backward, the
    same number of times. While evaluating, or in a single process, it is plain BatchNorm.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        # What timm's fused layers do after the normalisation.
        self.drop: nn.Module = nn.Identity()
        self.act: nn.Module = nn.Identity()

    @classmethod
    def like(cls, norm: _BatchNorm) -> SynchronisedBatchNorm:
        """The synchronised twin of a layer, with the same parameters and buffers."""
        twin = cls(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        twin.weight, twin.bias = norm.weight, norm.bias
        twin.running_mean, twin.running_var = norm.running_mean, norm.running_var
        twin.num_batches_tracked = norm.num_batches_tracked
        for name in ("drop", "act"):
            if isinstance(getattr(norm, name, None), nn.Module):
                setattr(twin, name, getattr(norm, name))
        return twin.train(norm.training)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise InputError(
                f"A batch for BatchNorm has {input.ndim} dimensions, but it needs at least 2: samples and channels."
            )

    def forward(self, input: Tensor) -> Tensor:
        """Normalise each channel of the joint batch."""
        self._check_input_dim(input)
        if not self.training or not ranks.active():
            return self.act(self.drop(super().forward(input)))
        share = 0.0
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            share = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
        tracked = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        normalised = _normalise(input, self.weight, self.bias, tracked[0], tracked[1], share, self.eps)
        return self.act(self.drop(normalised))


class _JointNormalisation(torch.autograd.Function):
    """Normalisation by the joint statistics: one all-reduce forward, one backward."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        share: float,
        eps: float,
    ) -> Tensor:
        """Normalise x by the statistics of all ranks, and move the running ones by ``share`` towards them."""
        wide = _at_least_single(x)
        channels = x.shape[1]
        sums = torch.zeros(2 * channels + 1, dtype=torch.float64)
        count = x.shape[0] * math.prod(x.shape[2:])
        if count:
            var, mean = torch.var_mean(wide, _all_but_channels(x), correction=0)
            var, mean = var.double(), mean.double()
            # In double precision the second moment gives the joint variance back without loss.
            sums = torch.cat([count * mean, count * (var + mean**2), mean.new_tensor([count])])
        ranks.all_reduce_sum(sums)
        total = float(sums[-1])
        if total < 2:
            raise InputError(
                f"BatchNorm got {total:.0f} values a channel from all ranks together, but it needs at least 2 to train."
            )
        mean = sums[:channels] / total
        var = (sums[channels:-1] / total - mean**2).clamp_min(0)
        if running_mean is not None and running_var is not None:
            running_mean.lerp_(mean.to(running_mean), share)
            running_var.lerp_((var * (total / (total - 1))).to(running_var), share)
        mean, scale = mean.to(wide), (var + eps).rsqrt().to(wide)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.total = total
        out = (wide - _beside(mean, x)) * _beside(scale, x)
        if weight is not None:
            out = out * _beside(weight, x)
        if bias is not None:
            out = out + _beside(bias, x)
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        """The gradients of this rank's samples, given the losses of all ranks, and of the layer's own parameters."""
        x, weight, mean, scale = ctx.saved_tensors
        grad = _at_least_single(grads[0])
        standardised = (_at_least_single(x) - _beside(mean, x)) * _beside(scale, x)
        along = _all_but_channels(x)
        # The parameters' gradients stay this rank's own: whoever averages gradients over ranks averages these too.
        grad_bias, grad_weight = grad.sum(along), (grad * standardised).sum(along)
        sums = torch.stack([grad_bias, grad_weight]).double() / ctx.total
        ranks.all_reduce_sum(sums)
        mean_grad, mean_product = sums.to(grad)
        grad_x = grad - _beside(mean_grad, x) - standardised * _beside(mean_product, x)
        grad_x = grad_x * _beside(scale if weight is None else scale * weight, x)
        return (
            grad_x.to(x.dtype),
            None if weight is None else grad_weight.to(weight),
            None if weight is None else grad_bias.to(weight),
            None, None, None, None,
        )  # fmt: skip


@cast(Any, torch.compiler).disable
def _normalise(*arguments: Any) -> Tensor:
    """The joint normalisation, as a call that a compiler leaves alone: a collective cannot be fused with anything."""
    return _JointNormalisation.apply(*arguments)  # pyright: ignore[reportReturnType]


def _replaced(module: nn.Module) -> nn.Module:
    """Every plain BatchNorm below (or at) a module replaced by its twin."""
    if isinstance(module, _BatchNorm):
        return module if isinstance(module, SynchronisedBatchNorm) else SynchronisedBatchNorm.like(module)
    for name, child in module.named_children():
        module.add_module(name, _replaced(child))
    return module


def _on_cuda(module: nn.Module) -> bool:
    return any(tensor.is_cuda for tensor in (*module.parameters(), *module.buffers()))


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


def _beside(value: Tensor, x: Tensor) -> Tensor:
    """A value for each channel in a shape that broadcasts against x."""
    return value.view(1, -1, *[1] * (x.ndim - 2))


def _at_least_single(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
