"""A finished run: the one door to what training, or ``siammm cluster``, left. Its files are read by the modules here.

    run = Run.open("my-run")
    run.config, run.metrics, run.mixture, run.groups, run.cluster_N, run.embeddings, run.images

Legend:  N images of the run, in the order of its table; D dimensions, K clusters.
"""

from __future__ import annotations

import shlex
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from siammm.core.errors import InputError, SiamMMError, StoredFileError
from siammm.core.progress import Progress, silent
from siammm.core.text import one_line, printable
from siammm.data.contents import is_data
from siammm.data.loader import Loader
from siammm.data.view_settings import ViewSettings
from siammm.learn.encode import on_device
from siammm.learn.networks import Encoder, SiameseNetwork
from siammm.mixture.estimator import GaussianMixture, VonMisesFisherMixture
from siammm.mixture.groups import Groups
from siammm.runs import files
from siammm.runs.assignments import group_numbers, groups_of_most_images, named_labels, read_assignments
from siammm.runs.borrowed_encoder import check_unchanged, open_again
from siammm.runs.clustered import path_columns, table_again
from siammm.runs.group_names import GroupNames
from siammm.runs.images import RunImages, find_images, find_rows, image_loader, merge_reading, open_images
from siammm.runs.kept_embeddings import check_all_there, encode_again, map_embeddings
from siammm.runs.mixture_file import load_clustered, load_trained
from siammm.runs.network_file import load_network
from siammm.runs.origin import RunOrigin
from siammm.runs.pretrained import Backbone, EncoderChoice
from siammm.runs.selections import Selections
from siammm.settings.training import DataConfig, TrainConfig


class Run(RunOrigin):
    """What ``siammm train``, ``siammm cluster``, ``SiamMM.save``, ``save_pretrained`` or ``siammm export`` left.

    Each part is read when it is first asked for. A part that is missing or damaged raises an error of one sentence.
    """

    @classmethod
    def open(cls, given: str | Path, *, device: torch.device | str = "cpu", progress: Progress = silent) -> Self:
        """Open a finished run; its networks will be on ``device``."""
        run = cls(given, device=device, progress=progress)
        if not run.path.is_dir():
            what = "is a file" if run.path.exists() else "does not exist"
            how = "give one that siammm train or siammm cluster wrote"
            hint = _how_to_cluster(run.path) if run.path.is_file() and is_data(run.path) else ""
            raise InputError(f"{run.given} {what}, but a run is a folder; {how}{hint}.")
        if run.is_finished or run.clustering is not None:
            return run
        if run._has_own_config:
            command = f"siammm train --resume {shlex.quote(str(given))}"
            raise InputError(f"The run {run.given} has not finished; continue with: {command}.")
        reason = f"is a folder, but no run: it has no {files.ENCODER}, and no {files.SUMMARY} of siammm cluster"
        hint = _how_to_cluster(run.path) if is_data(run.path) else ""
        raise InputError(f"{run.given} {reason}; give one that siammm train or siammm cluster wrote{hint}.")

    @classmethod
    def unfinished(cls, given: str | Path) -> Self:
        """A run to resume: of its parts there are config, facts, metrics and a checkpoint."""
        run = cls(given)
        if not run._has_own_config:
            reason = f"is not a run folder: it has no {files.CONFIG}"
            raise InputError(f"{run.given} {reason}; give the folder that siammm train wrote.")
        return run

    @classmethod
    def of(
        cls,
        name: str,
        network: SiameseNetwork,
        config: TrainConfig,
        view: ViewSettings,
        mixture: VonMisesFisherMixture | None,
        n_images: int | None = None,
    ) -> Self:
        """A run that is in memory and not in a folder."""
        run = cls(name, device=next(network.parameters()).device)
        run.network, run.config, run.view, run.facts = network, config, view, {"n_images": n_images}
        run.has_clusters = mixture is not None
        if mixture is not None:
            run.mixture = mixture
        return run

    # -- networks ----------------------------------------------------------------------------------------------------

    @cached_property
    def config(self) -> TrainConfig:
        """The settings of the training; of a run that was clustered with the encoder of another, of that one."""
        return super().config if self.encoder_run is None else self.encoder_run.config

    @cached_property
    def network(self) -> SiameseNetwork:
        """Both encoders, in evaluation mode; of a run that was clustered, the one that it was clustered with."""
        found = self.clustering
        if found is None:
            return on_device(load_network(self._network_file), self.device)
        if self.encoder_run is not None:
            network = self.encoder_run.network
        else:
            network = SiameseNetwork(Encoder(self._pretrained.backbone, nn.Identity()), momentum=False).eval()
        check_unchanged(found, self.given, network, self.view)
        return network

    @cached_property
    def encoder_run(self) -> Run | None:
        """The run whose encoder a run of ``siammm cluster`` was clustered with, if it is one of ours."""
        found = self.clustering
        if found is None or found.encoder is None or found.encoder["kind"] != "run":
            return None
        try:
            return Run.open(str(found.encoder["path"]), device=self.device)
        except (SiamMMError, KeyError) as error:
            which = f"{found.encoder_name}, which cannot be opened ({one_line(error).partition(';')[0]})"
            raise InputError(
                f"{self.given} was clustered with the run {which}; put it back, or cluster again."
            ) from error

    @cached_property
    def _pretrained(self) -> Backbone:
        """The pretrained encoder that it was clustered with, opened again by its name."""
        assert self.clustering is not None
        return open_again(self.clustering, self.given, self.path / files.SUMMARY, self.device)

    def encoder(self, choice: EncoderChoice = "online") -> Encoder:
        """One of the two encoders."""
        if choice == "online":
            return self.network.encoder
        if self.network.momentum_encoder is None:
            raise InputError(f"The run {self.given} has no momentum encoder; leave --encoder out.")
        return self.network.momentum_encoder

    @property
    def embedding_encoder(self) -> Encoder:
        """The encoder whose embeddings are clustered: the momentum encoder, or the only one."""
        return self.network.momentum_encoder or self.network.encoder

    def embedding_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The unit embeddings of a batch of images, as rows to keep and as what the mixture is of."""
        embedding_BD = functional.normalize(self.embedding_encoder(x).float(), dim=1)
        return embedding_BD, embedding_BD

    @cached_property
    def view(self) -> ViewSettings:
        """How images are shown to the encoder without augmentation."""
        if self.clustering is None:
            return self._header[1]
        return self._pretrained.view if self.encoder_run is None else self.encoder_run.view

    @property
    def image_size(self) -> int:
        """Width and height of what the encoder sees; 0 where a table was clustered."""
        if self.clustering is None:
            return self.view.size
        return 0 if self.clustering.encoder is None else int(self.clustering.encoder.get("image_size") or 0)

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
        if self.clustering is not None:
            return load_clustered(self.mixture_file, self.given, self.clustering)
        return load_trained(self.mixture_file, self.given, self._header[0].network.embedding_dim)

    @property
    def n_clusters(self) -> int:
        """Clusters, including those without images."""
        return int(self.mixture.n_components_) if self.clustering is None else self.clustering.n_clusters

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
        if not self.has_clusters:
            return None
        if self.clustering is not None and self.clustering.family == "gaussian":
            return GaussianMixture.load(self.mixture_file).groups_
        return self.mixture.groups_

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
        # The ids of a table of embeddings are the user's, and of any type.
        of_images = self.clustering is None or self.clustering.encoder is not None
        return read_assignments(path, n_clusters, ids_are_text=of_images, again=self._again)

    @property
    def _again(self) -> str:
        return "train again" if self.clustering is None else "cluster again"

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

    # -- images and embeddings ---------------------------------------------------------------------------------------

    def reading(self, given: DataConfig, *, needs_labels: bool = False) -> DataConfig:
        """How to read images: as given, with the run's own names of columns where none are given."""
        own = self.config.reading if self.clustering is None else self.clustering.reading
        return merge_reading(given, own, needs_labels=needs_labels)

    def loader(self, data: str | None, reading: DataConfig, *, progress: Progress = silent) -> Loader:
        """The images in ``data``, or else the run's own, ready to be encoded."""
        where = self.data if data is None else data
        if where is None:
            raise InputError(f"{self.given} does not bring images with it; give some with --data.")
        reading = self.reading(reading)
        return image_loader(open_images(where, reading), self.view, reading, self.device, progress=progress)

    @cached_property
    def images(self) -> RunImages:
        """The images of the run, if they are still there; see ``find_images``."""
        return self.find_images(None, DataConfig())

    def find_images(self, data: str | None, reading: DataConfig) -> RunImages:
        """Find the images of the run in ``data``, by default where they were; they become ``images``."""
        self._progress("looking for the images", 0, 0)
        where = str(self.data if data is None else data)
        if self.clustering is not None and self.clustering.encoder is None:
            names = [self.ids, *path_columns(self.assignments)]
            found = find_rows(names, self.clustering.data, data, self.reading(reading))
        else:
            found = find_images(self.ids, self.fingerprint, where, self.reading(reading), was_given=data is not None)
        self.images, source = found, found.source
        # Labels that the run was not told of, if the images have them.
        if source is not None and source.labels is not None and self.label_names is None and found.is_whole:
            codes, names = np.asarray(source.labels)[found.position_N].tolist(), source.label_names
            self._labels = named_labels([names[code] if names else str(code) for code in codes])
        return found

    @property
    def has_embeddings(self) -> bool:
        """Whether the run kept the embeddings that it clustered."""
        return (self.path / files.EMBEDDINGS).is_file()

    @cached_property
    def embeddings(self) -> np.ndarray:
        """What was clustered, of unit length, in float16, mapped from its file.

        What the run did not keep is read or encoded again: from the table that was clustered, or from the images.
        """
        if not self.has_embeddings and self.clustering is not None and self.clustering.encoder is None:
            rows_ND = table_again(self.clustering, self.given)
            if len(rows_ND) != self.n_images:
                raise StoredFileError(
                    f"{self.path / files.ASSIGNMENTS} has {self.n_images:,} rows, but the table has {len(rows_ND):,}; "
                    "cluster the table again."
                )
            return rows_ND
        if not self.has_embeddings:
            check_all_there(self.given, self.images)
            return encode_again(self.given, self.images, self.network, self.view, self._progress)
        shape = (self.n_images, int(self.mixture.n_features_in_))
        return map_embeddings(self.path / files.EMBEDDINGS, shape)


def _how_to_cluster(path: Path) -> str:
    """How a run is made of images or a table that were given in its place."""
    return f", or make one with: siammm cluster {shlex.quote(printable(path))}"
