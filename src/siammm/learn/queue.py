"""Embeddings of the last few batches, the oldest making room for the newest: MoCo's queue.

Legend:  Q rows, B rows of a batch, D dimensions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor


class Queue:
    """Unit embeddings of both views, the newest first.

    Until there are any, random directions from ``seed``, as in MoCo; without a seed zeros, and ``is_full`` tells.
    Nothing changes its shape or address, so that a captured step goes on using it. Every rank is given the rows of all,
    and so keeps the same ones.
    """

    def __init__(self, size: int, dim: int, device: torch.device, *, seed: int | None = None) -> None:
        start = torch.zeros(2, size, dim)
        if seed is not None:
            start = torch.randn(2, size, dim, generator=torch.Generator().manual_seed(seed))
        self.view_2QD = functional.normalize(start, dim=2).to(device)

    @property
    def is_full(self) -> Tensor:
        """Whether the oldest row holds anything, on the device; no dimensions."""
        return (self.view_2QD[:, -1] != 0).any()

    def push(self, v_1_BD: Tensor, v_2_BD: Tensor) -> None:
        """Take in these embeddings, and let as many old ones go."""
        for rows_QD, new_BD in zip(self.view_2QD, (v_1_BD, v_2_BD), strict=True):
            new_BD = functional.normalize(new_BD.detach().float(), dim=1)[: rows_QD.shape[0]]
            rows_QD.copy_(torch.cat([new_BD, rows_QD[: rows_QD.shape[0] - new_BD.shape[0]]]))
