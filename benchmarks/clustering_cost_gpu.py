"""What does clustering cost an epoch of training?

    PYTHONPATH=src python benchmarks/clustering_cost_gpu.py --output OUT --images-per-second 3000

First on CIFAR-10's shapes: whole epochs of the trainer with 4,000 fixed clusters against epochs without clusters. Then
at ImageNet's size: the trainer's own clustering of a bank of 1,281,167 x 256, all of an epoch's E and M steps, tables
and merging, with 100,000 and 1,000 fixed clusters and with 100,000 that merge by the paper's rule; seconds by part. The
ratio of an epoch with 100,000 to one with 1,000 follows with the images a second that ``large_images_gpu.py`` measures.
Every case is a process of its own with a time limit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch

import record
import step_variants
from siammm.bench import clock
from siammm.bench.mixture import ClusteringLoad
from siammm.data.sources import open_source
from siammm.learn.clustering import Clustering
from siammm.learn.guard import CollapseError
from siammm.learn.loop import Trained, Training
from siammm.learn.observers import Silent
from siammm.mixture import em, merge
from siammm.mixture.components import VonMisesFisherComponents
from siammm.settings.fields import with_settings
from siammm.settings.presets import PRESETS
from sweep import arguments, fresh_question, swept

# What is timed by itself; within one of these no other is counted.
PARTS: list[tuple[Any, str, str]] = [
    (em, "principal_directions", "principal directions"),
    (em, "e_step", "E steps"),
    (em, "refilled", "refilling empty clusters"),
    (VonMisesFisherComponents, "estimated", "M steps: directions and concentrations"),
    (em, "assignments", "assignments for the loss"),
    (Clustering, "_loss_concentrations", "concentrations for the loss"),
    (Clustering, "refill", "tables for the loss"),
    (merge, "merge_round", "round of merging"),
]


def one(case: dict[str, Any]) -> dict[str, Any]:
    device = torch.device(case["device"])
    return epochs(case, device) if case["what"] == "epochs" else bank(case, device)


def pictures(n: int, size: int) -> np.ndarray:
    """Smooth random pictures: noise alone has nothing that two views could share."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(n, 3, 4, 4, generator=generator)
    fine = [torch.nn.functional.interpolate(c, (size, size), mode="bicubic").clamp(0, 1) for c in coarse.split(4096)]
    return (torch.cat(fine) * 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()


class Stamps(Silent):
    """When each epoch ended."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def finished_epoch(self, row: dict[str, Any]) -> None:
        self.rows.append(row | {"ended": time.monotonic()})


def epochs(case: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Whole epochs of the trainer; the first ones, in which it compiles and seeds, are not counted."""
    step_variants.set_globally(case["variants"])
    k = case["k"]
    settings = {
        "cluster_after": 0.0,  # every epoch has clusters: none is to be counted without
        "epochs": case["epochs"] + 2,
        "batch_size": case["batch"],
        "hidden_dim": case["width"],
        "backbone": case["backbone"],
        "cluster_loss": "mle" if k else "none",
        "merge": case["merge"],
        "n_components": k or None,
        **step_variants.settings(case["variants"]),
    }
    listener = Stamps()
    training = Training(
        with_settings(PRESETS["cifar"], **settings), open_source(pictures(case["n"], 32)), device, listener=listener
    )
    step_variants.apply(training, case["variants"])
    training.finish = lambda: cast(Trained, None)
    stopped = None
    try:
        training.run()
    except CollapseError as error:  # made-up pictures may well collapse: the time of an epoch is the same
        stopped = str(error)
    ends = [row["ended"] for row in listener.rows]
    whole = np.diff(ends)[1:].tolist()  # with the end of the epoch: health, metrics
    counted = [row["seconds"] for row in listener.rows][2:]
    return {
        "seconds": statistics.median(counted),
        "epochs_counted": counted,
        "with_end_of_epoch": statistics.median(whole),
        "images_per_second": training.steps_per_epoch * training.batch_size / statistics.median(counted),
        "peak_memory_gb": clock.peak_memory(device) / 1e9,
        "stopped": stopped,
    }


@contextmanager
def stopwatch(device: torch.device) -> Iterator[dict[str, float]]:
    """Seconds of each part, the device idle before and after it."""
    found: dict[str, float] = defaultdict(float)
    inside: list[str] = []

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def part(*args: Any, **kwargs: Any) -> Any:
            if inside:
                return call(*args, **kwargs)
            inside.append(name)
            clock.synchronise(device)
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                clock.synchronise(device)
                found[name] += time.perf_counter() - started
                inside.pop()

        return part

    before = [getattr(owner, name) for owner, name, _ in PARTS]
    for (owner, name, said), call in zip(PARTS, before, strict=True):
        setattr(owner, name, timed(said, call))
    try:
        yield found
    finally:
        for (owner, name, _), call in zip(PARTS, before, strict=True):
            setattr(owner, name, call)


def bank(case: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """One epoch's clustering of a large bank, in all and by part."""
    config = with_settings(PRESETS["imagenet-200"], merge=case["merge"], embedding_dim=case["d"])
    config = with_settings(config, concentration_dims=min(config.objective.concentration_dims or 0, case["d"]))
    clock.reset_peak_memory(device)
    load = ClusteringLoad(config, n_images=case["n"], n_components=case["k"], device=device)
    whole = dict(
        zip(
            ("samples", "expectation_and_maximisation", "merging"),
            load.epoch_seconds(repeats=case["repeats"]),
            strict=True,
        )
    )
    peak = clock.peak_memory(device)
    load.restart()
    with stopwatch(device) as parts:
        started = time.perf_counter()
        samples = load.samples()
        clock.synchronise(device)
        parts["bank as unit rows"] = time.perf_counter() - started
        load.clustering.expectation_and_maximisation(samples)
        load.clustering.merge(samples)
        apart = time.perf_counter() - started
    parts["rest"] = max(0.0, apart - sum(parts.values()))
    return {
        "seconds": sum(whole.values()),
        **whole,
        "parts": dict(parts),
        "apart": apart,
        "left": load.clustering.n_components,
        "peak_memory_gb": peak / 1e9,
    }


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    usual: dict[str, Any] = {"device": args.device}
    found: list[dict[str, Any]] = []
    if args.epochs:
        small = usual | {
            "what": "epochs", "n": args.small_n, "batch": args.batch, "width": args.width, "epochs": args.epochs,
            "backbone": args.backbone, "variants": args.variants,
        }  # fmt: skip
        found += [small | {"k": 0, "merge": "none"}, small | {"k": args.small_k, "merge": "none"}]
        found += [small | {"k": args.small_k, "merge": "auto"}] if args.merging else []
    large = usual | {"what": "bank", "n": args.n, "d": args.d, "repeats": args.repeats}
    found += [large | {"k": k, "merge": "none"} for k in args.ks]
    found += [large | {"k": max(args.ks), "merge": rule} for rule in ("paper", "auto")] if args.merging else []
    return found


def main() -> None:
    parser = arguments(__doc__, limit=180.0)
    parser.add_argument("--small-n", type=int, default=50_000)
    parser.add_argument("--small-k", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--epochs", type=int, default=5, help="counted, after two that are not; 0 leaves them out")
    parser.add_argument("--variants", nargs="*", default=[])
    parser.add_argument("--n", type=int, default=1_281_167)
    parser.add_argument("--d", type=int, default=256)
    parser.add_argument("--ks", type=int, nargs="*", default=[1000, 100_000])
    parser.add_argument("--merging", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--images-per-second", type=float, nargs="*", default=[2000.0, 3000.0], help="of ResNet-50 at 224, measured"
    )
    args, results = swept("clustering_cost_gpu.py", parser, cases, one)
    path = record.write(
        fresh_question(f"clustering-cost-{'gpu' if args.device.startswith('cuda') else 'cpu'}", args.output),
        "What clustering costs an epoch of training",
        body(results, args),
        seeds="0",
        n=f"{args.small_n:,} images of 32 pixels, median of {args.epochs} epochs; a bank of {args.n:,} x {args.d}, "
        f"median of {args.repeats}",
        output=args.output,
    )
    print(path.read_text())


def body(results: list[dict[str, Any]], args: argparse.Namespace) -> str:
    text = ""
    small = [r for r in results if r["what"] == "epochs"]
    if small:
        plain = next((r["seconds"] for r in small if not r["k"] and "seconds" in r), None)
        rows = [
            [
                f"K = {r['k']:,}, merge {r['merge']}" if r["k"] else "without clusters",
                *(
                    [f"failed: {r['failed']}", "", "", ""]
                    if "failed" in r
                    else [
                        f"{r['seconds']:.3f}",
                        f"{r['images_per_second']:,.0f}",
                        f"{r['seconds'] / plain:.4f}" if plain else "",
                        f"{r['peak_memory_gb']:.2f}",
                    ]
                ),
            ]
            for r in small
        ]
        text += f"## Whole epochs, {args.small_n:,} images of 32 pixels, batch {args.batch}\n\n"
        text += record.table(["epoch", "seconds", "images/s", "x the epoch without", "memory, GB"], rows) + "\n\n"
    large = [r for r in results if r["what"] == "bank"]
    text += f"## The clustering of one epoch, {args.n:,} x {args.d}\n\n"
    good = [r for r in large if "failed" not in r]
    names = list(dict.fromkeys(name for r in good for name in r["parts"]))
    rows = [["**all told**", *(f"**{r['seconds']:.3f}**" for r in good)]]
    rows += [[name, *(f"{r['parts'].get(name, 0.0):.3f}" for r in good)] for name in names]
    rows += [["K after it", *(f"{r['left']:,}" for r in good)]]
    rows += [["peak memory, GB", *(f"{r['peak_memory_gb']:.2f}" for r in good)]]
    text += record.table(["seconds", *(f"K = {r['k']:,}, merge {r['merge']}" for r in good)], rows)
    text += "\n\nAll told is a run by itself; the parts are of a run that waits for the device after each.\n"
    for r in large:
        if "failed" in r:
            text += f"\nK = {r['k']:,}, merge {r['merge']}: failed, {r['failed']}.\n"
    fixed = {r["k"]: r["seconds"] for r in good if r["merge"] == "none"}
    if len(fixed) > 1:
        most, least = max(fixed), min(fixed)
        ratios = [
            f"{(args.n / rate + fixed[most]) / (args.n / rate + fixed[least]):.4f} at {rate:,.0f} images a second"
            for rate in args.images_per_second
        ]
        text += (
            f"\nAn epoch with {most:,} fixed clusters to one with {least:,}: {', '.join(ratios)} (the paper: 2.33). "
            "The updates take the same in both: an image reads its own few clusters.\n"
        )
    return text


if __name__ == "__main__":
    main()
