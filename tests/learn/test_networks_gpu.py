"""A training step of the networks on a GPU, captured in a graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from siammm.learn.optim import build_optimiser
from tests.learn.test_networks import loss_of, small_network

pytestmark = pytest.mark.gpu


@pytest.mark.filterwarnings("ignore")  # the compiler's own: what it imports is deprecated
@pytest.mark.parametrize(("name", "compiled"), [("lars", False), ("sgd", False), ("adamw", False), ("lars", True)])
def test_a_captured_training_step_is_the_eager_one(name: str, compiled: bool) -> None:
    """Forward in bf16, targets, backward, optimiser and momentum update: captured once, replayed with other values."""
    rate = {"lars": 1.0, "sgd": 0.1, "adamw": 1e-3}[name]
    steps = [(rate, 0.9, 0.0), (0.7 * rate, 0.95, 0.0), (rate, 0.99, 1.0), (0.3 * rate, 0.99, 0.0)]
    batches = torch.randn(len(steps), 2, 64, 3, 8, 8, generator=torch.Generator().manual_seed(0)).cuda()
    found = {mode: _trained(name, batches, steps, mode, compiled=compiled) for mode in ("eager", "captured")}
    torch.testing.assert_close(found["captured"], found["eager"], rtol=1e-2, atol=1e-3)


def _trained(name: str, batches: Tensor, steps: list[Any], mode: str, *, compiled: bool) -> dict[str, Tensor]:
    network = small_network().cuda().to(memory_format=torch.channels_last)
    start = copy.deepcopy(network.state_dict())
    lr, momentum, found_inf = (torch.zeros((), device="cuda", dtype=kind) for kind in (None, torch.float64, None))
    optimiser: Any = build_optimiser(name, network, lr=lr, weight_decay=1e-4)
    optimiser.found_inf = found_inf
    x = torch.zeros_like(batches[0])
    forward = torch.compile(network) if compiled else network

    def step() -> None:
        optimiser.zero_grad(set_to_none=False)
        x_1, x_2 = (view.contiguous(memory_format=torch.channels_last) for view in x)
        with torch.autocast("cuda", torch.bfloat16):
            v_1, v_2, z_1, z_2, _ = forward(x_1, x_2)
            targets = network.targets(x_1, x_2, z_1, z_2)
        loss_of(v_1, v_2, *targets).backward()
        optimiser.step()
        network.update_momentum(momentum)

    # A step that is called off, with a momentum of 1, changes nothing but BatchNorm's statistics: a warm-up for free.
    x.copy_(batches[0])
    found_inf.fill_(1)
    momentum.fill_(1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    for key, value in network.state_dict().items():
        if "running" not in key and "tracked" not in key:
            assert torch.equal(value, start[key]), key
    with torch.no_grad():
        for key, value in network.state_dict().items():
            value.copy_(start[key])
    run = step
    if mode == "captured":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    for batch, values in zip(batches, steps, strict=True):
        x.copy_(batch)
        for cell, value in zip((lr, momentum, found_inf), values, strict=True):
            cell.fill_(value)
        run()
    torch.cuda.synchronize()
    return {key: value.float() for key, value in network.state_dict().items()}
