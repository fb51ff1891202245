"""The accelerated update on a GPU: the same training as the plain one, on both loaders, and as on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from siammm.data.sources import open_source
from siammm.learn.cuda import addresses, optimisers, update
from siammm.learn.loop import Training
from siammm.learn.objective import Stage
from siammm.settings.fields import with_settings
from siammm.settings.presets import PRESETS
from tests.data.image_sets import example_images
from tests.learn.cuda.gpu_runs import SMALL, images, losses, losses_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("repeatable")]


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


def test_updates_by_kernels_train_as_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = losses("cuda", optimiser="lars")
    monkeypatch.setattr(addresses, "supports", lambda *lists: False)
    settings = tuple((SMALL | {"optimiser": "lars"}).items())
    np.testing.assert_allclose(found, losses_of.__wrapped__("cuda", True, True, settings), atol=5e-3)


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


@pytest.mark.parametrize("levels", ["groups", "both"])
def test_groups_count_in_a_captured_step(levels: str) -> None:
    """Images of four colours; clusters count from the second epoch on, groups from the third."""
    settings = {"cluster_after": 0.3, "group_after": 0.6, "epochs": 4, "group_levels": levels, "backbone": "conv-small"}
    config = with_settings(PRESETS["cifar"], **(SMALL | settings))
    found: list[list[float]] = []
    for captured in (True, False):
        colours = example_images(256, size=(16, 16), n_classes=4).images
        training = Training(config, open_source(colours), torch.device("cuda"))
        assert training.accelerated is not None
        training.accelerated.captures &= captured
        training.run()
        training.close()
        assert training.grouping is not None
        assert set(training.accelerated.graphs) == ({Stage.GROUPS} if captured else set())
        found.append([row["loss"] for row in training.metrics[:3]])  # of one epoch with groups
    np.testing.assert_allclose(found[0], found[1], atol=2e-2)


def test_streamed_images_train_as_resident_ones() -> None:
    # One epoch: workers crop in bytes and the device in floats, a difference that grows with every epoch.
    streamed = losses("cuda", loader="streaming", workers=2, epochs=1)
    np.testing.assert_allclose(streamed, losses("cuda", loader="resident", epochs=1), atol=5e-2)


def test_numbers_that_are_none_stop_a_captured_run_and_change_nothing() -> None:
    from siammm.learn.guard import CollapseError

    config = with_settings(PRESETS["cifar"], **(SMALL | {"learning_rate": 1e30, "epochs": 20}))
    training = Training(config, open_source(images()), torch.device("cuda"))
    with pytest.raises(CollapseError, match="no longer finite"):
        training.run()
    assert all(bool(p.isfinite().all()) for p in training.network.parameters())
