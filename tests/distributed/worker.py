"""One rank: fits every case to its own shard and writes what it found. ``test_gloo.py`` starts it as torchrun would."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from siammm import GaussianMixture, VonMisesFisherMixture

KINDS = {"vmf": VonMisesFisherMixture, "gaussian": GaussianMixture}


def fitted(case: dict[str, Any], rows: Any) -> dict[str, Any]:
    mixture = KINDS[case["kind"]](**case["parameters"]).fit(rows)
    vmf = case["kind"] == "vmf"
    found = {
        "labels": mixture.labels_,
        "lower_bound": mixture.lower_bound_,
        "centres": mixture.mean_directions_ if vmf else mixture.means_,
        "spreads": mixture.concentrations_ if vmf else mixture.variances_,
    }
    if dist.get_rank() == 0:  # no other rank takes part in what one does with a fit
        found["predicted"], found["score"] = mixture.predict(rows), mixture.score(rows)
        if mixture.merge == "auto":
            found["groups"] = mixture.groups(rows).label_K
    if mixture.merges_ is not None:
        found["counts"], found["linkage"] = mixture.merges_.n_components, mixture.merges_.linkage
    return found


def shard(X: np.ndarray, bounds: list[int]) -> np.ndarray:
    return X[bounds[dist.get_rank()] : bounds[dist.get_rank() + 1]]


def run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    X = np.load(folder / f"{case['data']}.npy")
    rows: Any = shard(X, case["bounds"])
    last = dist.get_rank() == dist.get_world_size() - 1
    spoil = case.get("spoil")
    if spoil == "nan" and last:
        rows = rows.copy()
        rows[3, 1] = np.nan
    if spoil == "zero-dimensional" and last:
        rows = rows[0]
    if spoil == "narrow" and last:
        rows = rows[:, :-1]
    if spoil == "half" and last:
        rows = rows.astype(np.float32)
    if case.get("tensors"):
        rows = torch.from_numpy(rows)
    if spoil is None:
        return fitted(case, rows)
    began = time.monotonic()
    try:
        fitted(case, rows)
    except ValueError as error:
        return {"error": str(error), "type": type(error).__name__, "seconds": time.monotonic() - began}
    return {"error": ""}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    for case in json.loads((folder / "cases.json").read_text()):
        found = run(case, folder)
        arrays: dict[str, Any] = {key: np.asarray(value) for key, value in found.items()}
        np.savez(folder / f"{case['name']}.{dist.get_rank()}.npz", **arrays)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
