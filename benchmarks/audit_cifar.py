"""How many planted label errors does the audit find, beside confident learning on the same features?

    python benchmarks/audit_cifar.py FEATURES.npz --share 0.05 --seeds 0 1 2

FEATURES.npz holds `features` and `labels`. A share of the labels is made wrong, each any other class alike. Among as
many first suspects as labels were planted, the share of planted ones is both precision and recall.

Confident learning (Northcutt, Jiang and Chuang, 2021) gets out-of-fold probabilities of a logistic regression on these
features, its penalty chosen by likelihood, and ranks in three ways: by self-confidence, by normalised margin, and by
its own choice of errors (pruned by noise rate) followed by the others, both parts by self-confidence. cleanlab computes
them where it can be imported (`pip install --target FOLDER cleanlab`, and PYTHONPATH=FOLDER); elsewhere the same
published rules, written out below.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score

import record
from siammm.audit import Audit, audit, plant_errors
from siammm.metrics import knn_accuracy, out_of_fold_probabilities

PEERS = ("self-confidence", "normalised margin", "confident learning")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", type=Path, help="an .npz file, or digits for the pixels of scikit-learn's digits")
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--question", default="audit-cifar10", help="the name of the result's file")
    parser.add_argument("--what", default="features", help="what the features are, for the title")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    array, labels = _read(args.features)
    features = torch.from_numpy(array).to(device)
    knn = knn_accuracy(features, labels, features, labels, leave_one_out=True)
    library, rankings = _peers()

    rows: list[list[str]] = []
    found: dict[str, list[tuple[float, float]]] = {}
    last: Audit | None = None
    is_planted = np.zeros(0, dtype=bool)
    for seed in args.seeds:
        planted, is_planted = plant_errors(labels, args.share, seed=seed)
        start = time.perf_counter()
        last = audit(features, planted, rounds=args.rounds, seed=seed)
        seconds = time.perf_counter() - start
        _add(rows, found, seed, "siammm audit", last.score_N, is_planted, seconds)
        for name, witness_N in last.witness_N.items():
            _add(rows, found, seed, f"its {name} alone", -witness_N, is_planted, None)
        start = time.perf_counter()
        probability = out_of_fold_probabilities(features, torch.from_numpy(planted).to(device), seed=seed)
        probability_NC = np.ascontiguousarray(probability.double().cpu().numpy())
        probability_NC /= probability_NC.sum(axis=1, keepdims=True)
        shared = time.perf_counter() - start
        for name in PEERS:
            start = time.perf_counter()
            suspicion_N = rankings[name](planted, probability_NC)
            took = shared + time.perf_counter() - start
            _add(rows, found, seed, f"{library}: {name}", suspicion_N, is_planted, took)
    assert last is not None
    means = [
        [what, f"{np.mean([p for p, _ in values]):.4f}", f"{np.mean([a for _, a in values]):.4f}"]
        for what, values in found.items()
    ]
    n_planted = int(is_planted.sum())
    suspects = last.image_N[last.probability_N < last.threshold]
    weights = ", ".join(f"{name} {weight:.2f}" for name, weight in last.weights.items())
    body = f"""Means over the seeds:

{record.table(["method", f"planted among the first {n_planted:,}", "average precision"], means)}

{args.share:.0%} of the labels were made wrong ({n_planted:,}), each any other class alike. kNN accuracy of the features
with the labels as they were (leave one out, k = 200): {knn:.4f}.
The peer's probabilities are out of fold (5 folds), of a logistic regression on the same features; its rankings are by
{library}. Errors that the labels had before are counted against every method.{_caution(args.features)}

Of the last seed: weights of the audit's witnesses: {weights}.
The estimated share of wrong labels is {last.error_rate:.4f}; of {last.n_suspects:,} suspects with a probability below
{last.threshold:g}, the share that was planted is {float(is_planted[suspects].mean()):.4f}.

Each seed:

{record.table(["seed", "method", f"planted among the first {n_planted:,}", "average precision", "seconds"], rows)}
"""
    path = record.write(
        args.question,
        f"Planted label errors that are found: {args.what}",
        body,
        seeds=", ".join(map(str, args.seeds)),
        n=f"{len(labels):,} images, {features.shape[1]} features, {len(np.unique(labels))} classes",
        output=args.output,
    )
    print(path)


def _caution(path: Path) -> str:
    """What a reader must know of data that choices were made on."""
    if path != Path("digits"):
        return ""
    return "\n**The audit was developed on this set, among others (docs/audit.md): these figures are not held out.**"


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    if path == Path("digits"):
        pixels, labels = (np.asarray(array) for array in load_digits(return_X_y=True))
        return pixels.astype(np.float32), labels
    with np.load(path, allow_pickle=False) as stored:
        features, labels = (np.asarray(stored[name]) for name in ("features", "labels"))
    return features.astype(np.float32), labels.astype(np.int64)


def _add(
    rows: list[list[str]],
    found: dict[str, list[tuple[float, float]]],
    seed: int,
    what: str,
    suspicion_N: np.ndarray,
    is_planted: np.ndarray,
    seconds: float | None,
) -> None:
    first = np.argsort(-suspicion_N, kind="stable")[: int(is_planted.sum())]
    precision = float(is_planted[first].mean())
    average = float(average_precision_score(is_planted, suspicion_N))
    found.setdefault(what, []).append((precision, average))
    rows.append([str(seed), what, f"{precision:.4f}", f"{average:.4f}", "" if seconds is None else f"{seconds:.1f}"])
    print(rows[-1], flush=True)


# ------------------------------------------------------------------------------------------------------------- the peer

Ranking = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _peers() -> tuple[str, dict[str, Ranking]]:
    """The peer's rankings by cleanlab, or by its published rules where it is not installed."""
    try:
        import cleanlab  # pyright: ignore[reportMissingImports]
        from cleanlab.filter import find_label_issues  # pyright: ignore[reportMissingImports]
        from cleanlab.rank import get_label_quality_scores  # pyright: ignore[reportMissingImports]
    except ImportError:
        return "confident learning, written out", {
            "self-confidence": self_confidence,
            "normalised margin": normalised_margin,
            "confident learning": lambda y, p: _flagged_first(y, p, confident_learning(y, p)),
        }

    def flagged_first(y: np.ndarray, p: np.ndarray) -> np.ndarray:
        return _flagged_first(y, p, find_label_issues(y, p, filter_by="prune_by_noise_rate", n_jobs=1))

    return f"cleanlab {cleanlab.__version__}", {
        "self-confidence": lambda y, p: -get_label_quality_scores(y, p, method="self_confidence"),
        "normalised margin": lambda y, p: -get_label_quality_scores(y, p, method="normalized_margin"),
        "confident learning": flagged_first,
    }


def self_confidence(label_N: np.ndarray, probability_NC: np.ndarray) -> np.ndarray:
    """How improbable the given label is."""
    return -probability_NC[np.arange(len(label_N)), label_N]


def normalised_margin(label_N: np.ndarray, probability_NC: np.ndarray) -> np.ndarray:
    """How much more probable the likeliest other label is than the given one."""
    others_NC = probability_NC.copy()
    others_NC[np.arange(len(label_N)), label_N] = -np.inf
    return others_NC.max(axis=1) + self_confidence(label_N, probability_NC)


def confident_learning(label_N: np.ndarray, probability_NC: np.ndarray) -> np.ndarray:
    """Which labels confident learning calls errors, pruned by noise rate.

    An image counts as (given i, truly j) where j is the likeliest class among those whose probability reaches the mean
    that images labelled j give it. For each i and j the counts, scaled so that every row sums to the images labelled i,
    say how many errors of this kind there are, and as many images labelled i with the largest p_j - p_i are called so.
    """
    n, n_classes = probability_NC.shape
    threshold_C = np.array([probability_NC[label_N == c, c].mean() for c in range(n_classes)])
    above_NC = np.where(probability_NC >= threshold_C - 1e-6, probability_NC, -np.inf)
    confident = np.isfinite(above_NC).any(axis=1)
    joint_CC = np.zeros((n_classes, n_classes))
    np.add.at(joint_CC, (label_N[confident], above_NC[confident].argmax(axis=1)), 1)
    np.fill_diagonal(joint_CC, np.maximum(joint_CC.diagonal(), 1))
    joint_CC *= np.bincount(label_N, minlength=n_classes)[:, None] / joint_CC.sum(axis=1, keepdims=True)
    is_error_N = np.zeros(n, dtype=bool)
    for i in range(n_classes):
        labelled = np.flatnonzero(label_N == i)
        for j in range(n_classes):
            many = round(joint_CC[i, j])
            if i != j and many:
                margin = probability_NC[labelled, j] - probability_NC[labelled, i]
                is_error_N[labelled[np.argsort(-margin, kind="stable")[:many]]] = True
    # A label that is also the likeliest is not called an error.
    return is_error_N & (probability_NC.argmax(axis=1) != label_N)


def _flagged_first(label_N: np.ndarray, probability_NC: np.ndarray, is_error_N: np.ndarray) -> np.ndarray:
    return self_confidence(label_N, probability_NC) + 2.0 * is_error_N


if __name__ == "__main__":
    main()
