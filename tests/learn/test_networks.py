"""What heads are made of, and the pair of encoders: what moves, what stays its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from siammm.core.errors import InputError
from siammm.learn.backbones import build_backbone
from siammm.learn.networks import Encoder, SiameseNetwork, predictor, projector
from siammm.learn.optim import build_optimiser


def small_network(*, momentum: bool = True, with_predictor: bool = True, seed: int = 0) -> SiameseNetwork:
    torch.manual_seed(seed)
    backbone = build_backbone("conv-small", image_size=8)
    encoder = Encoder(backbone, projector(256, 32, 16))
    return SiameseNetwork(encoder, predictor(16, 32) if with_predictor else None, momentum=momentum)


def views(n: int = 12, *, seed: int = 1) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, n, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    return x[0], x[1]


def loss_of(v_1: Tensor, v_2: Tensor, v_1m: Tensor, v_2m: Tensor) -> Tensor:
    cosine = nn.functional.cosine_similarity
    return 2 - cosine(v_1, v_2m).mean() - cosine(v_2, v_1m).mean()


def norms(module: nn.Module) -> list[Any]:
    return [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]


# -- heads -------------------------------------------------------------------------------------------------------------


def test_heads_are_the_papers() -> None:
    head = projector(512)
    kinds = [type(part) for part in head]
    assert kinds == [nn.Linear, nn.BatchNorm1d, nn.ReLU] * 2 + [nn.Linear, nn.BatchNorm1d]
    linear = [part for part in head if isinstance(part, nn.Linear)]
    assert [(part.in_features, part.out_features) for part in linear] == [(512, 4096), (4096, 4096), (4096, 256)]
    assert [part.bias for part in linear] == [None] * 3
    assert [norm.affine for norm in norms(head)] == [True, True, False]
    guess = predictor()
    assert [type(part) for part in guess] == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]
    letter = predictor(last_norm="plain")  # all MLP layers have BatchNorm
    assert [type(part) for part in letter] == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear, nn.BatchNorm1d]
    assert guess(torch.randn(4, 256)).shape == (4, 256)


def test_settings_of_heads() -> None:
    assert [norm.affine for norm in norms(predictor(8, 16, last_norm="affine"))] == [True, True]
    assert isinstance(predictor(8, 16, last_norm="none")[-1], nn.Linear)
    assert len(projector(8, 16, 4, layers=1)) == 2
    with pytest.raises(InputError, match="last_norm is 'batch'"):
        predictor(8, 16, last_norm="batch")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="layers is 0"):
        projector(8, 16, 4, layers=0)


# -- the pair of encoders ----------------------------------------------------------------------------------------------


def test_predictions_have_gradients_and_targets_have_none() -> None:
    network = small_network()
    x_1, x_2 = views()
    v_1, v_2, z_1, z_2, _ = network(x_1, x_2)
    v_1m, v_2m = network.targets(x_1, x_2, z_1, z_2)
    assert all(v.shape == (12, 16) for v in (v_1, v_2, z_1, z_2, v_1m, v_2m))
    assert [v.requires_grad for v in (v_1, v_2, z_1, z_2, v_1m, v_2m)] == [True, True, True, True, False, False]
    # Fresh from the copy, both encoders say the same of the same batch.
    torch.testing.assert_close(v_1m, z_1, rtol=0, atol=0)
    loss_of(v_1, v_2, v_1m, v_2m).backward()
    assert network.predictor is not None
    assert network.momentum_encoder is not None
    assert all(p.grad is not None for p in (*network.encoder.parameters(), *network.predictor.parameters()))
    assert all(p.grad is None and not p.requires_grad for p in network.momentum_encoder.parameters())


def test_without_momentum_encoder_targets_are_the_projections_of_the_same_pass() -> None:
    network = small_network(momentum=False)
    x_1, x_2 = views()
    passes = []
    network.encoder.register_forward_hook(lambda *_: passes.append(1))
    v_1, v_2, z_1, z_2, _ = network(x_1, x_2)
    v_1m, v_2m = network.targets(x_1, x_2, z_1, z_2)
    assert len(passes) == 2
    torch.testing.assert_close((v_1m, v_2m), (z_1, z_2), rtol=0, atol=0)
    assert not v_1m.requires_grad
    assert v_1.requires_grad
    assert v_2.requires_grad
    network.update_momentum(0.9)  # nothing follows, nothing happens


def test_without_predictor_predictions_are_projections() -> None:
    network = small_network(with_predictor=False)
    v_1, v_2, z_1, z_2, _ = network(*views())
    torch.testing.assert_close((v_1.detach(), v_2.detach()), (z_1, z_2), rtol=0, atol=0)


def test_each_view_is_a_batch_of_its_own() -> None:
    network = small_network()
    x_1, x_2 = views()
    v_1 = network(x_1, x_2)[0]
    torch.testing.assert_close(v_1, network(x_1, 5 + 3 * x_2)[0], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_momentum_encoder_follows_exactly(kind: str) -> None:
    network = small_network()
    assert network.momentum_encoder is not None
    with torch.no_grad():
        for p in network.encoder.parameters():
            p.add_(torch.randn_like(p))
    before = [p.double() for p in network.momentum_encoder.parameters()]
    network.update_momentum(0.9 if kind == "number" else torch.tensor(0.9, dtype=torch.float64))
    for old, online, new in zip(
        before, network.encoder.parameters(), network.momentum_encoder.parameters(), strict=True
    ):
        torch.testing.assert_close(new.double(), 0.9 * old + 0.1 * online.double(), rtol=1e-6, atol=1e-7)
    moved = copy.deepcopy(network.momentum_encoder.state_dict())
    network.update_momentum(1.0)
    torch.testing.assert_close(network.momentum_encoder.state_dict(), moved, rtol=0, atol=0)
    network.update_momentum(torch.tensor(0.0))
    for online, new in zip(network.encoder.parameters(), network.momentum_encoder.parameters(), strict=True):
        torch.testing.assert_close(new, online, rtol=1e-6, atol=1e-6)


def test_encoders_that_agree_stay_as_they_are() -> None:
    network = small_network()
    assert network.momentum_encoder is not None
    for momentum in (0.99, torch.tensor(0.37)):
        network.update_momentum(momentum)
        for online, new in zip(network.encoder.parameters(), network.momentum_encoder.parameters(), strict=True):
            assert torch.equal(online, new)


def test_each_encoder_keeps_its_own_statistics() -> None:
    network = small_network()
    assert network.momentum_encoder is not None
    x_1, x_2 = views()
    z_1, z_2 = network(x_1, x_2)[2:4]
    online, own = norms(network.encoder)[0], norms(network.momentum_encoder)[0]
    assert int(online.num_batches_tracked) == 2
    assert int(own.num_batches_tracked) == 0
    network.targets(3 * x_1, 3 * x_2, z_1, z_2)
    assert int(own.num_batches_tracked) == 2
    kept = own.running_var.clone()
    assert not torch.allclose(kept, online.running_var)
    network.update_momentum(0.0)
    assert torch.equal(own.running_var, kept)


def test_modes_reach_both_encoders_and_evaluation_leaves_statistics_alone() -> None:
    network = small_network().eval()
    before = copy.deepcopy(network.state_dict())
    z_1, z_2 = network(*views())[2:4]
    network.targets(*views(), z_1, z_2)
    torch.testing.assert_close(network.state_dict(), before, rtol=0, atol=0)


def test_bf16_autocast_and_channels_last_agree_with_single_precision() -> None:
    network = small_network()
    plain = network(*views())[0]
    twin = small_network().to(memory_format=torch.channels_last)
    x_1, x_2 = (x.contiguous(memory_format=torch.channels_last) for x in views())
    torch.testing.assert_close(twin(x_1, x_2)[0], plain, rtol=1e-3, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        v_1, v_2, z_1, z_2, _ = twin(x_1, x_2)
        v_1m, _ = twin.targets(x_1, x_2, z_1, z_2)
        features = twin.encoder.features(x_1)
    assert {v.dtype for v in (v_1, v_2, z_1, v_1m, features)} == {torch.float32}
    assert nn.functional.cosine_similarity(v_1, plain).min() > 0.99


def test_a_step_learns() -> None:
    network = small_network()
    optimiser = build_optimiser("sgd", network, lr=0.05, weight_decay=1e-4)
    losses = []
    for _ in range(12):
        x_1, x_2 = views(32)
        v_1, v_2, z_1, z_2, _ = network(x_1, x_1 + 0.1 * x_2)
        loss = loss_of(v_1, v_2, *network.targets(x_1, x_1 + 0.1 * x_2, z_1, z_2))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        network.update_momentum(0.99)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test_the_whole_network_is_one_graph_for_the_compiler() -> None:
    """Traced without a break: what the compiler's back end does with it is not ours."""
    network = small_network()
    eager = network(*views())
    twin = small_network()
    compiled = torch.compile(twin, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*views()), eager, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(norms(network), norms(twin), strict=True):
        torch.testing.assert_close(ours.running_mean, theirs.running_mean)
        assert int(ours.num_batches_tracked) == int(theirs.num_batches_tracked)
