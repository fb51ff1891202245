"""How do time and memory of an epoch's clustering grow with N, K, H and d?

    PYTHONPATH=src python benchmarks/growth.py --output OUT

One of the four is varied at a time, by doublings around a base; the others stay. Slopes are those of a straight line
through the logarithms, by least squares: 1 is linear growth. Memory is the device's peak, bank and tables included; a
CPU keeps no such count.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import record
from siammm.bench import clock
from siammm.bench.mixture import ClusteringLoad
from siammm.settings.fields import with_settings
from siammm.settings.presets import PRESETS
from sweep import fresh, fresh_question

LETTERS: tuple[str, ...] = ("n", "k", "h", "d")


def measured(sizes: dict[str, int], device: torch.device, *, merge: str, repeats: int) -> dict[str, Any]:
    settings = {"merge": merge, "embedding_dim": sizes["d"], "n_neighbours": sizes["h"], "concentration_dims": None}
    config = with_settings(PRESETS["imagenet-200"], **settings)
    gc.collect()
    clock.reset_peak_memory(device)
    load = ClusteringLoad(config, n_images=sizes["n"], n_components=sizes["k"], device=device)
    _, steps, merging = load.epoch_seconds(repeats=repeats)
    return {
        **sizes,
        "expectation_and_maximisation": steps,
        "merging": merging,
        "memory_gb": clock.peak_memory(device) / 1e9 if device.type == "cuda" else None,
    }


def slope(sizes: list[float], values: list[float]) -> float:
    """Of a straight line through the logarithms, by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=record.RESULTS)
    parser.add_argument("--n", type=int, nargs="+", default=[160_000, 320_000, 640_000, 1_280_000])
    parser.add_argument("--k", type=int, nargs="+", default=[12_500, 25_000, 50_000, 100_000])
    parser.add_argument("--h", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--d", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--base", type=int, nargs=4, metavar=("N", "K", "H", "D"), default=[640_000, 25_000, 4, 256])
    parser.add_argument("--merge", choices=["none", "paper", "auto"], default="paper")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    base: dict[str, int] = dict(zip(LETTERS, args.base, strict=True))
    args.output.mkdir(parents=True, exist_ok=True)
    lines = fresh(args.output / "growth.jsonl")
    results: dict[str, list[dict[str, Any]]] = {}
    for letter in LETTERS:
        results[letter] = []
        for size in getattr(args, letter):
            try:
                found = measured(base | {letter: size}, device, merge=args.merge, repeats=args.repeats)
            except torch.OutOfMemoryError:
                found = base | {letter: size, "failed": "out of memory"}
            results[letter].append(found)
            with lines.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"varied": letter, **found}) + "\n")
            print(json.dumps(found), flush=True)
    path = record.write(
        fresh_question(f"growth-{'gpu' if device.type == 'cuda' else 'cpu'}", args.output),
        "How an epoch's clustering grows with N, K, H and d",
        body(results, base),
        seeds="0",
        n=f"base {base['n']:,} x {base['d']}, K = {base['k']:,}, H = {base['h']}; median of {args.repeats}",
        output=args.output,
    )
    print(path.read_text())


def body(results: dict[str, list[dict[str, Any]]], base: dict[str, int]) -> str:
    quantities = {
        "expectation_and_maximisation": "E and M steps, tables, s",
        "merging": "merging, s",
        "memory_gb": "memory, GB",
    }
    slopes: list[list[str]] = []
    text = ""
    for letter, found in results.items():
        good = [r for r in found if "failed" not in r]
        rows = [[f"{r[letter]:,}", *("" if r[q] is None else f"{r[q]:.4f}" for q in quantities)] for r in good]
        text += f"\n## {letter.upper() if letter != 'd' else 'd'}\n\n"
        text += record.table([letter.upper() if letter != "d" else "d", *quantities.values()], rows) + "\n"
        row = [letter.upper() if letter != "d" else "d"]
        for quantity in quantities:
            values = [r[quantity] for r in good]
            usable = len(values) > 1 and all(value is not None and value > 0 for value in values)
            row.append(f"{slope([r[letter] for r in good], values):.2f}" if usable else "")
        slopes.append(row)
    others = f"N = {base['n']:,}, K = {base['k']:,}, H = {base['h']}, d = {base['d']}"
    head = f"Exponents of growth, the others at {others}:\n\n"
    return head + record.table(["varied", *quantities.values()], slopes) + "\n" + text


if __name__ == "__main__":
    main()
