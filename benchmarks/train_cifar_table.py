"""Put runs of `train_cifar.py` side by side, as a result with all that is needed to run them again.

    python benchmarks/train_cifar_table.py RUNS... --question cifar10-byol-and-siammm --title "..."

RUNS are the .json files that `train_cifar.py` wrote, each with its command, commit, hardware and software, which become
those of the result. Those of the results that are kept are in results/runs, without their epochs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import record

COLUMNS = {
    "kNN, k = 200": "knn_online",
    "kNN, k = 20": "knn20_online",
    "kNN of the momentum encoder": "knn_momentum",
    "linear": "linear_online",
    "kNN with clean statistics": "knn_online_clean_statistics",  # in some trials
    "effective rank": "effective_rank",
    "K": "n_clusters",
    "AMI": "ami",
    "NMI": "nmi",
    "ARI": "ari",
    "Hungarian": "hungarian_accuracy",
    "majority": "majority_accuracy",
    "images/s": "images_per_second",
    "seconds": "seconds",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--question", required=True)
    parser.add_argument("--title", required=True)
    parser.add_argument("--note", default="", help="what the reader should know besides")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    runs: list[dict[str, Any]] = [json.loads(path.read_text()) for path in args.runs]
    columns = {title: name for title, name in COLUMNS.items() if any(name in run for run in runs)}
    rows = [
        [_name(run), str(run["settings"]["epochs"]), *(_written(run.get(name)) for name in columns.values())]
        for run in runs
    ]
    settings = "\n".join(f"- {run['recipe']}: `{json.dumps(run['settings'])}`" for run in runs)
    curves = "\n".join(f"- {_name(run)}: {_curve(run['k_curve'])}" for run in runs if "k_curve" in run)
    clusters = "The scores of the clusters are of the training images. " if curves else ""
    ranks = "The effective rank is that of the embeddings of the last epoch. " if "effective rank" in columns else ""
    body = f"""{record.table(["recipe", "epochs", *columns], rows)}

Accuracies are of the last epoch, on {runs[0]["judged"]}, which were
neither trained on nor clustered. {clusters}kNN is weighted (T = 0.1 for
k = 200, 0.07 for k = 20) on the backbone's features; linear is logistic regression on these, its penalty chosen on a
tenth of the training images. {ranks}Images a second are the median epoch's.

The runs, and their settings beside those of the preset:

{settings}
"""
    if curves:
        body += f"\nK, at about twenty epochs spread over training:\n\n{curves}\n"
    if args.note:
        body += f"\n{args.note}\n"
    seeds = ", ".join(sorted({str(run["settings"]["random_state"]) for run in runs}))
    trained = runs[0].get("n", 45_000 if runs[0]["validation"] else 50_000)
    judged = runs[0].get("n_judged", 5_000 if runs[0]["validation"] else 10_000)
    n = f"{trained:,} training images, {judged:,} {'held out' if runs[0]['validation'] else 'test images'}"
    measured = {
        name: "; ".join(dict.fromkeys(run.get(name, "not noted") for run in runs))
        for name in ("command", "commit", "hardware", "software")
    }
    print(record.write(args.question, args.title, body, seeds=seeds, n=n, output=args.output, measured=measured))


def _name(run: dict[str, Any]) -> str:
    """The recipe, and what the command changed of it."""
    words = [run["recipe"]]
    for flag in run["command"].split(" --")[1:]:
        name, *values = flag.split()
        if name == "set":
            words += [pair.replace("=", " ").replace("_", " ") for pair in values]
        elif name not in ("recipe", "epochs", "seed", "validation", "keep"):
            words.append(" ".join([name.replace("-", " "), *values]))
    return ", ".join(words)


def _curve(counts: list[int | None]) -> str:
    """About twenty of them; there are none before clustering begins."""
    return ", ".join("none" if k is None else f"{k:,}" for k in counts[:: max(1, len(counts) // 20)])


def _written(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if isinstance(value, float) and abs(value) <= 1 else f"{value:,}"


if __name__ == "__main__":
    main()
