"""Shapes and stems of backbones, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from siammm.core.errors import InputError
from siammm.learn.backbones import build_backbone


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("conv-small", 8), ("conv-small", 16), ("resnet18", 8), ("resnet18", 32), ("resnet18", 64), ("resnet10t", 32),
        ("skresnet18", 40), ("vit_tiny_patch16_224", 32), ("mobilenetv3_small_100", 64), ("convnext_atto", 64),
    ],
)  # fmt: skip
def test_features_have_the_width_that_is_said(name: str, size: int) -> None:
    backbone: Any = build_backbone(name, image_size=size).eval()
    with torch.no_grad():
        assert backbone(torch.randn(2, 3, size, size)).shape == (2, backbone.num_features)


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "pooled", "left"),
    [
        (28, 3, 1, False, 4), (32, 3, 1, False, 4), (40, 3, 1, False, 5), (41, 3, 1, True, 3), (64, 3, 1, True, 4),
        (96, 3, 1, True, 6), (97, 7, 2, True, 4), (224, 7, 2, True, 7),
    ],
)  # fmt: skip
def test_stem_suits_the_size_of_the_images(size: int, kernel: int, stride: int, pooled: bool, left: int) -> None:
    backbone: Any = build_backbone("resnet18", image_size=size).eval()
    assert backbone.conv1.kernel_size == (kernel, kernel)
    assert backbone.conv1.stride == (stride, stride)
    assert isinstance(backbone.maxpool, nn.MaxPool2d) == pooled
    with torch.no_grad():
        assert backbone.forward_features(torch.randn(1, 3, size, size)).shape[-2:] == (left, left)


def test_deep_stems_are_made_finer_too() -> None:
    tiny: Any = build_backbone("resnet10t", image_size=32)
    small: Any = build_backbone("resnet10t", image_size=64)
    large: Any = build_backbone("resnet10t", image_size=128)
    assert [backbone.conv1[0].stride for backbone in (tiny, small, large)] == [(1, 1), (1, 1), (2, 2)]
    assert isinstance(tiny.maxpool, nn.Identity)
    assert isinstance(small.maxpool, nn.MaxPool2d)


def test_residual_blocks_start_as_the_identity_if_asked() -> None:
    with_zeros: Any = build_backbone("resnet18", image_size=32)
    without: Any = build_backbone("resnet18", image_size=32, zero_init_residual=False)
    assert not with_zeros.layer1[0].bn2.weight.any()
    assert without.layer1[0].bn2.weight.all()


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("resnet-18", {}, "no backbone 'resnet-18'; did you mean resnet18 or"),
        ("conv-smal", {}, "did you mean conv-small or"),
        ("qwertyuiop", {}, "timm.list_models"),
        ("resnet18.nothing", {}, "Invalid pretrained tag .nothing. for resnet18"),
        ("vit_tiny_patch16_224", {"image_size": 40}, "patches of 16 pixels, but the image size is 40"),
        ("vit_tiny_patch16_224", {"image_size": 8}, "patches of 16 pixels, but the image size is 8"),
        ("resnet18", {"image_size": 0}, "image_size is 0"),
        ("conv-small", {"pretrained": True}, "no pretrained weights"),
        (
            "resnet10t",
            {"pretrained": True},
            r"timm:resnet10t cannot be downloaded \(no network here\); give their file, https://",
        ),
    ],
)
def test_refusals(name: str, settings: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import timm.models._builder as builder

    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("no network here")

    monkeypatch.setattr(builder, "load_pretrained", unreachable)
    everything: dict[str, Any] = {"image_size": 32} | settings
    with pytest.raises(InputError, match=says) as caught:
        build_backbone(name, **everything)
    assert str(caught.value).endswith((".", "?"))


def test_a_pretrained_network_keeps_its_stem(monkeypatch: pytest.MonkeyPatch) -> None:
    import timm.models._builder as builder

    def loaded(model: Any, **_: Any) -> None:
        nn.init.constant_(model.conv1[0].weight, 0.25)

    monkeypatch.setattr(builder, "load_pretrained", loaded)
    backbone: Any = build_backbone("resnet10t", image_size=32, pretrained=True)
    assert backbone.conv1[0].stride == (2, 2)
    assert isinstance(backbone.maxpool, nn.MaxPool2d)
    assert (backbone.conv1[0].weight == 0.25).all()
