"""Both views in one batch give what two calls give: outputs, gradients, running statistics, a whole training."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from siammm.learn.backbones import build_backbone
from siammm.learn.batchnorm import SynchronisedBatchNorm
from siammm.learn.cuda.fused import fuse, fused
from siammm.learn.networks import Encoder, SiameseNetwork, predictor, projector
from tests.learn.small_runs import measured, prepared, run_through, small_config, small_images


def network(backbone: str, *, size: int = 16) -> SiameseNetwork:
    torch.manual_seed(0)
    body = build_backbone(backbone, image_size=size, zero_init_residual=False)
    encoder = Encoder(body, projector(int(body.num_features), hidden=32, out=16))  # pyright: ignore[reportArgumentType]
    return SiameseNetwork(encoder, predictor(16, hidden=32)).train()


@pytest.mark.parametrize(
    "backbone", ["conv-small", "resnet18", "resnet26d", pytest.param("resnet26", marks=pytest.mark.slow)]
)
def test_one_batch_of_two_views_is_two_batches(backbone: str) -> None:
    plain = network(backbone).double()
    joined = copy.deepcopy(plain)
    assert fuse(joined)
    x_1, x_2 = torch.randn(2, 4, 3, 16, 16, dtype=torch.float64).unbind()
    noise = (torch.randn(4, 16, dtype=torch.float64), torch.randn(4, 16, dtype=torch.float64))
    outputs = []
    for model in (plain, joined):
        found = model(x_1, x_2, noise)
        targets = model.targets(x_1, x_2, found.z_1, found.z_2)
        (found.v_1.square().sum() + (found.v_2 * found.z_1).sum()).backward()
        outputs.append([found.v_1, found.v_2, found.z_1, found.z_2, *targets])
    for one, two in zip(*outputs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)
    for (name, one), (other, two) in zip(plain.named_parameters(), joined.named_parameters(), strict=True):
        assert name == other
        if one.requires_grad:
            torch.testing.assert_close(one.grad, two.grad, rtol=1e-7, atol=1e-9)
    for (name, one), (_, two) in zip(plain.named_buffers(), joined.named_buffers(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9, msg=name)


def test_a_copy_has_layers_of_its_own() -> None:
    model = network("conv-small")
    assert fuse(model)
    x_1, x_2 = torch.randn(2, 6, 3, 16, 16).unbind()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert fuse(copied)
        copied(x_1, x_2).v_1.sum().backward()
        assert all(p.grad is not None for p in copied.encoder.parameters())
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert copy.deepcopy(model).fused == {}


def test_evaluation_is_untouched() -> None:
    model = network("conv-small").eval()
    x = torch.randn(2, 4, 3, 16, 16)
    before = model(x[0], x[1])
    assert fuse(model)
    after = model(x[0], x[1])
    for one, two in zip(before[:4], after[:4], strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("backbone", ["seresnet18", "resnetblur18", "vit_tiny_patch16_224", "mobilenetv3_small_050"])
def test_what_is_not_known_is_left_alone(backbone: str) -> None:
    body = build_backbone(backbone, image_size=32)
    model = SiameseNetwork(Encoder(body, projector(int(body.num_features), hidden=8, out=8)), predictor(8, hidden=8))  # pyright: ignore[reportArgumentType]
    assert not fuse(model)


def test_a_batchnorm_without_a_moving_average_is_left_alone() -> None:
    assert fused(nn.Sequential(nn.BatchNorm1d(3, momentum=None))) is None
    assert fused(nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False))) is None


def test_layers_that_processes_share_are_known_unless_they_do_more() -> None:
    assert fused(nn.Sequential(nn.SyncBatchNorm(3))) is not None
    assert fused(nn.Sequential(SynchronisedBatchNorm(3))) is not None
    assert fused(nn.Sequential(nn.SyncBatchNorm(3, process_group="some of them"))) is None
    with_activation = SynchronisedBatchNorm(3)
    with_activation.act = nn.SiLU()
    assert fused(nn.Sequential(with_activation)) is None


def test_training_is_the_same() -> None:
    settings = {"learning_rate": 0.01, "epochs": 2}
    plain = run_through(prepared(small_config(fused=False, **settings), small_images()))
    joined = run_through(prepared(small_config(fused=True, **settings), small_images()))
    for one, two in zip(measured(plain), measured(joined), strict=True):
        assert one["loss"] == pytest.approx(two["loss"], abs=1e-4)
        assert one["n_clusters"] == two["n_clusters"]
