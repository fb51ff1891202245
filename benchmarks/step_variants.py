"""Changes of the step that may make it faster, applied to a run before its first step: experiments, not yet product.

    load = Workload(config, device, n_images=50_000)
    apply(load.training, ["grouped-updates", "one-after-another"])

A change that proves itself belongs into ``siammm.learn``. All but ``tf32``, ``max-autotune`` and ``small-views``
compute the same but for rounding; ``tests/bench/test_step_variants.py`` holds them to it.

Legend:  B images of a batch, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from siammm.learn.cuda import addresses, update
from siammm.learn.loop import Training
from siammm.learn.networks import Predictions, SiameseNetwork
from siammm.learn.objective import batch_loss

# What each does, for the table of results.
VARIANTS = {
    "untried-convolutions": "cuDNN guesses the best convolutions, and does not try them",
    "tf32": "float32 products keep 10 bits (augmentation, loss)",
    "coordinate-descent": "inductor tunes its kernels around its first guess",
    "max-autotune": "inductor tries templates for products and convolutions, and tunes as above",
    "autotune-in-graphs": "as max-autotune, with candidates timed within a captured graph",
    "batch-norm-aten": "BatchNorm by torch's own kernels (cuDNN), not by inductor's",
    "not-fused": "each view by itself, BatchNorm by inductor (--fused is off)",
    "paired": "as not-fused, but both views in one batch with statistics of their own, by inductor",
    "pad-stem": "the first convolution reads 8 channels, 5 of them zeros: cuDNN is slow with 3",
    "grouped-updates": "LARS and the momentum encoder's update by torch's grouped operations, not by our kernels",
    "one-after-another": "the momentum encoder after the online one, not beside it",
    "small-views": "views of 24 pixels (--view-size 24)",
    "plain-loss": "the loss by torch's own kernels, not compiled",
    "no-compile": "nothing compiled by inductor, but captured",
    "no-capture": "compiled, but not captured",
}


def set_globally(names: Sequence[str]) -> list[str]:
    """Settings of torch; returns those that this torch does not know."""
    from torch._inductor import config as inductor

    unknown: list[str] = []
    if "tf32" in names:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    if "autotune-in-graphs" in names:
        names = [*names, "max-autotune"]
    options: dict[str, dict[str, Any]] = {
        # Kernels that are timed one by one with their launches are ranked wrongly for a graph (pytorch's PR 179246).
        "autotune-in-graphs": {"autotune_cudagraph_benchmarking": True},
        "coordinate-descent": {"coordinate_descent_tuning": True},
        "max-autotune": {"max_autotune": True, "coordinate_descent_tuning": True},
        "batch-norm-aten": {"fallback_batch_norm": True},
    }
    for name in names:
        for option, value in options.get(name, {}).items():
            if hasattr(inductor, option):
                setattr(inductor, option, value)
            else:
                unknown.append(option)
    return unknown


def settings(names: Sequence[str]) -> dict[str, Any]:
    """Settings of training that a variant changes."""
    found: dict[str, Any] = {}
    if "no-compile" in names:
        found["compile"] = False
    if "not-fused" in names or "paired" in names:
        found["fused"] = False
    if "small-views" in names:
        found["view_size"] = 24
    return found


def apply(training: Training, names: Sequence[str]) -> None:
    """Change a run that has not taken a step."""
    for name in names:
        if name not in VARIANTS:
            raise ValueError(f"{name!r} is no variant; they are {', '.join(VARIANTS)}.")
    twin = training.accelerated
    if "paired" in names:
        pair(training.network)
    if "pad-stem" in names:
        pad_stems(training.network)
    if "no-capture" in names and twin is not None:
        twin.captures, twin.side_stream = False, None
    if "untried-convolutions" in names:
        cast(Any, update)._convolutions_tried = nullcontext
    if "one-after-another" in names and twin is not None:
        twin.side_stream = None
    if "grouped-updates" in names:
        addresses.supports = lambda *lists: False
    if "plain-loss" in names:
        training.pieces.loss = batch_loss


# -- both views in one batch -------------------------------------------------------------------------------------------


# Whether a batch holds two views now: a single one goes through the same layers when the bank is filled.
_holds_both = [False]


@contextmanager
def _both_views() -> Iterator[None]:
    _holds_both[0] = True
    try:
        yield
    finally:
        _holds_both[0] = False


class _Paired:
    """BatchNorm of two views that lie in one batch, one after the other: each is normalised by itself."""

    def forward(self, input: Tensor) -> Tensor:
        x, norm = input, cast(_BatchNorm, self)
        if not norm.training or not _holds_both[0]:
            return _BatchNorm.forward(norm, x)
        wide = x.unflatten(0, (2, -1)).float()
        over = [1, *range(3, wide.ndim)]
        var, mean = torch.var_mean(wide, over, correction=0, keepdim=True)
        y = (wide - mean) * torch.rsqrt(var + norm.eps)
        if norm.affine:
            shape = [1, 1, -1] + [1] * (wide.ndim - 3)
            y = y * norm.weight.view(shape) + norm.bias.view(shape)
        self._keep(mean.detach(), var.detach(), wide.numel() // (2 * wide.shape[2]))
        return y.to(x.dtype).flatten(0, 1)

    def _keep(self, mean: Tensor, var: Tensor, count: int) -> None:
        """The running statistics after the first view, then the second."""
        norm = cast(_BatchNorm, self)
        if norm.running_mean is None or norm.running_var is None or norm.momentum is None:
            return
        m = norm.momentum
        for running, found_2C in (
            (norm.running_mean, mean.view(2, -1)),
            (norm.running_var, var.view(2, -1) * (count / (count - 1))),
        ):
            running.copy_((1 - m) ** 2 * running + m * (1 - m) * found_2C[0] + m * found_2C[1])
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(2)


class PairedBatchNorm1d(_Paired, nn.BatchNorm1d): ...


class PairedBatchNorm2d(_Paired, nn.BatchNorm2d): ...


class PairedNetwork(SiameseNetwork):
    """The same networks, each called once with both views."""

    def forward(self, x_1: Tensor, x_2: Tensor, noise: tuple[Tensor, Tensor] | None = None) -> Predictions:
        with _both_views():
            z = self.encoder(_joined(x_1, x_2))
            v = z if noise is None else z + torch.cat(noise)
            if self.predictor is not None:
                v = self.predictor(v).float()
        (z_1, z_2), (v_1, v_2) = z.chunk(2), v.chunk(2)
        scores = None if self.prototypes is None else (self.scored(v_1), self.scored(v_2))
        return Predictions(v_1, v_2, z_1, z_2, scores)

    @torch.no_grad()
    def followed(self, x_1: Tensor, x_2: Tensor) -> tuple[Tensor, Tensor]:
        assert self.momentum_encoder is not None
        with _both_views():
            first, second = self.momentum_encoder(_joined(x_1, x_2)).chunk(2)
        return first, second


def _joined(x_1: Tensor, x_2: Tensor) -> Tensor:
    x = torch.cat([x_1, x_2])
    return x.contiguous(memory_format=torch.channels_last) if x.is_cuda else x


def pair(network: SiameseNetwork) -> None:
    """Let a network take both views in one batch; its weights and their names stay."""
    network.__class__ = PairedNetwork
    kinds = {nn.BatchNorm1d: PairedBatchNorm1d, nn.BatchNorm2d: PairedBatchNorm2d}
    for module in network.modules():
        if isinstance(module, _BatchNorm):
            # timm has a BatchNorm with its activation inside, which this is not made for.
            if type(module) not in kinds:
                raise ValueError(f"{type(module).__name__} cannot be paired.")
            module.__class__ = kinds[type(module)]


# -- the stem ----------------------------------------------------------------------------------------------------------


class PaddedConv2d(nn.Conv2d):
    """The same convolution with zeros beside its few channels: products want their inputs in eights."""

    def forward(self, input: Tensor) -> Tensor:
        missing = -input.shape[1] % 8
        padding = (0, 0, 0, 0, 0, missing)
        weight = functional.pad(self.weight, padding)
        x = functional.pad(input, padding)
        if input.is_cuda:
            x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
        return self._conv_forward(x, weight, self.bias)


def pad_stems(network: SiameseNetwork) -> None:
    for module in network.modules():
        if type(module) is nn.Conv2d and module.in_channels == 3 and module.padding_mode == "zeros":
            module.__class__ = PaddedConv2d
