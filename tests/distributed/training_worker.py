"""One rank: trains every case and writes what it measured. ``test_training.py`` starts it as torchrun would."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from siammm.core import processes, ranks
from siammm.data.sources import open_source
from siammm.learn.loop import Training
from siammm.settings.training import TrainConfig
from tests.learn.small_runs import STEPS, measured, resumed, run_through, small_config, small_images, stopped
from tests.runs.parts import begun

N_IMAGES = 128


def case_config(**settings: Any) -> TrainConfig:
    """Batches of 32 at a low rate: otherwise BatchNorm makes much of the last bit, and a run differs from itself."""
    return small_config(**({"batch_size": N_IMAGES // STEPS, "learning_rate": 0.005} | settings))


def case_images() -> np.ndarray:
    return small_images(N_IMAGES)


def prepared(case: dict[str, Any], folder: Path) -> Training:
    """Only the first rank has a folder, as in the command."""
    config = case_config(**case["settings"])
    source = open_source(case_images())
    run = None
    if ranks.is_writer() and case.get("run"):
        run = begun(folder / case["run"], config, {"fingerprint": source.fingerprint()})
    return Training(config, source, torch.device(case.get("device", "cpu")), recorder=run)


def done(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    if case.get("resume"):
        training = resumed(case_config(**case["settings"]), folder / case["resume"], case_images())
        if not ranks.is_writer():
            training.recorder = None
    else:
        training = prepared(case, folder)
    if case.get("stop"):
        stopped(training, case["stop"])
        return {"measured": [], "shard": [training.bank.first, training.bank.last]}
    found: dict[str, Any] = {"shard": [training.bank.first, training.bank.last]}
    if case.get("finish"):
        trained = training.run()
        assert trained.mixture is not None
        assert trained.clusters is not None
        found |= {"labels": trained.clusters.tolist(), "embeddings": trained.embeddings.tolist()}
        found["n_components"] = trained.mixture.n_components_
        assert trained.groups is not None
        found["groups"] = trained.groups.label_K.tolist()
    else:
        run_through(training)
    found |= {"measured": measured(training), "fused": bool(training.network.fused)}
    found["history"] = training.clustering.history.n_components
    found["weight"] = float(sum(p.detach().double().sum() for p in training.network.parameters()))
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    with processes.setup("cpu", timeout=timedelta(seconds=120)) as context:
        for case in json.loads((folder / "cases.json").read_text()):
            found = done(case, folder)
            (folder / f"{case['name']}.{context.rank}.json").write_text(json.dumps(found))
    # A stopped training stays behind in a cycle; the group's threads must have ended before Python does.
    tasks = Path("/proc/self/task")
    if tasks.is_dir():
        names = [(task / "comm").read_text().strip() for task in tasks.iterdir()]
        assert not [name for name in names if "gloo" in name], names


if __name__ == "__main__":
    main()
