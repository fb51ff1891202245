"""The outlier score of an image that was not among those that the scale is of.

``metrics.outliers`` ranks a set of images among themselves. A model that sees one image at a time needs the same scale
as a function of the log density alone: it goes through the score of every reference image, and straight between two.
A straight line, and not the step of a rank, so that the last bits of a density do not decide a whole place.

Legend:  N images, P points of the scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# More points than this say nothing more: 1 / 65,535 of the reference images lie between two.
_MOST_POINTS = 2**16 - 1
# Densities are computed in float32; what is closer than a few of its steps is the same.
_STEPS = 8


@dataclass(frozen=True)
class OutlierScale:
    """Log densities, ascending, and the outlier score at each, descending from 1 or less to 0."""

    density_P: np.ndarray
    score_P: np.ndarray

    @classmethod
    def of(cls, log_density_N: np.ndarray) -> OutlierScale:
        """The scale of these reference images, whose scores are those of ``outlier_score``.

        Images whose densities are equal but for rounding share a point.
        """
        density_N = np.sort(np.asarray(log_density_N, dtype=np.float64))
        n = len(density_N)
        density_P, first_P = np.unique(density_N, return_index=True)
        last_P = np.append(first_P[1:], n) - 1
        kept = _apart(density_P, _STEPS * float(np.finfo(np.float32).eps) * float(np.abs(density_P).max()))
        density_P, last_P = density_P[kept], last_P[kept]
        if len(density_P) > _MOST_POINTS:
            some = np.unique(np.linspace(0, len(density_P) - 1, _MOST_POINTS).round().astype(np.int64))
            density_P, last_P = density_P[some], last_P[some]
        # The share of the others that are likelier; of equal ones none is.
        return cls(density_P, (n - 1 - last_P) / max(1, n - 1))

    def __call__(self, log_density_N: np.ndarray) -> np.ndarray:
        """The outlier score of images with these log densities; beyond the reference, that of its nearest image."""
        score_N = np.interp(np.asarray(log_density_N, dtype=np.float64), self.density_P, self.score_P)
        return score_N.astype(np.float32)


def _apart(density_P: np.ndarray, gap: float) -> np.ndarray:
    """The points that are further than this from the one before, of those that are kept."""
    kept, last = [0], float(density_P[0])
    for number, density in enumerate(density_P.tolist()):
        if density - last > gap:
            kept.append(number)
            last = density
    return np.asarray(kept, dtype=np.int64)
