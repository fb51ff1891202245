"""The optimisers behind one interface.

All of them can be captured in a CUDA graph: the learning rate may be a 0-d tensor that is filled before each replay,
their state exists from the start, and a step can be called off on the device: where the optimiser's attribute
``found_inf``, a 0-d float32 tensor on the parameters' device, holds 1, ``step`` changes nothing at all. This is the
protocol of torch's fused optimisers.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from siammm.core.errors import InputError
from siammm.learn.cuda.optimisers import FusedLARS, FusedMuon
from siammm.learn.lars import LARS, check_settings
from siammm.learn.muon import Muon, matrices

OptimiserName = Literal["lars", "muon", "sgd", "adamw"]
OPTIMISERS: tuple[OptimiserName, ...] = get_args(OptimiserName)


def build_optimiser(
    name: str,
    module: nn.Module,
    *,
    lr: float | Tensor,
    weight_decay: float = 0.0,
    momentum: float = 0.9,
    trust_coefficient: float = 0.001,
    turned: nn.Module | None = None,
    fused: bool = False,
) -> torch.optim.Optimizer:
    """An optimiser with groups for the weights, and for the biases and other 1-D parameters, which get no decay.

    Parameters without gradients, such as a momentum encoder's, are left out. ``momentum`` is the first beta of AdamW,
    ``trust_coefficient`` that of LARS and Muon. Muon has a third group, before these: the matrices that it turns, those
    of the part ``turned`` or of the whole module. ``fused`` runs LARS and Muon as Triton kernels where they fit. The
    state is made here and not at the first step, which may be captured or called off.
    """
    if name not in OPTIMISERS:
        raise InputError(f"optimiser is {name!r}, but it must be one of {', '.join(OPTIMISERS)}.")
    check_settings(lr, weight_decay, momentum)
    weights: list[Tensor] = []
    others: list[Tensor] = []
    for key, p in module.named_parameters():
        if p.requires_grad:
            (others if p.ndim <= 1 or key.rsplit(".", 1)[-1] == "bias" else weights).append(p)
    if not weights and not others:
        raise InputError("There is no parameter to train: none of the module's asks for a gradient.")
    rest: dict[str, Any] = {"params": others, "weight_decay": 0.0}
    groups: list[dict[str, Any]] = [{"params": weights, "weight_decay": weight_decay}, rest]
    if name in ("lars", "muon"):
        rest["excluded"] = True
        if name == "lars":
            return (FusedLARS if fused else LARS)(groups, lr, momentum=momentum, trust_coefficient=trust_coefficient)
        turning = {id(p) for p in matrices(module if turned is None else turned)}
        if not turning:
            raise InputError("There is no matrix that Muon could turn; use another optimiser, such as lars.")
        groups[0]["params"] = [p for p in weights if id(p) not in turning]
        groups.insert(0, {"params": [p for p in weights if id(p) in turning], "weight_decay": 0.0, "turned": True})
        return (FusedMuon if fused else Muon)(groups, lr, momentum=momentum, trust_coefficient=trust_coefficient)
    # Only the fused forms know found_inf; Metal's and the like are asked for as they come.
    native = all(p.device.type in ("cpu", "cuda") for p in (*weights, *others))
    optimiser: torch.optim.Optimizer
    if name == "sgd":
        optimiser = torch.optim.SGD(groups, lr, momentum=momentum, fused=native)
    else:
        capturable = any(p.is_cuda for p in (*weights, *others))
        optimiser = torch.optim.AdamW(groups, lr, betas=(momentum, 0.999), fused=native, capturable=capturable)
    _fill_state(optimiser)
    return optimiser


def _fill_state(optimiser: torch.optim.Optimizer) -> None:
    """Zeros for everything that the optimiser will keep, as its first step would make them."""
    for group in optimiser.param_groups:
        for p in group["params"]:
            state = optimiser.state[p]
            if isinstance(optimiser, torch.optim.AdamW):
                on_device = group["fused"] or group["capturable"]
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if on_device else "cpu")
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            elif group["momentum"]:
                state["momentum_buffer"] = torch.zeros_like(p)
