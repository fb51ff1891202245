"""The optimisers behind one interface.

All of them can be captured in a CUDA graph: the learning rate may be a 0-d tensor that is filled before each replay,
their state exists from the start, and a step is called off on the device. For that, set the optimiser's attribute
``found_inf`` to a 0-d float32 tensor on the parameters' device: where it holds 1, ``step`` changes nothing at all. This
is the protocol of torch's fused optimisers and of ``torch.amp.GradScaler``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    parameters: nn.Module | Iterable[nn.Module] | Iterable[tuple[str, Tensor]],
    *,
    lr: float | Tensor,
    weight_decay: float = 0.0,
    momentum: float = 0.9,
    trust_coefficient: float = 0.001,
    turned: nn.Module | None = None,
    fused: bool = False,
) -> torch.optim.Optimizer:
    """An optimiser with groups for the weights, and for the biases and other 1-D parameters, which get no decay.

    ``parameters`` is a module, several, or named parameters; those without gradients, such as a momentum encoder's, are
    left out. ``momentum`` is the first beta of AdamW, ``trust_coefficient`` that of LARS and Muon. Muon has a
    third group, before these: the matrices that it turns, which are those of the module ``turned``, or of all modules.
    ``fused`` takes the steps of LARS and Muon by Triton kernels where they fit, as on a GPU in float32.
    The state is made here and not at the first step: a captured first step would make it anew at every replay, and
    torch's fused SGD leaves it unset if that step is called off.
    """
    if name not in OPTIMISERS:
        raise InputError(f"optimiser is {name!r}, but it must be one of {', '.join(OPTIMISERS)}.")
    check_settings(lr, weight_decay, momentum)
    parts = [parameters] if isinstance(parameters, nn.Module) else list(parameters)
    weights, others = _split(parts)
    groups: list[dict[str, Any]] = [
        {"params": weights, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    if name in ("lars", "muon"):
        groups[1]["excluded"] = True
        if name == "lars":
            return (FusedLARS if fused else LARS)(groups, lr, momentum=momentum, trust_coefficient=trust_coefficient)
        modules = [part for part in parts if isinstance(part, nn.Module)] if turned is None else [turned]
        turning = {id(p) for module in modules for p in matrices(module)}
        if not turning:
            raise InputError("There is no matrix that Muon could turn; use another optimiser, such as lars.")
        groups[0]["params"] = [p for p in weights if id(p) not in turning]
        turned_group = {"params": [p for p in weights if id(p) in turning], "weight_decay": 0.0, "turned": True}
        groups.insert(0, turned_group)
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


def _split(parts: Sequence[nn.Module | tuple[str, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """Weights, and what gets no decay: every trained parameter once."""
    named: list[tuple[str, Tensor]] = []
    for part in parts:
        named += part.named_parameters() if isinstance(part, nn.Module) else [part]
    trained = {id(p): (name, p) for name, p in named if p.requires_grad}
    if not trained:
        raise InputError("There is no parameter to train: none of those given asks for a gradient.")
    plain = {key for key, (name, p) in trained.items() if p.ndim <= 1 or name.rsplit(".", 1)[-1] == "bias"}
    weights = [p for key, (_, p) in trained.items() if key not in plain]
    return weights, [p for key, (_, p) in trained.items() if key in plain]


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
