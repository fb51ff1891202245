"""Does it pay to work through a batch in parts that stay in the GPU's cache?

    PYTHONPATH=src python benchmarks/cache_parts.py --output OUT

A BatchNorm needs a whole batch's statistics, but what comes before and after it does not: for each part of a batch,
normalise, convolve, and add to the next statistics while the part is still in the cache (on the way back likewise). A
stack of convolutions with BatchNorm and ReLU is timed so, as one captured graph, forward and forward with backward, for
parts of several sizes. Only times are asked for: sums of a part are taken about its own first row.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import record
from siammm.bench import clock
from siammm.learn import norm_kernels as kernels

# Channels and side of the images in the four stages of a ResNet-18 on 32 pixels.
STAGES = [(64, 32), (128, 16), (256, 8), (512, 4)]


class Stack:
    """Convolutions of one stage, each with BatchNorm and ReLU, on a batch that is cut into parts."""

    def __init__(self, channels: int, side: int, images: int, part: int, layers: int, device: torch.device) -> None:
        self.channels, self.layers = channels, layers
        self.rows = part * side * side
        shape = (part, channels, side, side)
        self.parts = images // part
        kind: dict[str, Any] = {"dtype": torch.bfloat16 if device.type == "cuda" else torch.float32, "device": device}

        def last(*shape: int) -> Tensor:
            return torch.randn(*shape, **kind).to(memory_format=torch.channels_last)

        self.first = [last(*shape) for _ in range(self.parts)]
        self.weights = [0.05 * last(channels, channels, 3, 3) for _ in range(layers)]
        self.block_r, self.block_c, most = kernels._tiles(self.rows, channels, 1)
        self.programs = max(1, min(most, kernels._PROGRAMS))
        self.columns = -(-channels // self.block_c)
        self.moments = [torch.ones(1, 2, channels, device=device) for _ in range(layers)]
        self.scale = torch.ones(channels, device=device)
        self.partial = torch.zeros(self.parts, self.programs, 2, channels, device=device)
        self.tile = {"BLOCK_R": self.block_r, "BLOCK_C": self.block_c}

    def sums(self, x: Tensor, number: int) -> None:
        kernels._sums[(self.columns, self.programs, 1)](
            x, self.partial[number], self.rows, self.channels, self.programs, **self.tile, **kernels._SUMMING
        )

    def apply(self, x: Tensor, layer: int) -> Tensor:
        y = torch.empty_like(x)
        grid = (-(-self.rows // self.block_r), self.columns, 1)
        kernels._apply[grid](
            x, y, x, self.moments[layer], self.scale, self.scale, self.rows, self.channels,
            AFFINE=True, RESIDUAL=False, RELU=True, **self.tile, **kernels._USUAL,
        )  # fmt: skip
        return y

    def forward(self) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """The outputs of all convolutions, and their inputs."""
        inputs, outputs = [self.first], []
        for layer, weight in enumerate(self.weights):
            found: list[Tensor] = []
            for number in range(self.parts):
                if layer:
                    inputs[layer].append(self.apply(outputs[layer - 1][number], layer - 1))
                found.append(torch.conv2d(inputs[layer][number], weight, padding=1))
                self.sums(found[-1], number)
            outputs.append(found)
            inputs.append([])
        return outputs, inputs

    def backward(self, outputs: list[list[Tensor]], inputs: list[list[Tensor]]) -> list[Tensor]:
        """The gradients of the weights, from ones at the end."""
        grads = [torch.ones_like(x) for x in outputs[-1]]
        found: list[Tensor] = []
        grid = (-(-self.rows // self.block_r), self.columns, 1)
        switches = {"AFFINE": True, "RELU": True, "LOOK": False}
        for layer in reversed(range(self.layers)):
            total = torch.zeros_like(self.weights[layer], dtype=torch.float32)
            for number in range(self.parts):
                x, dy = outputs[layer][number], grads[number]
                dx = torch.empty_like(x)
                kernels._gradient[grid](
                    dy, x, x, self.moments[layer], self.scale, self.scale, self.moments[layer], dx, dx,
                    self.rows, self.channels, **switches, RESIDUAL=False, **self.tile, **kernels._USUAL,
                )  # fmt: skip
                wanted = [layer > 0, True, False]
                dy, d_weight, _ = torch.ops.aten.convolution_backward(
                    dx, inputs[layer][number], self.weights[layer], None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1,
                    wanted,
                )  # fmt: skip
                total += d_weight
                if layer:
                    before = outputs[layer - 1][number]
                    kernels._gradient_sums[(self.columns, self.programs, 1)](
                        dy, before, before, self.moments[layer - 1], self.scale, self.scale, self.partial[number],
                        self.rows, self.channels, self.programs, **switches, **self.tile, **kernels._SUMMING,
                    )  # fmt: skip
                    grads[number] = dy
            found.append(total)
        return found


def milliseconds(work: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """The median of three windows, captured where there is a GPU."""
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        work = graph.replay

    def advance(steps: int) -> None:
        for _ in range(steps):
            work()

    return 1000 * statistics.median(clock.windows(advance, device, seconds=seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2048, help="of both views together")
    parser.add_argument("--parts", type=int, nargs="+", default=[2048, 512, 256, 128, 64])
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    device = torch.device(args.device)
    rows: list[list[str]] = []
    for stage in args.stages:
        channels, side = STAGES[stage]
        for part in args.parts:
            stack = Stack(channels, side, args.images, part, args.layers, device)
            forward = milliseconds(stack.forward, device, args.seconds)
            both = milliseconds(lambda stack=stack: stack.backward(*stack.forward()), device, args.seconds)
            rows.append([f"{channels} channels, {side} x {side}", str(part), f"{forward:.3f}", f"{both:.3f}"])
            print(rows[-1], flush=True)
            del stack
    table = record.table(["stage", "images of a part", "forward, ms", "forward and backward, ms"], rows)
    path = record.write(
        "cache-parts", "A batch in parts that stay in the cache", table, seeds="none",
        n=f"{args.images:,} images, {args.layers} convolutions", output=args.output,
    )  # fmt: skip
    print(path.read_text())


if __name__ == "__main__":
    main()
