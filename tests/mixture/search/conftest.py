"""The compiled part as users get it, and in other builds."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from siammm.mixture.search import cpu_kernels
from tests.mixture.search.built_kernels import BUILDS


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("builds")


@pytest.fixture(params=BUILDS)
def build(request: pytest.FixtureRequest, builds: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each kind of library in turn, used whatever the sizes."""
    flags, cpu = BUILDS[request.param]
    monkeypatch.setattr(cpu_kernels, "_FLAGS", (*cpu_kernels._FLAGS, *flags))
    monkeypatch.setattr(cpu_kernels, "_found", {})
    monkeypatch.setattr(cpu_kernels, "_LEAST_WORK", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(builds))
    monkeypatch.setenv("SIAMMM_COMPILED", cpu)
    library = cpu_kernels.library()
    if library is None:
        pytest.skip("this compiler cannot build it")
    return library


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and nothing loaded yet."""
    monkeypatch.setattr(cpu_kernels, "_found", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SIAMMM_COMPILED", raising=False)
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "siammm" / "compiled"


@pytest.fixture
def built(builds: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library in a cache that is empty otherwise; not loaded, and built for all tests once."""
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(builds))
        library = cpu_kernels.library()
    assert library is not None
    fresh.mkdir(mode=0o700, parents=True)
    return Path(shutil.copy2(library._name, fresh))
