"""The numbers of components: by size, so that they do not depend on where a fit began.

Legend:  K components.
"""

from __future__ import annotations

# torch is only partly typed.
# pyright: reportUnknownMemberType=false
from typing import Any

import numpy as np
import torch

from siammm.mixture.graph import Array

# What a fit finds of every component, as far as a kind of mixture has it.
_OF_COMPONENTS = ("weights_", "mean_directions_", "concentrations_", "means_", "variances_")


def number_by_size(mixture: Any, size_K: Array) -> Array:
    """Number the components of a fitted mixture by these sizes, the largest first; returns their former numbers.

    ``labels_`` follow. Groups are of the former numbers, so look for them afterwards.
    """
    order = np.argsort(-size_K, kind="stable")
    for name in _OF_COMPONENTS:
        if hasattr(mixture, name):
            setattr(mixture, name, getattr(mixture, name)[_like(order, getattr(mixture, name))])
    number_K = np.empty_like(order)
    number_K[order] = np.arange(len(order))
    mixture.labels_ = _like(number_K, mixture.labels_)[mixture.labels_]
    mixture.groups_ = None
    return order


def _like(values: Array, other: Any) -> Any:
    return torch.from_numpy(values).to(other.device) if isinstance(other, torch.Tensor) else values
