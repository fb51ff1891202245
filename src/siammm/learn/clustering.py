"""The mixture while the encoder learns: E and M steps from the last centroids, merging, and what the loss reads.

The engine is ``siammm.mixture``; this holds its state from epoch to epoch. The loss reads tables of fixed shape (the
clusters of every image, the direction and concentration of every cluster), which are refilled in place: a captured
update keeps reading them while K falls.

Legend:  N images, K clusters, H neighbours, D dimensions; mu mean direction, kappa concentration.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from siammm.core import ranks
from siammm.learn import checkpoint, losses, peer_losses
from siammm.mixture import em, merge, seeding, vmf
from siammm.mixture.components import Components, ConcentrationRule, ConcentrationSettings, VonMisesFisherComponents
from siammm.mixture.em import Assignment
from siammm.mixture.estimator import VonMisesFisherMixture
from siammm.mixture.merge import MergeSettings
from siammm.mixture.merge_tree import MergeHistory
from siammm.mixture.samples import Samples
from siammm.settings.training import NCE_CONCENTRATION, ClusteringConfig, ObjectiveConfig

# Clusters catch up with the embeddings that an epoch moved, and those that no image is nearest to are filled again.
_STEPS_BEFORE_MERGING = 2
_ROWS_AT_ONCE = 65_536


class Clustering:
    """The components, their history, and the tables that the loss reads."""

    def __init__(
        self,
        n_components: int,
        n_images: int,
        dim: int,
        device: torch.device,
        *,
        objective: ObjectiveConfig,
        settings: ClusteringConfig,
        seed: int,
    ) -> None:
        self.objective, self.settings, self.seed, self.n_start = objective, settings, seed, n_components
        self.components: VonMisesFisherComponents | None = None
        self.history = MergeHistory(n_components)
        self.generator = torch.Generator().manual_seed(seed)
        h = min(objective.n_neighbours, n_components)
        self.index_NH = torch.zeros(n_images, h, dtype=torch.int64, device=device)
        self.weight_NH = torch.zeros(n_images, h, device=device)
        self.mu_KD = torch.zeros(n_components, dim, device=device)
        self.kappa_K, self.log_normaliser_K = (torch.zeros(n_components, device=device) for _ in range(2))

    @property
    def n_components(self) -> int:
        """K now."""
        return self.n_start if self.components is None else int(self.components.weight_K.shape[0])

    @property
    def assignment(self) -> Assignment:
        """How images are shared among clusters: Eq. 8 and 10."""
        return Assignment(**self._sharing)

    @property
    def _sharing(self) -> dict[str, Any]:
        names = ("n_neighbours", "temperature", "size_weighting")
        return {name: getattr(self.objective, name) for name in names}

    def merge_settings(self, within_GD: Tensor | None) -> MergeSettings:
        """How a round of merging chooses its pairs."""
        given, rule = self.settings, "auto" if self.settings.merge == "auto" else "paper"
        share = given.merge_share if rule == "auto" else 1.0  # the paper's rule has a pace of its own
        # An empty cluster is the first to merge, within the share: the share is the pace of K.
        limits = {"threshold": given.merge_threshold, "floor": given.merge_floor, "share": share}
        return MergeSettings(rule=rule, drop_empty=False, within_GD=within_GD, **limits)

    # -- Algorithm 1 --------------------------------------------------------------------------------------------------

    def expectation_and_maximisation(self, samples: Samples) -> float:
        """E and M steps from the last epoch's centroids, then the tables for the loss. Returns the log likelihood."""
        if self.settings.centroids == "reinitialised":
            # As k-means with several initialisations: each runs to its end, and the best is kept.
            starts = (self._stepped(samples, self._seeded(samples)) for _ in range(self.settings.n_init))
            self.components, log_likelihood = max(starts, key=lambda start: start[1])
        elif self.components is None:
            self.components, log_likelihood = self._stepped(samples, self._seeded(samples))
        else:
            settings = self._concentration_settings(samples)
            self.components, log_likelihood = self._stepped(samples, replace(self.components, settings=settings))
        index_NH, weight_NH, _ = em.assignments(samples, self.components, self.assignment)
        kappa_K = self._loss_concentrations(samples, index_NH[:, 0])
        # Of all ranks: the images of a batch are not those of a rank's shard.
        index_NH, weight_NH = (ranks.all_gather_rows(rows, samples.device) for rows in (index_NH, weight_NH))
        self.refill(index_NH, weight_NH, kappa_K)
        return log_likelihood

    def merge(self, samples: Samples, within_GD: Tensor | None = None) -> None:
        """One round of merging, after an epoch, of clusters that have caught up with the embeddings it moved.

        ``within_GD``: the directions of the groups, where these are known; clusters of different groups stay apart.
        """
        if self.settings.merge == "none" or self.components is None:
            return
        components = self.components
        for _ in range(_STEPS_BEFORE_MERGING):
            components, _ = self._step(samples, components)
        components, _ = merge.merge_round(
            samples, components, self.assignment, self.merge_settings(within_GD), self.history
        )
        self.components = _own_kind(components)

    def finish(self, samples: Samples, X: Tensor, within_GD: Tensor | None = None) -> VonMisesFisherMixture:
        """The mixture that a run leaves: the last centroids, settled on the final embeddings X of this rank.

        The automatic rule continues until its test stops it: an epoch's share limits the pace of training, not the
        result. Nothing is split: clusters that training has pulled together belong together, whatever they still
        show inside.
        """
        assert self.components is not None, "a run without clusters has no mixture"
        components = merge.restarted(samples, self.components, self.components.centre_KD, self.assignment)
        if self.settings.merge == "auto":
            settings = replace(self.merge_settings(within_GD), drop_empty=True)
            components, self.history = merge.merged(
                samples, components, self.assignment, settings, history=self.history, splits=False
            )
        mixture = VonMisesFisherMixture(
            n_components=int(components.weight_K.shape[0]),
            concentration=self._concentration_rule,
            concentration_dims=self._concentration_dims(samples),
            random_state=self.seed,
            **self._sharing,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the clusters have settled in training
            mixture.fit(X, init=components.centre_KD)
        self.components = _own_kind(components)
        mixture.merges_ = self.history.finished(components.centre_KD)
        if self.settings.merge == "auto":  # nothing is left to merge now, but mixture.groups asks how they were found
            mixture.set_params(merge="auto")
        return mixture

    def nearest(self, samples: Samples) -> Tensor:
        """The cluster of each of this rank's images, under the present clusters."""
        assert self.components is not None
        return em.assignments(samples, self.components, self.assignment)[0][:, 0]

    # -- the tables that the loss reads -------------------------------------------------------------------------------

    def refill(self, index_NH: Tensor, weight_NH: Tensor, kappa_K: Tensor) -> None:
        """Put these assignments, concentrations and the present directions where the loss reads them."""
        assert self.components is not None
        k, h = self.n_components, index_NH.shape[1]
        self.index_NH.zero_()[:, :h] = index_NH
        self.weight_NH.zero_()[:, :h] = weight_NH  # fewer clusters than neighbours: the others weigh nothing
        self.mu_KD.zero_()[:k] = self.components.mu_KD.to(self.mu_KD)
        self.kappa_K.zero_()[:k] = kappa_K.to(self.kappa_K)
        if self.objective.normaliser:
            log_normaliser_K = vmf.log_normaliser(kappa_K, self.mu_KD.shape[1])
            self.log_normaliser_K.zero_()[:k] = log_normaliser_K.to(self.log_normaliser_K)

    def _loss_concentrations(self, samples: Samples, cluster_N: Tensor) -> Tensor:
        """The concentrations of the components, as the loss is to see them."""
        assert self.components is not None
        kappa_K = self.components.kappa_K
        if self.objective.concentration == "proximity":
            return self._proximity(samples, cluster_N)
        if self.objective.concentration == "constant":
            kappa_K = torch.full_like(kappa_K, float(kappa_K.mean()))
        scale = self.objective.concentration_scale
        if scale == "literal":
            return kappa_K
        if scale == "auto":
            scale = NCE_CONCENTRATION if self.objective.sharpened else 1.0
        return losses.relative_concentrations(kappa_K, weight_K=self.components.weight_K, scale=scale)

    def _proximity(self, samples: Samples, cluster_N: Tensor) -> Tensor:
        """PCL's concentrations, from the distances of the images to the centroids of their clusters."""
        assert self.components is not None
        mu_KD = self.components.mu_KD.to(samples.device, samples.dtype)
        sum_K, count_K = (torch.zeros(mu_KD.shape[0], dtype=samples.dtype, device=samples.device) for _ in range(2))
        for start, x_ND in samples.chunks(_ROWS_AT_ONCE):
            index_N = cluster_N[start : start + x_ND.shape[0]]
            cosine_N = (x_ND * mu_KD[index_N]).sum(dim=1)
            sum_K.index_add_(0, index_N, (2 - 2 * cosine_N).clamp_min(0).sqrt())
            count_K.index_add_(0, index_N, torch.ones_like(cosine_N))
        ranks.all_reduce_sum(sum_K, count_K)
        temperature = self.objective.prototype_temperature
        return peer_losses.proximity_concentrations(sum_K / count_K.clamp_min(1), count_K, temperature=temperature)

    # -- E and M steps ------------------------------------------------------------------------------------------------

    def _stepped(
        self, samples: Samples, components: VonMisesFisherComponents
    ) -> tuple[VonMisesFisherComponents, float]:
        """The E and M steps of an epoch, and the likelihood in the last of them."""
        log_likelihood = float("nan")
        for _ in range(self.settings.em_steps):
            components, log_likelihood = self._step(samples, components)
        return components, log_likelihood

    def _step(self, samples: Samples, components: VonMisesFisherComponents) -> tuple[VonMisesFisherComponents, float]:
        # A cluster that no image is nearest to any more is filled again from a large one: only merging lowers K. Its
        # soft count does not tell: as somebody's second choice it may stay above 0 for ever.
        statistics = em.e_step(samples, components, self.assignment)
        empty_K = statistics.nearest_K <= 0
        counts, means = em.refilled(statistics, self.generator, samples.n_columns, empty_K=empty_K)
        return components.estimated(counts, means), statistics.log_likelihood

    def _seeded(self, samples: Samples) -> VonMisesFisherComponents:
        centre_KD = seeding.seeds(samples, self.n_components, "k-means++", self.generator, overseed=False)
        centre_KD = centre_KD.to(samples.parameter_device)
        start = VonMisesFisherComponents.started(centre_KD, self._concentration_settings(samples))
        return _own_kind(merge.restarted(samples, start, start.centre_KD, self.assignment))

    def _concentration_settings(self, samples: Samples) -> ConcentrationSettings:
        settings = ConcentrationSettings(rule=self._concentration_rule)
        dims = self._concentration_dims(samples)
        if dims is None:
            return settings
        basis_DP, energy = em.principal_directions(samples, dims)
        return replace(settings, basis_DP=basis_DP, energy=energy)

    def _concentration_dims(self, samples: Samples) -> int | None:
        dims = self.objective.concentration_dims
        return None if dims is None else min(dims, samples.n_columns)

    @property
    def _concentration_rule(self) -> ConcentrationRule:
        return "closed-form" if self.objective.concentration == "closed-form" else "per-component"

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def as_tensors(self) -> dict[str, Tensor]:
        """All of it, for a checkpoint."""
        tensors = checkpoint.with_prefix("history", self.history.as_tensors())
        tensors["generator"] = self.generator.get_state()
        if self.components is not None:
            mu_KD, kappa_K, weight_K = self.components.mu_KD, self.components.kappa_K, self.components.weight_K
            tensors |= {"mu": mu_KD, "kappa": kappa_K, "weight": weight_K, **self._tables}
            if self.components.settings.basis_DP is not None:
                tensors["basis"] = self.components.settings.basis_DP
                tensors["energy"] = torch.tensor(self.components.settings.energy, dtype=torch.float64)
        return tensors

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what ``as_tensors`` took."""
        self.history = MergeHistory.from_tensors(checkpoint.grouped(tensors, "history"))
        self.generator.set_state(tensors["generator"])
        if "mu" not in tensors:
            return
        device = self.mu_KD.device if self.mu_KD.device.type != "mps" else torch.device("cpu")
        settings = ConcentrationSettings(rule=self._concentration_rule)
        if "basis" in tensors:
            settings = replace(settings, basis_DP=tensors["basis"].to(device), energy=float(tensors["energy"]))
        mu_KD, kappa_K, weight_K = (tensors[name].to(device) for name in ("mu", "kappa", "weight"))
        self.components = VonMisesFisherComponents(mu_KD=mu_KD, kappa_K=kappa_K, weight_K=weight_K, settings=settings)
        for name, table in self._tables.items():
            table.copy_(tensors[name])

    @property
    def _tables(self) -> dict[str, Tensor]:
        """What the loss reads, by the names of a checkpoint."""
        return {
            "index": self.index_NH,
            "share": self.weight_NH,
            "table_mu": self.mu_KD,
            "table_kappa": self.kappa_K,
            "table_normaliser": self.log_normaliser_K,
        }


def _own_kind(components: Components) -> VonMisesFisherComponents:
    """The engine returns the kind of components that it was given."""
    assert isinstance(components, VonMisesFisherComponents)
    return components
