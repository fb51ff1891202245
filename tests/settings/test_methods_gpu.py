"""SiamMM's peers on a GPU: captured and step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from siammm.data.sources import open_source
from siammm.learn.loop import Training
from siammm.settings.training import MethodName
from tests.learn.small_runs import run_through, small_images
from tests.settings.small_methods import PEERS, small_method

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("repeatable")]


def losses_on(device: str, name: MethodName, *, captured: bool) -> list[float]:
    """The losses of a run in which the clusters, the queue and the prototypes each begin to count on the way."""
    late: dict[str, dict[str, Any]] = {"swav": {"queue_after": 0.4}, "propos": {"cluster_after": 0.4}}
    settings = {"epochs": 3, "learning_rate": 0.01, "precision": "fp32", "compile": False, **late.get(name, {})}
    training = Training(small_method(name, **settings), open_source(small_images(128)), torch.device(device))
    twin = training.accelerated
    if twin is not None:
        twin.captures &= captured
    run_through(training)
    training.close()
    assert bool(twin and twin.graphs) == (captured and device == "cuda")
    return [row["loss"] for row in training.metrics]


@pytest.mark.parametrize("name", PEERS)
def test_a_captured_peer_trains_as_one_step_by_step(name: MethodName) -> None:
    np.testing.assert_allclose(
        losses_on("cuda", name, captured=True), losses_on("cuda", name, captured=False), rtol=2e-2, atol=5e-3
    )
