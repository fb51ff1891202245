"""What most images of each group are labelled, and which labels disagree with that.

It is shown beside the ranking and is no part of it: a group may hold several classes, whose labels are all right.

Legend:  N labelled images, G groups, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class GroupLabels:
    """The groups of the labelled images, with the labels that they hold."""

    group_N: np.ndarray
    label_N: np.ndarray
    """The given label of each image."""
    table_GC: np.ndarray
    """How many images of each group have each label."""

    @classmethod
    def of(cls, group_N: np.ndarray, label_N: np.ndarray, n_groups: int, n_classes: int) -> GroupLabels:
        """Count the labels of each group."""
        table_GC = np.zeros((n_groups, n_classes), dtype=np.int64)
        np.add.at(table_GC, (group_N, label_N), 1)
        return cls(group_N=group_N, label_N=label_N, table_GC=table_GC)

    @property
    def count_G(self) -> np.ndarray:
        """Labelled images of each group."""
        return self.table_GC.sum(axis=1)

    @property
    def commonest_G(self) -> np.ndarray:
        """The commonest label of each group, the first of equals; 0 for a group without labelled images."""
        return self.table_GC.argmax(axis=1)

    @property
    def purity_G(self) -> np.ndarray:
        """The share of that label; 0 for a group without labelled images."""
        return self.table_GC.max(axis=1) / np.maximum(self.count_G, 1)

    @property
    def commonest_N(self) -> np.ndarray:
        """The commonest label of each image's group."""
        return self.commonest_G[self.group_N]

    @property
    def disagrees_N(self) -> np.ndarray:
        """Whether an image's label is another than the commonest of its group."""
        return self.commonest_N != self.label_N

    @property
    def share_N(self) -> np.ndarray:
        """How common each image's label is in its group."""
        return self.table_GC[self.group_N, self.label_N] / self.count_G[self.group_N]
