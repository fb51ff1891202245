"""Embeddings of the last few batches, the oldest making room for the newest: MoCo's queue.

Legend:  Q rows, B rows of a batch, D dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from siammm.learn.networks import SiameseNetwork


@dataclass(frozen=True)
class Queued:
    """Embeddings of earlier batches that a batch is compared with, of view 1 and of view 2."""

    view_2QD: Tensor
    scores: tuple[Tensor, Tensor] | None = None
    """Their cosines with the prototypes (Q, K), where there are prototypes."""
    counts: Tensor | None = None
    """With prototypes: 1 where the queue is in use already, else 0; no dimensions."""


class Queue:
    """Unit embeddings of both views, the newest first.

    Until there are any, random directions from ``seed``, as in MoCo; without a seed zeros, and ``is_full`` tells.
    Nothing changes its shape or address, so that a captured update keeps using it. Every rank is given the rows of all,
    and so keeps the same ones.
    """

    def __init__(
        self, size: int, dim: int, device: torch.device, *, seed: int | None = None, starts_at: int = 0
    ) -> None:
        self.starts_at = starts_at
        start = torch.zeros(2, size, dim)
        if seed is not None:
            start = torch.randn(2, size, dim, generator=torch.Generator().manual_seed(seed))
        self.view_2QD = functional.normalize(start, dim=2).to(device)

    @property
    def is_full(self) -> Tensor:
        """Whether the oldest row holds anything, on the device; no dimensions."""
        return (self.view_2QD[:, -1] != 0).any()

    @torch.no_grad()
    def read(self, network: SiameseNetwork, epoch: Tensor) -> Queued:
        """The rows as the loss reads them; with prototypes they count once the queue is full and due."""
        if network.prototypes is None:
            return Queued(self.view_2QD)
        first, second = (network.scored(rows) for rows in self.view_2QD)
        return Queued(self.view_2QD, (first, second), ((epoch >= self.starts_at) & self.is_full).float())

    def push(self, v_1_BD: Tensor, v_2_BD: Tensor) -> None:
        """Take in these embeddings, and let as many old ones go."""
        for rows_QD, new_BD in zip(self.view_2QD, (v_1_BD, v_2_BD), strict=True):
            new_BD = functional.normalize(new_BD.detach().float(), dim=1)[: rows_QD.shape[0]]
            rows_QD.copy_(torch.cat([new_BD, rows_QD[: rows_QD.shape[0] - new_BD.shape[0]]]))
