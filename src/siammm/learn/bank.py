"""The bank: the momentum embeddings of both views of every image, as training made them.

It costs no extra pass: every step leaves the embeddings it computed anyway. Under ``torch.distributed`` each rank keeps
a contiguous shard, whichever rank an image was trained on.

Legend:  N images, B images of a batch, D dimensions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from siammm.core.errors import InputError


def shard(n_images: int, rank: int, world_size: int) -> tuple[int, int]:
    """First and one past the last image of a rank's shard."""
    return rank * n_images // world_size, (rank + 1) * n_images // world_size


class Bank:
    """Two unit embeddings for each image of this rank's shard."""

    def __init__(self, n_images: int, dim: int, device: torch.device, *, rank: int = 0, world_size: int = 1) -> None:
        self.first, self.last = shard(n_images, rank, world_size)
        self.n_rows = self.last - self.first
        # One more row takes what belongs to other ranks: shapes stay fixed, and nothing has to be selected.
        self.view_2ND = torch.zeros(2, self.n_rows + 1, dim, device=device)

    def update(self, position_B: Tensor, v_1_BD: Tensor, v_2_BD: Tensor) -> None:
        """Keep the embeddings of these images, those that are this rank's."""
        row_B = position_B - self.first
        row_B = torch.where((row_B >= 0) & (row_B < self.n_rows), row_B, self.n_rows)
        self.view_2ND[0].index_copy_(0, row_B, functional.normalize(v_1_BD.float(), dim=1))
        self.view_2ND[1].index_copy_(0, row_B, functional.normalize(v_2_BD.float(), dim=1))

    def embeddings(self) -> Tensor:
        """One unit vector per image: the mean direction of its two views, v_ND."""
        return functional.normalize(self.view_2ND[:, :-1].sum(dim=0), dim=1)

    def check(self) -> None:
        """Refuse NaN and infinity here: the mixture would only notice later, and could not say why."""
        if not bool(torch.isfinite(self.view_2ND).all()):
            raise InputError("The embeddings hold NaN or infinity; lower --learning-rate, or use --precision fp32.")
