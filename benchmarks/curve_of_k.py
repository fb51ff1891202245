"""Draw K through training, from the records of ``study.py``: one panel for each set, one line for each run.

    python benchmarks/study.py run benchmarks/studies/curve-of-k.json --data DATA --output OUT/curve-of-k
    python benchmarks/curve_of_k.py 'CIFAR-10=OUT/curve-of-k/cifar10-*' 'CIFAR-100=OUT/curve-of-k/cifar100-*' \\
        --figure docs/images/curve-of-k.svg

A set is a folder of records, or the beginning of their names. Writes the figure, and a record with K at the start,
after each quarter of the epochs with clusters, and at the end. ``study_figures.py`` draws accuracy against K from the
same records.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import record

WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 230, 56, 46, 40
# One panel with a background of its own, so that it reads on any page; browsers in dark mode get the darker one.
STYLE = """
  text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 12px; fill: #57606a }
  .panel { fill: #ffffff; stroke: #d0d7de }
  .title { fill: #1f2328; font-size: 14px; font-weight: 600 }
  .rule { stroke: #d8dee4 }
  .classes { stroke: #57606a; stroke-dasharray: 5 4 }
  polyline { fill: none; stroke-width: 1.8 }
  .auto { stroke: #1a7f5a; fill: #1a7f5a }
  .paper { stroke: #8250df; fill: #8250df }
  polyline.auto, polyline.paper { fill: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #9ea7b3 }
    .panel { fill: #0d1117; stroke: #30363d }
    .title { fill: #e6edf3 }
    .rule { stroke: #30363d }
    .classes { stroke: #9ea7b3 }
    .auto { stroke: #3fb58c; fill: #3fb58c }
    .paper { stroke: #b392f0; fill: #b392f0 }
  }
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", metavar="NAME=RECORDS", help="the name of a set, and its records")
    parser.add_argument("--figure", type=Path, required=True, help="the SVG file to write")
    parser.add_argument("--output", type=Path, help="folder for the result (default: benchmarks/results)")
    options = parser.parse_args()
    sets: dict[str, dict[str, dict[str, Any]]] = {}
    for pair in options.sets:
        name, folder = pair.split("=", 1)
        sets[name] = records(folder)
        if not sets[name]:
            parser.error(f"there is no record of a run in {folder}; run the study first")
    options.figure.write_text(drawn(sets), "utf-8")
    print(written(sets, options.figure, options.output))


def records(given: str) -> dict[str, dict[str, Any]]:
    """The records in a folder, or those whose names begin so, each by its name; not those of runs that failed."""
    folder, beginning = (Path(given), "*") if Path(given).is_dir() else (Path(given).parent, Path(given).name)
    found = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(folder.glob(f"{beginning}.json"))}
    return {name: run for name, run in found.items() if "failed" not in run}


def curve_of(run: dict[str, Any]) -> list[tuple[int, int]]:
    """The epochs with clusters, and K: before the first of them that of the start, after the last what was left."""
    counts = [(epoch, k) for epoch, k in enumerate(run["k_curve"], 1) if k is not None]
    first, last = counts[0][0], counts[-1][0]
    return [(first - 1, run["n_clusters_at_start"]), *counts, (last, run["n_clusters"])]


def rule_of(run: dict[str, Any]) -> str:
    return "paper" if run["settings"].get("merge") == "paper" else "auto"


def drawn(sets: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The figure."""
    width, height = len(sets) * (LEFT + WIDTH + GAP), TOP + HEIGHT + 62
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="Number of clusters through training">\n<style>{STYLE}</style>',
        f'<rect class="panel" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
    ]
    for number, (name, runs) in enumerate(sets.items()):
        parts += panel(name, list(runs.values()), left=number * (LEFT + WIDTH + GAP) + LEFT)
    y = TOP + HEIGHT + 50
    for x, kind, words in ((LEFT, "auto", "merge=auto"), (LEFT + 110, "paper", "merge=paper")):
        parts.append(f'<circle class="{kind}" cx="{x}" cy="{y - 4}" r="4"/>{text(x + 9, y, words)}')
    parts.append(f'<path class="classes" d="M{LEFT + 228} {y - 4}h26"/>{text(LEFT + 260, y, "classes")}')
    return "\n".join([*parts, "</svg>\n"])


def panel(name: str, runs: list[dict[str, Any]], *, left: float) -> list[str]:
    """The curves of one set, K on a logarithmic scale."""
    curves = [curve_of(run) for run in runs]
    epochs = max(epoch for curve in curves for epoch, _ in curve)
    classes = runs[0]["n_classes"]
    counts = [classes, *(k for curve in curves for _, k in curve)]
    low, high = math.log(max(1, min(counts)) * 0.8), math.log(max(counts) * 1.2)

    def across(epoch: float) -> float:
        return left + WIDTH * epoch / epochs

    def down(count: float) -> float:
        return TOP + HEIGHT * (high - math.log(max(1, count))) / (high - low)

    parts = [text(left, TOP - 18, name, "title")]
    for power in range(5):
        for count in (10**power, 3 * 10**power):
            if low <= math.log(count) <= high:
                parts.append(f'<path class="rule" d="M{left} {down(count):.1f}h{WIDTH}"/>')
                parts.append(text(left - 8, down(count) + 4, f"{count:,}", anchor="end"))
    marks = range(0, epochs + 1, max(1, round(epochs / 4)))
    parts += [text(across(epoch), TOP + HEIGHT + 18, str(epoch), anchor="middle") for epoch in marks]
    parts.append(text(left + WIDTH, TOP - 18, "epoch across, K up", anchor="end"))
    parts.append(f'<path class="classes" d="M{left} {down(classes):.1f}h{WIDTH}"/>')
    for run, curve in zip(runs, curves, strict=True):
        points = " ".join(f"{across(epoch):.1f},{down(k):.1f}" for epoch, k in curve)
        parts.append(f'<polyline class="{rule_of(run)}" points="{points}"/>')
        end = curve[-1]
        parts.append(f'<circle class="{rule_of(run)}" cx="{across(end[0]):.1f}" cy="{down(end[1]):.1f}" r="3.5"/>')
    return parts


def text(x: float, y: float, words: str, kind: str = "", *, anchor: str = "start") -> str:
    """A line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{words}</text>'


def written(sets: dict[str, dict[str, dict[str, Any]]], figure: Path, output: Path | None) -> Path:
    """The record with the figures of the curves."""
    rows: list[list[str]] = []
    runs = [run for found in sets.values() for run in found.values()]
    for name, found in sets.items():
        for cell, run in found.items():
            counts = [k for _, k in curve_of(run)][:-1]
            quarters = [counts[round(share * (len(counts) - 1))] for share in (0.25, 0.5, 0.75)]
            left = [run["n_clusters"], run.get("n_groups", ""), run["n_classes"]]
            rows.append([name, cell, *(str(value) for value in (counts[0], *quarters, counts[-1], *left))])
    header = [
        "set", "run", "K at the start", "a quarter", "half", "three quarters", "last epoch", "K left", "groups",
        "classes",
    ]  # fmt: skip
    body = f"""![K through training](../../{figure.as_posix()})

{record.table(header, rows)}

Quarters are of the epochs with clusters. What is left is what merging ends with after the last epoch.
"""
    measured = {
        key: "; ".join(dict.fromkeys(str(run.get(key, "not noted")) for run in runs))
        for key in ("commit", "hardware", "software")
    }
    measured["command"] = "python benchmarks/study.py run benchmarks/studies/curve-of-k.json --data SET --output CELLS"
    n = "; ".join(f"{name}: {next(iter(found.values()))['n']:,} images" for name, found in sets.items())
    seeds = ", ".join(sorted({str(run["settings"]["random_state"]) for run in runs}))
    title = "K through training, from three starts"
    return record.write("curve-of-k", title, body, seeds=seeds, n=n, measured=measured, output=output)


if __name__ == "__main__":
    main()
