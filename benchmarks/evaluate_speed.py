"""How long do kNN and the quick linear probe take on 50,000 features of 512 dimensions and 10,000 test features?

    python benchmarks/evaluate_speed.py

The features are drawn around ten centres, so that the probe has something to find. Times are the least of three, after
a first run that is not counted (on a GPU it loads kernels).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

import record
from siammm.metrics.knn import RULES, knn_accuracies
from siammm.metrics.linear import linear_scores

N_BANK, N_QUERIES, DIMENSIONS, CLASSES = 50_000, 10_000, 512, 10
T = TypeVar("T")
HEADER = ["what", "seconds", "result"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=["knn", "linear"])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    bank, labels = features(N_BANK, 0, device)
    query, wanted = features(N_QUERIES, 1, device)
    rows: list[list[str]] = []
    if args.only != "linear":
        seconds, found = timed(lambda: knn_accuracies(query, wanted, bank, labels), args.repeats, device)
        rules = ", ".join(f"{100 * share:.1f} % (k {k}, T {t:g})" for share, (k, t) in zip(found, RULES, strict=True))
        rows.append(["kNN, k = 200 and 20, T = 0.1 and 0.07, one search", f"{seconds:.3f}", rules])
        print(rows[-1], flush=True)
    if args.only != "knn":
        seconds, probe = timed(lambda: linear_scores(bank, labels, query, wanted), args.repeats, device)
        rows.append(
            [
                f"linear probe, penalty chosen among {len(probe.recipe['penalties_tried'])}",
                f"{seconds:.3f}",
                f"{100 * probe.top1:.1f} %",
            ]
        )
        print(rows[-1], flush=True)
    path = record.write(
        f"evaluate-{'gpu' if device.type == 'cuda' else 'cpu'}",
        "How fast encoders are measured once their features are there",
        f"{record.table(HEADER, rows)}\n\nThe least of {args.repeats} runs, on {device}.",
        seeds="0",
        n=f"{N_BANK:,} x {DIMENSIONS} training and {N_QUERIES:,} test features, {CLASSES} classes",
        output=args.output,
    )
    print(path)


def features(n: int, seed: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Overlapping classes around the same centres."""
    centres = torch.randn(CLASSES, DIMENSIONS, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (n,), generator=generator)
    noise = torch.randn(n, DIMENSIONS, generator=generator)
    return (0.12 * centres[labels] + noise).to(device), labels.to(device)


def timed(function: Callable[[], T], repeats: int, device: torch.device) -> tuple[float, T]:
    result = function()
    best = float("inf")
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        result = function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best, result


if __name__ == "__main__":
    main()
