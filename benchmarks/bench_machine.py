"""A record of what ``siammm bench`` measured, and the row for ``siammm.bench.references``.

    siammm bench --output figures.json
    python benchmarks/bench_machine.py figures.json --output OUT

Run it on the machine that was measured: the record names its hardware and commit.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import record
from siammm.bench.references import number, rate, share
from sweep import fresh_question

HEADER = ["figure", "value"]


def rows(figures: dict[str, Any]) -> list[list[str]]:
    clustering = figures["clustering"] or {}
    found = [
        ["images of a step", str(figures["batch_size"])],
        ["images a second, full step", rate(figures["images_per_second"])],
        ["the same in each window", ", ".join(rate(value) for value in figures["windows"])],
        ["without the cluster loss", rate(figures["images_per_second_alone"])],
        ["share of the device's peak", share(figures["share_of_peak"])],
        ["GFLOP of an image", number(figures["flops_per_image"] / 1e9)],
        ["peak memory, GB", number(figures["peak_memory"] / 1e9)],
        ["search for nearest clusters, TFLOP/s", number(figures["search_flops"] / 1e12)],
        ["clustering an epoch, seconds", number(figures["clustering_seconds"])],
        *([f"- {name.replace('_', ' ')}", number(clustering[name])] for name in clustering),
        ["its share of the epoch", share(figures["clustering_share"])],
        ["first step, seconds", number(figures["first_step_seconds"])],
        ["until the step has its pace, seconds", number(figures["ready_seconds"])],
        [f"all {figures['epochs']} epochs, hours", number(figures["hours"])],
    ]
    if figures["loader_images_per_second"] is not None:
        found.append([f"loader, {figures['workers']} workers, images/s", rate(figures["loader_images_per_second"])])
    return found


def reference(figures: dict[str, Any], machine: str, source: str) -> str:
    values = {
        "machine": machine,
        "preset": figures["preset"],
        "batch_size": figures["batch_size"],
        "images_per_second": _short(figures["images_per_second"]),
        "images_per_second_alone": _short(figures["images_per_second_alone"]),
        "share_of_peak": _short(figures["share_of_peak"]),
        "clustering_share": _short(figures["clustering_share"]),
        "search_teraflops": _short(figures["search_flops"] / 1e12),
        "memory_gigabytes": _short(figures["peak_memory"] / 1e9),
        "hours": _short(figures["hours"]),
        "source": source,
    }
    inner = "".join(f"        {name}={value!r},\n" for name, value in values.items()).replace("'", '"')
    return f"    Reference(\n{inner}    ),"


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path, help="what siammm bench --output wrote")
    parser.add_argument("--question", default="bench")
    parser.add_argument("--output", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    stored = json.loads(args.figures.read_text("utf-8"))
    machine = stored["machine"]
    body = (
        f"{machine['device']}; a large {machine['precision']} product runs at "
        f"{number(machine['peak_flops'] / 1e12)} TFLOP/s; `siammm --help` takes {stored['help_seconds']:.2f} s.\n"
    )
    for figures in stored["presets"]:
        body += f"\n## {figures['preset']}: {figures['backbone']} at {figures['view_size']} pixels\n\n"
        body += record.table(HEADER, rows(figures)) + "\n"
    names = ", ".join(f"{f['preset']} ({f['n_images']:,} images, K = {f['n_components']:,})" for f in stored["presets"])
    path = record.write(
        fresh_question(args.question, args.output),
        "How fast this machine trains and clusters",
        body,
        seeds="0",
        n=names,
        output=args.output,
        measured=record.circumstances() | {"command": "siammm bench"},
    )
    print(path.read_text())
    for figures in stored["presets"]:
        print(reference(figures, machine["device"], f"benchmarks/results/{path.name}"))


if __name__ == "__main__":
    main()
