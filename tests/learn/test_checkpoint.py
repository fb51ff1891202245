"""Checkpoints: what is read is what was written, to the bit, or it is refused."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from siammm.core.errors import InputError, StoredFileError
from siammm.learn import checkpoint
from siammm.learn.checkpoint import LAST, PREVIOUS
from siammm.learn.optim import build_optimiser
from tests.learn.small_runs import check_same_bits

TENSORS = {
    "float32": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
    "float64": torch.linspace(0, 1, 7, dtype=torch.float64),
    "bfloat16": torch.tensor([1.0, -0.0, math.inf, math.nan], dtype=torch.bfloat16),
    "int64": torch.arange(5) - 2,
    "uint8": torch.arange(256).to(torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "number": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
    "turned": torch.arange(6.0).reshape(2, 3).T,
    "not finite": torch.tensor([math.nan, -math.inf, 0.0, -0.0]),
}
FACTS: dict[str, Any] = {"epoch": 3, "log_likelihood": math.inf, "set_aside": {"ä/ö.png": "is empty"}, "none": None}


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "new" / "folder", TENSORS, FACTS)
    tensors, facts = checkpoint.read(path)
    check_same_bits(tensors, TENSORS)
    assert facts == FACTS
    assert checkpoint.load(path.parent)[1:] == (FACTS, path, None)


def test_a_number_that_is_none_is_kept_as_such(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"x": torch.zeros(1)}, {"log_likelihood": math.nan})
    assert math.isnan(checkpoint.load(tmp_path)[1]["log_likelihood"])


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    for number in range(4):
        checkpoint.save(tmp_path, {"x": torch.full((2,), float(number))}, {"number": number})
        assert checkpoint.load(tmp_path)[1] == {"number": number}
    assert sorted(path.name for path in tmp_path.iterdir()) == [LAST, PREVIOUS]
    assert checkpoint.read(tmp_path / PREVIOUS)[1] == {"number": 2}


def test_saving_takes_a_copy(tmp_path: Path) -> None:
    """Views of one tensor, tensors that share memory and parameters are all written as they are now."""
    base = torch.arange(6.0)
    checkpoint.save(tmp_path, {"all": base, "part": base[2:4], "same": base, "learnt": nn.Parameter(base)}, {})
    base.zero_()
    tensors = checkpoint.load(tmp_path)[0]
    assert tensors["all"].tolist() == tensors["same"].tolist() == tensors["learnt"].tolist() == list(range(6))
    assert tensors["part"].tolist() == [2, 3]


def test_no_pickle_and_nothing_but_safetensors(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, TENSORS, FACTS)
    with safe_open(path, framework="pt") as stored:
        assert set(stored.keys()) == TENSORS.keys()
        assert json.loads(stored.metadata()["facts"])["epoch"] == 3


def test_a_checkpoint_is_verified_before_it_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, {"x": torch.zeros(3)}, {"number": 0})

    def careless(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, path, metadata=metadata)

    monkeypatch.setattr(checkpoint, "save_file", careless)
    with pytest.raises(StoredFileError, match="damaged"):
        checkpoint.save(tmp_path, {"x": torch.zeros(3)}, {"number": 1})
    assert [path.name for path in tmp_path.iterdir()] == [LAST]
    assert checkpoint.load(tmp_path)[1] == {"number": 0}


@pytest.mark.parametrize("moves", [0, 1])
def test_a_move_that_fails_loses_nothing(moves: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, {"x": torch.zeros(3)}, {"number": 0})
    done: list[Any] = []

    def replace(source: Path, target: Path) -> None:
        if len(done) == moves:
            raise OSError(28, "No space left on device")
        done.append(target)
        Path(source).rename(target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(InputError, match="No space left on device"):
        checkpoint.save(tmp_path, {"x": torch.zeros(3)}, {"number": 1})
    assert checkpoint.load(tmp_path)[1] == {"number": 0}
    assert len(list(tmp_path.iterdir())) == 1


def test_an_empty_folder_says_so(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(StoredFileError, match="no checkpoint"):
            checkpoint.load(folder)


def test_another_format_says_which(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / LAST, metadata={"format": "2", "facts": "{}", "digest": "0"})
    with pytest.raises(StoredFileError, match="has format 2, but this version of siammm reads 1"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("header", [None, {"facts": "no JSON"}, {"facts": "3"}, {"format": "1"}])
def test_a_file_of_somebody_else_is_refused(header: dict[str, str] | None, tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / LAST, metadata=header)
    with pytest.raises(StoredFileError, match="not a checkpoint of siammm, or it is damaged"):
        checkpoint.load(tmp_path)


def test_every_bit_counts(tmp_path: Path) -> None:
    """Whichever bit of the file changes, it is refused: what is read is never wrong."""
    path = checkpoint.save(tmp_path, {"x": torch.arange(4.0), "y": torch.ones(2, dtype=torch.int64)}, {"epoch": 1})
    whole = path.read_bytes()
    for place in range(0, len(whole), 3):
        spoilt = bytearray(whole)
        spoilt[place] ^= 1 << (place % 8)
        path.write_bytes(spoilt)
        try:
            found = checkpoint.read(path)
        except StoredFileError:
            continue
        # Only spaces that fill up the header may differ.
        assert found[1] == {"epoch": 1}
        assert found[0]["x"].tolist() == [0, 1, 2, 3]
        assert whole[place : place + 1] == b" "


# -- optimisers and modules


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def step(model: nn.Module, optimiser: torch.optim.Optimizer, seed: int) -> None:
    optimiser.zero_grad()
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    optimiser.step()


@pytest.mark.parametrize("name", ["lars", "sgd", "adamw"])
def test_an_optimiser_goes_on_as_if_it_had_not_been_stored(name: str, tmp_path: Path) -> None:
    models = [network(0), network(1)]
    rates = [torch.tensor(0.1), torch.tensor(0.1)]
    optimisers = [
        build_optimiser(name, model, lr=rate, weight_decay=1e-2) for model, rate in zip(models, rates, strict=True)
    ]
    for seed in range(3):
        step(models[0], optimisers[0], seed)
    tensors = {
        **checkpoint.with_prefix("network", models[0].state_dict()),
        **checkpoint.with_prefix("optimiser", checkpoint.optimiser_tensors(optimisers[0])),
    }
    checkpoint.save(tmp_path, tensors, {})
    stored = checkpoint.load(tmp_path)[0]
    checkpoint.restore_module(models[1], checkpoint.grouped(stored, "network"))
    checkpoint.restore_optimiser(optimisers[1], checkpoint.grouped(stored, "optimiser"))
    for seed in range(3, 6):
        for rate in rates:
            rate.fill_(0.1 / seed)  # whoever owns the rate goes on changing it
        for model, optimiser in zip(models, optimisers, strict=True):
            step(model, optimiser, seed)
    check_same_bits(models[0].state_dict(), models[1].state_dict())
    check_same_bits(*(checkpoint.optimiser_tensors(optimiser) for optimiser in optimisers))


def test_rates_and_other_settings_stay_the_optimisers_own() -> None:
    rate = torch.tensor(0.5)
    first, second = network(0), network(1)
    stored = checkpoint.optimiser_tensors(build_optimiser("sgd", first, lr=0.1, momentum=0.9))
    optimiser = build_optimiser("sgd", second, lr=rate, momentum=0.8, weight_decay=0.3)
    checkpoint.restore_optimiser(optimiser, stored)
    assert all(group["lr"] is rate for group in optimiser.param_groups)
    assert [group["weight_decay"] for group in optimiser.param_groups] == [0.3, 0.0]
    assert {group["momentum"] for group in optimiser.param_groups} == {0.8}


@pytest.mark.parametrize("change", ["missing", "more", "shape"])
def test_a_module_takes_all_of_its_state_or_none(change: str) -> None:
    state = dict(network(0).state_dict())
    if change == "missing":
        del state["0.weight"]
    elif change == "more":
        state["5.weight"] = torch.zeros(1)
    else:
        state["0.weight"] = torch.zeros(9, 9)
    with pytest.raises(StoredFileError, match="another network"):
        checkpoint.restore_module(network(1), state)


def test_prefixes() -> None:
    tensors = {"a": torch.zeros(1), "b/c": torch.ones(1)}
    named = checkpoint.with_prefix("x", tensors) | checkpoint.with_prefix("xy", tensors)
    assert set(named) == {"x/a", "x/b/c", "xy/a", "xy/b/c"}
    check_same_bits(checkpoint.grouped(named, "x"), tensors)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lars"])
def test_an_optimiser_of_channels_last_weights_goes_on_as_it_would_have(name: str) -> None:
    """A file keeps no memory layout, and the fused optimisers walk through memory."""

    def trained(steps: int, state: dict[str, torch.Tensor] | None = None) -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(0)
        module = torch.nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        optimiser = build_optimiser(name, module, lr=0.1, weight_decay=1e-3)
        if state is not None:
            module.load_state_dict({key: state[key] for key in ("weight", "bias")})
            restored = {key: value.contiguous() for key, value in state.items() if "." in key}
            checkpoint.restore_optimiser(optimiser, restored)
        for step in range(steps, 4):
            optimiser.zero_grad()
            generator = torch.Generator().manual_seed(step)
            module(torch.randn(2, 4, 8, 8, generator=generator)).square().sum().backward()
            optimiser.step()
            if state is None and step == 1:
                saved.update(module.state_dict() | checkpoint.optimiser_tensors(optimiser))
                for key in saved:
                    saved[key] = saved[key].clone(memory_format=torch.contiguous_format)
        return module, optimiser

    saved: dict[str, torch.Tensor] = {}
    whole, _ = trained(0)
    resumed, _ = trained(2, saved)
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
