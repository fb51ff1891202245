"""What a study found: the figures of its cells, and its claims beside the paper's.

A claim is one sentence of the paper about two rows of a table: that a cell is *better* than another in a figure, or
(``"same": true``) that it makes no difference. It is judged by the differences of paired seeds on each set of images:

- **agrees**: the mean difference has the paper's direction and is more than two standard errors from zero (for
  "no difference": it is within the margin, half a point, with two standard errors on either side);
- **disagrees**: the same in the other direction (beyond the margin);
- **not decided**: anything else, also where fewer than three seeds are there.

Two standard errors of three pairs are a weaker test than they sound: by chance alone a difference of nothing passes in
one direction about once in eleven times.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import record
import study_cells
from study_cells import Cell

Found = dict[str, dict[int, dict[str, Any]]]
"""The records by cell and seed."""

COLUMNS = {
    "kNN, k = 200": "knn_online", "kNN, k = 20": "knn20_online", "linear": "linear_online",
    "effective rank": "effective_rank", "K": "n_clusters", "groups": "n_groups", "AMI of clusters": "ami",
    "AMI of groups": "groups_ami", "NMI of groups": "groups_nmi", "Hungarian, groups": "groups_hungarian_accuracy",
    "Hungarian, groups, judged": "judged_groups_hungarian_accuracy", "ratio of groups": "groups_ratio",
    "seconds": "seconds", "images/s": "images_per_second",
}  # fmt: skip
# Each a table of its own, where a record has any of them.
FEW_LABELS = {
    "1 %: top-1": "semi_1_top1", "1 %: top-5": "semi_1_top5", "10 %: top-1": "semi_10_top1",
    "10 %: top-5": "semi_10_top5", "transfer": "transfer_mean", "to CIFAR-10": "transfer_cifar10",
    "to CIFAR-100": "transfer_cifar100", "to Tiny-ImageNet": "transfer_tiny", "mosaics, mAP": "mosaics_map",
}  # fmt: skip
CLUSTERS = {
    "k-means, 1 a class: AMI": "k1_train_ami", "NMI": "k1_train_nmi", "ARI": "k1_train_ari",
    "Hungarian": "k1_train_hungarian_accuracy", "majority": "k1_train_majority_accuracy",
    "judged, named by training": "k1_judged_named", "5 a class: AMI": "k5_train_ami",
    "5 a class: majority": "k5_train_majority_accuracy", "5 a class: judged": "k5_judged_named",
    "25 a class: AMI": "k25_train_ami", "25 a class: majority": "k25_train_majority_accuracy",
    "25 a class: judged": "k25_judged_named",
}  # fmt: skip
# Differences of shares are said in points; with a claim of no difference, this many points are none.
MARGIN = 0.5
FEWEST_SEEDS = 3


def written(path: Path, study: dict[str, Any], output: Path, folder: Path | None = None) -> Path:
    """Write the result of all cells that have a record."""
    cells = [cell for cell in study_cells.cells_of(study) if study_cells.record_of(output, cell) is not None]
    runs = [_found(output, cell) for cell in cells]
    if not runs:
        raise SystemExit(f"There is no record of a cell in {output}; run the study first.")
    body = f"{study['text']}\n"
    if "paper" in study:
        body += f"\n**{study['table']} of the paper**: {study['paper']}\n"
    for image_set in dict.fromkeys(cell.image_set for cell in cells):
        found = of_set(cells, output, image_set)
        body += f"\n{f'## {image_set}' if image_set else ''}\n\n{figures(study, found)}\n"
    if study.get("claims"):
        body += f"\n## Beside the paper\n\n{claims(study, cells, output)}\n\n{_HOW_JUDGED}\n"
    if any(cell.is_oracle for cell in cells):
        body += "\nCells that are called oracle are told the labels: a diagnosis, not a result of any method.\n"
    body += f"""
Mean and deviation over the seeds; the last column is the mean and deviation of the differences of paired seeds, in
points of kNN with 200 voters. Accuracies are of the last epoch, on {runs[0]["judged"]}, which were neither trained on
nor clustered; the scores of clusters and groups are of the training images. Seconds are of trainings that shared the
GPU with others.

Predictions, written before the study ran:

{chr(10).join(f"- {text}" for text in study["predictions"])}
"""
    if study.get("findings"):
        body += f"\nWhat came out:\n\n{chr(10).join(f'- {text}' for text in study['findings'])}\n"
    shared = {key: value for key, value in study["shared"].items() if key != "base"}
    settings = "\n".join(f"- {name}: `{json.dumps(study['cells'][name])}`" for name in _names(cells))
    body += f"\nAll cells share `{json.dumps(shared)}`; each changes:\n\n{settings}\n"
    if study.get("sets"):
        body += "\nAnd each set of images:\n\n"
        body += "\n".join(f"- {name}: `{json.dumps(given)}`" for name, given in study["sets"].items()) + "\n"
    measured = {
        name: "; ".join(dict.fromkeys(str(run.get(name, "not noted")) for run in runs))
        for name in ("commit", "hardware", "software")
    }
    data, at_once = study.get("data", "data" if study.get("sets") else "cifar10"), study.get("at_once", 4)
    measured["command"] = f"python benchmarks/study.py run {path} --data {data} --at-once {at_once}"
    seeds = ", ".join(map(str, sorted({cell.seed for cell in cells})))
    counts = {(cell.image_set, run["n"], run["n_judged"]) for cell, run in zip(cells, runs, strict=True)}
    n = "; ".join(
        f"{f'{name}: ' if name else ''}{n:,} training images, {judged:,} judged"
        for name, n, judged in sorted(counts, key=str)
    )
    return record.write(study["name"], study["title"], body, seeds=seeds, n=n, measured=measured, output=folder)


def of_set(cells: Sequence[Cell], output: Path, image_set: str | None) -> Found:
    """The records of one set of images."""
    found: Found = {}
    for cell in cells:
        if cell.image_set == image_set:
            found.setdefault(cell.name, {})[cell.seed] = _found(output, cell)
    return found


def figures(study: Mapping[str, Any], found: Found) -> str:
    """The figures of the cells of one set, with what differs from the baseline."""
    runs = [run for seeds in found.values() for run in seeds.values()]
    columns = _present(COLUMNS, runs)
    baseline = found.get(study["baseline"], {})
    rows: list[list[str]] = []
    for name, seeds in found.items():
        means = [_spread([run[key] for run in seeds.values() if run.get(key) is not None]) for key in columns.values()]
        failed = [run for run in seeds.values() if "failed" in run]
        if failed:
            means[0] = f"{means[0]} ({len(failed)} of {len(seeds)} failed: {failed[0]['failed'].split('.')[0]})".strip()
        gains = differences(found, name, study["baseline"], "knn_online")
        title = f"{name} (oracle)" if any(run.get("oracle") for run in seeds.values()) else name
        rows.append([title, str(len(seeds)), *means, "" if seeds is baseline else _spread(gains)])
    text = record.table(["cell", "seeds", *columns, f"kNN, points above {study['baseline']}"], rows)
    for title, wanted in (
        ("Few labels, transfer, and several classes an image", FEW_LABELS),
        ("Clusters of k-means on the features", CLUSTERS),
    ):
        columns = _present(wanted, runs)
        if columns:
            rows = [
                [name, *(_spread([run[key] for run in seeds.values() if key in run]) for key in columns.values())]
                for name, seeds in found.items()
            ]
            text += f"\n\n{title}:\n\n{record.table(['cell', *columns], rows)}"
    return text


def _present(columns: Mapping[str, str], runs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    return {title: name for title, name in columns.items() if any(run.get(name) is not None for run in runs)}


# -- the paper's claims ------------------------------------------------------------------------------------------------

_HOW_JUDGED = """The difference is that of paired seeds, in points (percent), with its standard error. Agrees: in the
paper's direction and more than two standard errors from zero; where the paper says that there is no difference, at
most half a point with two standard errors. Disagrees: the same the other way round. Fewer than three seeds decide
nothing."""


def claims(study: Mapping[str, Any], cells: Sequence[Cell], output: Path) -> str:
    """Each claim of the paper beside what was found, on each set."""
    rows: list[list[str]] = []
    for image_set in dict.fromkeys(cell.image_set for cell in cells):
        found = of_set([cell for cell in cells if not cell.is_oracle], output, image_set)
        for claim in study["claims"]:
            if image_set not in claim.get("sets", [image_set]):
                continue
            pairs = differences(found, claim["better"], claim["than"], claim["figure"])
            said = f"{claim['paper']:+.1f}" if "paper" in claim else ""
            word = verdict(pairs, same=claim.get("same", False))
            rows.append([
                claim.get("table", study.get("table", "")), claim["says"], said, image_set or "",
                f"{claim['better']} - {claim['than']}, {claim['figure']}", _difference(pairs), str(len(pairs)), word,
            ])  # fmt: skip
    header = ["table", "the paper", "its difference", "set", "ours", "difference", "seeds", "verdict"]
    return record.table(header, rows)


def differences(found: Found, first: str, second: str, figure: str) -> list[float]:
    """Those of paired seeds, in points; a training that failed has no figure."""
    one, other = found.get(first, {}), found.get(second, {})
    return [
        100 * (one[seed][figure] - other[seed][figure])
        for seed in one
        if seed in other and one[seed].get(figure) is not None and other[seed].get(figure) is not None
    ]


def verdict(pairs: Sequence[float], *, same: bool = False) -> str:
    """Agrees, disagrees, not decided."""
    if len(pairs) < FEWEST_SEEDS:
        return "not decided"
    mean, error = statistics.mean(pairs), statistics.stdev(pairs) / math.sqrt(len(pairs))
    if same:
        if abs(mean) + 2 * error <= MARGIN:
            return "agrees"
        return "disagrees" if abs(mean) - 2 * error > MARGIN else "not decided"
    if abs(mean) <= 2 * error:
        return "not decided"
    return "agrees" if mean > 0 else "disagrees"


def _difference(pairs: Sequence[float]) -> str:
    if not pairs:
        return "not measured"
    mean = f"{statistics.mean(pairs):+.2f}"
    return f"{mean} ± {statistics.stdev(pairs) / math.sqrt(len(pairs)):.2f}" if len(pairs) > 1 else mean


def _found(output: Path, cell: Cell) -> dict[str, Any]:
    found = study_cells.record_of(output, cell)
    assert found is not None
    return found


def _names(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(cell.name for cell in cells))


def _spread(values: list[float]) -> str:
    """Mean and deviation, with the digits that values of this size need."""
    if not values:
        return ""
    digits = 4 if max(map(abs, values)) <= 1 else 2 if max(map(abs, values)) < 20 else 0
    mean = f"{statistics.mean(values):,.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):,.{digits}f}" if len(values) > 1 else mean
