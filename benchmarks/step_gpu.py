"""How many images a second does the full SiamMM step do on CIFAR-10's shapes, and lightly's BYOL beside it?

    PYTHONPATH=src:carry/site python benchmarks/step_gpu.py --output OUT
    PYTHONPATH=src:carry/site python benchmarks/step_gpu.py --output OUT --variants grouped-updates one-after-another

ResNet-18 for 32 pixels, two views, momentum encoder, cluster loss with 4,000 clusters; 50,000 made-up images. Every
case is a process of its own with a time limit, and its result is kept at once as a line of JSON. Images a second are
the median of three windows, by the clock, with the device idle before and after each window and no wait within.

lightly's BYOL is what its documentation shows for CIFAR-10 (heads of 1,024, no blur), with the same ResNet-18, bf16
autocast, channels-last, batch 512 and 16 loader workers. It needs torchvision, and two packages that need nothing else:
``pip install --no-deps --target carry/site lightly==1.6.0 lightning-utilities``.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

import gpu_state
import record
import step_variants
from siammm.bench import clock, images
from siammm.bench.workload import Workload, flops_per_image
from siammm.core.device import network_precision
from siammm.learn.backbones import build_backbone
from siammm.settings.fields import with_settings
from siammm.settings.presets import PRESETS
from sweep import arguments, fresh_question, swept

N_COMPONENTS = 4000


def one(case: dict[str, Any]) -> dict[str, Any]:
    """One case, in a process of its own."""
    device = torch.device(case["device"])
    return lightly(case, device) if case["who"] == "lightly" else siammm(case, device)


def siammm(case: dict[str, Any], device: torch.device) -> dict[str, Any]:
    names = case["variants"]
    unknown = step_variants.set_globally(names)
    settings = {
        "batch_size": case["batch"],
        "hidden_dim": case["width"],
        "backbone": case["backbone"],
        "n_components": min(N_COMPONENTS, case["n_images"] // 4),
        "merge": "none",
        "compile": case["compile"],
    }
    config = with_settings(PRESETS["cifar"], **(settings | step_variants.settings(names)))
    clock.reset_peak_memory(device)
    load = Workload(config, device, n_images=case["n_images"])
    step_variants.apply(load.training, names)
    ready = load.prepare(clustered=True)
    found, state = gpu_state.watched(
        lambda: clock.windows(lambda n: load.advance(n, clustered=True), device, seconds=case["seconds"])
    )
    load.check()
    rates = [load.batch_size / seconds for seconds in found]
    return {
        "images_per_second": statistics.median(rates),
        "windows": rates,
        "milliseconds": 1000 * statistics.median(found),
        "teraflops": statistics.median(rates) * flops_per_image(config) / 1e12,
        "peak_memory_gb": clock.peak_memory(device) / 1e9,
        "ready_seconds": ready,
        "unknown_options": unknown,
        **state,
        "captured": bool(load.training.accelerated and load.training.accelerated.graphs),
    }


class Pictures(Dataset[Any]):
    """Images as PIL has them, as torchvision's CIFAR10 gives them out."""

    def __init__(self, pixels: np.ndarray, transform: Any) -> None:
        self._pixels, self._transform = pixels, transform

    def __len__(self) -> int:
        return len(self._pixels)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return self._transform(Image.fromarray(self._pixels[i])), 0


class Branch(nn.Module):
    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x).flatten(start_dim=1))


def lightly(case: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """BYOL by lightly's parts, in the order of its documentation."""
    from lightly.loss import NegativeCosineSimilarity  # pyright: ignore[reportMissingImports]
    from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead  # pyright: ignore[reportMissingImports]
    from lightly.models.utils import (  # pyright: ignore[reportMissingImports]
        deactivate_requires_grad,
        update_momentum,
    )
    from lightly.transforms.byol_transform import (  # pyright: ignore[reportMissingImports]
        BYOLTransform,
        BYOLView1Transform,
        BYOLView2Transform,
    )

    torch.backends.cudnn.benchmark = True
    transform = BYOLTransform(
        view_1_transform=BYOLView1Transform(input_size=32, gaussian_blur=0.0),
        view_2_transform=BYOLView2Transform(input_size=32, gaussian_blur=0.0),
    )
    loader = DataLoader(
        Pictures(images.arrays(case["n_images"], 32, 0), transform),
        batch_size=case["batch"],
        shuffle=True,
        drop_last=True,
        num_workers=case["workers"],
        pin_memory=device.type == "cuda",
        persistent_workers=case["workers"] > 0,
    )
    backbone = build_backbone(case["backbone"], image_size=32)
    features, width = int(backbone.num_features), case["width"]  # pyright: ignore[reportArgumentType]
    online = Branch(backbone, BYOLProjectionHead(features, width, 256)).to(device)
    predictor = BYOLPredictionHead(256, width, 256).to(device)
    if device.type == "cuda":
        online = online.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    target = copy.deepcopy(online)
    deactivate_requires_grad(target)
    criterion = NegativeCosineSimilarity()
    rate = 0.06 * case["batch"] / 128
    optimiser = torch.optim.SGD(
        [*online.parameters(), *predictor.parameters()], lr=rate, momentum=0.9, weight_decay=5e-4
    )
    bf16 = network_precision(device) == "bf16"

    def epochs() -> Any:
        while True:
            yield from loader

    stream = epochs()

    def advance(steps: int) -> None:
        for _ in range(steps):
            (x_1, x_2), _ = next(stream)
            x_1, x_2 = (
                x.to(device, non_blocking=True, memory_format=torch.channels_last if bf16 else torch.preserve_format)
                for x in (x_1, x_2)
            )
            update_momentum(online, target, m=0.99)
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                p_1, p_2 = predictor(online(x_1)), predictor(online(x_2))
                with torch.no_grad():
                    z_1, z_2 = target(x_1), target(x_2)
                loss = 0.5 * (criterion(p_1, z_2) + criterion(p_2, z_1))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()

    first = clock.seconds_of(lambda: advance(1), device)
    # An epoch's worth of batches first: workers start, and their queues fill.
    advance(max(1, min(len(loader), 4 * case["workers"])))
    found, state = gpu_state.watched(lambda: clock.windows(advance, device, seconds=3 * case["seconds"]))
    rates = [case["batch"] / seconds for seconds in found]
    return {
        "images_per_second": statistics.median(rates),
        "windows": rates,
        "milliseconds": 1000 * statistics.median(found),
        "peak_memory_gb": clock.peak_memory(device) / 1e9,
        "ready_seconds": first,
        **state,
    }


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    usual: dict[str, Any] = {
        "who": "siammm", "device": args.device, "backbone": args.backbone, "n_images": args.n_images,
        "seconds": args.seconds, "compile": {"auto": None, "yes": True, "no": False}[args.compile], "variants": [],
    }  # fmt: skip
    found: list[dict[str, Any]] = []
    if args.lightly:
        found.append(
            usual
            | {"who": "lightly", "batch": args.lightly_batch, "width": args.lightly_width, "workers": args.workers}
        )
    if not args.only_variants:
        found += [usual | {"batch": batch, "width": width} for width in args.widths for batch in args.batches]
    for text in args.variants:
        names = [name for name in text.split(",") if name]
        found += [
            usual | {"batch": batch, "width": args.widths[0], "variants": names} for batch in args.variant_batches
        ]
    return found


def main() -> None:
    parser = arguments(__doc__, limit=150.0)
    parser.add_argument("--batches", type=int, nargs="*", default=[256, 512, 1024])
    parser.add_argument("--widths", type=int, nargs="*", default=[4096, 2048], help="of the heads' hidden layers")
    parser.add_argument("--variants", nargs="*", default=[], help="names from step_variants.py, joined by commas")
    parser.add_argument("--variant-batches", type=int, nargs="*", default=[256])
    parser.add_argument("--only-variants", action="store_true", help="leave out the step as it is")
    parser.add_argument("--lightly", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--lightly-batch", type=int, default=512)
    parser.add_argument("--lightly-width", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--n-images", type=int, default=50_000)
    parser.add_argument("--seconds", type=float, default=6.0, help="of the three windows of a case together")
    parser.add_argument("--compile", choices=["auto", "yes", "no"], default="auto")
    args, results = swept("step_gpu.py", parser, cases, one, step_variants.VARIANTS)
    device = torch.device(args.device)
    peak = clock.peak_flops(device, network_precision(device)) / 1e12
    path = record.write(
        fresh_question("step-gpu" if device.type == "cuda" else "step-cpu", args.output),
        f"The full step on images of 32 pixels, {args.backbone}",
        body(results, peak),
        seeds="0",
        n=f"{args.n_images:,} images, {min(N_COMPONENTS, args.n_images // 4):,} clusters; median of 3 windows",
        output=args.output,
    )
    print(path.read_text())


def body(results: list[dict[str, Any]], peak: float) -> str:
    """The table, and what each is to lightly."""
    peer = next((r for r in results if r["who"] == "lightly" and "failed" not in r), None)
    rows: list[list[str]] = []
    for r in results:
        name = "lightly, BYOL" if r["who"] == "lightly" else "siammm" + "".join(f" + {v}" for v in r["variants"])
        if "failed" in r:
            rows.append([name, str(r["width"]), str(r["batch"]), f"failed: {r['failed']}", "", "", "", "", "", ""])
            continue
        spread = f"{min(r['windows']):,.0f} to {max(r['windows']):,.0f}"
        rows.append(
            [
                name,
                str(r["width"]),
                str(r["batch"]),
                f"{r['images_per_second']:,.0f} ({spread})",
                f"{r['milliseconds']:.2f}",
                f"{100 * r['teraflops'] / peak:.0f} %" if "teraflops" in r else "",
                f"{r['peak_memory_gb']:.2f}",
                f"{r['ready_seconds']:.0f}",
                f"{r['clock_mhz']:,.0f} MHz, {r['watts']:.0f} W, {r['celsius']:.0f} C" if "clock_mhz" in r else "",
                f"{r['images_per_second'] / peer['images_per_second']:.2f}" if peer else "",
            ]
        )
    header = ["step", "heads", "batch", "images/s", "ms a step", "of peak", "memory, GB", "s until ready", "GPU"]
    header.append("x lightly")
    used = {name for r in results for name in r["variants"]}
    notes = "\n".join(f"- {name}: {step_variants.VARIANTS[name]}." for name in sorted(used))
    return (
        f"{record.table(header, rows)}\n\nThe peak is {peak:.1f} TFLOP/s, of a large product, measured in the same "
        "run; operations are those of the networks, counted by torch. lightly's heads are narrower (its own "
        f"benchmark's), its step has no clusters.\n\n{notes}"
    )


if __name__ == "__main__":
    main()
