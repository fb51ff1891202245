"""From a folder of photographs to a page with its groups: how long, how much memory, and are the groups the kinds?

    python benchmarks/photographs.py PACKS [--per-kind 60] [--record]

PACKS is the folder with the packed sets. Ten kinds of Tiny-ImageNet, named in ``KINDS`` before anything was run, are
written to one folder of JPEG files whose names say nothing. Then ``siammm cluster`` and ``siammm report`` run as a user
would run them, with the encoder that is installed with ``siammm[lite]``.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

import record
from group_sets import unpacker
from siammm.metrics import clustering_scores

KINDS = ("goldfish", "king penguin", "golden retriever", "monarch", "African elephant", "school bus", "beacon")
KINDS += ("computer keyboard", "pizza", "suspension bridge")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packs", type=Path)
    parser.add_argument("--per-kind", type=int, default=60)
    parser.add_argument("--record", action="store_true", help="write the figures to benchmarks/results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kind_of = photographs(options.packs, Path(folder) / "photos", options.per_kind)
        seconds = [run(folder, "cluster", "photos"), run(folder, "report", "photos-clusters")]
        page = Path(folder) / "photos-clusters-report.html"
        table = pq.read_table(Path(folder) / "photos-clusters" / "assignments.parquet")
        megabytes = page.stat().st_size / 1e6
    truth = np.array([KINDS.index(kind_of[Path(name).name]) for name in table["filepath"].to_pylist()])
    groups = table["group"].to_numpy()
    scores = clustering_scores(truth, groups)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
    header = ["photographs", "kinds", "groups", "AMI", "accuracy", "cluster, s", "report, s", "memory, GB", "page, MB"]
    figures = [len(truth), len(KINDS), len(np.unique(groups)), f"{scores.ami:.3f}", f"{scores.hungarian_accuracy:.3f}"]
    figures += [f"{seconds[0]:.0f}", f"{seconds[1]:.0f}", f"{peak:.1f}", f"{megabytes:.1f}"]
    text = record.table(header, [[str(figure) for figure in figures]])
    text += f"\n\nTiny-ImageNet, 64 pixels, {options.per_kind} of each kind: {', '.join(KINDS)}. Memory is the peak of "
    text += "the larger of the two commands; accuracy is by Hungarian matching."
    print(text)
    if options.record:
        title = "From a folder of photographs to a page with its groups"
        print(record.write("photographs", title, text, seeds="0", n=f"{len(truth)} photographs"))


def photographs(packs: Path, folder: Path, per_kind: int) -> dict[str, str]:
    """Write the folder; returns the kind of each file."""
    folder.mkdir(parents=True)
    pack = unpacker(packs).read_pack(packs / "tinyimagenet_train_a.npz")
    names = [str(name).split(",")[0] for name in pack["names"]]
    rows = [(kind, row) for kind in KINDS for row in np.flatnonzero(pack["labels"] == names.index(kind))[:per_kind]]
    order = np.random.default_rng(0).permutation(len(rows))
    kind_of: dict[str, str] = {}
    for number, place in enumerate(order):
        kind, row = rows[place]
        kind_of[f"{number:05d}.jpg"] = kind
        Image.fromarray(pack["images"][row]).save(folder / f"{number:05d}.jpg", quality=95)
    return kind_of


def run(folder: str, *command: str) -> float:
    """How long a command of siammm takes, in seconds."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "siammm", *command], cwd=folder, check=True)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
