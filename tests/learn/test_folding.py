"""Networks without BatchNorm layers, for evaluation."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from siammm.learn.folding import folded

pytestmark = pytest.mark.usefixtures("one_thread")


def varied(network: nn.Module) -> nn.Module:
    """The network with running statistics as training leaves them."""
    generator = torch.Generator().manual_seed(0)
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean = torch.randn(layer.num_features, generator=generator) * 0.1  # pyright: ignore[reportAttributeAccessIssue]
            layer.running_var = torch.rand(layer.num_features, generator=generator) + 0.5  # pyright: ignore[reportAttributeAccessIssue]
    return network.eval()


@pytest.mark.parametrize("name", ["resnet18", "tf_efficientnet_lite0"])
@torch.no_grad()
def test_the_same_function(name: str) -> None:
    network = varied(timm.create_model(name, num_classes=0))
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    lean = folded(network, 64)
    assert lean is not None
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in lean.modules())
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(lean(x), network(x), rtol=1e-3, atol=1e-4)
    assert all(torch.equal(tensor, before[key]) for key, tensor in network.state_dict().items())


class NormFirst(nn.Module):
    """BatchNorm comes first, although it was made after the convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(self.norm(x).relu()).mean(dim=(2, 3))


def test_another_order_is_noticed() -> None:
    assert folded(varied(NormFirst()), 16) is None
    assert folded(nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1)), 16) is None
