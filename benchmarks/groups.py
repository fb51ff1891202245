"""Do components have groups, and are they found? Sets with and without a coarser order, and embeddings of images.

    python benchmarks/groups.py [EMBEDDINGS.npz ...]

EMBEDDINGS hold ``embeddings`` and ``labels``, as `train_cifar.py --keep` leaves them. The rule was fixed on components
strewn at random, on the families of ``DEVELOP`` and on quarters of one CIFAR-10 run; the families of ``JUDGE`` are new
to it, drawn as for the judgement of merging.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.metrics import adjusted_mutual_info_score

import merge_families
import record
from siammm import VonMisesFisherMixture
from siammm.mixture import groups

HEADER = ["set", "n", "true groups", "clusters", "groups", "modularity", "of chance", "neighbours", "AMI of clusters"]


def described(name: str, x: np.ndarray, start: int, classes: np.ndarray, true: str) -> list[str]:
    """A row of the table: what is found from so many clusters, beside the classes."""
    mixture = VonMisesFisherMixture(start, merge="auto", random_state=0).fit(x)
    found = mixture.groups(x)
    k = len(found.label_K)
    ami = [adjusted_mutual_info_score(classes, labels) for labels in (mixture.labels_, found.label_K[mixture.labels_])]
    chance = groups.chance(max(found.neighbours, 1.0), k)
    figures = [
        f"{found.modularity:.3f}",
        f"{chance:.3f}",
        f"{found.neighbours:.1f}",
        *(f"{value:.3f}" for value in ami),
    ]
    row = [name, f"{len(x):,}", true, str(k), str(found.n_groups) if found.is_coarser else "none", *figures]
    print(row, flush=True)
    return row


def families(draws: int) -> list[list[str]]:
    """The judging families; a hierarchy's groups are its classes, and a flat one's its components."""
    rows: list[list[str]] = []
    for name in merge_families.JUDGE:
        for seed in range(draws):
            x, y, k = merge_families.make(name, seed)
            outer, each = _sizes(name, k)
            true = str(outer) if outer < k else "none"
            rows.append(described(name, x, 2 * k, np.where(y < 0, -1, y // each), true))
    return rows


def _sizes(name: str, k: int) -> tuple[int, int]:
    """The groups of a family and the components of each, by its name."""
    words = name.replace(",", "").split()
    if "hierarchy" not in name:
        return k, 1
    place = words.index("x")
    return int(words[place - 1]), int(words[place + 1])


def strewn(trials: int) -> str:
    """How near to ``chance`` components at random come."""
    rng: Any = np.random.default_rng(0)
    shares: list[float] = []
    wrong = 0
    for d in (2, 3, 4, 6, 8, 16, 64, 256):
        for k in (20, 60, 200, 600):
            for noise in (0.05, 0.1, 0.2, 0.4, 0.8, 1.2):
                for _ in range(trials):
                    centre_KD = merge_families.unit(rng.standard_normal((k, d)))
                    x = centre_KD[rng.integers(k, size=8000)] + noise * rng.standard_normal((8000, d)) / np.sqrt(d)
                    near = np.argpartition(-(x @ centre_KD.T), 2, axis=1)[:, :2] if k > 2 else np.zeros((8000, 2), int)
                    found = groups.found(near[:, 0], near[:, 1], k)
                    wrong += found.is_coarser
                    if found.neighbours >= groups.LEAST_NEIGHBOURS:
                        shares.append(found.modularity / groups.chance(found.neighbours, k))
    return (
        f"Components strewn at random, {8 * 4 * 6 * trials:,} sets of 20 to 600 in 2 to 256 dimensions, six spreads: "
        f"{wrong} with groups. Of {len(shares):,} with enough neighbours the modularity was at most "
        f"{max(shares):.2f} of chance's, {np.median(shares):.2f} by the median."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("embeddings", nargs="*", type=Path)
    parser.add_argument("--draws", type=int, default=2, help="of each family")
    parser.add_argument("--trials", type=int, default=3, help="of each kind of components at random")
    parser.add_argument("--output", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    rows: list[list[str]] = []
    for path in args.embeddings:
        stored = np.load(path)
        x, y = stored["embeddings"].astype(np.float32), stored["labels"].astype(int)
        rows.append(described(path.stem, x, 400, y, f"{len(np.unique(y))} classes"))
    rows += families(args.draws)
    body = (
        f"{record.table([*HEADER, 'AMI of groups'], rows)}\n\n"
        "AMI is to the outer level of a hierarchy, to the components of a flat family, or to the classes. "
        f"{strewn(args.trials)}"
    )
    path = record.write(
        "groups", "Groups of clusters", body, seeds=f"0 to {args.draws - 1} (data), 0 (start)", n="in the table",
        output=args.output,
    )  # fmt: skip
    print(path.read_text())


if __name__ == "__main__":
    main()
