"""LARS and Muon by Triton kernels: the same steps as ``learn/lars.py`` and ``learn/muon.py``, in fewer passes.

Where the kernels do not fit (another type, gradients in another memory layout) the plain step is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from siammm.learn.cuda import addresses, muon_kernels
from siammm.learn.cuda.muon_kernels import TurnKernels
from siammm.learn.cuda.update_kernels import LarsKernels
from siammm.learn.lars import LARS
from siammm.learn.muon import Muon, matrix_shape, newton_schulz, reach

# Most products are too small to fill a GPU, so several run at a time, on streams beside each other.
_STREAMS = 4


class FusedLARS(LARS):
    """LARS whose whole step is three kernels."""

    def _move_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        if not self._move_by_kernels(groups):
            super()._move_groups(groups)

    def _move_by_kernels(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Take the step, if the kernels fit; whether they do."""
        first = groups[0]
        shared = ("lr", "momentum", "trust_coefficient")
        if not all(_same(group[name], first[name]) for group in groups for name in shared):
            return False
        pairs = [(p, group) for group in groups for p in group["params"] if p.grad is not None]
        params, grads = [p for p, _ in pairs], [p.grad for p, _ in pairs]
        buffers = [self._buffer(p) for p in params]
        if not addresses.supports(params, grads, buffers):
            return False
        decays = [0.0 if group["excluded"] else float(group["weight_decay"]) for _, group in pairs]
        scaled = [not group["excluded"] for _, group in pairs]
        made_for = (params[0].device, *(p.numel() for p in params), *decays, *scaled)
        kernels = self._made("_kernels", made_for, lambda: LarsKernels(params, decays, scaled))
        if kernels is None:
            return False
        kernels(params, grads, buffers, found_inf=self.found_inf, **{name: first[name] for name in shared})
        return True

    def _made(self, name: str, made_for: Any, make: Callable[[], Any]) -> Any:
        """The kernels for these parameters, made once; None during a capture, which cannot copy from the host.

        Which parameters have gradients may change, so there may be several. A copy of the optimiser makes its own.
        """
        made: dict[Any, Any] = self.__dict__.setdefault(name, {})
        if made_for not in made and not addresses.capturing():
            made[made_for] = make()
        return made.get(made_for)


class FusedMuon(Muon, FusedLARS):
    """Muon whose matrices turn by six kernels around the products, which run on several streams."""

    def _turn(self, params: list[Tensor], group: dict[str, Any]) -> None:
        if not self._turn_by_kernels(params, group):
            super()._turn(params, group)

    def _turn_by_kernels(self, params: list[Tensor], group: dict[str, Any]) -> bool:
        """Take the step of all matrices at once, if the kernels fit; whether they do."""
        params = sorted(params, key=matrix_shape)  # those of one shape side by side
        grads, buffers = [cast(Tensor, p.grad) for p in params], [self._buffer(p) for p in params]
        if not muon_kernels.supports(params, grads, buffers):
            return False
        made_for = (params[0].device, *(p.shape for p in params))
        kernels = self._made("_turn_kernels", made_for, lambda: TurnKernels(params))
        if kernels is None:
            return False
        streams, settings = self._streams(params[0].device), {name: group[name] for name in ("lr", "momentum")}
        settings |= {"reach": reach(group), "found_inf": self.found_inf}
        kernels(lambda stacks: _make_orthogonal(stacks, streams), params, grads, buffers, **settings)
        return True

    def _streams(self, device: torch.device) -> list[torch.cuda.Stream]:
        """The same in every step: each has a workspace of its own for products."""
        made: dict[torch.device, list[torch.cuda.Stream]] = self.__dict__.setdefault("_made_streams", {})
        if device.type == "cuda" and device not in made:
            made[device] = [torch.cuda.Stream(device) for _ in range(_STREAMS)]
        return made.get(device, [])


def _make_orthogonal(stacks: Sequence[tuple[Tensor, Tensor]], streams: Sequence[torch.cuda.Stream]) -> None:
    """Write the orthogonal form of the first of each pair, of length 1, into the second."""
    if not streams:
        for x_MRC, out_MRC in stacks:
            newton_schulz(x_MRC, out_MRC)
        return
    here = torch.cuda.current_stream(stacks[0][0].device)
    for stream in streams:
        stream.wait_stream(here)
    # The longest first, each to the stream that has the least to do.
    loads = [0] * len(streams)
    for x_MRC, out_MRC in sorted(stacks, key=lambda pair: -_work(pair[0])):
        number = loads.index(min(loads))
        loads[number] += _work(x_MRC)
        with torch.cuda.stream(streams[number]):
            newton_schulz(x_MRC, out_MRC)
    for stream in streams:
        here.wait_stream(stream)


def _work(x_MRC: Tensor) -> int:
    """What the products of these matrices cost, up to a factor."""
    return x_MRC.numel() * min(x_MRC.shape[1:])


def _same(one: float | Tensor, other: float | Tensor) -> bool:
    """Whether two settings are the same; tensors by identity, since reading a value would wait for the GPU."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    return one == other
