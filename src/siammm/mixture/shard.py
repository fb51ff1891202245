"""A rank's rows among those of all ranks: what decides about all rows, from each rank's own.

Legend:  N rows of this rank, M rows that were chosen among all.
"""

from __future__ import annotations

# torch is only partly typed.
# pyright: reportUnknownMemberType=false
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from siammm.core import ranks

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Shard:
    """Which of all rows this rank has. Alone, or where each rank is for itself, these are all."""

    n_total: int
    first: int = 0
    is_one_of_many: bool = False

    @classmethod
    def of(cls, n_rows: int, *, together: bool) -> Self:
        """So many rows; if ``together``, as one of all ranks' shards, and every rank must take part."""
        if not together or not ranks.active():
            return cls(n_rows)
        counts = ranks.all_gather_counts(n_rows, ranks.transport())
        return cls(sum(counts), sum(counts[: ranks.rank()]), is_one_of_many=True)

    def taken(self, rows: Array, chosen_M: Array) -> Array:
        """The rows with these numbers, which are in order, from whichever rank has them."""
        if not self.is_one_of_many:
            return rows[chosen_M]
        is_mine_M = (chosen_M >= self.first) & (chosen_M < self.first + len(rows))
        return gathered(np.asarray(rows[chosen_M[is_mine_M] - self.first]))

    def counted(self, value_N: Array) -> tuple[Array, Array]:
        """The different values of all rows, in order, and how often each is there."""
        value_U, count_U = np.unique(value_N, return_counts=True)
        if not self.is_one_of_many:
            return value_U, count_U
        value_U, place = np.unique(gathered(value_U), return_inverse=True)
        every_count, count_U = gathered(count_U), np.zeros(len(value_U), dtype=np.int64)
        np.add.at(count_U, place, every_count)
        return value_U, count_U

    def summed(self, counts: Array) -> Array:
        """The sum of every rank's counts."""
        if not self.is_one_of_many:
            return counts
        total = torch.from_numpy(counts).to(ranks.transport())
        ranks.all_reduce_sum(total)
        return total.cpu().numpy()


def gathered(rows: Array) -> Array:
    """Every rank's rows, one under the other in the order of ranks."""
    if not ranks.active():
        return rows
    device = ranks.transport()
    return ranks.all_gather_rows(torch.from_numpy(np.ascontiguousarray(rows)).to(device), device).cpu().numpy()
