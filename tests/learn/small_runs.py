"""Runs that take less than a second: 32 images of 8 x 8 pixels, the small backbone, narrow heads.

    training = prepared(small_config(epochs=2))
    run_through(training)

Merging is by the paper's rule with a threshold of 0, so that some clusters merge in every epoch.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from siammm.data.sources import Source, open_source
from siammm.learn import checkpoint, state
from siammm.learn.bookkeeping import Interrupted
from siammm.learn.loop import Trained, Training
from siammm.learn.observers import Listener
from siammm.runs.run import Run
from siammm.runs.writer import RunWriter
from siammm.settings.fields import with_settings
from siammm.settings.training import TrainConfig
from tests.data.image_sets import example_images
from tests.runs.parts import begun

CPU = torch.device("cpu")
N_IMAGES = 32
STEPS = 4
"""Updates in an epoch."""

# What a run measures of itself and not of what it learns.
TIMINGS = ("seconds", "images_per_second", "probe_seconds")

SMALL: dict[str, Any] = {
    "backbone": "conv-small",
    "hidden_dim": 32,
    "embedding_dim": 16,
    "epochs": 2,
    "batch_size": N_IMAGES // STEPS,
    "optimiser": "sgd",
    "learning_rate": 0.1,
    "weight_decay": 1e-4,
    "warmup_epochs": 1,
    "encoder_momentum": 0.99,
    "instance_loss": "cosine",
    "contrastive_temperature": 1.0,
    "cluster_after": 0.0,
    "n_components": 12,
    "merge": "paper",
    "merge_threshold": 0.0,
    "merge_share": 0.1,
    "device": "cpu",
    "tensorboard": False,
}


def small_config(**settings: Any) -> TrainConfig:
    return with_settings(TrainConfig(), **(SMALL | settings))


def small_images(n: int = N_IMAGES, *, seed: int = 0) -> np.ndarray:
    """Images of four colours."""
    return example_images(n, size=(8, 8), n_classes=4, seed=seed).images


def prepared(
    config: TrainConfig,
    images: Source | np.ndarray | None = None,
    *,
    folder: Path | None = None,
    listener: Listener | None = None,
) -> Training:
    """A run that has not begun; it writes into ``folder``, where there is one."""
    source = images if isinstance(images, Source) else open_source(small_images() if images is None else images)
    run = None if folder is None else begun(folder, config, {"fingerprint": source.fingerprint()})
    return Training(config, source, CPU, recorder=run, listener=listener)


def resumed(config: TrainConfig, folder: Path, images: Source | np.ndarray | None = None) -> Training:
    """The run in this folder, as a new process would go on with it."""
    source = images if isinstance(images, Source) else open_source(small_images() if images is None else images)
    recorder = RunWriter(folder, tensorboard=False)
    return Training(config, source, CPU, recorder=recorder, resume_from=Run.unfinished(folder).checkpoint()[:2])


def run_through(training: Training) -> Training:
    """All epochs, without the mixture that is fitted at the end, which takes as long as they do."""
    training.finish = lambda: cast(Trained, None)
    training.run()
    return training


def steps_done(training: Training) -> int:
    return training.epoch * training.steps_per_epoch + training.step_in_epoch


def stopped(training: Training, after: int) -> None:
    """Run until so many updates are done, then stop as a signal would."""
    training.stop_requested = lambda: steps_done(training) >= after
    with contextlib.suppress(Interrupted):
        training.run()
        raise AssertionError(f"the run went on after {after} updates")
    assert steps_done(training) == after


def losses_of(training: Training) -> list[float]:
    return [row[name] for row in training.metrics for name in ("loss", "instance_loss", "cluster_loss") if name in row]


def measured(training: Training) -> list[dict[str, Any]]:
    """The metrics without what depends on the clock."""
    return [{name: value for name, value in row.items() if name not in TIMINGS} for row in training.metrics]


def everything(training: Training, trained: Trained | None = None) -> dict[str, Tensor]:
    """All tensors of a run, and of what it found."""
    tensors = {
        **checkpoint.with_prefix("network", training.network.state_dict()),
        **checkpoint.with_prefix("optimiser", checkpoint.optimiser_tensors(training.optimiser)),
        **state.clustering_tensors(training),
        **({} if training.queue is None else {"queue": training.queue.view_2QD}),
        "bank": training.bank.view_2ND[:, :-1],
        "totals": training.tally.totals,
    }
    if trained is not None:
        tensors["embeddings"] = torch.from_numpy(trained.embeddings)
        for name in ("clusters", "probability", "group_probability", "outlier_score"):
            if getattr(trained, name) is not None:
                tensors[name] = torch.from_numpy(np.asarray(getattr(trained, name)))
        if trained.mixture is not None and trained.mixture.merges_ is not None:
            tensors["directions"] = torch.as_tensor(trained.mixture.mean_directions_)
            tensors["concentrations"] = torch.as_tensor(trained.mixture.concentrations_)
            tensors["linkage"] = torch.from_numpy(trained.mixture.merges_.linkage)
    return tensors


def check_same_run(left: Training, right: Training) -> None:
    """Both have the same weights, state and metrics, bit for bit."""
    check_same_bits(everything(left), everything(right))
    assert measured(left) == measured(right)


def check_same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    different = [
        name
        for name, a in left.items()
        if a.dtype != right[name].dtype or a.shape != right[name].shape or not torch.equal(bits(a), bits(right[name]))
    ]
    assert not different, different


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
