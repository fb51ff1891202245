"""The library of the CPU's kernels: built once, found again, built anew where it is damaged, and done without."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from siammm.mixture import em
from siammm.mixture.estimator import VonMisesFisherMixture
from siammm.mixture.search import cpu_kernels, eightbit, neighbours
from tests.mixture.search.built_kernels import BUILDS, has_compiler, needs_compiler, rows


@needs_compiler
def test_built_once_then_found(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu_kernels.library() is not None
    [built] = fresh.iterdir()
    assert built.suffix == ".so"
    assert built.stat().st_mode & 0o077 == 0
    assert fresh.stat().st_mode & 0o077 == 0

    def refuse(*_: Any) -> None:
        raise AssertionError("built a second time")

    monkeypatch.setattr(cpu_kernels, "_build", refuse)
    monkeypatch.setattr(cpu_kernels, "_found", {})
    assert cpu_kernels.library() is not None


@needs_compiler
def test_another_source_or_cpu_is_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = cpu_kernels._compiler()
    names = {cpu_kernels._name(compiler)}
    with monkeypatch.context() as patch:
        patch.setattr(cpu_kernels, "_cpu", lambda: "another")
        names.add(cpu_kernels._name(compiler))
    other = tmp_path / "other.c"
    other.write_bytes(cpu_kernels._SOURCE.read_bytes() + b"\n")
    monkeypatch.setattr(cpu_kernels, "_SOURCE", other)
    names.add(cpu_kernels._name(compiler))
    assert len(names) == 3


@needs_compiler
@pytest.mark.skipif("avx2" not in BUILDS, reason="this CPU is older, or of another kind")
def test_a_library_as_an_older_cpu_would_have_it(builds: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(builds))
    files: set[str] = set()
    for cpu, floats in (("x86-64", False), ("x86-64-v3", True)):
        monkeypatch.setenv("SIAMMM_COMPILED", cpu)
        library = cpu_kernels.library()
        assert library is not None
        files.add(library._name)
        assert not cpu_kernels.multiplies_bytes()
        assert cpu_kernels.multiplies_floats() == floats
    monkeypatch.setenv("SIAMMM_COMPILED", "yes")  # neither 0 nor a CPU: as if it were not set
    library = cpu_kernels.library()
    assert library is not None
    assert cpu_kernels.multiplies_floats()
    assert len(files | {library._name}) == 3
    monkeypatch.setenv("SIAMMM_COMPILED", "x86-64-v99")
    assert cpu_kernels.library() is None


@needs_compiler
def test_building_at_the_same_time_leaves_one_whole_library(fresh: Path) -> None:
    compiler = cpu_kernels._compiler()
    fresh.mkdir(parents=True)
    with ThreadPoolExecutor(2) as pool:
        built = set(pool.map(lambda _: cpu_kernels._build(compiler, fresh, "one"), range(2)))
    assert set(fresh.iterdir()) == built
    assert cpu_kernels._whole(fresh, "one") in built


@needs_compiler
@pytest.mark.parametrize("left", [0, 0.5, *(pytest.param(size, marks=pytest.mark.slow) for size in (100, 0.9))])
def test_a_damaged_library_is_built_anew(left: float, built: Path) -> None:
    content = built.read_bytes()
    built.write_bytes(content[: int(left if left >= 1 else left * len(content))])
    assert cpu_kernels.library() is not None
    assert not built.exists() or built.read_bytes() == content


@pytest.mark.parametrize(
    "trouble", ["off", "no compiler", "broken compiler", "hidden functions", "no folder", "others may write", "rubbish"]
)
def test_without_a_library_torch_does_it(trouble: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if trouble == "off":
        monkeypatch.setenv("SIAMMM_COMPILED", "0")
    elif trouble == "no compiler":
        monkeypatch.setenv("CC", "no-such-compiler")
    elif trouble == "broken compiler":
        monkeypatch.setenv("CC", "false")
    elif trouble == "hidden functions":
        monkeypatch.setenv("CC", "cc -fvisibility=hidden" if has_compiler() else "false")
    elif trouble == "no folder":
        fresh.parent.parent.joinpath("siammm").write_text("a file where the folder would be")
    elif trouble == "others may write":
        fresh.mkdir(parents=True)
        fresh.chmod(0o777)
    else:

        def scribble(_: list[str], folder: Path, name: str) -> Path:
            path = folder / f"{name}.so"
            path.write_text("this is no library")
            return path

        monkeypatch.setattr(cpu_kernels, "_build", scribble)
    assert cpu_kernels.library() is None
    assert not cpu_kernels.multiplies_bytes()
    assert not cpu_kernels.multiplies_floats()
    assert cpu_kernels.nearest_by_floats(torch.ones(2, 3), torch.ones(4, 3), None, 1) is None
    monkeypatch.setattr(cpu_kernels, "_LEAST_WORK", 0)
    x, w = rows(300, 64, 10), rows(200, 64, 11)
    index = (x @ w.T).topk(3, dim=1).indices
    assert (eightbit.search_by_bytes(x, w, 3)[1] == index).float().mean() > 0.999
    assert torch.equal(neighbours.search(x, w, None, 3)[1], index)
    count, total = em.sums_by_component(x, index, torch.ones(300, 3), 200)
    assert count.sum().item() == pytest.approx(900)
    torch.testing.assert_close(total.sum(dim=0), 3 * x.sum(dim=0), rtol=1e-4, atol=1e-4)


def test_small_fits_compile_nothing(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "run", refuse)
    VonMisesFisherMixture(20, max_iter=3, random_state=0).fit(rows(2000, 64, 12).numpy())
    assert not fresh.exists()
