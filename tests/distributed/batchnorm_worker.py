"""One rank: does what ``test_batchnorm.py`` does in one process, on its share of each batch; writes what it found."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from siammm.core import processes, ranks
from siammm.core.errors import InputError
from siammm.learn.batchnorm import SynchronisedBatchNorm, synchronised
from siammm.learn.optim import build_optimiser
from tests.distributed import batchnorm_cases as cases


def normalised(case: cases.Case, context: processes.Context) -> dict[str, Tensor]:
    """One layer: outputs, gradients and statistics of this rank's share."""
    norm = synchronised(cases.layer(case))
    assert isinstance(norm, SynchronisedBatchNorm)
    found = cases.passed(norm, case, cases.shares(case)[context.rank])
    if case.affine:  # as an averaging of gradients would see them
        for key in ("weight_grad", "bias_grad"):
            dist.all_reduce(found[key])
    return found


def trained(context: processes.Context) -> dict[str, Any]:
    """A whole network by DistributedDataParallel, three steps."""
    network = cases.network()
    optimiser = build_optimiser("lars", network, lr=0.5, weight_decay=1e-4)
    synchronised(network)  # after the optimiser: the parameters are the same objects
    parallel = DistributedDataParallel(network)
    gathered = []
    for x_1, x_2 in cases.batches():
        x_1, x_2 = x_1.chunk(context.world_size)[context.rank], x_2.chunk(context.world_size)[context.rank]
        v_1, v_2, z_1, z_2, _ = parallel(x_1, x_2)
        targets = network.targets(x_1, x_2, z_1, z_2)
        optimiser.zero_grad()
        cases.loss_of(v_1, v_2, *targets).backward()
        optimiser.step()
        network.update_momentum(0.9)
        gathered.append(ranks.all_gather_batch(v_1))
    return {"state": network.state_dict(), "embeddings": gathered}


def too_few() -> str:
    """One value a channel in all."""
    norm = synchronised(nn.BatchNorm1d(3))
    try:
        norm(torch.ones(int(ranks.is_writer()), 3))
    except InputError as error:
        return str(error)
    return "accepted"


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    with processes.setup("cpu", timeout=timedelta(seconds=120)) as context:
        mine = torch.full((2, 3), float(context.rank), requires_grad=True)
        found = {
            "norms": {case.name: normalised(case, context) for case in cases.CASES},
            "trained": trained(context),
            "context": [context.rank, context.world_size, context.local_rank, str(context.device)],
            "functions": [ranks.rank(), ranks.world_size(), ranks.is_writer()],
            "gathered": ranks.all_gather_batch(mine),
            "gathered numbers": ranks.all_gather_batch(torch.tensor(context.rank)),
            "from rank 0": ranks.broadcast_int(7 + context.rank, context.device),
            "too few": too_few(),
        }
        dist.barrier()
        again = processes.setup("cpu")  # a group that is there is used
        assert again == context
    assert not dist.is_initialized()
    torch.save(found, folder / f"rank{context.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
