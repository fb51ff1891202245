"""Groups of images while the encoder learns: found once, then drawn apart by the images that are sure of theirs.

Clusters are finer than kinds of images, and the cluster loss keeps them so: it draws together whatever it takes for
one. From ``group_after`` on, training works at the level of groups. They are looked for among the embeddings
(``mixture.groups``, which finds their number), and from then on each epoch has an E and an M step of its own for them:
an image belongs to the group whose direction is nearest, and a group's direction is the mean of the images that are
surest of it. Only these count in the loss (``losses.group_loss``), first half of each group, at the end nearly all: the
encoder learns from the clear ones what the others are, as in SCAN's self-labelling.

Legend:  N images, G groups, D dimensions; mu mean direction of a group.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as functional
from torch import Tensor

from siammm.core import ranks
from siammm.mixture import groups
from siammm.mixture.group_rule import Groups, of_directions
from siammm.mixture.samples import Samples
from siammm.settings.training import NCE_CONCENTRATION

# The share of each group that counts in the loss, when groups begin and at the end.
CONFIDENT = (0.5, 0.9)
# So many samples of rows are asked for the number of groups, and the median counts: a single one errs by one or two.
_ASKED = 5
_STEPS, _STEPS_AT_THE_END = 1, 10
_ROWS_AT_ONCE = 65_536


class Grouping:
    """The directions of the groups, and the tables that the loss reads: each image's group, and whether it is sure."""

    def __init__(self, n_groups: int, n_images: int, dim: int, device: torch.device, ratio: float = 1.0) -> None:
        self.ratio = ratio
        """How clear the groups were when they were found; see ``Groups.ratio``."""
        self.mu_GD = torch.zeros(n_groups, dim, device=device)
        self.group_N = torch.zeros(n_images, dtype=torch.int64, device=device)
        self.weight_N = torch.zeros(n_images, device=device)

    @property
    def n_groups(self) -> int:
        """How many groups have images."""
        return int(self.group_N.unique().numel())

    @classmethod
    def found(cls, embedding_ND: Tensor, device: torch.device, *, seed: int) -> Grouping | None:
        """Look for groups among the embeddings of all images; None if there are none."""
        answers = [groups.among_samples(embedding_ND, seed=seed + number) for number in range(_ASKED)]
        answers.sort(key=lambda answer: (answer.n_groups, answer.ratio))
        middle = answers[len(answers) // 2]
        if not middle.is_found:
            return None
        n, dim = embedding_ND.shape
        grouping = cls(middle.n_groups, n, dim, device, middle.ratio)
        group_N = torch.from_numpy(middle.predict(embedding_ND, None)).to(device)
        grouping.mu_GD.index_add_(0, group_N, embedding_ND.to(grouping.mu_GD))
        grouping.mu_GD = functional.normalize(grouping.mu_GD, dim=1)
        return grouping

    def expectation_and_maximisation(self, samples: Samples, *, progress: float) -> None:
        """One E and M step, then the tables for the loss; ``progress`` is how much of the stage is over."""
        first, last = CONFIDENT
        self._settle(samples, first + (last - first) * progress, _STEPS)

    def finish(self, samples: Samples) -> Groups:
        """The groups that a run leaves, settled on its final embeddings: each a linear score, without components."""
        self._settle(samples, CONFIDENT[1], _STEPS_AT_THE_END)
        weight_GD = (NCE_CONCENTRATION * self.mu_GD).double().cpu().numpy()
        return of_directions(weight_GD, self.ratio)

    def _settle(self, samples: Samples, confident: float, steps: int) -> None:
        for _ in range(steps):
            group_N, is_sure_N = self._assigned(samples, confident)
            self._move(samples, group_N, is_sure_N)
        group_N, is_sure_N = self._assigned(samples, confident)
        # In place, because a captured update reads them.
        self.group_N.copy_(group_N)
        self.weight_N.copy_(is_sure_N)

    def _assigned(self, samples: Samples, confident: float) -> tuple[Tensor, Tensor]:
        """The nearest group of every image of all ranks, and whether it is among this share of that group.

        Of all ranks, because the images of a batch are not those of a rank's shard. An image is the surer, the nearer
        its group is than the next.
        """
        parts: list[Tensor] = []
        for _, x_ND in samples.chunks(_ROWS_AT_ONCE):
            value_N2, index_N2 = (x_ND.to(self.mu_GD) @ self.mu_GD.T).topk(2, dim=1)
            parts.append(torch.stack([index_N2[:, 0].double(), (value_N2[:, 0] - value_N2[:, 1]).double()], dim=1))
        rows = torch.cat(parts) if parts else torch.zeros(0, 2, dtype=torch.float64, device=self.mu_GD.device)
        rows = ranks.all_gather_rows(rows, self.mu_GD.device)
        group_N = rows[:, 0].long()
        return group_N, _surest(group_N, rows[:, 1], confident, len(self.mu_GD))

    def _move(self, samples: Samples, group_N: Tensor, is_sure_N: Tensor) -> None:
        """Each direction to the mean of the images that are sure of it; one that nobody is sure of stays."""
        sum_GD = torch.zeros_like(self.mu_GD)
        for start, x_ND in samples.chunks(_ROWS_AT_ONCE):
            rows = slice(samples.first_row + start, samples.first_row + start + x_ND.shape[0])
            sum_GD.index_add_(0, group_N[rows], x_ND.to(sum_GD) * is_sure_N[rows, None].to(sum_GD))
        ranks.all_reduce_sum(sum_GD)
        known_G1 = torch.linalg.vector_norm(sum_GD, dim=1, keepdim=True) > 1e-6
        self.mu_GD.copy_(torch.where(known_G1, functional.normalize(sum_GD, dim=1), self.mu_GD))

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def as_tensors(self) -> dict[str, Tensor]:
        """All of it, for a checkpoint."""
        ratio = torch.tensor(self.ratio, dtype=torch.float64)
        return {"mu": self.mu_GD, "index": self.group_N, "share": self.weight_N, "ratio": ratio}

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor], device: torch.device) -> Grouping:
        """What ``as_tensors`` took."""
        n_groups, dim = tensors["mu"].shape
        grouping = cls(n_groups, tensors["index"].shape[0], dim, device, float(tensors["ratio"]))
        for table, name in ((grouping.mu_GD, "mu"), (grouping.group_N, "index"), (grouping.weight_N, "share")):
            table.copy_(tensors[name])
        return grouping


def _surest(group_N: Tensor, margin_N: Tensor, share: float, n_groups: int) -> Tensor:
    """Which images are among this share of their group by their margin."""
    is_sure_N = torch.zeros_like(group_N, dtype=torch.bool)
    for group in range(n_groups):
        row = (group_N == group).nonzero().flatten()
        if len(row):
            count = max(1, round(share * len(row)))
            is_sure_N[row[margin_N[row].topk(count).indices]] = True
    return is_sure_N
