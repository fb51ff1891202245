"""What all mixtures share as scikit-learn estimators: fitting, predicting, saving and checking; not the components.

numpy in, numpy out; tensors in, tensors out, on their device. A fit ends with an E step, so ``fit(X).labels_`` and
``predict(X)`` are the same.
"""

from __future__ import annotations

# torch, scipy and scikit-learn are only partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
import math
import warnings
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import scipy.sparse
import torch
from sklearn.base import BaseEstimator, DensityMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from siammm.core import ranks
from siammm.core.checks import check_at_least, check_number, check_one_of, not_one_of
from siammm.core.errors import InputError
from siammm.mixture import em, merge, seeding, storage
from siammm.mixture.components import Components
from siammm.mixture.em import Assignment, AssignmentRule
from siammm.mixture.forms import Matrix, checked_form, device_for, in_the_form_of
from siammm.mixture.group_rule import Groups
from siammm.mixture.groups import found as find_groups
from siammm.mixture.merge import MergeRule
from siammm.mixture.merge_tree import Merges
from siammm.mixture.progress import FitProgress
from siammm.mixture.samples import Samples
from siammm.mixture.search import neighbours
from siammm.mixture.search.neighbours import Backend


@dataclass(frozen=True)
class _Fit:
    """One finished run of EM."""

    components: Components
    merges: Merges | None
    log_likelihoods: list[float]
    converged: bool


class Mixture(DensityMixin, BaseEstimator):
    """What both mixtures share: everything but the components themselves."""

    n_components: int
    n_neighbours: int
    temperature: float
    assignment: AssignmentRule
    size_weighting: bool
    merge: MergeRule | None
    merge_threshold: float
    merge_floor: int
    merge_share: float
    init: Any
    n_init: int
    max_iter: int
    tol: float
    warm_start: bool
    device: str
    backend: Backend
    random_state: Any
    progress: bool

    # What a fit finds; the subclasses add the parameters of their components.
    weights_: Any
    labels_: Any
    n_components_: int
    n_iter_: int
    converged_: bool
    lower_bound_: float
    lower_bounds_: list[float]
    merges_: Merges | None
    groups_: Groups | None = None
    n_features_in_: int

    _unit: bool

    def _keep(self, parameters: dict[str, Any]) -> None:
        """The body of every ``__init__``: each parameter as given, under its own name, as scikit-learn asks."""
        for name, value in parameters.items():
            if name != "self":
                setattr(self, name, value)

    # -- the parts that differ ------------------------------------------------------------------------------------

    @abstractmethod
    def _started(self, centre_KD: Tensor, samples: Samples) -> Components:
        """Components at these centres before the first step."""

    @abstractmethod
    def _components(self, device: torch.device) -> Components:
        """The fitted components."""

    @abstractmethod
    def _publish(self, components: Components, like: Matrix) -> None:
        """Set the fitted attributes that describe the components."""

    @abstractmethod
    def _check_own_parameters(self) -> None:
        """Refuse parameters that only this kind has."""

    def _prepare(self, samples: Samples, *, reset: bool) -> None:
        """Bring the samples into the form the components are written in."""

    def _prepare_centres(self, centres: Samples) -> None:
        """Bring centres that the user gave for a fit into the same form."""

    @abstractmethod
    def _carried_over(self, previous: Any, samples: Samples) -> Components:
        """The components of a fitted mixture, under this one's settings and in the form of these samples."""

    # -- fitting ----------------------------------------------------------------------------------------------------

    def fit(self, X: Matrix, y: object = None, *, init: object = None) -> Self:
        """Fit the mixture to the rows of X.

        Parameters
        ----------
        X : array, memory-mapped array, data frame or tensor of shape (n_samples, n_features)
            Under ``torch.distributed`` each rank passes its own rows.
        y : ignored
        init : fitted mixture or array of shape (n_components, n_features), optional
            Where to start, in place of the ``init`` given to the constructor: the components of the last epoch, say.

        Returns
        -------
        self
        """
        device = device_for(X, self.device)
        with ranks.refused_together(device):
            self.check_parameters()
            samples = Samples(self._checked_form(X, reset=True), device=device, unit=self._unit)
        samples.join_ranks()
        self._prepare(samples, reset=True)
        seed = ranks.broadcast_int(int(check_random_state(self.random_state).randint(2**31 - 1)), device)
        generator = torch.Generator().manual_seed(seed)
        best: _Fit | None = None
        with FitProgress(enabled=self.progress and ranks.is_writer()) as progress:
            for restart in range(self.n_init):
                progress.start_run(restart, self.n_init)
                run = self._fit_once(samples, self._start(samples, init, generator), generator, progress)
                if best is None or run.log_likelihoods[-1] > best.log_likelihoods[-1]:
                    best = run
        assert best is not None
        self._publish(best.components, X)
        self.n_components_ = int(best.components.weight_K.shape[0])
        self.merges_, self.converged_ = best.merges, best.converged
        self.groups_ = None  # those of other components
        self.lower_bounds_, self.n_iter_ = best.log_likelihoods, len(best.log_likelihoods)
        # From the published attributes, as in predict, so that labels are the same to the last bit.
        components = self._components(samples.parameter_device)
        index_NH, _, log_likelihood = em.assignments(samples, components, self._assignment())
        ranks.all_reduce_sum(log_likelihood)
        self.lower_bound_ = float(log_likelihood) / samples.n_total
        self.labels_ = in_the_form_of(index_NH[:, 0], X)
        if not self.converged_ and ranks.is_writer():
            text = f"EM did not converge in {self.max_iter} steps; raise max_iter or tol."
            warnings.warn(text, ConvergenceWarning, stacklevel=2)
        return self

    def fit_predict(self, X: Matrix, y: object = None) -> Any:
        """Fit, and return the component of each row."""
        return self.fit(X).labels_

    def _fit_once(
        self, samples: Samples, components: Components, generator: torch.Generator, progress: FitProgress
    ) -> _Fit:
        assignment, merges = self._assignment(), None
        if self.merge is not None:
            limits: dict[str, Any] = {
                "threshold": self.merge_threshold,
                "floor": self.merge_floor,
                "share": self.merge_share,
            }
            settings = merge.MergeSettings(rule=self.merge, unit=self._unit, **limits)
            components, history = merge.merged(samples, components, assignment, settings, on_round=progress.merged)
            merges = history.finished(components.centre_KD)
        components, log_likelihoods, converged = em.maximise(
            samples, components, assignment, self.max_iter, self.tol, generator, on_step=progress.stepped
        )
        return _Fit(em.calibrated(samples, components, assignment), merges, log_likelihoods, converged)

    def _start(self, samples: Samples, init: object, generator: torch.Generator) -> Components:
        """The components before the first E step of the paper's loop, with spreads from one hard assignment."""
        if init is None and self.warm_start and hasattr(self, "n_components_"):
            return self._carried_over(self, samples)
        init = self.init if init is None else init
        if isinstance(init, Mixture):
            kind, own_kind = type(init).__name__, type(self).__name__
            if type(init) is not type(self):
                raise InputError(f"init is a {kind}, but this is a {own_kind}; pass a {own_kind}.")
            check_is_fitted(init)
            if init.n_features_in_ != samples.n_columns:
                raise InputError(
                    f"init was fitted to {init.n_features_in_} features, but X has {samples.n_columns}; "
                    f"carry over a mixture of the same embeddings."
                )
            return self._carried_over(init, samples)
        if isinstance(init, str):
            k = self.n_components
            if k > samples.n_total:
                raise InputError(
                    f"n_components={k} is more than n_samples={samples.n_total}; "
                    f"a mixture needs at least one sample for each component: lower n_components."
                )
            if init not in seeding.INITS:
                raise not_one_of("init", init, (*seeding.INITS, "an array", "a fitted mixture"))
            # Merging needs many small components, so their seeds are not joined beforehand.
            centre_KD = seeding.seeds(samples, k, init, generator, overseed=self.merge is None)
        else:
            centre_KD = self._given_centres(init, samples)
        centre_KD = centre_KD.to(samples.parameter_device)
        return merge.restarted(samples, self._started(centre_KD, samples), centre_KD, self._assignment())

    def _given_centres(self, init: object, samples: Samples) -> Tensor:
        """Centres given by the user, in the form that the components need."""
        try:
            centre_KD = torch.as_tensor(cast(Any, init), dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise not_one_of("init", init, (*seeding.INITS, "an array", "a fitted mixture")) from error
        if centre_KD.ndim != 2 or centre_KD.shape[1] != samples.n_columns or not centre_KD.shape[0]:
            raise InputError(
                f"init has shape {tuple(centre_KD.shape)}, but the centres of components for X need "
                f"(n_components, {samples.n_columns})."
            )
        centres = Samples(centre_KD, device=samples.parameter_device, unit=self._unit, name="init")
        self._prepare_centres(centres)
        return centres.rows()

    # -- using what was fitted ----------------------------------------------------------------------------------------

    def predict(self, X: Matrix) -> Any:
        """The component each row belongs to, shape (n_samples,)."""
        samples, components = self._ready(X)
        index_NH, _, _ = em.assignments(samples, components, self._assignment())
        return in_the_form_of(index_NH[:, 0], X)

    def predict_proba(self, X: Matrix) -> Any:
        """The share of each component in each row: sparse, ``n_neighbours`` entries per row, which sum to 1.

        A ``scipy.sparse.csr_matrix`` of shape (n_samples, n_components_), or a sparse tensor for tensors. Under
        ``assignment="posterior"`` the entries are the largest of the posterior, so a row sums to less than 1.
        """
        samples, components = self._ready(X)
        index_NH, weight_NH, _ = em.assignments(samples, components, self._assignment())
        n, h = index_NH.shape
        shape = (n, components.weight_K.shape[0])
        index, weight = index_NH.reshape(-1), weight_NH.reshape(-1)
        if isinstance(X, Tensor):
            place = torch.stack([torch.arange(n, device=index.device).repeat_interleave(h), index])
            return torch.sparse_coo_tensor(place, weight, shape, check_invariants=False).to(X.device)
        entries = (weight.cpu().numpy(), index.cpu().numpy(), np.arange(0, n * h + 1, h))
        table = scipy.sparse.csr_matrix(entries, shape=shape)
        table.sort_indices()
        return table

    def assign(self, X: Matrix) -> tuple[Any, Any, Any]:
        """The component of each row, the share of the row that it has, and the row's log density; each (n_samples,).

        What ``predict``, ``predict_proba`` and ``score_samples`` say of the rows, in fewer passes over them.
        """
        samples, components = self._ready(X)
        index_NH, weight_NH, _ = em.assignments(samples, components, self._assignment())
        found = (index_NH[:, 0], weight_NH[:, 0], em.log_likelihoods(samples, components))
        component_N, share_N, log_density_N = (in_the_form_of(values, X) for values in found)
        return component_N, share_N, log_density_N

    def nearest(self, X: Matrix, count: int = 2) -> Any:
        """The nearest components of each row, nearest first, shape (n_samples, at most ``count``)."""
        check_at_least("count", count, 1)
        samples, components = self._ready(X)
        index_NH = em.assignments(samples, components, Assignment(n_neighbours=count, backend=self.backend))[0]
        return in_the_form_of(index_NH, X)

    def groups(self, X: Matrix, *, n_groups: int | None = None, together: bool = False) -> Groups:
        """Find groups of samples, which may be more or fewer than the components, and keep them as ``groups_``.

        ``n_groups`` of the result is their number, and ``label_K`` the group that most rows of each component are in.
        ``predict_group`` then gives any rows their group, also after ``save`` and ``load``. Groups are communities of
        the rows' neighbour graph, as many of them as the elbow of the scatter within groups says where that is clear,
        and else those that are clearest beside one Gaussian; if there are none, every component is its own group
        (``is_found`` is False). If you know the number, give it as ``n_groups``.

        Under ``torch.distributed`` they are those of this rank's rows; with ``together=True`` those of all ranks' rows,
        and every rank must call this, as ``fit``.

        Components found with ``merge="auto"`` that are as clear as any communities are kept, or grouped themselves.
        """
        samples, components = self._ready(X)
        index_N2 = em.assignments(samples, components, Assignment(n_neighbours=2, backend=self.backend))[0]
        seed = int(self.random_state) if isinstance(self.random_state, (int, np.integer)) else 0
        separate = self.merge == "auto"
        self.groups_ = find_groups(
            X,
            index_N2,
            self.n_components_,
            unit=self._unit,
            separate=separate,
            seed=seed,
            centre_KD=components.centre_KD,
            together=together,
            so_many=n_groups,
        )
        return self.groups_

    def predict_group(self, X: Matrix) -> Any:
        """The group each row belongs to, shape (n_samples,); its component, if no groups were found.

        ``groups`` must have been called before, also by whoever saved the mixture.
        """
        groups = self._known_groups()
        if not groups.is_found:
            return self.predict(X)
        return in_the_form_of(torch.from_numpy(groups.predict(self._checked(X), None)), X)

    def predict_group_proba(self, X: Matrix) -> Any:
        """The probability of each group for each row, shape (n_samples, n_groups); rows sum to 1.

        If no groups were found, they are the shares of the components, as in ``predict_proba`` but not sparse.
        """
        groups = self._known_groups()
        if not groups.is_found:
            share = self.predict_proba(X)
            return share.to_dense() if isinstance(X, Tensor) else share.toarray()
        return in_the_form_of(torch.from_numpy(groups.predict_proba(self._checked(X))), X)

    def score_samples(self, X: Matrix) -> Any:
        """The log density of each row under the whole mixture, shape (n_samples,)."""
        samples, components = self._ready(X)
        return in_the_form_of(em.log_likelihoods(samples, components), X)

    def score(self, X: Matrix, y: object = None) -> float:  # pyright: ignore[reportIncompatibleMethodOverride] - None there
        """The mean log density of the rows; under ``torch.distributed``, of this rank's."""
        return float(self.score_samples(X).mean())

    def bic(self, X: Matrix) -> float:
        """The Bayesian information criterion on X; lower is better."""
        n = len(X)
        return -2 * self.score(X) * n + self._n_parameters() * float(np.log(n))

    def aic(self, X: Matrix) -> float:
        """Akaike's information criterion on X; lower is better."""
        return -2 * self.score(X) * len(X) + 2 * self._n_parameters()

    def sample(self, n_samples: int = 1) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Draw from the mixture: rows of shape (n_samples, n_features), and the component each came from."""
        check_is_fitted(self)
        if n_samples < 1:
            raise InputError(f"n_samples is {n_samples}, but a draw needs at least 1.")
        random = check_random_state(self.random_state)
        generator = torch.Generator().manual_seed(int(random.randint(2**31 - 1)))
        components = self._components(torch.device("cpu"))
        labels = torch.multinomial(components.weight_K, n_samples, replacement=True, generator=generator).sort().values
        counts = zip(*labels.unique(return_counts=True), strict=True)
        rows = [self._draw(components, int(k), int(count), generator) for k, count in counts]
        return torch.cat(rows).numpy(), labels.numpy()

    @abstractmethod
    def _draw(self, components: Any, k: int, count: int, generator: torch.Generator) -> Tensor:
        """Samples of one component."""

    def save(self, path: str | Path) -> None:
        """Write the fitted mixture to one ``.safetensors`` file, its settings as JSON in the header; no pickle."""
        check_is_fitted(self)
        storage.save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a mixture that ``save`` wrote."""
        return storage.load(cls, Path(path))

    # -- checks -----------------------------------------------------------------------------------------------------

    def _ready(self, X: Matrix) -> tuple[Samples, Components]:
        check_is_fitted(self)
        samples = self._samples(self._checked_form(X))
        self._prepare(samples, reset=False)
        return samples, self._components(samples.parameter_device)

    def _checked(self, X: Matrix) -> Matrix:
        """The rows as they are, if the mixture can take them."""
        rows = self._checked_form(X)
        self._samples(rows)  # looks at every number
        return rows

    def _checked_form(self, X: Matrix, *, reset: bool = False) -> Matrix:
        return checked_form(self, X, unit=self._unit, reset=reset)

    def _samples(self, rows: Matrix) -> Samples:
        return Samples(rows, device=device_for(rows, self.device), unit=self._unit)

    def _known_groups(self) -> Groups:
        check_is_fitted(self)
        if self.groups_ is None:
            raise InputError("No groups are known of this mixture; find them with groups(X) first.")
        return self.groups_

    def _assignment(self) -> Assignment:
        return Assignment(
            rule=self.assignment,
            n_neighbours=self.n_neighbours,
            temperature=self.temperature,
            size_weighting=self.size_weighting,
            backend=self.backend,
        )

    def _n_parameters(self) -> int:
        check_is_fitted(self)
        return self._components(torch.device("cpu")).n_parameters()

    def check_parameters(self) -> None:
        """Refuse parameters that no data would suit, as ``fit`` does first."""
        for name in ("n_components", "n_neighbours", "n_init", "max_iter", "merge_floor"):
            check_at_least(name, getattr(self, name), 1)
        lowest, highest = 1e-6, 1e6
        limits = "it must be at least 1e-6 and at most 1e6"
        check_number("temperature", self.temperature, lambda value: lowest <= value <= highest, limits)
        if isinstance(self.random_state, (int, np.integer)) and not 0 <= int(self.random_state) < 2**32:
            raise InputError(f"random_state is {self.random_state}, but a seed must be from 0 to 4294967295.")
        check_number("tol", self.tol, lambda value: 0 <= value < math.inf, "it must be a finite number of 0 or more")
        check_number("merge_threshold", self.merge_threshold, math.isfinite, "it must be a finite number")
        share = "it must be above 0 and at most 1"
        check_number("merge_share", self.merge_share, lambda value: 0 < value <= 1, share)
        check_one_of("assignment", self.assignment, em.ASSIGNMENT_RULES)
        check_one_of("backend", self.backend, neighbours.BACKENDS)
        if self.merge is not None:
            check_one_of("merge", self.merge, (*merge.MERGE_RULES, None))
        self._check_own_parameters()
