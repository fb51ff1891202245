"""Parts of the accelerated update on a GPU, each with and without: compiled, both views at once, side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from siammm.data.loader import ResidentLoader, StreamingLoader
from siammm.data.sources import open_source
from siammm.learn.loop import Training
from siammm.settings.fields import with_settings
from siammm.settings.presets import PRESETS
from tests.learn.cuda.gpu_runs import images, losses

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("repeatable")]


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
