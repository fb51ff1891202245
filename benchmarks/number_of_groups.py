"""How many kinds of things are there? Every rule of ``group_rules.py`` on embeddings whose classes are known.

    python benchmarks/number_of_groups.py run EMBEDDINGS.npz ... --cells FOLDER [--classes 3 10] [--sizes 15 uneven]
    python benchmarks/number_of_groups.py table --cells FOLDER

An EMBEDDINGS file is any table with labels that ``siammm cluster`` reads; its name says which set and which encoder
(``group_sets.py`` makes the sets, ``siammm embed`` the embeddings). ``run`` takes all classes and random subsets of so
many classes, with all or so many samples of a class (``--sizes``), at most ``--rows`` samples of each subset, and
writes one file of JSON lines per set, a line for each rule; what is there is not run again. ``table`` gathers what is
there.

Which sets are for development and which for judging stands in ``DEVELOP``: a rule or a constant may have seen those,
and no others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

import group_rules
import record
from siammm.data.embeddings import read_embeddings
from siammm.metrics import clustering_scores

DEVELOP = ("cifar10", "cifar100", "digits", "mnist", "fashion", "tinydev", "cyrillic")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running, table = commands.add_parser("run"), commands.add_parser("table")
    for command in (running, table):
        command.add_argument("--cells", type=Path, required=True, help="folder of the files of JSON lines")
    running.add_argument("embeddings", type=Path, nargs="+")
    running.add_argument("--classes", type=int, nargs="*", default=[], help="also subsets of so many classes")
    running.add_argument("--subsets-only", action="store_true", help="not all classes together")
    running.add_argument(
        "--sizes", nargs="+", default=["all"], help="samples of a class; uneven: between an eighth of them and all"
    )
    running.add_argument("--seeds", type=int, nargs="+", default=[0])
    running.add_argument("--rows", type=int, default=2000)
    running.add_argument("--rules", nargs="+", default=[*group_rules.RULES, *group_rules.TOLD])
    table.add_argument("--title", default="Number of groups")
    table.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.command == "run":
        run(options)
    else:
        show(options)


def run(options: argparse.Namespace) -> None:
    options.cells.mkdir(parents=True, exist_ok=True)
    for path in options.embeddings:
        table = read_embeddings(path)
        x_ND, label_N = np.array(table.embeddings, dtype=np.float32), np.asarray(table.labels)
        x_ND /= np.linalg.norm(x_ND, axis=1, keepdims=True).clip(1e-9)
        classes = np.unique(label_N)
        counts = sorted({c for c in options.classes if c < len(classes)})
        if not options.subsets_only:
            counts.append(len(classes))
        for seed, count, size in itertools.product(options.seeds, counts, options.sizes):
            random = np.random.default_rng([seed, count])
            chosen = random.permutation(classes)[:count]
            row = random.permutation(np.flatnonzero(np.isin(label_N, chosen)))
            row = of_size(label_N, row, size, random)[: options.rows]
            name = path.stem if size == "all" else f"{path.stem}-{size}"
            for rule in options.rules:
                cell(options.cells, name, rule, seed, x_ND[row], label_N[row])


def of_size(label_N: np.ndarray, row: np.ndarray, size: str, random: np.random.Generator) -> np.ndarray:
    """So many of these rows of each class, in their order; with "uneven", another number of each."""
    if size == "all":
        return row
    kept = np.zeros(len(row), bool)
    for label in np.unique(label_N[row]):
        own = np.flatnonzero(label_N[row] == label)
        count = round(len(own) * 8 ** -random.random()) if size == "uneven" else int(size)
        kept[own[:count]] = True
    return row[kept]


def cell(folder: Path, name: str, rule: str, seed: int, x_ND: np.ndarray, label_N: np.ndarray) -> None:
    """One rule on one set, written to its file."""
    true_k = len(np.unique(label_N))
    path = folder / f"{name}.jsonl"
    if (*place({"set": name, "classes": true_k, "seed": seed}), rule) in {(*place(c), c["rule"]) for c in read(path)}:
        return
    start = time.perf_counter()
    found_N = group_rules.labels_of(rule, x_ND, seed, true_k)
    seconds = time.perf_counter() - start
    scores = clustering_scores(label_N, found_N)
    figures = {
        "set": name, "rule": rule, "seed": seed, "n": len(x_ND), "classes": true_k,
        "found": len(np.unique(found_N)), "ami": scores.ami, "accuracy": scores.hungarian_accuracy,
        "seconds": round(seconds, 2), "commit": record.commit(), "hardware": record.hardware(),
    }  # fmt: skip
    with path.open("a") as file:
        file.write(json.dumps(figures) + "\n")
    print(f"{name:24s} {true_k:4d} {rule:28s} {figures['found']:4d} {scores.ami:.3f} {seconds:.1f} s", flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    """The cells of a set that are there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def place(figures: dict[str, Any]) -> tuple[str, int, int]:
    """Which set a cell is of."""
    return figures["set"], figures["classes"], figures["seed"]


def size_of(name: str) -> str:
    """How many samples a class of this set has, as ``--sizes`` said."""
    last = name.rsplit("-", 1)[-1]
    return last if last == "uneven" or last.isdigit() else "all"


def is_right(found: int, classes: int) -> bool:
    """Within 20 % of the classes, or one."""
    return abs(found - classes) <= max(1.0, 0.2 * classes)


def show(options: argparse.Namespace) -> None:
    cells = [figures for path in sorted(options.cells.glob("*.jsonl")) for figures in read(path)]
    order = [*group_rules.RULES, *group_rules.TOLD]
    body: list[str] = []
    for half in ("develop", "judge"):
        own = [c for c in cells if (c["set"].split("-")[0] in DEVELOP) == (half == "develop")]
        if not own:
            continue
        # Rules may have run on different sets, so each is compared with k-means on its own.
        body += [f"## Sets to {half} on", ""]
        body += ["| rule | sets | number right | AMI, k-means told K | accuracy, k-means told K | seconds |"]
        body += ["|---|---|---|---|---|---|"]
        told = {place(c): c for c in own if c["rule"] == "k-means, told K"}
        for rule in order:
            of_rule = [c for c in own if c["rule"] == rule and place(c) in told]
            if of_rule:
                right = sum(is_right(c["found"], c["classes"]) for c in of_rule)
                pairs = [
                    f"{np.mean([c[key] for c in of_rule]):.3f}, {np.mean([told[place(c)][key] for c in of_rule]):.3f}"
                    for key in ("ami", "accuracy")
                ]
                seconds = np.median([c["seconds"] for c in of_rule])
                body.append(f"| {rule} | {len(of_rule)} | {right} | {pairs[0]} | {pairs[1]} | {seconds:.1f} |")
        rules = [rule for rule in order if any(c["rule"] == rule for c in own)]
        body += ["", "Number right (mean AMI), by samples of a class:", ""]
        body += ["| samples | " + " | ".join(rules) + " |", "|---" * (len(rules) + 1) + "|"]
        for size in sorted({size_of(c["set"]) for c in own}):
            entries = []
            for rule in rules:
                here = [c for c in own if c["rule"] == rule and size_of(c["set"]) == size]
                right = sum(is_right(c["found"], c["classes"]) for c in here)
                entries.append(f"{right} of {len(here)} ({np.mean([c['ami'] for c in here]):.2f})" if here else "")
            body.append(f"| {size} | " + " | ".join(entries) + " |")
        body += ["", "Number found (AMI), by set:", ""]
        body += ["| set, classes, seed | " + " | ".join(rules) + " |", "|---" * (len(rules) + 1) + "|"]
        for key in sorted({place(c) for c in own}):
            here = {c["rule"]: c for c in own if place(c) == key}
            entries = [f"{here[r]['found']} ({here[r]['ami']:.2f})" if r in here else "" for r in rules]
            body.append(f"| {key[0]}, {key[1]}, {key[2]} | " + " | ".join(entries) + " |")
        body.append("")
    commits = ", ".join(sorted({c["commit"] for c in cells}))
    seeds = ", ".join(str(seed) for seed in sorted({c["seed"] for c in cells}))
    hardware = "; ".join(sorted({c["hardware"] for c in cells}))
    lines = [
        f"# {options.title}",
        "",
        f"Commit {commits}; seeds {seeds}; at most {max(c['n'] for c in cells)} samples ",
    ]
    lines[-1] += f"of a set; {hardware}."
    text = "\n".join([*lines, "", *body])
    if options.output:
        options.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
