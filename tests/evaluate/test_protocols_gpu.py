"""The linear probe and fine-tuning on a GPU."""

from __future__ import annotations

import pytest

from siammm.evaluate.fine_tuning import FineTuneSettings, fine_tune
from siammm.evaluate.linear_probe import LinearSettings, linear_probe
from siammm.evaluate.training import Setup
from tests.evaluate.test_fine_tuning import backbone
from tests.evaluate.test_linear_probe import HALF, Means, coloured

pytestmark = pytest.mark.gpu


def test_on_a_gpu_as_on_the_cpu() -> None:
    settings = LinearSettings(epochs=20, batch_size=16, learning_rate=2.0)
    source = coloured()
    images = (source, source.labels)
    on_cpu, on_gpu = (
        linear_probe(Means().to(device), images, images, settings, Setup(view=HALF, device=device))
        for device in ("cpu", "cuda")
    )
    assert on_gpu.top1 == pytest.approx(on_cpu.top1, abs=0.05)


def test_fine_tuning() -> None:
    source = coloured()
    images = (source, source.labels)
    settings = FineTuneSettings(epochs=20, min_updates=60, batch_size=8, backbone_rate=0.1, head_rate=2.0)
    result = fine_tune(backbone(), images, images, settings, Setup(view=HALF, device="cuda"))
    assert result.top1 > 0.9
