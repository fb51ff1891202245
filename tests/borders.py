"""Which samples lie clearly in one cluster or group, so that rounding does not decide.

Batches of another size, another library or a copy of the weights in other memory give embeddings that differ in the
last bits. A sample between two clusters may then fall into either.
"""

from typing import Any

import numpy as np

_LEAST_MARGIN = 1e-3


def is_clear(share: Any) -> np.ndarray:
    """Whether the most probable one of each row is ahead of the second; nearly all rows must be."""
    dense = share.toarray() if hasattr(share, "toarray") else np.asarray(share)
    clear = np.diff(np.sort(dense, axis=1)[:, -2:])[:, 0] > _LEAST_MARGIN
    assert clear.mean() > 0.95
    return clear
