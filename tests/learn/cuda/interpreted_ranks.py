"""Two processes normalise by the BatchNorm kernels as one does with the whole batch, under Triton's interpreter.

A program of its own, as ``interpreted_norms.py`` is. The processes are real, and joined by gloo.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from siammm.learn.backbones import build_backbone
from siammm.learn.batchnorm import synchronised
from siammm.learn.cuda import norm_kernels
from siammm.learn.cuda.fused import fuse, normalised
from siammm.learn.networks import Encoder, SiameseNetwork, predictor, projector
from tests.distributed.launch import LOOPBACK

WORLD, GROUPS = 2, 2
# Shape of the joint batch; learnt scale, residual, ReLU. Means far above the spread, which differ between the ranks.
CASES = [
    ((8, 24, 3, 3), True, True, True),
    ((12, 130), False, False, False),
    ((8, 16, 3, 3), True, False, True),
    ((8, 24), True, True, False),
]


def layer(channels: int, *, images: bool, affine: bool, shared: bool) -> Any:
    torch.manual_seed(1)
    made: Any = (nn.BatchNorm2d if images else nn.BatchNorm1d)(channels, affine=affine)
    if affine:
        nn.init.uniform_(made.weight, 0.5, 1.5)
        nn.init.normal_(made.bias)
    return nn.SyncBatchNorm.convert_sync_batchnorm(made) if shared else made


def inputs(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """The groups of a joint batch, what is added, and the gradients: (G, N, C, ...)."""
    drawn = torch.randn(3, GROUPS, *shape, generator=torch.Generator().manual_seed(len(shape) + shape[1]))
    x = drawn[0] + 50 * torch.randn(shape[1], generator=torch.Generator().manual_seed(2)).view(
        -1, *[1] * len(shape[2:])
    )
    x[:, : shape[0] // WORLD] += 3
    return x, drawn[1], drawn[2]


def kernels(rank: int, shape: tuple[int, ...], affine: bool, residual: bool, relu: bool) -> dict[str, Tensor]:
    """What one rank finds of its share of each group."""
    x, added, dy = (part.chunk(WORLD, dim=1)[rank].flatten(0, 1) for part in inputs(shape))
    if x.ndim == 4:
        x = x.to(memory_format=torch.channels_last)
    norm = layer(shape[1], images=x.ndim == 4, affine=affine, shared=True)
    x.requires_grad_()
    y = normalised(x, norm, GROUPS, added if residual else None, relu=relu)[0]
    y.backward(dy)
    return {"y": y.detach(), **gradients(x, norm), **remembered(norm)}


def whole(shape: tuple[int, ...], affine: bool, residual: bool, relu: bool) -> dict[str, Tensor]:
    """The same by torch, of whole groups and in double precision."""
    x, added, dy = (part.double() for part in inputs(shape))
    norm = layer(shape[1], images=x.ndim == 5, affine=affine, shared=False).double()
    x.requires_grad_()
    y = torch.stack([norm(group) for group in x]) + (added if residual else 0)
    y = functional.relu(y) if relu else y
    y.backward(dy)
    return {"y": y.detach(), **gradients(x, norm), **remembered(norm)}


def gradients(x: Tensor, norm: Any) -> dict[str, Tensor]:
    assert x.grad is not None
    found = {"dx": x.grad}
    return found | ({"weight": norm.weight.grad, "bias": norm.bias.grad} if norm.affine else {})


def remembered(norm: Any) -> dict[str, Tensor]:
    return {name: getattr(norm, name) for name in ("running_mean", "running_var", "num_batches_tracked")}


def network() -> SiameseNetwork:
    torch.manual_seed(0)
    body: Any = build_backbone("resnet18", image_size=8, zero_init_residual=False)
    body.layer2 = body.layer3 = body.layer4 = nn.Sequential()
    body.num_features = 64
    return SiameseNetwork(Encoder(body, projector(64, 16, 8, 2)), predictor(8, 16), momentum=False).train()


def network_gradients(model: SiameseNetwork, rank: int | None = None) -> dict[str, Tensor]:
    """Gradients of a network: on a rank of its share, fused and averaged by DDP; otherwise of all images, by torch."""
    x_1, x_2 = torch.randn(2, 4, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    run: Any = model
    if rank is not None:
        synchronised(model)
        assert fuse(model)
        x_1, x_2 = (x.chunk(WORLD)[rank].to(memory_format=torch.channels_last) for x in (x_1, x_2))
        run = nn.parallel.DistributedDataParallel(model)
    found = run(x_1, x_2)
    alike = functional.cosine_similarity
    (alike(found.v_1, found.z_2.detach()) + alike(found.v_2, found.z_1.detach())).mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def work(rank: int, folder: Path) -> None:
    """What a rank does: all cases, then the network."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    found = {str(case): kernels(rank, *case) for case in CASES}
    found["network"] = network_gradients(network(), rank)
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def in_ranks(folder: Path) -> list[dict[str, dict[str, Tensor]]]:
    """What each rank found; they are forked from here, as importing torch takes longer than their work."""
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    started = []
    for rank in range(WORLD):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work(rank, folder)
                code = 0
            except BaseException:
                traceback.print_exc(file=sys.stdout)
            finally:
                sys.stdout.flush()
                os._exit(code)
        started.append(child)
    ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in started]
    assert ended == [0] * WORLD, ended
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]


def joined(name: str, parts: list[Tensor]) -> Tensor:
    """What the ranks found as one process has it: rows of groups together, gradients of parameters added up."""
    if name in ("y", "dx"):
        return torch.cat([part.unflatten(0, (GROUPS, -1)) for part in parts], dim=1)
    if name in ("weight", "bias"):
        return torch.stack(parts).sum(dim=0)
    assert all(torch.equal(part, parts[0]) for part in parts), name
    return parts[0]


def check(name: str, found: Tensor, expected: Tensor, tolerance: float) -> bool:
    error = float((found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-12))
    sys.stdout.write(f"{'ok  ' if error <= tolerance else 'FAIL'} {name}: {error:.1e}\n")
    return error <= tolerance


def main() -> int:
    torch.set_num_threads(1)
    # The interpreter is quicker with few programs.
    norm_kernels._ROWS_AT_ONCE, norm_kernels._FEW = 64, 128
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder:
        ranks = in_ranks(Path(folder))
    passed = True
    for case in CASES:
        for name, expected in whole(*case).items():
            found = joined(name, [rank[str(case)][name] for rank in ranks])
            passed &= check(f"{name}, {case}", found, expected, 1e-4)
    for name, expected in network_gradients(network()).items():
        passed &= check(
            f"a ResNet's gradient, {name}", joined(name, [rank["network"][name] for rank in ranks]), expected, 2e-2
        )
    return 0 if passed else 1


sys.exit(main())
