"""Draw clusters with their images, as the paper's last figures do: a cluster by class, and a class by cluster.

    python benchmarks/cluster_sheet.py OUT/figure-clusters/cifar10-siammm-0.npz DATA/cifar10 --output FIGURES

The first argument is what ``study.py`` keeps with ``"keep": true``: the labels and clusters of all training images of
DATA. Two sheets are written. In the first, each block is a cluster and each row a class in it, the commonest first:
the clusters are those with the most images that are not of their commonest class. In the second, each block is a class
and each row a cluster whose commonest class it is, the largest first. Images are drawn by seed 0.

Legend:  N images, H neighbours, S pixels of a side.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

BLOCKS, ROWS, COLUMNS = 4, 4, 12
_GAP, _WHITE = 4, 255


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kept", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    with np.load(args.kept) as kept, np.load(args.data / "train.npz") as train:
        labels, clusters, images = kept["labels"], kept["index_NH"][:, 0], train["images"]
        names = [str(name) for name in train["names"]] if "names" in train else None
    if len(images) != len(labels):
        parser.error(f"{args.kept} is of {len(labels):,} images, but {args.data} has {len(images):,}.")
    args.output.mkdir(parents=True, exist_ok=True)
    for name, groups, parts, chosen in (
        ("clusters", clusters, labels, most_mixed(clusters, labels)),
        ("classes", labels, own_cluster(clusters, labels), np.unique(labels)[:BLOCKS]),
    ):
        path = args.output / f"{name}.png"
        Image.fromarray(sheet(images, groups, parts, chosen)).save(path)
        print(path)
        for group in chosen.tolist():
            print(" ", said(groups == group, parts, names if name == "clusters" else None))


def most_mixed(clusters: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The clusters with the most images that are not of their commonest class."""
    counts = np.zeros((clusters.max() + 1, labels.max() + 1), dtype=np.int64)
    np.add.at(counts, (clusters, labels), 1)
    others = counts.sum(axis=1) - counts.max(axis=1)
    return np.argsort(-others, kind="stable")[:BLOCKS]


def own_cluster(clusters: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The cluster of each image where its class is the commonest there, and -1 elsewhere."""
    counts = np.zeros((clusters.max() + 1, labels.max() + 1), dtype=np.int64)
    np.add.at(counts, (clusters, labels), 1)
    return np.where(counts.argmax(axis=1)[clusters] == labels, clusters, -1)


def commonest(parts: np.ndarray) -> np.ndarray:
    """The parts of a group by size, at most so many as there are rows."""
    values, counts = np.unique(parts[parts >= 0], return_counts=True)
    return values[np.argsort(-counts, kind="stable")][:ROWS]


def sheet(images: np.ndarray, groups: np.ndarray, parts: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Blocks of rows of images: a block for each chosen group, a row for each of its commonest parts."""
    side, random = images.shape[1], np.random.default_rng(0)
    drawn = np.full((len(chosen) * (ROWS * side + _GAP) - _GAP, COLUMNS * side, 3), _WHITE, np.uint8)
    for block, group in enumerate(chosen.tolist()):
        for row, part in enumerate(commonest(parts[groups == group]).tolist()):
            there = np.flatnonzero((groups == group) & (parts == part))
            top = block * (ROWS * side + _GAP) + row * side
            for column, at in enumerate(random.permutation(there)[:COLUMNS].tolist()):
                drawn[top : top + side, column * side : (column + 1) * side] = images[at]
    return drawn


def said(of_group: np.ndarray, parts: np.ndarray, names: list[str] | None) -> str:
    """The rows of a block, with the number of their images."""
    counts = {part: int((parts[of_group] == part).sum()) for part in commonest(parts[of_group]).tolist()}
    rows = [f"{names[part] if names else f'cluster {part}'} {count:,}" for part, count in counts.items()]
    return f"{int(of_group.sum()):,} images: {', '.join(rows)}"


if __name__ == "__main__":
    main()
