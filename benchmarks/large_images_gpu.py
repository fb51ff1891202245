"""ResNet-50 at 224 pixels: our step beside a plain eager loop of the same step, and what the loader brings.

    PYTHONPATH=src python benchmarks/large_images_gpu.py --output OUT

Both steps get the same crops, which wait on the device, and do the same: colours of both views, both through the online
networks and the momentum encoder, instance and cluster loss, LARS, momentum update, bank. The plain loop is bf16
autocast and channels-last with nothing compiled, captured or fused, as one would write it first. Every case is a
process of its own with a time limit; a batch that does not fit is a row that says so.

Hours for the paper's 200 epochs follow from the measured images a second; for several GPUs see ``many_gpus.py``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional

import record
import step_variants
from siammm import losses
from siammm.bench import clock, images
from siammm.bench.workload import Workload, flops_per_image, image_size, loader_rate
from siammm.core.device import network_precision
from siammm.data import augment, view_settings
from siammm.learn.build import build_network
from siammm.learn.optim import build_optimiser
from siammm.settings.fields import with_settings
from siammm.settings.presets import PRESETS
from siammm.settings.training import TrainConfig
from sweep import arguments, fresh_question, swept

N_IMAGES, EPOCHS = 1_281_167, 200


def settings_of(case: dict[str, Any]) -> TrainConfig:
    changed = {"batch_size": case["batch"], "hidden_dim": case["width"], "backbone": case["backbone"]}
    changed |= {"image_size": case["size"], "n_components": 100_000, "merge": "none"}
    return with_settings(PRESETS["imagenet-200"], **changed)


def one(case: dict[str, Any]) -> dict[str, Any]:
    device = torch.device(case["device"])
    config = settings_of(case)
    if case["who"] == "loader":
        return loader(case, config, device)
    step_variants.set_globally(case["variants"])
    clock.reset_peak_memory(device)
    found = ours(case, config, device) if case["who"] == "siammm" else plain(case, config, device)
    rates = [case["batch"] / seconds for seconds in found.pop("seconds")]
    return {
        "images_per_second": statistics.median(rates),
        "windows": rates,
        "teraflops": statistics.median(rates) * flops_per_image(config) / 1e12,
        "peak_memory_gb": clock.peak_memory(device) / 1e9,
        **found,
    }


def ours(case: dict[str, Any], config: TrainConfig, device: torch.device) -> dict[str, Any]:
    config = with_settings(config, **step_variants.settings(case["variants"]))
    load = Workload(config, device, n_images=N_IMAGES)
    step_variants.apply(load.training, case["variants"])
    ready = load.prepare(clustered=True)
    seconds = clock.windows(lambda n: load.advance(n, clustered=True), device, seconds=case["seconds"])
    load.check()
    return {
        "seconds": seconds,
        "ready_seconds": ready,
    }


def plain(case: dict[str, Any], config: TrainConfig, device: torch.device) -> dict[str, Any]:
    """The same step as a plain loop."""
    torch.manual_seed(0)
    size, batch, k = image_size(config), case["batch"], 1000
    bf16 = network_precision(device) == "bf16"
    network = build_network(config, size).to(device)
    if device.type == "cuda":
        network = network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    network.train()
    encoder, predictor, follower = network.encoder, network.predictor, network.momentum_encoder
    assert predictor is not None
    assert follower is not None
    optimisation, h = config.optimisation, config.objective.n_neighbours
    optimiser: Any = build_optimiser("lars", network, lr=0.05, weight_decay=optimisation.weight_decay)
    torch.backends.cudnn.benchmark = case["tuned"]
    crops = [torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8, device=device) for _ in range(2)]
    sample_B = torch.arange(batch, device=device)
    two = view_settings.views(size, config.views.augmentation)
    dim = config.network.embedding_dim
    mu_KD = functional.normalize(torch.randn(k, dim, device=device), dim=1)
    kappa_K = torch.ones(k, device=device)
    index_BH = torch.randint(k, (batch, h), device=device)
    weight_BH = torch.full((batch, h), 1 / h, device=device)
    bank_2ND = torch.zeros(2, 2 * batch, dim, device=device)
    number = 0

    def advance(steps: int) -> None:
        nonlocal number
        for _ in range(steps):
            x_1, x_2 = (
                augment.colour(crop, view_settings.draw(view, size, size, 0, number, sample_B, which), view)
                for which, (view, crop) in enumerate(zip(two, crops, strict=True))
            )
            if device.type == "cuda":
                x_1, x_2 = (x.to(memory_format=torch.channels_last) for x in (x_1, x_2))
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                v_1, v_2 = predictor(encoder(x_1)).float(), predictor(encoder(x_2)).float()
                with torch.no_grad():
                    t_1, t_2 = follower(x_1), follower(x_2)
            tables = (mu_KD[index_BH], kappa_K[index_BH], weight_BH, None)
            loss = losses.instance_loss(v_1, v_2, t_1, t_2)
            loss = loss + losses.soft_assignment_loss(v_1, *tables) + losses.soft_assignment_loss(v_2, *tables)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            with torch.no_grad():
                for p, q in zip(encoder.parameters(), follower.parameters(), strict=True):
                    q.lerp_(p, 0.01)
                for view, target in enumerate((t_1, t_2)):
                    bank_2ND[view].index_copy_(0, sample_B, functional.normalize(target, dim=1))
            number += 1

    first = clock.seconds_of(lambda: advance(1), device)
    if device.type == "cuda":
        advance(3)
    return {
        "seconds": clock.windows(advance, device, seconds=case["seconds"]),
        "ready_seconds": first,
    }


def loader(case: dict[str, Any], config: TrainConfig, device: torch.device) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="siammm-jpegs-") as folder:
        jpegs = Path(folder) / "jpegs"
        images.write_jpegs(jpegs, case["jpegs"], 0)
        made = sum(path.stat().st_size for path in jpegs.iterdir())
        rate, workers = loader_rate(config, jpegs, device, workers=case["workers"], seconds=case["seconds"])
    return {"images_per_second": rate, "used_workers": workers, "kilobytes": made / case["jpegs"] / 1e3}


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    usual: dict[str, Any] = {
        "device": args.device, "backbone": args.backbone, "size": args.size, "width": args.width,
        "seconds": args.seconds, "variants": [],
    }  # fmt: skip
    found: list[dict[str, Any]] = []
    for batch in args.batches:
        found.append(usual | {"who": "siammm", "batch": batch})
        found.append(usual | {"who": "plain", "batch": batch, "tuned": args.tuned_plain})
    found += [
        usual | {"who": "siammm", "batch": args.batches[0], "variants": text.split(",")} for text in args.variants
    ]
    found += [
        usual | {"who": "loader", "batch": 64, "workers": workers, "jpegs": args.jpegs} for workers in args.workers
    ]
    return found


def main() -> None:
    parser = arguments(__doc__, limit=180.0)
    parser.add_argument("--batches", type=int, nargs="*", default=[256, 512])
    parser.add_argument("--variants", nargs="*", default=[], help="of our step, at the first batch")
    parser.add_argument("--tuned-plain", action=argparse.BooleanOptionalAction, default=True, help="cudnn.benchmark")
    parser.add_argument("--backbone", default="resnet50")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--workers", type=int, nargs="*", default=[15])
    parser.add_argument("--jpegs", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--clustering-seconds", type=float, default=0.0, help="of an epoch at this size, measured")
    args, results = swept("large_images_gpu.py", parser, cases, one, step_variants.VARIANTS)
    device = torch.device(args.device)
    peak = clock.peak_flops(device, network_precision(device)) / 1e12
    path = record.write(
        fresh_question(f"large-images-{'gpu' if device.type == 'cuda' else 'cpu'}", args.output),
        f"{args.backbone} at {args.size} pixels: our step beside a plain eager loop",
        body(results, args, peak),
        seeds="0",
        n=f"batches of {', '.join(map(str, args.batches))}; median of 3 windows; {args.jpegs:,} JPEG files",
        output=args.output,
    )
    print(path.read_text())


def body(results: list[dict[str, Any]], args: argparse.Namespace, peak: float) -> str:
    eager = {r["batch"]: r["images_per_second"] for r in results if r["who"] == "plain" and "failed" not in r}
    rows = []
    for r in results:
        if r["who"] == "loader":
            continue
        name = "plain eager loop" if r["who"] == "plain" else "siammm"
        name += " with cudnn.benchmark" if r.get("tuned") else ""
        name += "".join(f" + {v}" for v in r["variants"])
        if "failed" in r:
            rows.append([name, str(r["batch"]), f"failed: {r['failed']}", "", "", "", ""])
            continue
        ratio = r["images_per_second"] / eager[r["batch"]] if r["batch"] in eager else None
        rows.append(
            [
                name,
                str(r["batch"]),
                f"{r['images_per_second']:,.0f}",
                f"{100 * r['teraflops'] / peak:.0f} %",
                f"{r['peak_memory_gb']:.1f}",
                f"{r['ready_seconds']:.0f}",
                "" if ratio is None else f"{ratio:.2f}",
            ]
        )
    header = ["step", "batch", "images/s", f"of {peak:.3g} TFLOP/s", "memory, GB", "s until ready", "x plain"]
    text = record.table(header, rows)
    steps = [r for r in results if r["who"] == "siammm" and "failed" not in r]
    loaders = [r for r in results if r["who"] == "loader" and "failed" not in r]
    for r in loaders:
        text += (
            f"\n\nThe streaming loader brings {r['images_per_second']:,.0f} images a second (both views cut) with "
            f"{r['used_workers']} workers, from JPEG files of {r['kilobytes']:.0f} kB in the system's cache."
        )
    if not steps:
        return text
    best = max(steps, key=lambda r: r["images_per_second"])

    def hours(rate: float) -> str:
        return f"{EPOCHS * (N_IMAGES / rate + args.clustering_seconds) / 3600:,.1f}"

    projected = [
        ["1 GPU, the step", f"{best['images_per_second']:,.0f}", hours(best["images_per_second"])],
    ]
    if loaders:
        brought = max(r["images_per_second"] for r in loaders)
        one_gpu = min(brought, best["images_per_second"])
        projected.append(["1 GPU with this loader", f"{one_gpu:,.0f}", hours(one_gpu)])
    text += f"\n\n## Projected: {EPOCHS} epochs of {N_IMAGES:,} images, batch {best['batch']}\n\n"
    text += record.table(["", "images/s", "hours"], projected)
    return (
        text + f"\n\nFrom the measured step{' and clustering' if args.clustering_seconds else ', without clustering'}."
    )


if __name__ == "__main__":
    main()
