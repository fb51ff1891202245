"""Two processes, each with its share of the batch, normalise and train as one with the whole. Real gloo, here."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from siammm.core import processes, ranks
from siammm.core.device import choose_device
from siammm.core.errors import InputError
from siammm.learn.batchnorm import SynchronisedBatchNorm, synchronised
from siammm.learn.optim import build_optimiser
from tests.distributed import batchnorm_cases as cases
from tests.distributed.launch import run_ranks
from tests.nursery import Nursery

WORLD = 2
JOINED = ("out", "grad", "evaluated")


@pytest.fixture(scope="module")
def two(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    folder = tmp_path_factory.mktemp("batchnorm")
    run_ranks(nursery, "batchnorm_worker.py", folder, WORLD, timeout=200)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(WORLD)]


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_two_ranks_normalise_as_one(case: cases.Case, two: list[dict[str, Any]]) -> None:
    found = [rank["norms"][case.name] for rank in two]
    one = cases.passed(cases.layer(case), case, cases.joint(case))
    tolerance = 1e-2 if case.offset else 1e-5  # float32 holds 1000 + x to 6e-5, and gradients sum that up
    for key, expected in one.items():
        if key in JOINED:
            torch.testing.assert_close(
                torch.cat([rank[key] for rank in found]), expected, rtol=tolerance, atol=tolerance
            )
        else:
            for rank in found:
                torch.testing.assert_close(rank[key], expected, rtol=tolerance, atol=tolerance)


def test_two_ranks_train_the_network_that_one_trains(two: list[dict[str, Any]]) -> None:
    network = cases.network()
    optimiser = build_optimiser("lars", network, lr=0.5, weight_decay=1e-4)
    for number, (x_1, x_2) in enumerate(cases.batches()):
        v_1, v_2, z_1, z_2, _ = network(x_1, x_2)
        targets = network.targets(x_1, x_2, z_1, z_2)
        optimiser.zero_grad()
        cases.loss_of(v_1, v_2, *targets).backward()
        optimiser.step()
        network.update_momentum(0.9)
        for rank in two:
            torch.testing.assert_close(rank["trained"]["embeddings"][number], v_1.detach(), rtol=1e-3, atol=1e-4)
    for rank in two:
        assert list(rank["trained"]["state"]) == list(network.state_dict())
        torch.testing.assert_close(rank["trained"]["state"], dict(network.state_dict()), rtol=1e-3, atol=1e-5)


def test_ranks_know_each_other(two: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(two):
        assert rank["context"] == [number, WORLD, number, "cpu"]
        assert rank["functions"] == [number, WORLD, number == 0]
        assert rank["gathered"].tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2
        assert not rank["gathered"].requires_grad
        assert rank["gathered numbers"].tolist() == [0, 1]
        assert rank["from rank 0"] == 7
        assert "1 values per channel" in rank["too few"]


def test_one_process_keeps_its_layers() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    assert synchronised(network) is network
    assert type(network[1]) is nn.BatchNorm2d


def test_alone_the_layer_is_plain_batchnorm() -> None:
    for case in cases.CASES:
        if case.rows[0] and case.rows[1]:
            plain: Any = cases.layer(case)
            own = SynchronisedBatchNorm.like(copy.deepcopy(plain))
            batch = cases.joint(case)
            torch.testing.assert_close(cases.passed(own, case, batch), cases.passed(plain, case, batch))
    with pytest.raises(InputError, match="1 dimensions"):
        SynchronisedBatchNorm(3)(torch.ones(3))


def test_the_twin_shares_what_the_layer_held() -> None:
    plain = nn.BatchNorm1d(3).eval()
    twin = SynchronisedBatchNorm.like(plain)
    assert twin.weight is plain.weight
    assert twin.running_var is plain.running_var
    assert not twin.training
    assert list(twin.state_dict()) == list(plain.state_dict())


def test_timms_fused_layer_keeps_its_activation() -> None:
    from timm.layers.norm_act import BatchNormAct2d

    plain: Any = BatchNormAct2d(3, act_layer=nn.SiLU)
    x = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(SynchronisedBatchNorm.like(copy.deepcopy(plain))(x), plain(x))


def test_alone_every_function_is_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with processes.setup("cpu") as context:
        assert context == processes.Context(0, 1, 0, torch.device("cpu"))
    assert (ranks.rank(), ranks.world_size(), ranks.is_writer()) == (0, 1, True)
    batch = torch.ones(2, requires_grad=True)
    assert not ranks.all_gather_batch(batch).requires_grad
    assert ranks.broadcast_int(7, torch.device("cpu")) == 7


@pytest.mark.parametrize(
    ("device", "environment", "says"),
    [
        ("auto", {"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ("auto", {"LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1'"),
        ("cpu", {"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2, but WORLD_SIZE is 2"),
        ("cpu", {"WORLD_SIZE": "2"}, "RANK and MASTER_ADDR and MASTER_PORT"),
        ("tpu", {}, "The device 'tpu' is not available here"),
        ("meta", {}, "The device 'meta' is not available here"),
    ],
)
def test_setup_refuses(device: str, environment: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=says):
        processes.setup(device)


def test_each_process_takes_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", 1, 4) == torch.device("cuda", 1)
    assert choose_device("cuda:1", 0, 1) == torch.device("cuda", 1)
    with pytest.raises(InputError, match=r"GPU 2 was asked for, but this machine has 2;"):
        choose_device("cuda", 2, 4)
    with pytest.raises(InputError, match=r"'cuda:1' is one GPU, but there are 4 processes"):
        choose_device("cuda:1", 0, 4)
