"""How near to the memory's speed are the BatchNorm kernels, and which tiles suit them?

    PYTHONPATH=src python benchmarks/norm_speed.py --output OUT

Each kernel is timed alone on the activations of a ResNet-18 on 32 pixels, two views a batch, for several sizes of tile,
warps, programs that sum up, and tiles on their way from memory at once (stages). Bytes are the least that a kernel must
read and write.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import record
from siammm.learn.cuda import norm_kernels as kernels

# Channels, side of the images, and the layers of a ResNet-18 that are so.
STAGES = [(64, 32, 5), (128, 16, 5), (256, 8, 5), (512, 4, 5)]
# Tensors that each reads or writes, in a block with a residual and two readers.
SUMMING = {"_sums": 1, "_gradient_sums": 5}
ONE_PASS = {"_apply": 3, "_gradient": 3}


def choices(name: str) -> Iterator[dict[str, int]]:
    """The present one first."""
    if name in SUMMING:
        for tile, warps, stages, programs in itertools.product((4096, 2048), (4, 8), (4, 3, 2, 1), (512, 1056)):
            yield {"tile": tile, "warps": warps, "stages": stages, "programs": programs}
    else:
        present = kernels._APPLIED_TILE if name == "_apply" else kernels._TILE
        tiles = sorted((8192, 4096, 2048, 1024), key=lambda tile: tile != present)
        for tile, warps in itertools.product(tiles, (4, 8)):
            yield {"tile": tile, "warps": warps}


class Layer:
    """Tensors of one size, and the kernels on them."""

    def __init__(self, images: int, channels: int, side: int, device: torch.device) -> None:
        self.rows, self.channels = images * side * side, channels
        kind: dict[str, Any] = {"dtype": torch.bfloat16 if device.type == "cuda" else torch.float32, "device": device}
        n = 2 * self.rows
        self.x, self.dy, self.seen = (torch.randn(n, channels, **kind) for _ in range(3))
        self.y, self.residual = torch.empty_like(self.x), torch.empty_like(self.x)
        self.moments, self.sums = (torch.ones(2, 2, channels, device=device) for _ in range(2))
        self.weight, self.bias = torch.ones(channels, device=device), torch.zeros(channels, device=device)

    def call(self, name: str, choice: dict[str, int]) -> Callable[[], Any]:
        block_c = max(16, min(kernels._WIDEST, kernels.triton.next_power_of_2(self.channels)))
        block_r = choice["tile"] // block_c
        columns, blocks = -(-self.channels // block_c), -(-self.rows // block_r)
        fixed: dict[str, Any] = {"BLOCK_R": block_r, "BLOCK_C": block_c, "num_warps": choice["warps"]}
        fixed["enable_fp_fusion"] = True
        switches = {"AFFINE": True, "RELU": True}
        kernel = getattr(kernels, name)
        if name in SUMMING:
            programs = max(1, min(blocks, choice["programs"] // (2 * columns)))
            partial = torch.empty(2, programs, 2, self.channels, device=self.x.device)
            grid, sizes = (columns, programs, 2), (self.rows, self.channels, programs)
            fixed["STAGES"] = choice["stages"]
            if name == "_sums":
                return lambda: kernel[grid](self.x, partial, *sizes, **fixed)
            return lambda: kernel[grid](
                self.dy, self.y, self.x, self.seen, self.moments, self.weight, self.bias, self.residual, partial,
                *sizes, **switches, LOOK=True, SECOND=True, KEEP=True, **fixed,
            )  # fmt: skip
        grid = (blocks, columns, 2)
        if name == "_apply":
            return lambda: kernel[grid](
                self.x, self.y, self.dy, self.moments, self.weight, self.bias, self.rows, self.channels, **switches,
                RESIDUAL=True, **fixed,
            )  # fmt: skip
        return lambda: kernel[grid](
            self.dy, self.x, self.moments, self.weight, self.bias, self.sums, self.y, self.rows, self.channels,
            AFFINE=True, RELU=False, **fixed,
        )  # fmt: skip


def seconds(call: Callable[[], Any], device: torch.device, *, calls: int = 20, repeats: int = 3) -> float:
    """Of one call, by the median; on a GPU from a captured graph, as in training."""
    call()
    if device.type != "cuda":
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    found: list[float] = []
    for _ in range(repeats):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        found.append(first.elapsed_time(last) / 1000 / calls)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1024, help="of a batch, each with two views")
    parser.add_argument("--most", type=int, help="try this many choices only")
    parser.add_argument("--output", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("without a GPU the kernels need TRITON_INTERPRET=1")
    found: dict[tuple[str, tuple[int, ...]], list[tuple[float, float]]] = {}
    for channels, side, layers in STAGES:
        layer = Layer(args.images, channels, side, device)
        for name, tensors in (SUMMING | ONE_PASS).items():
            size = tensors * layer.x.numel() * layer.x.element_size()
            for choice in itertools.islice(choices(name), args.most):
                taken = seconds(layer.call(name, choice), device)
                found.setdefault((name, tuple(choice.values())), []).append((layers * taken, layers * size))
    rows: list[list[str]] = []
    for name in SUMMING | ONE_PASS:
        present = next(iter(choices(name))).values()
        totals = {choice: sum(t for t, _ in parts) for (other, choice), parts in found.items() if other == name}
        for choice in [tuple(present), *sorted(totals, key=lambda c: totals[c])[:4]]:
            parts = found[name, choice]
            speeds = [f"{size / taken / 1e9:,.0f}" for taken, size in parts]
            rows.append([f"`{name}`", ", ".join(str(c) for c in choice), f"{1000 * totals[choice]:.3f}", *speeds])
    sizes = [f"GB/s at {channels} x {side} x {side}" for channels, side, _ in STAGES]
    table = record.table(["kernel", "tile, warps, stages, programs", "ms of 20 layers", *sizes], rows)
    body = (
        f"{table}\n\nThe first line of each kernel is the present choice, the others the four fastest of those tried."
    )
    n = f"{args.images:,} images, two views each"
    path = record.write(
        "norm-speed", "The BatchNorm kernels, by size of tile", body, seeds="none", n=n, output=args.output
    )
    print(path.read_text())


if __name__ == "__main__":
    main()
