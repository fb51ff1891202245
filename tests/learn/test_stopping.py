"""A training that was stopped goes on bit for bit, and its checkpoints hold what it needs."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from siammm.core.errors import InputError
from siammm.data.sources import open_source
from siammm.learn import backbones, checkpoint
from siammm.learn.backbones import ConvSmall
from siammm.learn.loop import Training
from siammm.learn.observers import Silent
from siammm.learn.schedule import learning_rate
from tests.data.image_sets import WRITERS, example_images
from tests.learn.small_runs import (
    N_IMAGES,
    STEPS,
    check_same_bits,
    check_same_run,
    everything,
    losses_of,
    measured,
    prepared,
    resumed,
    run_through,
    small_config,
    steps_done,
    stopped,
)

pytestmark = pytest.mark.usefixtures("one_thread")

VARIANTS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "accumulate": {"accumulate": 2},
    "principal directions": {"concentration_dims": 4, "concentration": "closed-form"},
    "streaming": {"loader": "streaming", "workers": 0},
    "lars": {"optimiser": "lars", "learning_rate": 1.0},
    "muon": {"optimiser": "muon", "learning_rate": 1.0},
    "adamw": {"optimiser": "adamw", "learning_rate": 1e-3},
    "simsiam": {"instance_loss": "simsiam"},
    "contrastive": {"instance_loss": "contrastive"},
    "a temperature that rises": {
        "instance_loss": "contrastive",
        "contrastive_temperature": 0.2,
        "contrastive_temperature_end": 1.0,
    },
    "nce-centroids": {"cluster_loss": "nce-centroids", "n_negatives": 4},
    "nce-samples": {"cluster_loss": "nce-samples"},
    "clean": {"embeddings": "clean"},
    "reinitialised": {"centroids": "reinitialised", "n_init": 2},
    "normaliser": {"normaliser": True, "concentration_scale": "literal"},
    "later": {"cluster_after": 0.34, "epochs": 3},
    "auto": {"merge": "auto", "n_components": 24, "merge_share": 0.2},
    "bf16": {"precision": "bf16"},
}


def merged_in(training: Training, first: int, last: int) -> bool:
    """Whether K fell in these epochs, counted from 1."""
    start = training.clustering.n_start
    counts: dict[int, int] = {0: start} | {row["epoch"]: row.get("n_clusters", start) for row in training.metrics}
    return counts[last] < counts[first - 1]


# Each of these keeps a state of its own; the others differ from them by what is computed, not by what is kept.
QUICK = [
    "as it comes",
    "accumulate",
    "principal directions",
    "streaming",
    "muon",
    "adamw",
    "clean",
    "reinitialised",
    "later",
]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]
)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    config = small_config(**VARIANTS[name])
    whole = run_through(prepared(config, folder=tmp_path / "whole"))
    # In the middle of the last epoch, at a step that is random but the same in every run of this test.
    epochs = config.optimisation.epochs
    after = (epochs - 1) * STEPS + 1 + zlib.crc32(name.encode()) % (STEPS - 1)
    stopped(prepared(config, folder=tmp_path / "parts"), after)
    rest = resumed(config, tmp_path / "parts")
    assert steps_done(rest) == after
    check_same_run(run_through(rest), whole)
    assert merged_in(rest, 1, epochs - 1)
    assert merged_in(rest, epochs, epochs)


@pytest.mark.parametrize("name", ["as it comes", "later"])
def test_a_run_that_was_stopped_at_the_end_of_an_epoch_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    config = small_config(**VARIANTS[name])
    whole = run_through(prepared(config, folder=tmp_path / "whole"))
    stopped(prepared(config, folder=tmp_path / "parts"), STEPS)
    rest = resumed(config, tmp_path / "parts")
    assert (rest.epoch, rest.step_in_epoch) == (1, 0)
    check_same_run(run_through(rest), whole)


def test_a_run_may_be_stopped_after_every_single_update(tmp_path: Path) -> None:
    """Down to what it finds at its end and leaves in its last checkpoint."""
    config = small_config(epochs=3)
    whole = prepared(config, folder=tmp_path / "whole")
    expected = everything(whole, whole.run())
    training = prepared(config, folder=tmp_path / "parts")
    for after in range(1, 3 * STEPS):
        stopped(training, after)
        training = resumed(config, tmp_path / "parts")
    check_same_bits(everything(training, training.run()), expected)
    assert measured(training) == measured(whole)
    ours, theirs = (checkpoint.load(tmp_path / name / "checkpoints") for name in ("parts", "whole"))
    check_same_bits(ours[0], theirs[0])
    assert {**ours[1], "seconds": 0} == {**theirs[1], "seconds": 0}


class Skipping(ConvSmall):
    """A network that draws numbers of its own, as some of timm do."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


def test_what_a_network_draws_by_itself_is_by_the_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although torch seeds its generator differently in every process; that of the program stays as it is."""
    monkeypatch.setattr(backbones, "ConvSmall", Skipping)
    config = small_config()
    plain = run_through(prepared(config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        before = torch.get_rng_state()
        whole = run_through(prepared(config, folder=tmp_path / "whole"))
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(2)
        stopped(prepared(config, folder=tmp_path / "parts"), STEPS + 2)
        torch.manual_seed(3)
        check_same_run(run_through(resumed(config, tmp_path / "parts")), whole)
    check_same_run(plain, whole)
    ours, theirs = (checkpoint.load(tmp_path / name / "checkpoints") for name in ("parts", "whole"))
    check_same_bits(ours.tensors, theirs.tensors)
    monkeypatch.undo()
    assert losses_of(run_through(prepared(config))) != losses_of(whole)


def test_a_run_that_is_over_only_finishes_again(tmp_path: Path) -> None:
    config = small_config(epochs=2)
    whole = prepared(config, folder=tmp_path)
    expected = everything(whole, whole.run())
    again = resumed(config, tmp_path)
    assert again.epoch == 2
    check_same_bits(everything(again, again.run()), expected)
    assert again.metrics == whole.metrics


def test_what_is_measured_after_the_checkpoint_is_forgotten(tmp_path: Path) -> None:
    """A run that was killed goes on from its last checkpoint; epochs after it are measured again."""
    config = small_config(epochs=2)
    stopped(prepared(config, folder=tmp_path), STEPS)
    kept = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(kept + '{"epoch": 2, "loss": 0}\n{"epo')
    training = resumed(config, tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == kept
    run_through(training)
    assert [row["epoch"] for row in training.metrics] == [1, 2]


def test_the_rate_follows_its_schedule_also_after_a_stop(tmp_path: Path) -> None:
    config = small_config(epochs=2)
    rates: list[list[float]] = []

    class Watch(Silent):
        def stepped(self, epoch: int, step: int, steps: int) -> None:
            rates.append([float(group["lr"]) for group in training.optimiser.param_groups])

    training = prepared(config, folder=tmp_path, listener=Watch())
    stopped(training, STEPS + 1)
    training = resumed(config, tmp_path)
    training.listener = Watch()
    run_through(training)
    expected = [learning_rate(step, 2 * STEPS, STEPS, 0.1, N_IMAGES // STEPS) for step in range(2 * STEPS)]
    assert rates == [[pytest.approx(rate)] * 2 for rate in expected]


def test_a_checkpoint_is_written_as_often_as_asked(tmp_path: Path) -> None:
    saved: list[int] = []
    training = prepared(small_config(epochs=1, save_every=0), folder=tmp_path)
    plain = training.save

    def save() -> None:
        saved.append(steps_done(training))
        plain()

    training.save = save
    run_through(training)
    assert saved == [1, 2, 3, 4]
    run_through(prepared(small_config(epochs=1, save_every=60), folder=tmp_path / "seldom"))
    assert [path.name for path in (tmp_path / "seldom" / "checkpoints").iterdir()] == ["last.safetensors"]


def test_a_resumed_run_refuses_other_images_that_cannot_be_read(tmp_path: Path) -> None:
    config = small_config(epochs=2, max_bad_images=0.5)
    given = example_images(N_IMAGES, size=(8, 8), n_classes=4)
    root = WRITERS["folder"](tmp_path, given)
    stopped(prepared(config, open_source(root), folder=tmp_path / "run"), 2)
    (root / "class000" / "00001.png").write_bytes(b"gone")
    with pytest.raises(InputError, match=r"class000/00001\.png"):
        resumed(config, tmp_path / "run", open_source(root))
