"""The Triton kernels of the mixture: where they fit, and when they are chosen.

What they compute is checked by ``interpreted_kernels.py`` and on a GPU by ``test_kernels_gpu.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from siammm.core.errors import InputError
from siammm.mixture.search import kernels, neighbours
from tests.learn.cuda.compiled_kernels import compiled, needs_a_compiler

# Capability, and bytes of shared memory that a program may take.
CHIPS = {"A100": (80, 166_912), "RTX 3090": (86, 101_376), "RTX 4090": (89, 101_376), "H200": (90, 232_448)}


def test_another_number_of_components_does_not_compile_again() -> None:
    pytest.importorskip("triton")
    for kernel in (kernels._propose, kernels._rescore, kernels._distance_sums):
        counts = [p for p in kernel.params if p.name in ("n", "k", "first_component", "n_tiles")]
        assert counts
        assert all(p.do_not_specialize for p in counts), kernel.__name__


def check_fits(chip: str, d: int) -> None:
    """The two kernels that fill a chip, compiled for it with the tiles that are chosen there."""
    capability, room = CHIPS[chip]
    generation, width = capability // 10, kernels.triton.next_power_of_2(d)
    nearest = kernels.nearest_tiles(d, generation, room)
    distances = kernels.distance_tiles(d, generation, room)
    assert nearest is not None
    assert distances is not None
    numbers = dict.fromkeys(("n", "k", "first_component", "n_tiles"), "i32")
    bulk_copy = generation >= 9 and d % 16 == 0
    rows, columns, side = nearest["BLOCK_N"], nearest["BLOCK_K"], distances["BLOCK"]
    propose = {
        "D": d, "BLOCK_D": width, "EVEN_D": width == d, "BULK_COPY": bulk_copy, "CANDIDATES": 8, "DEPTH": 3,
        "HAS_BIAS": True, "TILE_BITS": 11, "LEAST": -3.0e38, **nearest,
    }  # fmt: skip
    tiles = f"tensordesc<fp16[{columns},{width}]>" if bulk_copy else "*fp16"
    for kernel, types, settings, shape in (
        (kernels._propose, {"x_ptr": "*fp16", "w_tiles": tiles, "candidate_ptr": "*i32"}, propose, (rows, columns)),
        (
            kernels._distance_sums,
            {"mu_ptr": "*fp16", "partial_ptr": "*fp64"},
            {"D": d, "BLOCK_D": width, **distances},
            (side, side),
        ),
    ):
        options = {name: settings.pop(name) for name in ("num_warps", "num_stages")}
        taken = compiled(kernel, numbers | types, settings, capability=capability, **options).metadata.shared
        expected = kernels._shared_bytes(d, *shape, options["num_stages"], generation)
        assert 0 < taken <= expected <= room, kernel.__name__


@needs_a_compiler
@pytest.mark.parametrize(("chip", "d"), [("RTX 3090", 512), ("A100", 768), ("H200", 512)])
def test_kernels_fit_on_the_chip(chip: str, d: int) -> None:
    check_fits(chip, d)


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize("d", [16, 64, 128, 200, 256, 384, 512, 768, 1024])
@pytest.mark.parametrize("chip", CHIPS)
def test_kernels_fit_on_every_chip(chip: str, d: int) -> None:
    if d > 512 and chip.startswith("RTX"):
        pytest.skip("torch serves there")
    check_fits(chip, d)


def test_tiles_are_those_that_were_measured_on_an_h200() -> None:
    pytest.importorskip("triton")
    found = [kernels.nearest_tiles(d, 9, 232_448) for d in (64, 256, 512, 1024)]
    assert [(t["BLOCK_N"], t["num_warps"], t["num_stages"]) for t in found if t] == [
        (128, 8, 3), (128, 8, 3), (64, 4, 2), (32, 4, 1),
    ]  # fmt: skip
    assert kernels.distance_tiles(256, 9, 232_448) == {"BLOCK": 128, "num_warps": 8, "num_stages": 2}


class Properties(NamedTuple):
    shared_memory_per_block_optin: int


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], room: int) -> None:
    """A GPU of these properties, as far as the choice of a backend looks."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties(room))


def chosen(requested: neighbours.Backend, d: int) -> str:
    return neighbours.choose_backend(requested, torch.device("cuda"), torch.float32, d=d, k=1000, n_neighbours=5)


@pytest.mark.parametrize(
    ("capability", "room", "most"),
    [((9, 0), 232_448, 1024), ((8, 0), 166_912, 1024), ((8, 9), 101_376, 512), ((7, 5), 65_536, 0)],
)
def test_what_does_not_fit_a_gpu_is_left_to_torch(
    capability: tuple[int, int], room: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    pretend(monkeypatch, capability, room)
    for d in (15, 16, 100, 256, 512, 513, 1024, 1025):
        assert chosen("auto", d) == ("triton" if 16 <= d <= most else "torch"), d
    said = f"takes 16 to {most} features here" if most else "needs a GPU of NVIDIA's Ampere generation or later"
    with pytest.raises(InputError, match=said):
        chosen("triton", most + 1)


def test_a_gpu_without_triton_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (9, 0), 232_448)
    monkeypatch.setattr(kernels, "triton", None)
    assert chosen("auto", 256) == chosen("torch", 256) == "torch"
    with pytest.raises(InputError, match="needs Triton and a CUDA device"):
        chosen("triton", 256)


def test_a_gpu_of_amd_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (9, 4), 65_536)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert chosen("auto", 64) == "torch"
