"""Whatever goes wrong in training: a named error or a sane result, and always a checkpoint that can be gone on from."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from siammm.core.errors import InputError, SiamMMError, StoredFileError
from siammm.data.sources import open_source
from siammm.data.view_settings import ViewSettings
from siammm.learn import checkpoint, state
from siammm.learn.checkpoint import LAST, PREVIOUS
from siammm.learn.filling import fill_bank
from siammm.learn.guard import CollapseError
from siammm.learn.loop import Training
from siammm.learn.observers import Silent
from tests.data.image_sets import example_images, write_folder
from tests.learn.small_runs import (
    STEPS,
    check_same_bits,
    check_same_run,
    everything,
    prepared,
    resumed,
    run_through,
    small_config,
    small_images,
    stopped,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def weights(training: Training) -> dict[str, Tensor]:
    """Everything that an update changes."""
    state = checkpoint.optimiser_tensors(training.optimiser)
    return {
        **{name: p.detach().clone() for name, p in training.network.named_parameters()},
        **{name: value.clone() for name, value in state.items()},
    }


# -- an encoder that tells nothing apart


def zeroed(module: nn.Module | None) -> None:
    assert module is not None
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()


def stands_still(training: Training) -> None:
    """From now on at a rate of 0."""
    for group in training.optimiser.param_groups:
        group["lr"] = torch.zeros(())


@pytest.mark.parametrize("embeddings", ["bank", "clean"])
def test_a_constant_encoder_is_a_collapse(embeddings: str, tmp_path: Path) -> None:
    training = prepared(small_config(embeddings=embeddings), folder=tmp_path)
    zeroed(training.network.encoder)
    zeroed(training.network.momentum_encoder)
    with pytest.raises(CollapseError, match="nearly the same embedding") as raised:
        training.run()
    assert "--learning-rate" in str(raised.value)
    assert (training.epoch, len(training.metrics)) == (1, 1)
    assert training.metrics[0]["deviation"] < 0.01
    assert not (tmp_path / "checkpoints").exists()  # a collapsed encoder is not worth keeping


def test_an_encoder_that_knows_one_direction_goes_on() -> None:
    """All embeddings on one line through the origin, at both ends of it: so are those of images of two kinds."""
    training = prepared(small_config(cluster_loss="none"))
    for encoder in (training.network.encoder, training.network.momentum_encoder):
        assert encoder is not None
        last: Any = [layer for layer in encoder.projector.modules() if isinstance(layer, nn.Linear)][-1]
        with torch.no_grad():
            last.weight.copy_(last.weight[:1].expand_as(last.weight))
    stands_still(training)
    training.run()
    assert training.metrics[-1]["effective_rank"] < 1.5
    assert training.metrics[-1]["deviation"] > 0.5


def test_the_last_good_checkpoint_survives_a_collapse(tmp_path: Path) -> None:
    config = small_config(epochs=3)
    whole = run_through(prepared(config, folder=tmp_path / "whole"))
    stopped(prepared(config, folder=tmp_path / "run"), STEPS + 1)
    training = resumed(config, tmp_path / "run")
    zeroed(training.network.encoder)
    zeroed(training.network.momentum_encoder)
    stands_still(training)
    training.bank.view_2ND.zero_()
    with pytest.raises(CollapseError):
        training.run()
    rest = run_through(resumed(config, tmp_path / "run"))
    check_same_run(rest, whole)


# -- numbers that are none


class Poison(Silent):
    """Spoils one update: its pixels, its gradient or the weights before it."""

    def __init__(self, kind: str, after: int) -> None:
        self.kind, self.after = kind, after
        self.before: dict[str, Tensor] = {}

    def stepped(self, epoch: int, step: int, steps: int) -> None:
        if epoch * steps + step != self.after:
            return
        network, pieces = self.training.network, self.training.pieces
        if self.kind == "pixels":
            plain = pieces.views
            pieces.views = lambda *given: tuple(x.masked_fill(x > 0.5, math.nan) for x in plain(*given))
        elif self.kind == "gradient":
            next(network.encoder.parameters()).register_hook(lambda gradient: gradient * math.inf)
        else:
            with torch.no_grad():
                network.predictor[0].weight[0, 0] = math.nan if self.kind == "weight" else 3e38  # pyright: ignore
        self.before = weights(self.training)

    def began(self, training: Training) -> None:
        self.training = training


@pytest.mark.parametrize("kind", ["pixels", "gradient", "weight"])
@pytest.mark.parametrize("optimiser", ["lars", "sgd", "adamw"])
def test_a_loss_that_is_not_finite_changes_no_weight(kind: str, optimiser: str) -> None:
    poison = Poison(kind, after=2)
    config = small_config(optimiser=optimiser, learning_rate=1e-3, instance_loss="cosine")
    training = prepared(config, listener=poison)
    with pytest.raises(CollapseError, match="no longer finite") as raised:
        training.run()
    assert "--learning-rate" in str(raised.value)
    first = training.batches_of_rank(0)[2][:3].tolist()
    names = ", ".join(training.loader.identifiers()[i] for i in first)
    assert f"in update 3 of epoch 1 ({training.batch_size} images: {names} ...)" in str(raised.value)
    check_same_bits(weights(training), poison.before)
    assert training.step_in_epoch == 3


@pytest.mark.parametrize("kind", ["pixels", "weight"])
def test_the_last_good_checkpoint_survives_numbers_that_are_none(kind: str, tmp_path: Path) -> None:
    """Although a checkpoint is written after every update."""
    config = small_config(save_every=0)
    whole = run_through(prepared(config, folder=tmp_path / "whole"))
    training = prepared(config, folder=tmp_path / "run", listener=Poison(kind, after=STEPS + 2))
    with pytest.raises(CollapseError):
        training.run()
    tensors, facts, path, _ = checkpoint.load(tmp_path / "run" / "checkpoints")
    assert path.name == LAST
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert (facts["epoch"], facts["step_in_epoch"]) == (1, 2 if kind == "pixels" else 1)
    rest = run_through(resumed(config, tmp_path / "run"))
    check_same_bits(everything(rest), everything(whole))


@pytest.mark.parametrize("where", ["bank", "statistics", "optimiser", "queue"])
def test_what_is_not_finite_is_never_saved(where: str, tmp_path: Path) -> None:
    training = prepared(small_config(queue_size=8, instance_loss="contrastive"), folder=tmp_path)
    stopped(training, 2)
    before = (tmp_path / "checkpoints" / LAST).read_bytes()
    if where == "bank":
        training.bank.view_2ND[1, 3, 2] = math.nan
    elif where == "queue":
        assert training.queue is not None
        training.queue.view_2QD[0, 3, 2] = math.inf
    elif where == "statistics":
        next(b for name, b in training.network.named_buffers() if name.endswith("running_var"))[0] = math.nan
    else:
        next(iter(training.optimiser.state.values()))["momentum_buffer"].flatten()[0] = math.nan
    with pytest.raises(CollapseError, match="after update 2 of epoch 1, so they were not saved"):
        training.save()
    assert (tmp_path / "checkpoints" / LAST).read_bytes() == before
    run_through(resumed(small_config(queue_size=8, instance_loss="contrastive"), tmp_path))


def test_a_rate_that_is_far_too_high_ends_in_a_named_error() -> None:
    config = small_config(optimiser="sgd", learning_rate=1e30, warmup_epochs=0, epochs=4)
    with pytest.raises(CollapseError):
        run_through(prepared(config))


def test_embeddings_that_are_not_finite_are_named(tmp_path: Path) -> None:
    training = prepared(small_config())
    fill_bank(training)
    training.bank.view_2ND[0, 3, 2] = math.nan
    with pytest.raises(InputError, match="NaN or infinity"):
        training.samples()


# -- too few images, or too much alike


@pytest.mark.parametrize("colours", ["one", "several"])
@pytest.mark.parametrize("settings", [{}, {"merge": "auto"}, {"n_components": 1}, {"cluster_loss": "none"}])
def test_equal_images_end_in_a_collapse_or_a_sane_result(settings: dict[str, Any], colours: str) -> None:
    """Where their views differ there is something to embed; what is found says nothing, but in numbers."""
    image = small_images(1) if colours == "several" else np.full((1, 8, 8, 3), 77, np.uint8)
    training = prepared(small_config(**settings), np.repeat(image, 32, axis=0))
    try:
        trained = training.run()
    except CollapseError as error:
        assert "check that the images differ" in str(error)  # noqa: PT017 - one of two good ends
        return
    assert np.isfinite(trained.embeddings).all()
    if trained.clusters is not None:
        assert trained.mixture is not None
        assert 0 <= trained.clusters.min() <= trained.clusters.max() < trained.mixture.n_components_


def test_equal_images_without_augmentation_are_a_collapse() -> None:
    training = prepared(small_config(), np.repeat(small_images(1), 32, axis=0))
    plain = ViewSettings(size=8, scale=(1.0, 1.0), ratio=(1.0, 1.0), flip=0.0, jitter_probability=0.0, grey=0.0)
    training.loader.view_settings = (plain, plain)
    with pytest.raises(CollapseError, match="check that the images differ"):
        training.run()


@pytest.mark.parametrize("n", [0, 1])
def test_no_image_and_one_image_are_refused(n: int) -> None:
    with pytest.raises(InputError, match="at least 2" if n else "no pixels"):
        prepared(small_config(n_components=None), small_images(n) if n else np.zeros((0, 8, 8, 3), np.uint8))


@pytest.mark.parametrize("settings", [{}, {"loader": "streaming", "workers": 0}])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_handful_of_images(n: int, settings: dict[str, Any]) -> None:
    training = prepared(small_config(n_components=None, batch_size=512, **settings), small_images(n))
    assert (training.batch_size, training.steps_per_epoch) == (n, 1)
    trained = training.run()
    assert trained.clusters is not None
    assert trained.clusters.shape == (n,)
    assert np.isfinite(trained.embeddings).all()


@pytest.mark.parametrize("instance", ["cosine", "simsiam", "contrastive"])
def test_two_images_a_batch(instance: str) -> None:
    training = prepared(small_config(batch_size=2, instance_loss=instance), small_images(14))
    trained = training.run()
    assert training.steps_per_epoch == 7
    assert np.isfinite(trained.embeddings).all()
    assert all(math.isfinite(value) for row in training.metrics for value in row.values())


def test_one_image_left_over_by_the_batches_has_a_direction_of_its_own() -> None:
    """BatchNorm in a batch of copies of one image would leave nothing of it."""
    training = prepared(small_config(batch_size=8), small_images(33))
    fill_bank(training)
    lengths = training.bank.view_2ND[:, :-1].norm(dim=2)
    torch.testing.assert_close(lengths, torch.ones_like(lengths))


def test_more_clusters_than_images_are_refused() -> None:
    with pytest.raises(InputError, match=r"--n-components is 12, but .* the number of images, 11"):
        prepared(small_config(), small_images(11))


# -- images that cannot be read


def damaged_folder(path: Path, n: int, bad: int) -> Path:
    root = write_folder(path, example_images(n, size=(8, 8), n_classes=2))
    for i, file in enumerate(sorted(root.rglob("*.png"))[:bad]):
        file.write_bytes(file.read_bytes()[:60] if i % 2 else b"not an image")
    return root


@pytest.mark.parametrize("loader", ["resident", "streaming"])
def test_a_few_images_that_cannot_be_read_are_set_aside(loader: str, tmp_path: Path) -> None:
    source = open_source(damaged_folder(tmp_path, 200, 2))
    training = prepared(small_config(epochs=1, loader=loader, workers=0, batch_size=66), source)
    assert list(training.loader.set_aside.reasons) == ["class000/00000.png", "class000/00001.png"]
    assert training.loader.n_images == 198
    assert training.loader.identifiers()[0] == "class000/00002.png"
    run_through(training)
    assert training.bank.n_rows == 198


@pytest.mark.parametrize("loader", ["resident", "streaming"])
def test_more_than_one_in_a_hundred_is_too_many(loader: str, tmp_path: Path) -> None:
    source = open_source(damaged_folder(tmp_path, 100, 2))
    with pytest.raises(InputError, match=r"2 of 100 images .* limit is 1 %.*--max-bad-images"):
        prepared(small_config(loader=loader, workers=0), source)
    allowed = prepared(small_config(loader=loader, workers=0, max_bad_images=0.02), source)
    assert allowed.loader.n_images == 98


@pytest.mark.parametrize("loader", ["resident", "streaming"])
def test_nothing_but_images_that_cannot_be_read(loader: str, tmp_path: Path) -> None:
    source = open_source(damaged_folder(tmp_path, 8, 8))
    with pytest.raises(InputError, match="can be read"):
        prepared(small_config(loader=loader, workers=0, max_bad_images=1.0, n_components=None), source)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_goes_away_while_training_is_named(workers: int, tmp_path: Path) -> None:
    root = damaged_folder(tmp_path, 32, 0)
    training = prepared(small_config(loader="streaming", workers=workers), open_source(root))
    (root / "class001" / "00017.png").unlink()
    with pytest.raises(InputError, match=r"^class001/00017\.png could be read when training began") as raised:
        training.run()
    assert "\n" not in str(raised.value)
    training.loader.close()


# -- checkpoints that are damaged or cannot be written


def spoil(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "truncated":
        data = data[: len(data) // 2]
    elif how == "a bit in the data":
        data[-1000] ^= 1
    elif how == "a bit in the header":
        data[200] ^= 1
    elif how == "empty":
        data = bytearray()
    elif how == "something else":
        data = bytearray(b"PK\x03\x04" + bytes(1000))
    path.write_bytes(data)


SPOILT = ["truncated", "a bit in the data", "a bit in the header", "empty", "something else"]


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    training = prepared(small_config(save_every=0), folder=folder)
    stopped(training, STEPS + 2)
    return folder / "checkpoints"


@pytest.mark.parametrize("how", SPOILT)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(how: str, two_checkpoints: Path, tmp_path: Path) -> None:
    for name in (LAST, PREVIOUS):
        (tmp_path / name).write_bytes((two_checkpoints / name).read_bytes())
    assert checkpoint.load(tmp_path)[1]["step_in_epoch"] == 2
    spoil(tmp_path / LAST, how)
    with pytest.raises(StoredFileError):
        checkpoint.read(tmp_path / LAST)
    _, facts, path, _ = checkpoint.load(tmp_path)
    assert (path.name, facts["step_in_epoch"]) == (PREVIOUS, 1)
    spoil(tmp_path / PREVIOUS, how)
    with pytest.raises(StoredFileError, match=LAST):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("how", SPOILT)
def test_a_damaged_checkpoint_never_takes_the_place_of_a_good_one(
    how: str, two_checkpoints: Path, tmp_path: Path
) -> None:
    for name in (LAST, PREVIOUS):
        (tmp_path / name).write_bytes((two_checkpoints / name).read_bytes())
    good = (tmp_path / PREVIOUS).read_bytes()
    spoil(tmp_path / LAST, how)
    loaded = checkpoint.load(tmp_path)
    assert loaded.skipped is not None
    assert LAST in loaded.skipped
    checkpoint.save(tmp_path, loaded.tensors, loaded.facts)
    assert (tmp_path / PREVIOUS).read_bytes() == good
    checkpoint.save(tmp_path, loaded.tensors, loaded.facts)
    spoil(tmp_path / LAST, how)  # behind the back of the process that wrote it
    good = (tmp_path / PREVIOUS).read_bytes()
    checkpoint.save(tmp_path, loaded.tensors, loaded.facts)
    assert (tmp_path / PREVIOUS).read_bytes() == good
    assert checkpoint.load(tmp_path).path.name == LAST


def test_a_newer_checkpoint_is_neither_passed_over_nor_replaced(two_checkpoints: Path, tmp_path: Path) -> None:
    tensors, facts, *_ = checkpoint.load(two_checkpoints)
    (tmp_path / PREVIOUS).write_bytes((two_checkpoints / PREVIOUS).read_bytes())
    save_file(tensors, tmp_path / LAST, metadata={"format": "2", "laid out": "otherwise"})
    newer = (tmp_path / LAST).read_bytes()
    with pytest.raises(StoredFileError, match="has format 2, but this version of siammm reads 1"):
        checkpoint.load(tmp_path)
    with pytest.raises(StoredFileError, match="has format 2"):
        checkpoint.save(tmp_path, tensors, facts)
    assert (tmp_path / LAST).read_bytes() == newer


def test_a_run_that_falls_back_goes_on_bit_for_bit(tmp_path: Path) -> None:
    config = small_config(save_every=0)
    whole = run_through(prepared(config, folder=tmp_path / "whole"))
    stopped(prepared(config, folder=tmp_path / "run"), STEPS)  # the one before is of the middle of this epoch
    spoil(tmp_path / "run" / "checkpoints" / LAST, "truncated")
    rest = resumed(config, tmp_path / "run")
    assert (rest.epoch, rest.step_in_epoch, rest.metrics) == (0, STEPS - 1, [])
    check_same_run(run_through(rest), whole)


def test_a_run_killed_between_two_moves_has_the_checkpoint_before(two_checkpoints: Path, tmp_path: Path) -> None:
    (tmp_path / PREVIOUS).write_bytes((two_checkpoints / LAST).read_bytes())
    (tmp_path / f".{LAST}.0a1b2c3d.partial").write_bytes(b"half of it")
    (tmp_path / ".tmpAb3dEf").write_bytes(b"as safetensors leaves it")
    tensors, facts, path, _ = checkpoint.load(tmp_path)
    assert path.name == PREVIOUS
    checkpoint.save(tmp_path, tensors, facts)
    assert sorted(path.name for path in tmp_path.iterdir()) == [LAST, PREVIOUS]  # what was half written is cleared away


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file may grow beyond so many bytes, which programs meet as they meet a full disk: a write that fails."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


needs_limits = pytest.mark.skipif(sys.platform == "win32", reason="the limit on files is POSIX's")


@needs_limits
def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    config = small_config()
    stopped(prepared(config, folder=tmp_path), STEPS)
    before = {path.name: path.read_bytes() for path in (tmp_path / "checkpoints").iterdir()}
    training = resumed(config, tmp_path)
    training.stop_requested = lambda: True
    with full_disk(100_000), pytest.raises(InputError, match=r"cannot be written .*; make room and resume"):
        training.run()
    assert {path.name: path.read_bytes() for path in (tmp_path / "checkpoints").iterdir()} == before
    run_through(resumed(config, tmp_path))


@needs_limits
def test_metrics_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    training = prepared(small_config(), folder=tmp_path)
    with full_disk(10), pytest.raises(InputError, match=r"run folder .* cannot be written"):
        training.run()


def test_a_checkpoint_where_no_folder_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="cannot be written"):
        checkpoint.save(tmp_path / "file", {"x": torch.zeros(2)}, {})


def test_a_checkpoint_of_another_network_is_refused(two_checkpoints: Path) -> None:
    tensors, facts, *_ = checkpoint.load(two_checkpoints)
    with pytest.raises(SiamMMError, match="another network"):
        state.restore(prepared(small_config(embedding_dim=8)), tensors, facts)
