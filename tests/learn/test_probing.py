"""Labels and probes: they measure, and have no effect on training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from siammm.core.errors import InputError
from siammm.data.sources import open_source
from siammm.learn import probing
from siammm.learn.encode import encode
from tests.data.image_sets import WRITERS, example_images
from tests.learn.small_runs import (
    N_IMAGES,
    check_same_bits,
    everything,
    prepared,
    run_through,
    small_config,
    small_images,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("probe", [False, True])
def test_labels_never_reach_training(probe: bool, tmp_path: Path) -> None:
    given = example_images(N_IMAGES, size=(8, 8), n_classes=4)
    labelled = WRITERS["npz"](tmp_path, given)
    np.savez(tmp_path / "plain.npz", images=given.images)
    found = []
    for path, more in ((labelled, {"probe_every": 1}), (tmp_path / "plain.npz", {})):
        if probe and path == labelled:
            more = more | {"probe": str(labelled)}
        training = prepared(small_config(**more), open_source(path))
        found.append((everything(run_through(training)), training.metrics))
    check_same_bits(found[0][0], found[1][0])
    judged = [[row for row in metrics if "knn" in row] for _, metrics in found]
    assert [len(rows) for rows in judged] == [2, 0]
    assert all(0 <= row["knn"] <= 1 and row["ami"] <= 1 for row in judged[0])


def test_a_probe_is_matched_by_the_names_of_its_classes(tmp_path: Path) -> None:
    """Two sets may number the same classes differently; the colours are so plain that kNN must be right."""
    given = example_images(N_IMAGES, size=(8, 8), n_classes=2, seed=3)
    images = np.where((given.labels == 0)[:, None, None, None], 30, 220).astype(np.uint8) + given.images // 16
    names = ["dark", "light"]
    np.savez(tmp_path / "train.npz", images=images, labels=given.labels, names=np.array(names))
    np.savez(tmp_path / "probe.npz", images=images, labels=1 - given.labels, names=np.array(names[::-1]))
    config = small_config(epochs=1, probe=str(tmp_path / "probe.npz"))
    training = run_through(prepared(config, open_source(tmp_path / "train.npz")))
    assert training.metrics[-1]["knn"] == 1
    assert training.metrics[-1]["linear"] == 1
    assert 0 < training.metrics[-1]["probe_seconds"] < 60


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_probe_computes_in_the_precision_of_the_training(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def watched(*args: Any, autocast: bool = False, **more: Any) -> torch.Tensor:
        asked.append(autocast)
        return encode(*args, autocast=autocast, **more)

    monkeypatch.setattr(probing, "encode", watched)
    given = example_images(N_IMAGES, size=(8, 8), n_classes=2)
    np.savez(tmp_path / "train.npz", images=given.images, labels=given.labels)
    training = prepared(small_config(epochs=1, precision=precision), open_source(tmp_path / "train.npz"))
    training.probes.measured(training.network, training.clustering, training.samples, autocast=training.autocast)
    assert asked == [precision == "bf16"]
    low, exact = (encode(training.network, training.loader, "features", autocast=low) for low in (True, False))
    assert low.dtype == exact.dtype == torch.float32
    assert not torch.equal(low, exact)
    assert float((low * exact).sum(dim=1).min()) > 0.999


def test_too_few_of_a_class_have_no_linear_probe(tmp_path: Path) -> None:
    given = example_images(N_IMAGES, size=(8, 8), n_classes=2, seed=3)
    labels = np.where(np.arange(N_IMAGES) < 3, 2, given.labels)
    np.savez(tmp_path / "train.npz", images=given.images, labels=labels)
    config = small_config(epochs=1, probe=str(tmp_path / "train.npz"))
    row = run_through(prepared(config, open_source(tmp_path / "train.npz"))).metrics[-1]
    assert "knn" in row
    assert "linear" not in row


def test_a_probe_without_labels_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "plain.npy", small_images())
    with pytest.raises(InputError, match="has no labels"):
        prepared(small_config(epochs=1, probe=str(tmp_path / "plain.npy"))).run()
