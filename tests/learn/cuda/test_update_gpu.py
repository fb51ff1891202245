"""The accelerated update on a GPU: the same training as the plain one, on both loaders, and as on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from siammm.data.loader import ResidentLoader, StreamingLoader
from siammm.data.sources import open_source
from siammm.learn.cuda import addresses, optimisers, update
from siammm.learn.loop import Training
from siammm.settings.fields import with_settings
from siammm.settings.presets import PRESETS

pytestmark = pytest.mark.gpu

SMALL: dict[str, Any] = {
    "data": "images", "hidden_dim": 64, "embedding_dim": 32, "batch_size": 32, "epochs": 3, "n_components": 24,
    "optimiser": "sgd", "learning_rate": 0.1, "warmup_epochs": 0, "precision": "fp32", "compile": False,
    "augmentation": "32", "accumulate": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions that repeat themselves, in full precision: else two runs of the same step drift apart by more than a
    wrong one might, since cuDNN tries its convolutions before a capture and takes others than without."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def images(n: int = 256, size: int = 32) -> np.ndarray:
    """Smooth random pictures: noise alone has nothing that two views could share."""
    rng = np.random.default_rng(0)
    coarse = torch.from_numpy(rng.random((n, 3, 4, 4), dtype=np.float32))
    fine = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bicubic").clamp(0, 1)
    return (fine * 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()


def losses(device: str, *, captured: bool = True, beside: bool = True, **settings: Any) -> np.ndarray:
    return _losses(device, captured, beside, tuple(sorted((SMALL | settings).items())))


@functools.cache  # several tests compare with the same run
def _losses(device: str, captured: bool, beside: bool, settings: tuple[tuple[str, Any], ...]) -> np.ndarray:
    training = Training(with_settings(PRESETS["cifar"], **dict(settings)), open_source(images()), torch.device(device))
    if training.accelerated is not None:
        training.accelerated.captures &= captured
        if not beside:
            training.accelerated.side_stream = None
    training.run()
    training.close()
    return np.array([[row["loss"], row["instance_loss"], row["cluster_loss"]] for row in training.metrics])


@pytest.mark.parametrize("optimiser", ["sgd", "lars", "adamw"])
def test_a_captured_step_trains_as_an_uncaptured_one(optimiser: str) -> None:
    settings = {"optimiser": optimiser, "learning_rate": 0.01 if optimiser == "adamw" else 0.1}
    np.testing.assert_allclose(losses("cuda", **settings), losses("cuda", captured=False, **settings), atol=5e-3)


@pytest.mark.parametrize("optimiser", ["sgd", "lars"])
def test_the_accelerated_update_is_the_plain_one(optimiser: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused, on two streams, captured, by kernels: the losses and the weights of plain torch within rounding."""
    config = with_settings(PRESETS["cifar"], **(SMALL | {"optimiser": optimiser, "epochs": 1, "fused": True}))
    losses, weights = [], []
    start: list[torch.Tensor] = []
    for accelerated in (True, False):
        monkeypatch.setattr(update, "available_for", lambda config, device, on=accelerated: on)
        training = Training(config, open_source(images()), torch.device("cuda"))
        assert (training.accelerated is not None) == accelerated
        start = [p.detach().clone() for p in training.network.parameters()]
        training.run()
        training.close()
        assert training.accelerated is None or training.accelerated.graphs
        losses.append(training.metrics[-1]["loss"])
        weights.append([p.detach().clone() for p in training.network.parameters()])
    assert losses[0] == pytest.approx(losses[1], abs=5e-3)
    # By the way that all weights went together: those that hardly move have only rounding to compare.
    apart, way = (
        torch.cat([(one - other).flatten() for one, other in zip(*pair, strict=True)]).norm()
        for pair in ((weights[0], weights[1]), (weights[1], start))
    )
    assert float(apart) < 0.1 * float(way)


def test_a_gpu_trains_as_a_cpu() -> None:
    # One epoch: after it the two drift apart, as any two sums in another order do under BatchNorm.
    np.testing.assert_allclose(losses("cuda", epochs=1), losses("cpu", epochs=1), atol=5e-3)


# Importing torch's compiler warns of what torch itself still uses.
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch hides it, unless warnings are errors
# Fused, only the augmentation and the loss are compiled; else the networks too, here small ones, to save time.
@pytest.mark.parametrize("settings", [{"fused": True}, {"fused": False, "backbone": "conv-small"}], ids=str)
def test_a_compiled_step_trains_as_one_that_is_not(settings: dict[str, Any]) -> None:
    # One epoch: compiled code rounds bf16 elsewhere, and after an epoch the two drift apart.
    settings = settings | {"epochs": 1}
    np.testing.assert_allclose(losses("cuda", compile=True, **settings), losses("cuda", **settings), atol=1e-2)


def test_both_views_in_one_batch_train_as_each_by_itself() -> None:
    np.testing.assert_allclose(losses("cuda", fused=True, epochs=1), losses("cuda", fused=False, epochs=1), atol=5e-3)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_encoders_side_by_side_train_as_one_after_the_other(accumulate: int) -> None:
    settings = {"fused": True, "accumulate": accumulate}
    np.testing.assert_allclose(losses("cuda", **settings), losses("cuda", beside=False, **settings), atol=5e-3)


def test_updates_by_kernels_train_as_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = losses("cuda", optimiser="lars")
    monkeypatch.setattr(addresses, "supports", lambda *lists: False)
    settings = tuple((SMALL | {"optimiser": "lars"}).items())
    np.testing.assert_allclose(found, _losses.__wrapped__("cuda", True, True, settings), atol=5e-3)


def test_muon_in_a_captured_step_turns_as_in_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the weights, as shares of the way they went: on streams and captured, one product after another and not."""
    ends: list[list[torch.Tensor]] = []
    start: list[torch.Tensor] = []
    for captured in (True, False):
        monkeypatch.setattr(optimisers, "_STREAMS", 4 if captured else 0)
        settings = {"optimiser": "muon", "learning_rate": 20.0, "epochs": 1}
        config = with_settings(PRESETS["cifar"], **(SMALL | settings))
        training = Training(config, open_source(images()), torch.device("cuda"))
        assert training.accelerated is not None
        training.accelerated.captures &= captured
        matrices = training.optimiser.param_groups[0]["params"]
        start = [p.detach().clone() for p in matrices]
        training.run()
        training.close()
        ends.append([p.detach().clone() for p in matrices])
    for one, other, before in zip(*ends, start, strict=True):
        assert float((other - before).norm()) > 1e-2 * float(before.norm())
        assert float((one - other).norm()) < 0.3 * float((other - before).norm())


def test_a_captured_step_in_parts_trains_as_an_uncaptured_one() -> None:
    settings = {"fused": True, "accumulate": 2}
    np.testing.assert_allclose(losses("cuda", **settings), losses("cuda", captured=False, **settings), atol=5e-3)


def test_streamed_images_train_as_resident_ones() -> None:
    # One epoch: workers crop in bytes and the device in floats, a difference that grows with every epoch.
    streamed = losses("cuda", loader="streaming", workers=2, epochs=1)
    np.testing.assert_allclose(streamed, losses("cuda", loader="resident", epochs=1), atol=5e-2)


@pytest.mark.parametrize("loader", ["resident", "streaming"])
def test_a_resnet_50_takes_a_step_at_224_pixels(loader: str) -> None:
    config = with_settings(
        PRESETS["imagenet-200"], data="images", n_components=8, batch_size=32, epochs=1, loader=loader, compile=False,
        workers=2,
    )  # fmt: skip
    training = Training(config, open_source(images(128, 256)), torch.device("cuda"))
    assert isinstance(training.loader, ResidentLoader if loader == "resident" else StreamingLoader)
    training.run()
    training.close()
    assert np.isfinite(training.metrics[-1]["loss"])


def test_numbers_that_are_none_stop_a_captured_run_and_change_nothing() -> None:
    from siammm.learn.guard import CollapseError

    config = with_settings(PRESETS["cifar"], **(SMALL | {"learning_rate": 1e30, "epochs": 20}))
    training = Training(config, open_source(images()), torch.device("cuda"))
    with pytest.raises(CollapseError, match="no longer finite"):
        training.run()
    assert all(bool(p.isfinite().all()) for p in training.network.parameters())
