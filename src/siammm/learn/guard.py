"""The guard: is the encoder still telling images apart?

An encoder without negatives can collapse: to a point, to a line, or to NaN. After each epoch the guard looks at the
embeddings and the mixture. A loss that is not finite is caught within the update (``tally.py``).

Legend:  N images, D dimensions.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from siammm.core import ranks
from siammm.core.errors import SiamMMError
from siammm.mixture import em
from siammm.mixture.components import VonMisesFisherComponents
from siammm.mixture.samples import Samples

# Uniform directions have a deviation of 1 and an effective rank of nearly D; a collapsed encoder is far below both.
LEAST_DEVIATION = 0.01
LEAST_RANK = 1.5
SPREAD_OUT = 0.3


class CollapseError(SiamMMError):
    """Training was stopped because it had stopped learning anything; the last good checkpoint is kept."""


@dataclass(frozen=True)
class Health:
    """What the guard looks at after an epoch."""

    effective_rank: float
    """Directions in which the embeddings vary: exp of the entropy of the covariance's eigenvalues."""
    deviation: float
    """Mean deviation of a dimension, times the square root of D: 1 if the embeddings are spread evenly."""
    occupied: int | None = None
    """Clusters that have images."""
    least_concentration: float | None = None
    """Concentration of the loosest cluster."""
    largest_concentration: float | None = None
    """Concentration of the tightest cluster."""

    @classmethod
    def of(cls, samples: Samples, components: VonMisesFisherComponents | None) -> Health:
        """Measure the embeddings of all ranks, and the clusters where there are any."""
        rank, deviation = spread(samples)
        if components is None:
            return cls(effective_rank=rank, deviation=deviation)
        occupied, (least, largest) = int((components.weight_K > 0).sum()), components.kappa_K.aminmax()
        return cls(rank, deviation, occupied, float(least), float(largest))

    def as_metrics(self) -> dict[str, float]:
        """The measurements that were made, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def spread(samples: Samples) -> tuple[float, float]:
    """Effective rank and scaled deviation of the embeddings of all ranks."""
    d = samples.n_columns
    total_D = torch.zeros(d, dtype=torch.float64, device=samples.parameter_device)
    for _, x_ND in samples.chunks(2**16):
        total_D += x_ND.sum(dim=0).to(total_D)
    ranks.all_reduce_sum(total_D)
    mean_D = total_D / samples.n_total
    covariance_DD = em.second_moments(samples) - mean_D[:, None] * mean_D[None, :]
    return effective_rank(covariance_DD), math.sqrt(max(0.0, float(covariance_DD.diagonal().sum())))


def effective_rank(covariance_DD: Tensor) -> float:
    """exp of the entropy of the normalised eigenvalues: D if all directions vary alike, 1 if one does."""
    # On the CPU: a matrix of a few hundred rows is too small for a GPU to be good at.
    value_D = torch.linalg.eigvalsh(covariance_DD.cpu()).clamp_min(0)
    total = float(value_D.sum())
    if not total > 1e-12:
        return 0.0
    share_D = value_D / total
    return float((-(share_D * share_D.clamp_min(1e-300).log()).sum()).exp())


def diagnose(health: Health, n_images: int) -> str | None:
    """What is wrong, and what usually helps; None while all is well."""
    if not (math.isfinite(health.effective_rank) and math.isfinite(health.deviation)):
        return "The embeddings are not finite; lower --learning-rate, or use --precision fp32."
    if health.deviation < LEAST_DEVIATION:
        return (
            f"The encoder has collapsed: all {n_images:,} images have nearly the same embedding (deviation "
            f"{health.deviation:.2g}, where at least {LEAST_DEVIATION:g} is expected); check that the images differ, "
            "lower --learning-rate, or raise --encoder-momentum."
        )
    # Two tight groups vary along one line too, but are as far apart as can be: a collapse is a line without spread.
    if n_images > 2 and health.effective_rank < LEAST_RANK and health.deviation < SPREAD_OUT:
        return (
            f"The encoder has collapsed: the embeddings vary along one line (effective rank "
            f"{health.effective_rank:.2f}, where at least {LEAST_RANK:g} is expected); check that the images differ, "
            "lower --learning-rate or --cluster-weight, or use --instance-loss contrastive."
        )
    return None
