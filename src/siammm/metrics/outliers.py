"""How unusual a sample is, on a scale that means something to a reader."""

from __future__ import annotations

import numpy as np
from scipy.stats import rankdata


def outlier_score(log_density: np.ndarray) -> np.ndarray:
    """How unusual each sample is among all of them: the share of the others that the mixture finds likelier.

    A log density has no scale that means anything to a reader; 0.97 reads "more unusual than 97 % of the others".
    """
    others = max(1, len(log_density) - 1)
    return ((rankdata(-log_density, method="min") - 1) / others).astype(np.float32)
