"""The losses on a GPU: as on the CPU, without waiting for the device, and in a captured graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.learn.loss_problems import Problem, every_loss, gradient

pytestmark = pytest.mark.gpu


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@every_loss
def test_runs_on_the_gpu_without_waiting_and_in_a_captured_graph(loss: Callable[[Tensor, Problem], Tensor]) -> None:
    problem, expected = Problem(device="cuda"), loss(Problem().v_1, Problem())
    torch.testing.assert_close(loss(problem.v_1, problem).cpu(), expected)
    v = problem.v_1.detach().float().requires_grad_()

    def step(v: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            value = loss(v, problem)
        return value.detach(), gradient(value, v)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            for _ in range(3):
                step(v)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(v)
    with torch.no_grad():
        v.neg_()
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(captured, step(v.detach().clone().requires_grad_()))
