"""A backbone handed to timm makes the same features, without any code of ours."""

from __future__ import annotations

import pytest
import torch

from siammm.export.as_timm import as_timm, repeated
from siammm.learn.backbones import build_backbone
from siammm.settings.presets import PRESETS
from tests.export.runs import shake

# Name, pixels, and how often a pixel is repeated.
BACKBONES = [
    ("conv-small", 8, 4),
    ("conv-small", 11, 4),
    ("resnet18", 32, 4),
    ("resnet18.a1_in1k", 64, 2),
    ("resnet50", 32, 4),
    ("tf_efficientnet_lite0", 64, 1),
    ("vit_tiny_patch16_224", 32, 1),
    ("test_convnext", 64, 1),
]


@pytest.mark.parametrize(("name", "size", "times"), BACKBONES)
def test_features_are_the_same(name: str, size: int, times: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        backbone = build_backbone(name, image_size=size, zero_init_residual=False).eval()
    shake(backbone, torch.Generator().manual_seed(0))
    found = as_timm(backbone, name, size)
    assert found is not None
    assert found.repeat == times
    x = torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours, theirs = backbone(x), found.built()(repeated(x, times))
    assert float(ours.std()) > 0
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)


def test_every_preset_is_among_them() -> None:
    tried = {name for name, _, _ in BACKBONES}
    assert {preset.network.backbone for preset in PRESETS.values()} <= tried


@pytest.mark.slow
def test_the_large_preset() -> None:
    backbone = build_backbone("resnet50", image_size=224).eval()
    found = as_timm(backbone, "resnet50", 224)
    assert found is not None
    assert (found.repeat, found.arguments) == (1, {})


def test_what_timm_cannot_describe_is_said_and_not_guessed() -> None:
    """A deep stem of stride 1 has no equal among timm's arguments."""
    assert as_timm(build_backbone("test_resnet", image_size=32).eval(), "test_resnet", 32) is None


def test_repeating_is_what_the_nearest_neighbour_gives() -> None:
    x = torch.arange(12.0).view(1, 1, 3, 4)
    assert torch.equal(repeated(x, 1), x)
    assert torch.equal(repeated(x, 4), torch.nn.functional.interpolate(x, scale_factor=4, mode="nearest"))
