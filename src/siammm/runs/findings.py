"""What a run found: its clusters and groups, and the cluster, group and label of each of its images.

Legend:  N images of the run, in the order of its table; D dimensions, K clusters.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from siammm.core.errors import InputError
from siammm.core.text import printable
from siammm.mixture.estimator import VonMisesFisherMixture
from siammm.mixture.group_rule import Groups
from siammm.runs import files
from siammm.runs.assignments import group_numbers, groups_of_most_images, named_labels, read_assignments
from siammm.runs.group_names import GroupNames
from siammm.runs.mixture_file import load_trained
from siammm.runs.origin import RunOrigin
from siammm.runs.selections import Selections


class RunFindings(RunOrigin):
    """The part of ``Run`` that needs neither its networks nor its images."""

    _again = "train again"
    """What to do if a file is damaged."""
    _ids_are_text = True
    """Those of images are; those of a table's rows are the user's, and of any type."""

    # -- clusters ----------------------------------------------------------------------------------------------------

    @property
    def mixture_file(self) -> Path:
        """Where its clusters are."""
        return self.path / files.MIXTURE

    @cached_property
    def has_clusters(self) -> bool:
        """Whether it has a mixture; a training may be without."""
        return self.mixture_file.is_file()

    @cached_property
    def mixture(self) -> VonMisesFisherMixture:
        """The clusters."""
        if not self.has_clusters:
            raise InputError(
                f"The run {self.given} has no clusters, because it was trained without a mixture; train with another "
                "--method or --cluster-loss."
            )
        return load_trained(self.mixture_file, self.given, self._header[0].network.embedding_dim)

    @cached_property
    def n_clusters(self) -> int:
        """Clusters, including those without images."""
        return int(self.mixture.n_components_)

    @property
    def mean_KD(self) -> np.ndarray:
        """The mean direction of each cluster."""
        return torch.as_tensor(self.mixture.mean_directions_).double().cpu().numpy()

    @cached_property
    def groups(self) -> Groups | None:
        """The groups, as a rule that gives new images theirs; ``group_N`` has those of the run's own images.

        Every cluster is its own group if no others were found. None in runs of earlier versions, which kept no rule,
        and in runs without clusters.
        """
        return self.mixture.groups_ if self.has_clusters else None

    @property
    def has_groups(self) -> bool:
        """Whether new images can be given a group that is not simply their cluster."""
        return self.groups is not None and self.groups.is_found

    # -- the table of images -----------------------------------------------------------------------------------------

    @cached_property
    def assignments(self) -> pa.Table:
        """One row per image: id, cluster and group with their probabilities, outlier_score, label if there are any."""
        path, n_clusters = self.path / files.ASSIGNMENTS, self.n_clusters
        if not path.is_file() and not self._has_own_config:
            reason = "does not say which images it was trained on"
            raise InputError(f"{self.given} {reason}; give a run folder that siammm train wrote.")
        return read_assignments(path, n_clusters, ids_are_text=self._ids_are_text, again=self._again)

    @property
    def has_assignments(self) -> bool:
        """Whether the folder says which images the clusters are of."""
        return (self.path / files.ASSIGNMENTS).is_file()

    @property
    def n_images(self) -> int:
        """Images of the run."""
        return len(self.ids)

    @cached_property
    def ids(self) -> list[str]:
        """The names of the images; unique."""
        return [printable(name) for name in self.assignments.column("id").to_pylist()]

    @cached_property
    def cluster_N(self) -> np.ndarray:
        """The cluster of each image."""
        return self.assignments.column("cluster").to_numpy().astype(np.int64)

    @property
    def looked_for_groups(self) -> bool:
        """Whether its table has groups, if only of one cluster each; that of an earlier version has none."""
        return "group" in self.assignments.column_names

    @cached_property
    def is_grouped(self) -> bool:
        """Whether the images have groups that are not simply their clusters."""
        return self.looked_for_groups and not bool((self._group_column == self.cluster_N).all())

    @cached_property
    def group_N(self) -> np.ndarray:
        """The group of each image, as its table says, numbered from 0 without gaps; without groups, its cluster.

        It may be another than that of most images of its cluster: groups are an assignment of their own.
        """
        return self._groups[1] if self.is_grouped else self.cluster_N

    @cached_property
    def n_groups(self) -> int:
        """Groups of images; as many as clusters if there are none."""
        return len(self._groups[0]) if self.is_grouped else self.n_clusters

    @cached_property
    def group_K(self) -> np.ndarray:
        """The group that most images of each cluster are in. Without groups every cluster is its own.

        A cluster without images is in the group that its centre is in; in runs without a saved rule, in that of the
        nearest cluster.
        """
        if not self.is_grouped:
            return np.arange(self.n_clusters)
        group_K, is_filled_K = groups_of_most_images(self.cluster_N, self.group_N, self.n_clusters)
        filled, empty = np.flatnonzero(is_filled_K), np.flatnonzero(~is_filled_K)
        if len(empty):
            nearest = np.argmax(self.mean_KD[empty] @ self.mean_KD[filled].T, axis=1)
            group_K[empty] = group_K[filled[nearest]]
        if len(empty) and self.groups is not None and self.groups.is_found:
            number = {int(value): code for code, value in enumerate(self._groups[0])}
            by_rule = self.groups.label_K[empty].tolist()
            group_K[empty] = [number.get(value, near) for value, near in zip(by_rule, group_K[empty], strict=True)]
        return group_K

    @cached_property
    def _groups(self) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of groups in the table, and the place of each image's among them."""
        return np.unique(self._group_column, return_inverse=True)

    @property
    def _group_column(self) -> np.ndarray:
        return group_numbers(self.assignments, self.path / files.ASSIGNMENTS, again=self._again)

    @cached_property
    def group_names(self) -> GroupNames:
        """The names that a person has given to groups."""
        return GroupNames(self.path, self.group_N, self.n_groups)

    @cached_property
    def selections(self) -> Selections:
        """The images that a person has selected and named."""
        return Selections(self.path, self.ids)

    @cached_property
    def probability_N(self) -> np.ndarray:
        """The share of each image that its cluster has."""
        return self.assignments.column("probability").to_numpy()

    @cached_property
    def group_probability_N(self) -> np.ndarray | None:
        """How probable the group of each image is; None in runs of earlier versions, and without groups."""
        if not self.is_grouped or "group_probability" not in self.assignments.column_names:
            return None
        return self.assignments.column("group_probability").to_numpy()

    @cached_property
    def outlier_N(self) -> np.ndarray:
        """How unusual each image is, from 0 to 1."""
        return self.assignments.column("outlier_score").to_numpy()

    @property
    def label_N(self) -> np.ndarray:
        """Index in ``label_names``, -1 if there is none."""
        return self._labels[0]

    @property
    def label_names(self) -> list[str] | None:
        """The labels in their order; None if the images have no labels."""
        return self._labels[1]

    @cached_property
    def _labels(self) -> tuple[np.ndarray, list[str] | None]:
        if "label" not in self.assignments.column_names:
            return np.full(self.n_images, -1), None
        return named_labels(self.assignments.column("label").to_pylist())
