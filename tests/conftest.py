"""Shared data. Threads are few: the suite must behave on a laptop and on a shared machine alike."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from siammm.mixture import vmf
from tests.nursery import Nursery

# Tests that need a GPU also run from a bare checkout, where tyro may be absent.
HAS_TYRO = importlib.util.find_spec("tyro") is not None
needs_command_line = pytest.mark.skipif(not HAS_TYRO, reason="tyro is not installed, and the command line needs it")


@dataclass(frozen=True)
class Known:
    """Samples of a mixture whose parameters are known."""

    X: np.ndarray
    y: np.ndarray
    mean_directions: np.ndarray
    concentrations: np.ndarray
    weights: np.ndarray


def known_mixture(*, k: int, d: int, n: int, low: float, high: float, seed: int, uneven: float = 4.0) -> Known:
    generator = torch.Generator().manual_seed(seed)
    mu = torch.nn.functional.normalize(torch.randn(k, d, generator=generator, dtype=torch.float64), dim=1)
    kappa = torch.linspace(low, high, k, dtype=torch.float64)[torch.randperm(k, generator=generator)]
    weight = torch.linspace(1, uneven, k, dtype=torch.float64)
    count = (n * weight / weight.sum()).round().long()
    rows = [vmf.sample(mu[i], float(kappa[i]), int(count[i]), generator=generator) for i in range(k)]
    order = torch.randperm(int(count.sum()), generator=generator)
    y = torch.arange(k).repeat_interleave(count)[order]
    return Known(
        X=torch.cat(rows)[order].numpy(),
        y=y.numpy(),
        mean_directions=mu.numpy(),
        concentrations=kappa.numpy(),
        weights=(count / count.sum()).numpy(),
    )


@pytest.fixture(scope="session")
def twenty() -> Known:
    """The contract's mixture: 20 components in 128 dimensions, concentrations 50 to 500, unequal weights."""
    return known_mixture(k=20, d=128, n=20_000, low=50, high=500, seed=7)


@pytest.fixture(scope="session")
def small() -> Known:
    """Six well-separated components in 16 dimensions."""
    return known_mixture(k=6, d=16, n=900, low=60, high=200, seed=3)


def _one_thread() -> Iterator[None]:
    """Tiny networks: a second thread would only wait for the first, and sums come in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


one_thread = pytest.fixture(_one_thread, name="one_thread")
one_thread_per_module = pytest.fixture(_one_thread, name="one_thread_per_module", scope="module")


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Starts commands and programs as processes of their own."""
    if sys.platform == "win32":
        pytest.skip("processes are forked, which Windows cannot")
    with Nursery() as nursery:
        yield nursery


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to be in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions that repeat themselves, in full precision, for tests that compare two trainings on a GPU.

    Otherwise two runs of the same step drift apart by more than a wrong one might, since cuDNN tries its convolutions
    before a capture and takes others than without.
    """
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
