"""Gaussian components, for embeddings whose length means something: the twin of the von Mises-Fisher kind.

Spherical components have one variance each, t(x) = (x, |x|^2); diagonal ones have one for every dimension,
t(x) = (x, x^2). The rows must be centred (``Samples.centre``), so that E[x^2] - E[x]^2 does not cancel.

Legend:  N samples, K components, D dimensions, F length of the statistic, H neighbours;  mean and var of a component.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Covariance = Literal["spherical", "diag"]
COVARIANCES: tuple[Covariance, ...] = ("spherical", "diag")

# A component's variance is at least this share of the data's: a singleton must not have a density of infinity.
_LEAST_VARIANCE_SHARE = 1e-6


@dataclass(frozen=True, kw_only=True)
class GaussianComponents:
    """Gaussian components with a spherical or a diagonal covariance. A spherical variance is stored as one column."""

    mean_KD: Tensor
    var_KV: Tensor
    weight_K: Tensor
    data_variance: float
    """Mean variance of a dimension over all samples: the scale of the data."""

    @classmethod
    def started(cls, centre_KD: Tensor, covariance: Covariance, data_variance: float) -> GaussianComponents:
        """Components at these centres, equally weighted, each as wide as the data."""
        centre_KD = centre_KD.to(torch.float64)
        k, d = centre_KD.shape
        even = torch.full((k,), 1.0 / k, dtype=torch.float64, device=centre_KD.device)
        var_KV = even.new_full((k, d if covariance == "diag" else 1), max(data_variance, 1e-12))
        return cls(mean_KD=centre_KD, var_KV=var_KV, weight_K=even, data_variance=max(data_variance, 1e-12))

    @property
    def centre_KD(self) -> Tensor:
        """The means."""
        return self.mean_KD

    def statistic(self, x_ND: Tensor) -> Tensor:
        """(x, |x|^2) or (x, x^2)."""
        squares = x_ND**2
        if self.var_KV.shape[1] == 1:
            squares = squares.sum(dim=1, keepdim=True)
        return torch.cat([x_ND, squares], dim=1)

    def ranking(self, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """x . m - |m|^2 / 2, which is |x|^2 / 2 less half the squared distance."""
        return self.mean_KD.to(like), (-0.5 * (self.mean_KD**2).sum(dim=1)).to(like)

    def similarity(self, score_NH: Tensor, x_ND: Tensor) -> Tensor:
        """Minus half the squared distance in units of the data's total variance.

        On the unit sphere this is about the cosine less 1, so a temperature means the same for both mixtures.
        """
        half_squared = 0.5 * (x_ND**2).sum(dim=1, keepdim=True)
        return (score_NH - half_squared) / (self.data_variance * self.mean_KD.shape[1])

    def log_joint(self, x_ND: Tensor) -> Tensor:
        """log weight + log density, Eq. 2, in x's type. Shape: NK."""
        inverse_KV = 1 / self.var_KV
        offset_K = self._log_weighted_normaliser() - 0.5 * (self.mean_KD**2 * inverse_KV).sum(dim=1)
        linear_NK = x_ND @ (self.mean_KD * inverse_KV).to(x_ND).T
        if self.var_KV.shape[1] == 1:
            square_NK = (x_ND**2).sum(dim=1, keepdim=True) * inverse_KV.to(x_ND).T
        else:
            square_NK = x_ND**2 @ inverse_KV.to(x_ND).T
        return linear_NK - 0.5 * square_NK + offset_K.to(x_ND)

    def log_joint_of(self, x_ND: Tensor, score_NH: Tensor, index_NH: Tensor) -> Tensor:
        """The same for chosen components. Shape: NH."""
        offset_NH = self._log_weighted_normaliser().to(x_ND)[index_NH]
        if self.var_KV.shape[1] == 1:
            squared_NH = (x_ND**2).sum(dim=1, keepdim=True) - 2 * score_NH
            return offset_NH - 0.5 * squared_NH.clamp_min(0) / self.var_KV[:, 0].to(x_ND)[index_NH]
        mean_KD, inverse_KD = self.mean_KD.to(x_ND), (1 / self.var_KV).to(x_ND)
        columns = [((x_ND - mean_KD[k_N]) ** 2 * inverse_KD[k_N]).sum(dim=1) for k_N in index_NH.unbind(dim=1)]
        return offset_NH - 0.5 * torch.stack(columns, dim=1)

    def estimated(self, count_K: Tensor, mean_KF: Tensor) -> GaussianComponents:
        """Means and variances of maximum likelihood, the variances kept off zero."""
        d = self.mean_KD.shape[1]
        mean_KD, square_KV = mean_KF[:, :d], mean_KF[:, d:]
        if self.var_KV.shape[1] == 1:
            var_KV = (square_KV - (mean_KD**2).sum(dim=1, keepdim=True)) / d
        else:
            var_KV = square_KV - mean_KD**2
        var_KV = var_KV.clamp_min(_LEAST_VARIANCE_SHARE * self.data_variance)
        alive = (count_K > 0)[:, None]
        mean_KD, var_KV = torch.where(alive, mean_KD, self.mean_KD), torch.where(alive, var_KV, self.var_KV)
        return replace(self, mean_KD=mean_KD, var_KV=var_KV, weight_K=count_K / count_K.sum())

    def respread(self, count_K: Tensor, mean_KF: Tensor) -> GaussianComponents:
        """Variances and weights alone: the spread about the means as they are."""
        moved = self.estimated(count_K, mean_KF)
        shift_KV = (moved.mean_KD - self.mean_KD) ** 2
        if self.var_KV.shape[1] == 1:
            shift_KV = shift_KV.mean(dim=1, keepdim=True)
        return replace(moved, mean_KD=self.mean_KD, var_KV=moved.var_KV + shift_KV)

    def placed(self, centre_KD: Tensor) -> GaussianComponents:
        """The same covariance at other means."""
        return self.started(centre_KD, "spherical" if self.var_KV.shape[1] == 1 else "diag", self.data_variance)

    def taken(self, index: Tensor) -> GaussianComponents:
        """A selection of the components."""
        weight_K = self.weight_K[index]
        return replace(self, mean_KD=self.mean_KD[index], var_KV=self.var_KV[index], weight_K=weight_K / weight_K.sum())

    def n_parameters(self) -> int:
        """The means, the variances and the weights."""
        return self.mean_KD.numel() + self.var_KV.numel() + self.mean_KD.shape[0] - 1

    def _log_weighted_normaliser(self) -> Tensor:
        d = self.mean_KD.shape[1]
        log_weight_K = self.weight_K.clamp_min(torch.finfo(torch.float64).tiny).log()
        log_det_K = self.var_KV.log().sum(dim=1) * (d / self.var_KV.shape[1])
        return log_weight_K - 0.5 * (d * math.log(2 * math.pi) + log_det_K)
