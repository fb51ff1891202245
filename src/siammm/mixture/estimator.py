"""The two mixtures: ``VonMisesFisherMixture`` for directions, ``GaussianMixture`` where lengths matter too."""

from __future__ import annotations

# torch, scipy and scikit-learn are only partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from siammm.core.checks import check_at_least, check_number, check_one_of, check_positive
from siammm.core.errors import InputError
from siammm.mixture import em, vmf
from siammm.mixture.base import Mixture
from siammm.mixture.components import CONCENTRATION_RULES, Components, ConcentrationSettings, VonMisesFisherComponents
from siammm.mixture.em import AssignmentRule
from siammm.mixture.forms import Matrix, as_parameter, in_the_form_of
from siammm.mixture.gaussian import COVARIANCES, Covariance, GaussianComponents
from siammm.mixture.merge import MergeRule
from siammm.mixture.samples import Samples
from siammm.mixture.search.neighbours import Backend


class VonMisesFisherMixture(Mixture):
    """A mixture of von Mises-Fisher components, for embeddings whose direction is what matters.

    Rows are scaled to unit length. Each sample is shared among its ``n_neighbours`` nearest components (the paper's
    soft assignment), each component has its own concentration, and with ``merge`` the number of components is found.

    Parameters
    ----------
    n_components : int, default=8
        How many components to fit; with ``merge``, how many to start from (several times what you expect).
    n_neighbours : int, default=5
        How many of its nearest components a sample is shared among (H in the paper); 1 is hard assignment.
    temperature : float, default=0.02
        How strongly the nearest component is preferred; smaller is stronger (tau in the paper).
    assignment : {"nearest", "posterior"}, default="nearest"
        The paper's rule, or the posterior of textbook EM over all components, whose likelihood never falls.
    size_weighting : bool, default=False
        Whether larger components attract more (alpha in the paper, which sets it to 1).
    merge : {None, "auto", "paper"}, default=None
        If None, keep all ``n_components``. If "auto", merge until an acceptance test finds no more pairs to merge. If
        "paper", merge by the paper's threshold, which never stops by itself, down to ``merge_floor``. The module
        ``siammm.mixture.merge`` describes the steps of both.
    merge_threshold : float, default=-1.2
        With ``merge="paper"``: how far below the mean, in deviations, the distance of a pair must be (zeta).
    merge_floor : int, default=1
        Never merge to fewer components than this.
    merge_share : float, default=0.1
        At most this share of the components disappears in one round of merging.
    concentration : {"per-component", "closed-form", "shared"} or float, default="per-component"
        Maximum likelihood for each component, the paper's closed form (Eq. 7) for each, one for all, or a constant.
    concentration_dims : int, default=None
        Measure concentrations in this many principal directions (appendix C); None: in all dimensions. This is meant
        for comparing components: the density is then far from the best fit, and its likelihood may fall.
    small_sample_correction : bool, default=None
        Whether to correct the bias of components with few samples. If None, True unless ``assignment="posterior"``.
    concentration_shrinkage : float, default=None
        Pseudo-samples of average spread added to each component. If None, 1, or 0 with ``assignment="posterior"``.
    init : {"k-means++", "random"}, array or fitted mixture, default="k-means++"
        Where to start.
    n_init : int, default=1
        How many starts to try; the one with the highest likelihood is kept.
    max_iter : int, default=100
        The largest number of EM steps (after merging).
    tol : float, default=1e-4
        Stop when the mean log likelihood per sample changes by less.
    warm_start : bool, default=False
        Start from the components of the last ``fit``: the paper's consistent update.
    device : str, default="auto"
        "auto": a tensor's own device; for arrays the GPU if there is one.
    backend : {"auto", "torch", "low-precision", "triton"}, default="auto"
        How nearest components are searched; all give the same answer.
    random_state : int, RandomState or None, default=None
        Seed of the start.
    progress : bool, default=False
        Show a progress bar on standard error.

    Attributes
    ----------
    mean_directions_ : array of shape (n_components_, n_features)
    concentrations_ : array of shape (n_components_,)
    weights_ : array of shape (n_components_,), sums to 1
    labels_ : array of shape (n_samples,), the component of each row of the last fit
    n_components_ : int, the number of components after merging
    merges_ : Merges or None, the history of merging
    groups_ : Groups or None, what ``groups`` found since the last fit; ``save`` keeps it
    lower_bound_ : float, mean log likelihood of the last fit's rows (from their nearest components)
    lower_bounds_ : list of float, the same before each EM step
    n_iter_ : int, EM steps after merging
    converged_ : bool
    n_features_in_ : int

    Examples
    --------
    >>> import numpy as np
    >>> from siammm import VonMisesFisherMixture
    >>> X = np.repeat(np.eye(3), 20, axis=0) + 0.1 * np.random.default_rng(0).normal(size=(60, 3))
    >>> mixture = VonMisesFisherMixture(3, random_state=0).fit(X)
    >>> len(set(mixture.labels_[:20])), mixture.predict_proba(X).shape
    (1, (60, 3))
    """

    concentration: Any
    concentration_dims: int | None
    small_sample_correction: bool | None
    concentration_shrinkage: float | None
    mean_directions_: Any
    concentrations_: Any

    _unit = True

    def __init__(
        self,
        n_components: int = 8,
        *,
        n_neighbours: int = 5,
        temperature: float = 0.02,
        assignment: AssignmentRule = "nearest",
        size_weighting: bool = False,
        merge: MergeRule | None = None,
        merge_threshold: float = -1.2,
        merge_floor: int = 1,
        merge_share: float = 0.1,
        concentration: Any = "per-component",
        concentration_dims: int | None = None,
        small_sample_correction: bool | None = None,
        concentration_shrinkage: float | None = None,
        init: Any = "k-means++",
        n_init: int = 1,
        max_iter: int = 100,
        tol: float = 1e-4,
        warm_start: bool = False,
        device: str = "auto",
        backend: Backend = "auto",
        random_state: Any = None,
        progress: bool = False,
    ) -> None:
        self._keep(locals())

    def _settings(self) -> ConcentrationSettings:
        correction, shrinkage = self.small_sample_correction, self.concentration_shrinkage
        if correction is None:
            correction = self.assignment != "posterior"
        if shrinkage is None:
            shrinkage = 0.0 if self.assignment == "posterior" else 1.0
        return ConcentrationSettings(rule=self.concentration, small_sample_correction=correction, shrinkage=shrinkage)

    def _started(self, centre_KD: Tensor, samples: Samples) -> VonMisesFisherComponents:
        return VonMisesFisherComponents.started(centre_KD, self._settings_for(samples))

    def _carried_over(self, previous: Any, samples: Samples) -> VonMisesFisherComponents:
        return replace(previous._components(samples.parameter_device), settings=self._settings_for(samples))

    def _settings_for(self, samples: Samples) -> ConcentrationSettings:
        """The settings with the principal directions of the samples, where they are asked for."""
        dims = self.concentration_dims
        if dims is None:
            return self._settings()
        if dims > samples.n_columns:
            raise InputError(f"concentration_dims={dims} is more than the {samples.n_columns} features of X.")
        basis_DP, energy = em.principal_directions(samples, dims)
        return replace(self._settings(), basis_DP=basis_DP, energy=energy)

    def _components(self, device: torch.device) -> VonMisesFisherComponents:
        return VonMisesFisherComponents(
            mu_KD=as_parameter(self.mean_directions_, device),
            kappa_K=as_parameter(self.concentrations_, device),
            weight_K=as_parameter(self.weights_, device),
            settings=self._settings(),
        )

    def _publish(self, components: Components, like: Matrix) -> None:
        assert isinstance(components, VonMisesFisherComponents)
        self.mean_directions_ = in_the_form_of(components.mu_KD, like)
        self.concentrations_ = in_the_form_of(components.kappa_K, like)
        self.weights_ = in_the_form_of(components.weight_K, like)

    def _draw(self, components: VonMisesFisherComponents, k: int, count: int, generator: torch.Generator) -> Tensor:
        return vmf.sample(components.mu_KD[k], float(components.kappa_K[k]), count, generator=generator)

    def _check_own_parameters(self) -> None:
        if isinstance(self.concentration, str):
            check_one_of("concentration", self.concentration, (*CONCENTRATION_RULES, "a number"))
        else:
            check_positive("concentration", self.concentration)
            if self.concentration > vmf.MAX_CONCENTRATION:
                raise InputError(f"concentration={self.concentration} is above the limit of {vmf.MAX_CONCENTRATION:g}.")
        if self.concentration_dims is not None:
            check_at_least("concentration_dims", self.concentration_dims, 2)
        if (shrinkage := self.concentration_shrinkage) is not None:
            check_number("concentration_shrinkage", shrinkage, lambda n: 0 <= n < float("inf"), "it must be 0 or more")


class GaussianMixture(Mixture):
    """A mixture of Gaussian components, for embeddings whose length matters too.

    The same assignment, merging and interface as in ``VonMisesFisherMixture``, without scaling the rows.

    Parameters
    ----------
    covariance : {"spherical", "diag"}, default="spherical"
        One variance for each component, or one for each of its dimensions.
    n_components, n_neighbours, temperature, assignment, size_weighting, merge, merge_threshold, merge_floor,
    merge_share, init, n_init, max_iter, tol, warm_start, device, backend, random_state, progress
        As in ``VonMisesFisherMixture``. The temperature is in units of the data's total variance, which makes it mean
        the same as on the sphere.

    Attributes
    ----------
    means_ : array of shape (n_components_, n_features)
    variances_ : array of shape (n_components_,) or, for "diag", (n_components_, n_features)
    weights_, labels_, n_components_, merges_, groups_, lower_bound_, lower_bounds_, n_iter_, converged_,
    n_features_in_
        As in ``VonMisesFisherMixture``.
    """

    covariance: Covariance
    means_: Any
    variances_: Any
    data_mean_: Any
    data_variance_: float

    _unit = False

    def __init__(
        self,
        n_components: int = 8,
        *,
        covariance: Covariance = "spherical",
        n_neighbours: int = 5,
        temperature: float = 0.02,
        assignment: AssignmentRule = "nearest",
        size_weighting: bool = False,
        merge: MergeRule | None = None,
        merge_threshold: float = -1.2,
        merge_floor: int = 1,
        merge_share: float = 0.1,
        init: Any = "k-means++",
        n_init: int = 1,
        max_iter: int = 100,
        tol: float = 1e-4,
        warm_start: bool = False,
        device: str = "auto",
        backend: Backend = "auto",
        random_state: Any = None,
        progress: bool = False,
    ) -> None:
        self._keep(locals())

    def _prepare(self, samples: Samples, *, reset: bool) -> None:
        """Subtract the mean of the fitted data from the rows."""
        if reset:
            mean_D, variance = em.mean_and_variance(samples)
            self._new_mean, self._new_variance = mean_D.cpu().numpy(), variance
        samples.centre(as_parameter(self._new_mean if reset else self.data_mean_, samples.parameter_device))

    def _prepare_centres(self, centres: Samples) -> None:
        centres.centre(as_parameter(self._new_mean, centres.parameter_device))

    def _carried_over(self, previous: Any, samples: Samples) -> GaussianComponents:
        """The same components about the mean of the new data, with this mixture's kind of covariance."""
        device = samples.parameter_device
        moved_D = as_parameter(previous.data_mean_, device) - as_parameter(self._new_mean, device)
        components = previous._components(device)
        mean_KD, var_KV = components.mean_KD + moved_D, components.var_KV
        var_KV = var_KV.mean(dim=1, keepdim=True) if self.covariance == "spherical" else var_KV.expand(*mean_KD.shape)
        return replace(components, mean_KD=mean_KD, var_KV=var_KV, data_variance=max(self._new_variance, 1e-12))

    def _started(self, centre_KD: Tensor, samples: Samples) -> GaussianComponents:
        return GaussianComponents.started(centre_KD, self.covariance, self._new_variance)

    def _components(self, device: torch.device) -> GaussianComponents:
        variance = as_parameter(self.variances_, device)
        return GaussianComponents(
            mean_KD=as_parameter(self.means_, device) - as_parameter(self.data_mean_, device),
            var_KV=variance if variance.ndim == 2 else variance[:, None],
            weight_K=as_parameter(self.weights_, device),
            data_variance=self.data_variance_,
        )

    def _publish(self, components: Components, like: Matrix) -> None:
        assert isinstance(components, GaussianComponents)
        self.data_mean_, self.data_variance_ = self._new_mean, components.data_variance
        del self._new_mean, self._new_variance
        mean_D = as_parameter(self.data_mean_, components.mean_KD.device)
        self.means_ = in_the_form_of(components.mean_KD + mean_D, like)
        spherical = components.var_KV.shape[1] == 1 and self.covariance == "spherical"
        self.variances_ = in_the_form_of(components.var_KV[:, 0] if spherical else components.var_KV, like)
        self.weights_ = in_the_form_of(components.weight_K, like)

    def _draw(self, components: GaussianComponents, k: int, count: int, generator: torch.Generator) -> Tensor:
        d = components.mean_KD.shape[1]
        noise = torch.randn(count, d, generator=generator, dtype=torch.float64) * components.var_KV[k].sqrt()
        return noise + components.mean_KD[k] + as_parameter(self.data_mean_, torch.device("cpu"))

    def _check_own_parameters(self) -> None:
        check_one_of("covariance", self.covariance, COVARIANCES)
