"""A finished run: the one place that reads what training, or ``siammm cluster``, left.

    run = Run.open("my-run")
    run.config, run.metrics, run.mixture, run.groups, run.cluster_N, run.embeddings, run.images

Legend:  N images of the run, in the order of its table; D dimensions, K clusters.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as functional
from numpy.lib.format import open_memmap
from torch import Tensor, nn

from siammm.core.errors import InputError, SiamMMError, StoredFileError
from siammm.core.progress import Progress, silent
from siammm.core.text import one_line, printable, shown
from siammm.data.contents import is_data
from siammm.data.inventory import Inventory
from siammm.data.loader import Loader
from siammm.data.subset import SourceSubset
from siammm.data.view_settings import ViewSettings
from siammm.learn import checkpoint
from siammm.learn.encode import encode, on_device
from siammm.learn.networks import Encoder, SiameseNetwork
from siammm.learn.start import NO_WEIGHTS
from siammm.metrics.clustering import label_codes
from siammm.mixture.estimator import GaussianMixture, VonMisesFisherMixture
from siammm.mixture.groups import Groups
from siammm.runs import files
from siammm.runs.clustered import Clustered, is_clustered, path_columns, read_clustered, table_again
from siammm.runs.group_names import GroupNames
from siammm.runs.images import RunImages, find_images, find_rows, image_loader, merge_reading, open_images
from siammm.runs.network_file import load_network, network_digest, read_header
from siammm.runs.pretrained import EncoderChoice, Pretrained, name_of, open_pretrained
from siammm.runs.selections import Selections
from siammm.settings.stored import as_plain, from_plain
from siammm.settings.training import ClusteringConfig, DataConfig, TrainConfig

# What training notes besides its settings, as far as anybody reads it.
_FACTS: dict[str, type] = {"data_path": str, "fingerprint": str, "n_images": int, "kind": str, "versions": dict}


class Run:
    """What ``siammm train``, ``siammm cluster``, ``SiamMM.save``, ``save_pretrained`` or ``siammm export`` left.

    Each part is read when it is first asked for. A part that is missing or damaged raises an error of one sentence.
    """

    def __init__(self, given: str | Path, *, device: torch.device | str = "cpu", progress: Progress = silent) -> None:
        self.given, self.path = shown(given), Path(given).expanduser()
        """The run as the user named it, for messages, and its folder."""
        self.device, self._progress = torch.device(device), progress

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

    # -- settings and measurements -----------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name of the folder."""
        return printable(self.path.resolve().name)

    @cached_property
    def clustering(self) -> Clustered | None:
        """What ``siammm cluster`` noted, if it wrote the folder; None for a training."""
        is_trained = self.is_finished or self._has_own_config
        return None if is_trained or not is_clustered(self.path) else read_clustered(self.path / files.SUMMARY)

    @cached_property
    def config(self) -> TrainConfig:
        """The settings of the training; of a run that was clustered with the encoder of another, of that one."""
        if self._has_own_config:
            return self._stored[0]
        if self.clustering is None:
            return self._header[0]
        if self.encoder_run is None:
            raise InputError(f"{self.given} {self.clustering.sentence}; give a run that siammm train wrote.")
        return self.encoder_run.config

    @property
    def settings(self) -> dict[str, Any]:
        """All settings of the command that wrote it, as JSON holds them."""
        return as_plain(self.config) if self.clustering is None else self.clustering.settings

    @property
    def merging(self) -> ClusteringConfig:
        """How clusters were merged, in the words of the settings of training, whichever command wrote the run."""
        if self.clustering is None:
            return self.config.clustering
        given = self.clustering.settings
        names = ("n_components", "merge", "merge_threshold", "merge_floor", "merge_share")
        return ClusteringConfig(**{name: given[name] for name in names if name in given})

    @property
    def backbone(self) -> str:
        """The name of the network; empty where a table was clustered."""
        if self.clustering is None:
            return self.config.network.backbone
        return "" if self.clustering.encoder is None else printable(self.clustering.encoder["backbone"])

    @property
    def started_from(self) -> str | None:
        """The weights that its training started from; None for random ones, and where nothing was trained."""
        weights = NO_WEIGHTS if self.clustering is not None else self.config.network.weights
        return None if weights == NO_WEIGHTS else printable(weights)

    @property
    def method(self) -> str:
        """How it came about: a method of training, or clustering alone."""
        return self.config.method if self.clustering is None else "cluster"

    @property
    def epochs(self) -> int:
        """Epochs of training; 0 where there was none."""
        return self.config.optimisation.epochs if self.clustering is None else 0

    @property
    def random_state(self) -> int:
        """The seed of everything random."""
        found = self.clustering
        return self.config.run.random_state if found is None else int(found.settings["random_state"])

    @property
    def image_size(self) -> int:
        """Width and height of what the encoder sees; 0 where a table was clustered."""
        if self.clustering is None:
            return self.view.size
        return 0 if self.clustering.encoder is None else int(self.clustering.encoder.get("image_size") or 0)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What training or clustering noted besides its settings, such as versions; empty where it kept none."""
        found = self.clustering
        if found is None:
            return self._stored[1] if self._has_own_config else {}
        path = {} if found.encoder is None else {"data_path": found.data}
        facts = {"fingerprint": found.fingerprint, "n_images": found.n_samples, "versions": found.versions}
        return path | facts

    @property
    def data(self) -> str | None:
        """Its images: those that it was trained on, or that were clustered; None if the folder does not say."""
        if self.clustering is not None:
            return self.facts.get("data_path")
        return self.facts.get("data_path", self.config.data) if self._has_own_config else None

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of these images."""
        return self.facts.get("fingerprint")

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """What was measured, one row per epoch."""
        return read_metrics(self.path)

    @cached_property
    def merges(self) -> dict[str, Any]:
        """The tree of merges; empty if the run kept none."""
        if self.clustering is not None:
            return {"n_components": self.clustering.n_components}
        path = self.path / files.MERGES
        if not path.is_file():
            return {}
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StoredFileError(f"{path} cannot be read ({one_line(error)}); remove it, or train again.") from error
        return stored if isinstance(stored, dict) else {}

    @property
    def n_set_aside(self) -> int:
        """Images that could not be read."""
        if self.clustering is not None:
            return self.clustering.n_set_aside
        try:
            return len(json.loads((self.path / files.SET_ASIDE).read_text(encoding="utf-8"))["set_aside"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def checkpoint(self) -> checkpoint.Loaded:
        """The last whole checkpoint."""
        return checkpoint.load(self.path / files.CHECKPOINTS)

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is anything to resume from."""
        return checkpoint.exists(self.path / files.CHECKPOINTS)

    @property
    def is_finished(self) -> bool:
        """Whether its results are there."""
        return self._network_file.is_file()

    @property
    def inventory(self) -> Inventory | None:
        """The files of its images when it began; None in runs of earlier versions."""
        path = self.path / files.INVENTORY
        return Inventory.read(path) if path.is_file() else None

    @cached_property
    def _has_own_config(self) -> bool:
        """Whether config.json is ours; that of an export is timm's."""
        return (self.path / files.CONFIG).is_file() and not (self.path / files.NETWORKS).is_file()

    @cached_property
    def _stored(self) -> tuple[TrainConfig, dict[str, Any]]:
        path = self.path / files.CONFIG
        try:
            facts = dict(json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number))
            settings = facts.pop("settings")
            for name, kind in _FACTS.items():
                if not isinstance(facts.get(name), kind | None):
                    raise ValueError(f"{name} is {facts[name]!r:.40}")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise StoredFileError(f"{path} cannot be read ({one_line(error)}); train again.") from error
        return from_plain(settings, path), facts

    # -- networks ----------------------------------------------------------------------------------------------------

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
        digest = network_digest(network.momentum_encoder or network.encoder, self.view)
        if found.encoder is not None and found.encoder.get("digest") not in (None, digest):
            raise InputError(
                f"The encoder {found.encoder_name} is another than when {self.given} was clustered with it; put the "
                "earlier one back, or cluster again."
            )
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
    def _pretrained(self) -> Pretrained:
        """The pretrained encoder that it was clustered with, opened again by its name."""
        found = self.clustering
        assert found is not None
        if found.encoder is None:
            raise InputError(
                f"{self.given} {found.sentence}; give that table, or an encoder such as lite, to this command."
            )
        try:
            name, size = name_of(found.encoder), int(found.encoder["image_size"])
        except (KeyError, TypeError, ValueError) as error:
            path = self.path / files.SUMMARY
            raise StoredFileError(f"{path} does not say which encoder it was; cluster again.") from error
        return open_pretrained(name, image_size=size, device=self.device)

    def encoder(self, choice: EncoderChoice = "online") -> Encoder:
        """One of the two encoders."""
        if choice == "online":
            return self.network.encoder
        if self.network.momentum_encoder is None:
            raise InputError(f"The run {self.given} has no momentum encoder; leave --encoder out.")
        return self.network.momentum_encoder

    @property
    def clustered(self) -> Encoder:
        """The encoder whose embeddings are clustered: the momentum encoder, or the only one."""
        return self.network.momentum_encoder or self.network.encoder

    def embedding_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The unit embeddings of a batch of images, as rows to keep and as what the mixture is of."""
        embedding_BD = functional.normalize(self.clustered(x).float(), dim=1)
        return embedding_BD, embedding_BD

    @cached_property
    def view(self) -> ViewSettings:
        """How images are shown to the encoder without augmentation."""
        if self.clustering is None:
            return self._header[1]
        return self._pretrained.view if self.encoder_run is None else self.encoder_run.view

    @property
    def trained_epochs(self) -> int:
        """How many epochs its results are of; a run that is being continued has fewer than its settings say."""
        return self._header[0].optimisation.epochs

    @cached_property
    def _network_file(self) -> Path:
        exported = self.path / files.NETWORKS
        return exported if exported.is_file() else self.path / files.ENCODER

    @cached_property
    def _header(self) -> tuple[TrainConfig, ViewSettings]:
        return read_header(self._network_file)

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
        found = self.clustering
        if found is not None and found.family != "von-mises-fisher":
            raise InputError(
                f"The clusters of {self.given} are of --family {found.family}, and this needs von Mises-Fisher "
                "clusters; cluster again with --family von-mises-fisher."
            )
        mixture = VonMisesFisherMixture.load(self.mixture_file)
        width = self._header[0].network.embedding_dim if found is None else found.n_dimensions
        if mixture.n_features_in_ != width:
            raise InputError(
                f"The clusters in {self.given} have {mixture.n_features_in_} dimensions, but its embeddings have "
                f"{width}; the files are of two runs: copy the whole folder again."
            )
        if found is not None and mixture.n_components_ != found.n_clusters:
            raise InputError(
                f"There are {mixture.n_components_} clusters in {self.given}, but {files.SUMMARY} has "
                f"{found.n_clusters}; the files are of two runs: copy the whole folder again."
            )
        return mixture

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
        """One row per image: id, cluster, group, probability, outlier_score, and label if there are labels."""
        path, n_clusters = self.path / files.ASSIGNMENTS, self.n_clusters
        if not path.is_file() and not self._has_own_config:
            reason = "does not say which images it was trained on"
            raise InputError(f"{self.given} {reason}; give a run folder that siammm train wrote.")
        try:
            table = pq.read_table(path)
            cluster_N = table.column("cluster").cast(pa.int64()).to_numpy()
            # The ids of a table of embeddings are the user's, and of any type.
            of_images = self.clustering is None or self.clustering.encoder is not None
            if of_images and (table.column("id").null_count or not pa.types.is_string(table.schema.field("id").type)):
                raise ValueError("its ids are not text")
            has_groups = "group" in table.column_names
            for name in ("cluster", "probability", "outlier_score", *(["group"] if has_groups else [])):
                column = table.column(name)
                if column.null_count or not pa.types.is_primitive(column.type):
                    raise ValueError(f"{name} is not a number in every row")
            if has_groups and len(table) and table.column("group").cast(pa.int64()).to_numpy().min() < 0:
                raise ValueError("a group is below 0")
        except (OSError, KeyError, ValueError, pa.ArrowException) as error:
            remedy = f"copy the whole run folder, or {self._again}"
            raise StoredFileError(f"{path} cannot be read ({one_line(error)}); {remedy}.") from error
        if not len(table):
            raise StoredFileError(f"{path} holds no images; {self._again}.")
        if not 0 <= cluster_N.min() <= cluster_N.max() < n_clusters:
            raise StoredFileError(f"{path} names a cluster that {files.MIXTURE} has not; they are not of one run.")
        return table

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
    def group_K(self) -> np.ndarray:
        """The group that most images of each cluster are in, numbered from 0 without gaps.

        Every cluster is its own group if no other level was found, and in runs of earlier versions. A cluster without
        images is in the group that its centre is in; in runs without a saved rule, in that of the nearest cluster.
        """
        own_K = np.arange(self.n_clusters)
        if not self.looked_for_groups:
            return own_K
        values, group_N = np.unique(self.group_N, return_inverse=True)
        table_KG = np.zeros((self.n_clusters, len(values)), dtype=np.int64)
        np.add.at(table_KG, (self.cluster_N, group_N), 1)
        group_K, is_filled_K = table_KG.argmax(axis=1), table_KG.any(axis=1)
        filled, empty = np.flatnonzero(is_filled_K), np.flatnonzero(~is_filled_K)
        if (self.group_N == self.cluster_N).all():
            return own_K
        if len(empty) and self.groups is not None and self.groups.is_found:
            group_K[empty] = self.groups.label_K[empty]
        elif len(empty):
            nearest = np.argmax(self.mean_KD[empty] @ self.mean_KD[filled].T, axis=1)
            group_K[empty] = group_K[filled[nearest]]
        return np.unique(group_K, return_inverse=True)[1]

    @property
    def n_groups(self) -> int:
        """Groups of clusters; as many as clusters if no coarser level was found."""
        return int(self.group_K.max()) + 1

    @cached_property
    def group_names(self) -> GroupNames:
        """The names that a person has given to groups."""
        return GroupNames(self.path, self.cluster_N, self.group_K)

    @cached_property
    def selections(self) -> Selections:
        """The images that a person has selected and named."""
        return Selections(self.path, self.ids)

    @cached_property
    def group_N(self) -> np.ndarray:
        """The group of clusters that each image belongs to; where there are no groups, its cluster."""
        if "group" not in self.assignments.column_names:
            return self.cluster_N
        try:
            return self.assignments.column("group").cast(pa.int64()).to_numpy()
        except (ValueError, pa.ArrowException) as error:
            path = self.path / files.ASSIGNMENTS
            raise StoredFileError(f"{path} has groups that are no whole numbers; {self._again}.") from error

    @cached_property
    def probability_N(self) -> np.ndarray:
        """The share of each image that its cluster has."""
        return self.assignments.column("probability").to_numpy()

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
            return table_again(self.clustering, self.given)
        if not self.has_embeddings:
            return self._encoded_again()
        path, wanted = self.path / files.EMBEDDINGS, (self.n_images, int(self.mixture.n_features_in_))
        try:
            embeddings = open_memmap(path, mode="r")
        except (OSError, ValueError) as error:
            raise StoredFileError(f"{path} cannot be read ({one_line(error)}); remove it to embed again.") from error
        if embeddings.shape != wanted or embeddings.dtype.kind != "f":
            shape = embeddings.shape
            raise StoredFileError(f"{path} has the shape {shape}, but the run has {wanted}; remove it to embed again.")
        return embeddings

    def _encoded_again(self) -> np.ndarray:
        source, position_N = self.images.source, self.images.position_N
        if source is None or not self.images.is_whole:
            raise InputError(
                f"The run {self.given} kept no embeddings, and its images are no longer all in "
                f"{shown(self.images.data)}; say with --data where they are."
            )
        subset, reading, what = SourceSubset(source, position_N), self.images.reading, "reading the images again"
        try:
            # No image may be unreadable: a row that is missing would shift all others.
            loader = image_loader(
                subset, self.view, reading, self.device, limit=0.0, progress=self._progress, what=what
            )
        except InputError as error:
            raise InputError(
                f"The run {self.given} kept no embeddings, and not all of its images can be read again "
                f"({one_line(error).partition('; remove them')[0]}); put them back, or say with --data where they are."
            ) from error
        try:
            self._progress("embedding the images again", 0, 0)
            return encode(self.network, loader, "embeddings").cpu().numpy().astype(np.float16)
        finally:
            loader.close()


def _no_number(text: str) -> float:
    raise ValueError(f"it holds {text}")


def is_run_folder(path: Path) -> bool:
    """Whether a training has written into this folder."""
    return any((path / name).exists() for name in (files.ENCODER, files.METRICS, files.CHECKPOINTS))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The metrics in a run folder, one row per epoch; of rows that are damaged, the numbers that are left."""
    file = path / files.METRICS
    try:
        text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    except OSError as error:
        raise StoredFileError(f"{file} cannot be read ({one_line(error)}); check it, or remove it.") from error
    rows: list[dict[str, Any]] = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # a line that was being written when the machine went down
            break
        if isinstance(row, dict) and isinstance(row.get("epoch"), int):
            rows.append({name: value for name, value in row.items() if isinstance(value, int | float)})
    return rows


def named_labels(values: Sequence[Any]) -> tuple[np.ndarray, list[str] | None]:
    """Labels as numbers, in the order of their names, and these names; (all -1, None) if there are none."""
    objects = np.empty(len(values), dtype=object)
    objects[:] = list(values)
    codes_N, classes = label_codes(objects)
    if not classes:
        return np.full(len(values), -1), None
    order = sorted(range(len(classes)), key=lambda c: _natural(classes[c]))
    rank = np.empty(len(classes) + 1, dtype=np.int64)
    rank[order] = np.arange(len(order))
    rank[-1] = -1  # that of no label, whose code is -1
    return rank[codes_N], [printable(classes[c]) for c in order]


def _how_to_cluster(path: Path) -> str:
    """How a run is made of images or a table that were given in its place."""
    return f", or make one with: siammm cluster {shlex.quote(printable(path))}"


def _natural(label: Any) -> tuple[int, float, str]:
    """Numbers by their value, then text by its letters: "10" comes after "9"."""
    text = str(label)
    return (0, float(text), text) if text.isascii() and text.isdigit() else (1, 0.0, text)
