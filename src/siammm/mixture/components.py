"""What the EM engine needs to know of a kind of component, and the von Mises-Fisher kind.

Both kinds are exponential families: a sample enters only through a *statistic* t(x), the E step needs inner products
with t(x), and the M step needs the mean of t(x) over each component. The engine (``em.py``) is written once in these
terms.

Legend:  N samples, K components, D dimensions, F length of the statistic, H neighbours;
         mu mean direction, kappa concentration, r mean vector, rho = |r|.
"""

from __future__ import annotations

# torch is only partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self

import torch
from torch import Tensor

from siammm.mixture import vmf

ConcentrationRule = Literal["per-component", "closed-form", "shared"]
CONCENTRATION_RULES: tuple[ConcentrationRule, ...] = ("per-component", "closed-form", "shared")


class Components(Protocol):
    """All K components of a mixture: immutable, on one device, parameters in float64."""

    @property
    def centre_KD(self) -> Tensor:
        """Where each component is: what merging compares and a warm start carries over."""
        ...

    @property
    def weight_K(self) -> Tensor:
        """Mixing weights, which sum to 1."""
        ...

    def statistic(self, x_ND: Tensor) -> Tensor:
        """t(x), t_NF: what the M step averages."""
        ...

    def ranking(self, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """The affine score (w_KD, b_K) whose largest values are the nearest components, in the type of ``like``."""
        ...

    def similarity(self, score_NH: Tensor, x_ND: Tensor) -> Tensor:
        """The ranking's scores as what Eq. 10 divides by the temperature."""
        ...

    def log_joint(self, x_ND: Tensor) -> Tensor:
        """log weight_k + log f_k(x) for all components, NK; for chunks only."""
        ...

    def log_joint_of(self, x_ND: Tensor, score_NH: Tensor, index_NH: Tensor) -> Tensor:
        """The same for chosen components whose ranking scores are known, NH."""
        ...

    def estimated(self, count_K: Tensor, mean_KF: Tensor) -> Self:
        """The M step: components that fit these counts and mean statistics; those without samples stay as they are."""
        ...

    def respread(self, count_K: Tensor, mean_KF: Tensor) -> Self:
        """Weights and spreads that fit these counts and mean statistics, about the centres as they are."""
        ...

    def placed(self, centre_KD: Tensor) -> Self:
        """Components of the same kind at other centres, before anything is known of their spread."""
        ...

    def taken(self, index: Tensor) -> Self:
        """A selection of the components, weights scaled to sum to 1."""
        ...

    def n_parameters(self) -> int:
        """Free parameters of the mixture, for the information criteria."""
        ...


@dataclass(frozen=True, kw_only=True)
class ConcentrationSettings:
    """How kappa is estimated from the length of a component's mean vector."""

    rule: ConcentrationRule | float = "per-component"
    """Maximum likelihood each, the paper's closed form each, one for all, or this constant."""
    small_sample_correction: bool = True
    """Remove the bias of components with few samples. Off for textbook EM, whose likelihood must not fall."""
    shrinkage: float = 1.0
    """Samples of average spread that are added to every component."""
    basis_DP: Tensor | None = None
    """Principal directions in which the length is measured (appendix C); None: all dimensions."""
    energy: float = 1.0
    """Mean squared length of a sample within these directions."""


@dataclass(frozen=True, kw_only=True)
class VonMisesFisherComponents:
    """Von Mises-Fisher components: t(x) = x, for rows of unit length."""

    mu_KD: Tensor
    kappa_K: Tensor
    weight_K: Tensor
    settings: ConcentrationSettings

    @classmethod
    def started(cls, centre_KD: Tensor, settings: ConcentrationSettings) -> VonMisesFisherComponents:
        """Components at these centres, equally weighted, before anything is known of their spread."""
        centre_KD = centre_KD.to(torch.float64)
        k = centre_KD.shape[0]
        even = torch.full((k,), 1.0 / k, dtype=torch.float64, device=centre_KD.device)
        length_K = torch.linalg.vector_norm(centre_KD, dim=1, keepdim=True)
        # A row of zeros may be drawn as a centre, and has no direction: any will do, the first axis is one.
        first_D = torch.eye(1, centre_KD.shape[1], dtype=torch.float64, device=centre_KD.device)
        mu_KD = torch.where(length_K > 0, centre_KD / length_K.clamp_min(1e-300), first_D)
        return cls(mu_KD=mu_KD, kappa_K=torch.ones_like(even), weight_K=even, settings=settings)

    @property
    def centre_KD(self) -> Tensor:
        """The mean directions."""
        return self.mu_KD

    def statistic(self, x_ND: Tensor) -> Tensor:
        """The sample itself."""
        return x_ND

    def ranking(self, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """The cosine."""
        return self.mu_KD.to(like), None

    def similarity(self, score_NH: Tensor, x_ND: Tensor) -> Tensor:
        """The cosine, as in Eq. 10."""
        return score_NH

    def log_joint(self, x_ND: Tensor) -> Tensor:
        """Eq. 3 with the weights of Eq. 2, in x's type. Shape: NK."""
        # kappa (cosine - 1) + (log c + kappa): both terms stay small where kappa is large.
        offset_K = (self._log_weighted_normaliser() + self.kappa_K).to(x_ND)
        return (x_ND @ self.mu_KD.to(x_ND).T - 1) * self.kappa_K.to(x_ND) + offset_K

    def log_joint_of(self, x_ND: Tensor, score_NH: Tensor, index_NH: Tensor) -> Tensor:
        """Eq. 3 with the weights of Eq. 2 for chosen components. Shape: NH."""
        offset_K = (self._log_weighted_normaliser() + self.kappa_K).to(score_NH)
        return (score_NH - 1) * self.kappa_K.to(score_NH)[index_NH] + offset_K[index_NH]

    def estimated(self, count_K: Tensor, mean_KF: Tensor) -> VonMisesFisherComponents:
        """Eq. 6 and 7, with r of Eq. 5 given as the mean statistic."""
        rho_K = torch.linalg.vector_norm(mean_KF, dim=1)
        alive = (count_K > 0) & (rho_K > 0)
        mu_KD = torch.where(alive[:, None], mean_KF / rho_K.clamp_min(1e-300)[:, None], self.mu_KD)
        kappa_K = concentrations(rho_K, mean_KF, count_K, self.settings)
        kappa_K = torch.where(alive, kappa_K, self.kappa_K)
        return replace(self, mu_KD=mu_KD, kappa_K=kappa_K, weight_K=count_K / count_K.sum())

    def respread(self, count_K: Tensor, mean_KF: Tensor) -> VonMisesFisherComponents:
        """Concentrations and weights alone; a concentration is that of the samples about their own mean direction."""
        return replace(self.estimated(count_K, mean_KF), mu_KD=self.mu_KD)

    def placed(self, centre_KD: Tensor) -> VonMisesFisherComponents:
        """The same settings at other directions."""
        return self.started(centre_KD, self.settings)

    def taken(self, index: Tensor) -> VonMisesFisherComponents:
        """A selection of the components."""
        weight_K = self.weight_K[index]
        return replace(self, mu_KD=self.mu_KD[index], kappa_K=self.kappa_K[index], weight_K=weight_K / weight_K.sum())

    def n_parameters(self) -> int:
        """d - 1 for a direction, 1 for a concentration unless it is shared or given, and the weights."""
        k, d = self.mu_KD.shape
        spreads = {"per-component": k, "closed-form": k, "shared": 1}.get(str(self.settings.rule), 0)
        return k * (d - 1) + spreads + k - 1

    def _log_weighted_normaliser(self) -> Tensor:
        log_weight_K = self.weight_K.clamp_min(torch.finfo(torch.float64).tiny).log()
        return log_weight_K + vmf.log_normaliser(self.kappa_K, self.mu_KD.shape[1])


def concentrations(rho_K: Tensor, r_KD: Tensor, count_K: Tensor, settings: ConcentrationSettings) -> Tensor:
    """kappa of every component from its mean vector: Eq. 7, or appendix C where the settings have a basis."""
    if not isinstance(settings.rule, str):
        return torch.full_like(rho_K, float(settings.rule))
    d = r_KD.shape[1]
    if settings.basis_DP is not None:
        rho_K = torch.linalg.vector_norm(r_KD @ settings.basis_DP, dim=1)
        d = settings.basis_DP.shape[1]
    if settings.small_sample_correction:
        rho_K = vmf.corrected_length(rho_K, count_K, settings.energy)
    if settings.rule == "shared":
        pooled = (count_K * rho_K).sum() / count_K.sum()
        return vmf.concentration_mle(pooled, d).expand_as(rho_K)
    rho_K = vmf.shrunken_length(rho_K, count_K, settings.shrinkage)
    return (vmf.concentration_closed_form if settings.rule == "closed-form" else vmf.concentration_mle)(rho_K, d)
