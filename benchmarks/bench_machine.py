"""A record of what ``siammm bench`` measured.

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
from siammm.commands.bench import number, share
from sweep import fresh_question

HEADER = ["figure", "value"]


def rows(figures: dict[str, Any]) -> list[list[str]]:
    found = [
        ["images per step", str(figures["batch_size"])],
        ["images per second, full step", number(figures["images_per_second"])],
        ["without the cluster loss", number(figures["images_per_second_alone"])],
        ["share of the device's peak", share(figures["share_of_peak"])],
        ["GFLOP of an image", number(figures["flops_per_image"] / 1e9)],
        ["peak memory, GB", number(figures["peak_memory"] / 1e9)],
        ["clustering per epoch, seconds", number(figures["clustering_seconds"])],
        ["its share of the epoch", share(figures["clustering_share"])],
        ["until the step runs at full speed, seconds", number(figures["ready_seconds"])],
        [f"all {figures['epochs']} epochs, hours", number(figures["hours"])],
    ]
    if figures["loader_images_per_second"] is not None:
        found.append([f"loader, {figures['workers']} workers, images/s", number(figures["loader_images_per_second"])])
    return found


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
        f"{number(machine['peak_flops'] / 1e12)} TFLOP/s.\n"
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


if __name__ == "__main__":
    main()
