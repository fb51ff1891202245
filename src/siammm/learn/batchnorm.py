"""BatchNorm over the joint batch of all ranks: what makes several processes train as one.

On CUDA this is ``torch.nn.SyncBatchNorm``, which torch has for GPUs alone. On the CPU it is the small layer below; it
lets two processes on a laptop find what one finds, which is how the tests check the distributed loop.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from siammm.core import ranks
from siammm.core.errors import InputError


def synchronised(module: nn.Module) -> nn.Module:
    """Make every BatchNorm of a module share its statistics among the ranks, if there are several.

    Parameters and buffers are not copied and keep their names. Call it once the module is on its device, and before it
    is wrapped or compiled.
    """
    if not ranks.active():
        return module
    if not any(tensor.is_cuda for tensor in (*module.parameters(), *module.buffers())):
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
        _leave_moments_uncompiled()
        # What timm's fused layers do after the normalisation.
        self.drop: nn.Module = nn.Identity()
        self.act: nn.Module = nn.Identity()

    @classmethod
    def like(cls, norm: _BatchNorm) -> SynchronisedBatchNorm:
        """The synchronised twin of a layer, with the same parameters and buffers."""
        twin = cls(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked", "drop", "act"):
            if getattr(norm, name, None) is not None:
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
        wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        mean, var, total = _uncompiled_moments(wide)
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            share = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
            assert self.running_mean is not None
            assert self.running_var is not None
            self.running_mean.lerp_(mean.detach().to(self.running_mean), share)
            self.running_var.lerp_((var.detach() * (total / (total - 1))).to(self.running_var), share)
        shape = (1, -1, *[1] * (input.ndim - 2))
        out = (wide - mean.to(wide).view(shape)) * (var + self.eps).rsqrt().to(wide).view(shape)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return self.act(self.drop(out.to(input.dtype)))


def _joint_moments(x: Tensor) -> tuple[Tensor, Tensor, float]:
    """Mean and variance of each channel over the samples of all ranks, in double precision, and how many there are."""
    channels, count = x.shape[1], x.numel() // x.shape[1]
    along, double = [0, *range(2, x.ndim)], x.double()
    # In double precision the second moment gives the joint variance without loss.
    sums = torch.cat([double.sum(along), double.square().sum(along), double.new_tensor([count])])
    sums = ranks.sum_over_ranks(sums)
    total = float(sums[-1].detach())
    if total < 2:
        raise InputError(
            f"BatchNorm got {total:.0f} values per channel from all ranks together, but it needs at least 2 to train."
        )
    mean = sums[:channels] / total
    return mean, (sums[channels:-1] / total - mean**2).clamp_min(0), total


_uncompiled_moments: Any = None


def _leave_moments_uncompiled() -> None:
    """Have ``_joint_moments`` left out of what torch compiles: a collective cannot be fused with anything.

    With the first layer, not when this module is imported: torch's compiler takes seconds to import.
    """
    global _uncompiled_moments
    if _uncompiled_moments is None:
        _uncompiled_moments = cast(Any, torch.compiler).disable(_joint_moments)


def _replaced(module: nn.Module) -> nn.Module:
    """Every plain BatchNorm below (or at) a module replaced by its twin."""
    if isinstance(module, _BatchNorm):
        return module if isinstance(module, SynchronisedBatchNorm) else SynchronisedBatchNorm.like(module)
    for name, child in module.named_children():
        module.add_module(name, _replaced(child))
    return module
