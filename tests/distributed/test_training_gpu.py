"""Two processes that share one GPU train as one does, with the fused kernels and without. Joined by gloo.

NCCL wants a GPU for each process, so its part, that a collective waits in a stream of the GPU, is not tested here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import run_ranks
from tests.distributed.training_worker import prepared
from tests.learn.small_runs import measured, run_through
from tests.nursery import Nursery

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("repeatable")]

COMMON: dict[str, Any] = {"precision": "fp32", "compile": False, "epochs": 1}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"fused": False},
    "fused": {"fused": None},
    "fused, resnet": {"fused": None, "backbone": "resnet18", "optimiser": "lars"},
}


@pytest.fixture(scope="module")
def two(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each of two ranks found, by case."""
    folder = tmp_path_factory.mktemp("training")
    cases = [{"name": name, "settings": COMMON | CASES[name], "device": "cuda:0"} for name in CASES]
    (folder / "cases.json").write_text(json.dumps(cases))
    run_ranks(nursery, "training_worker.py", folder, 2, timeout=500)
    return {name: [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(2)] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_on_one_gpu_train_as_one(name: str, two: dict[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    case = {"settings": COMMON | CASES[name], "device": "cuda:0"}
    training = prepared(case, tmp_path)
    assert training.accelerated is not None
    assert bool(training.network.fused) == (CASES[name]["fused"] is None)
    one = measured(run_through(training))
    first, second = two[name]
    assert first["measured"] == second["measured"]
    assert first["weight"] == second["weight"]
    assert bool(first["fused"]) == bool(training.network.fused)
    for row, expected in zip(first["measured"], one, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], abs=2e-3)
        assert row["n_clusters"] == expected["n_clusters"]
