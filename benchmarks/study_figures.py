"""Draw two figures of the paper from the records of studies.

    python benchmarks/study_figures.py accuracy 'CIFAR-10=OUT/curve-of-k/cifar10-*' --figure accuracy-against-k.svg
    python benchmarks/study_figures.py time 'CIFAR-10=OUT/t7-time/cifar10-*' --figure time-of-initialisations.svg

*accuracy*: kNN on held-out training images against K through training, a line for each run, to be read from right to
left. Under it stands the correlation of the two, and that of kNN and the epoch beside it: what falls and what grows
both follow the epochs, so that a high correlation alone says nothing. *time*: the time of an epoch against the number
of clusters, for centroids that are carried over and for one and five initialisations, as a multiple of the first.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from curve_of_k import HEIGHT, LEFT, STYLE, TOP, WIDTH, records, rule_of, text

Run = dict[str, Any]
Points = list[tuple[float, float]]
GAP = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["accuracy", "time"])
    parser.add_argument("sets", nargs="+", metavar="NAME=RECORDS")
    parser.add_argument("--figure", type=Path, required=True, help="the SVG file to write")
    args = parser.parse_args()
    sets: dict[str, dict[str, Run]] = {}
    for pair in args.sets:
        name, given = pair.split("=", 1)
        sets[name] = records(given)
        if not sets[name]:
            parser.error(f"there is no record of a run in {given}; run the study first")
    panels: list[str] = []
    for number, (name, runs) in enumerate(sets.items()):
        left = number * (LEFT + WIDTH + GAP) + LEFT
        if args.what == "accuracy":
            panels += accuracy_panel(name, runs, left)
            print("\n".join(correlations(name, runs)))
        else:
            panels += time_panel(name, runs, left)
    width, height = len(sets) * (LEFT + WIDTH + GAP), TOP + HEIGHT + 62
    words = "Accuracy against K" if args.what == "accuracy" else "Time of an epoch against the number of clusters"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{words}">'
    back = f'<rect class="panel" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>'
    args.figure.write_text("\n".join([head, f"<style>{STYLE}</style>", back, *panels, "</svg>\n"]), "utf-8")
    print(args.figure)


# -- accuracy against K ------------------------------------------------------------------------------------------------


def looks(run: Run) -> list[dict[str, Any]]:
    """What was seen on the way, from the first epoch with clusters."""
    return [look for look in run.get("looked", []) if look["n_clusters"]]


def accuracy_panel(name: str, runs: dict[str, Run], left: float) -> list[str]:
    """One set: a line for each run."""
    lines = [(rule_of(run), [(float(look["n_clusters"]), look["knn"]) for look in looks(run)]) for run in runs.values()]
    return panel(name, [line for line in lines if line[1]], left, "K across, kNN up")


def correlations(name: str, runs: dict[str, Run]) -> list[str]:
    """Of log K and kNN, and of the epoch and kNN, for each run that was looked at three times or more."""
    found: list[str] = []
    for label, run in runs.items():
        seen = looks(run)
        ks, accuracies = [math.log(look["n_clusters"]) for look in seen], [look["knn"] for look in seen]
        if len(seen) < 3 or min(map(len, (set(ks), set(accuracies)))) < 2:
            continue
        of_k = statistics.correlation(ks, accuracies)
        of_epoch = statistics.correlation([float(look["epoch"]) for look in seen], accuracies)
        found.append(f"{name}, {label}: log K and kNN {of_k:+.3f}; epoch and kNN {of_epoch:+.3f}")
    return found


# -- time against initialisations --------------------------------------------------------------------------------------


def initialisations(run: Run) -> int:
    """In each epoch; 0 where centroids are carried over."""
    settings = run["settings"]
    return settings.get("n_init", 1) if settings.get("centroids") == "reinitialised" else 0


def times(runs: Sequence[Run]) -> dict[int, Points]:
    """For each number of initialisations, the time of an epoch by K, as a multiple of the shortest."""
    seconds = {(initialisations(run), run["n_clusters_at_start"]): 1 / run["images_per_second"] for run in runs}
    least = min(seconds.values())
    return {
        number: sorted((float(k), value / least) for (n, k), value in seconds.items() if n == number)
        for number in sorted({number for number, _ in seconds})
    }


def time_panel(name: str, runs: dict[str, Run], left: float) -> list[str]:
    """One set: a line for each number of initialisations."""
    found = times(list(runs.values()))
    lines = [("paper" if number else "auto", points) for number, points in found.items()]
    parts = panel(name, lines, left, "K across, time of an epoch up")
    for at, number in enumerate(found):
        words = f"{number} initialisation{'s' if number > 1 else ''}" if number else "carried over"
        k, value = found[number][-1]
        parts.append(text(left + at * 110, TOP + HEIGHT + 50, f"{words}: {value:.2f} at {k:,.0f}"))
    return parts


# -- both --------------------------------------------------------------------------------------------------------------


def panel(name: str, lines: Sequence[tuple[str, Points]], left: float, words: str) -> list[str]:
    """Lines with K across on a logarithmic scale."""
    across = [math.log(max(1, x)) for _, points in lines for x, _ in points]
    up = [y for _, points in lines for _, y in points]
    low_x, high_x, low_y, high_y = min(across), max(across), min(up), max(up)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            left + WIDTH * (math.log(max(1, x)) - low_x) / ((high_x - low_x) or 1),
            TOP + HEIGHT * (high_y - y) / ((high_y - low_y) or 1),
        )

    parts = [text(left, TOP - 18, name, "title"), text(left + WIDTH, TOP - 18, words, anchor="end")]
    for share in (0, 0.25, 0.5, 0.75, 1):
        value = low_y + share * (high_y - low_y)
        _, y = place(1, value)
        parts += [
            f'<path class="rule" d="M{left} {y:.1f}h{WIDTH}"/>',
            text(left - 8, y + 4, f"{value:.2f}", anchor="end"),
        ]
    for power in range(6):
        for k in (10**power, 3 * 10**power):
            if low_x <= math.log(k) <= high_x:
                x, _ = place(k, low_y)
                parts.append(text(x, TOP + HEIGHT + 18, f"{k:,}", anchor="middle"))
    for kind, points in lines:
        placed = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in points)
        x, y = place(*points[-1])
        parts += [
            f'<polyline class="{kind}" points="{placed}"/>',
            f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>',
        ]
    return parts


if __name__ == "__main__":
    main()
