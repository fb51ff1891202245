"""LARS and the momentum encoder's update on one flat buffer: an experiment for ``step_variants.py``.

Parameters, gradients, momentum buffers and the momentum encoder's parameters each become views of one long tensor, in
which every parameter starts at a multiple of a block. The update is then three steps, whatever the number of
parameters: sums of squares of each block, norms of each parameter from these, and one pass that reads weight, gradient,
buffer and follower once and writes three of them. That moves 36 bytes a parameter; the grouped operations of
``learn.optim`` and ``update_momentum`` move about 150.

Legend:  P values of all parameters with padding, B blocks, T parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from siammm.learn.loop import Training
from siammm.learn.optim import LARS

# Values of a block: a row of the sums. Most of the padding is at parameters of a BatchNorm, which are few.
BLOCK = 1024


class Flat:
    """The parameters of a run as views of flat buffers, and their update."""

    def __init__(self, training: Training, *, compiled: bool = True) -> None:
        optimiser, network = training.optimiser, training.network
        if not isinstance(optimiser, LARS) or network.momentum_encoder is None:
            raise ValueError("flat-update is for LARS with a momentum encoder.")
        self.optimiser = optimiser
        groups = {id(p): group for group in optimiser.param_groups for p in group["params"]}
        pairs = list(zip(network.encoder.parameters(), network.momentum_encoder.parameters(), strict=True))
        followed = {id(p) for p, _ in pairs}
        # Those that are followed first: the followers' buffer is then as long as the beginning of the others.
        params = [p for p, _ in pairs] + [p for p in network.parameters() if id(p) in groups and id(p) not in followed]
        device = params[0].device
        blocks = [-(-p.numel() // BLOCK) for p in params]
        starts = [0]
        for count in blocks:
            starts.append(starts[-1] + count)
        self.n_followed = starts[len(pairs)]
        self.p_BX, self.g_BX, self.b_BX = (torch.zeros(starts[-1], BLOCK, device=device) for _ in range(3))
        self.q_BX = torch.zeros(self.n_followed, BLOCK, device=device)
        for p, start in zip(params, starts, strict=False):
            state = optimiser.state[p]
            state["momentum_buffer"] = _moved(state["momentum_buffer"], self.b_BX, start)
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            with torch.no_grad():
                p.data = _moved(p.data, self.p_BX, start)
                p.grad = _moved(grad, self.g_BX, start)
        for (_, q), start in zip(pairs, starts, strict=False):
            q.data = _moved(q.data, self.q_BX, start)
        owner_B = torch.repeat_interleave(torch.arange(len(params)), torch.tensor(blocks))
        self.owner_B = owner_B.to(device)
        # One column a parameter: sums over its blocks are a product, which adds in a fixed order.
        self.member_TB = torch.nn.functional.one_hot(owner_B, len(params)).T.float().contiguous().to(device)
        excluded = torch.tensor([bool(groups[id(p)]["excluded"]) for p in params])
        decay = torch.tensor([float(groups[id(p)]["weight_decay"]) for p in params])
        self.scaled_T = (~excluded).to(device)
        self.decay_B1 = torch.where(excluded, 0.0, decay)[owner_B][:, None].to(device)
        first = optimiser.param_groups[0]
        self.momentum, self.trust = float(first["momentum"]), float(first["trust_coefficient"])
        self._update: Callable[..., None] = torch.compile(self._eager, dynamic=False) if compiled else self._eager

    @torch.no_grad()
    def __call__(self, follow: Tensor) -> None:
        """One update; ``follow`` is the momentum encoder's momentum, without dimensions."""
        lr, called_off = self.optimiser.param_groups[0]["lr"], cast(Any, self.optimiser).found_inf
        self._update(lr, called_off != 0, (1 - follow).float())

    def _eager(self, lr: Tensor, keeps: Tensor, weight: Tensor) -> None:
        update_BX = self.g_BX + self.decay_B1 * self.p_BX
        square_B2 = torch.stack([self.p_BX.square().sum(dim=1), update_BX.square().sum(dim=1)], dim=1)
        norm_T, length_T = (self.member_TB @ square_B2).sqrt().unbind(dim=1)
        known_T = self.scaled_T & (norm_T > 0) & (length_T > 0)
        ratio_T = torch.where(known_T, self.trust * norm_T / torch.where(known_T, length_T, 1.0), 1.0)
        new_b = update_BX * ratio_T[self.owner_B][:, None] + self.momentum * self.b_BX
        new_p = self.p_BX - lr * new_b
        new_p = torch.where(keeps, self.p_BX, new_p)
        self.b_BX.copy_(torch.where(keeps, self.b_BX, new_b))
        self.p_BX.copy_(new_p)
        self.q_BX.lerp_(new_p[: self.n_followed], torch.where(keeps, 0.0, weight))


def _moved(value: Tensor, flat_BX: Tensor, start: int) -> Tensor:
    """A view of the flat buffer with these values, shape and order in memory (channels-last stays so)."""
    view = flat_BX.view(-1).as_strided(value.shape, value.stride(), start * BLOCK)
    view.copy_(value)
    return view


def flatten(training: Training, *, compiled: bool = True) -> Flat:
    """Let a run that has not taken a step update its weights so: the optimiser's step waits for the follower's."""
    flat = Flat(training, compiled=compiled)
    optimiser, network = cast(Any, training.optimiser), cast(Any, training.network)
    assert isinstance(training.network, nn.Module)
    optimiser.step = lambda closure=None: None
    optimiser.zero_grad = lambda set_to_none=False: flat.g_BX.zero_()
    network.update_momentum = flat
    return flat
