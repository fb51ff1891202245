"""A finished run: the one place that reads what training left.

    run = Run.open("my-run")
    run.config, run.metrics, run.mixture, run.cluster_N, run.embeddings, run.images

Legend:  N images of the run, in the order of its table; D dimensions, K clusters.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as functional
from numpy.lib.format import open_memmap
from torch import Tensor

from siammm.core.errors import InputError, StoredFileError
from siammm.core.progress import Progress, silent
from siammm.core.text import one_line, printable, shown
from siammm.data.inventory import Inventory
from siammm.data.loader import Loader
from siammm.data.subset import SourceSubset
from siammm.data.view_settings import ViewSettings
from siammm.learn import checkpoint
from siammm.learn.encode import encode, on_device
from siammm.learn.networks import Encoder, SiameseNetwork
from siammm.metrics.clustering import label_codes
from siammm.mixture.estimator import VonMisesFisherMixture
from siammm.runs import files
from siammm.runs.images import RunImages, find_images, image_loader, merge_reading, open_images
from siammm.runs.network_file import load_network, read_header
from siammm.settings.stored import from_plain
from siammm.settings.training import DataConfig, TrainConfig

# What training notes besides its settings, as far as anybody reads it.
_FACTS: dict[str, type] = {"data_path": str, "fingerprint": str, "n_images": int, "kind": str, "versions": dict}

EncoderChoice = Literal["online", "momentum"]


class Run:
    """What ``siammm train``, ``SiamMM.save``, ``SiamMM.save_pretrained`` or ``siammm export`` left in a folder.

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
            raise InputError(f"{run.given} {what}, but a run is a folder; give one that siammm train wrote.")
        if run.is_finished:
            return run
        if run._has_own_config:
            command = f"siammm train --resume {shlex.quote(str(given))}"
            raise InputError(f"The run {run.given} has not finished; continue with: {command}.")
        if (run.path / files.MIXTURE).is_file() and (run.path / files.ASSIGNMENTS).is_file():
            reason = "was written by siammm cluster, which keeps no encoder"
            raise InputError(f"{run.given} {reason}; give a run folder that siammm train wrote.")
        reason = f"is a folder, but no run: it has no {files.ENCODER}"
        raise InputError(f"{run.given} {reason}; give one that siammm train wrote.")

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
    def config(self) -> TrainConfig:
        """The settings of the training."""
        return self._stored[0] if self._has_own_config else self._header[0]

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What training noted besides its settings, such as versions; empty where it kept none."""
        return self._stored[1] if self._has_own_config else {}

    @property
    def data(self) -> str | None:
        """The images that it was trained on, if the folder says so."""
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
        """Images that training could not read."""
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
        """Both encoders, in evaluation mode."""
        return on_device(load_network(self._network_file), self.device)

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
        return self._header[1]

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

    @cached_property
    def has_clusters(self) -> bool:
        """Whether it was trained with a mixture."""
        return (self.path / files.MIXTURE).is_file()

    @cached_property
    def mixture(self) -> VonMisesFisherMixture:
        """The clusters."""
        if not self.has_clusters:
            raise InputError(
                f"The run {self.given} has no clusters, because it was trained without a mixture; train with another "
                "--method or --cluster-loss."
            )
        mixture = VonMisesFisherMixture.load(self.path / files.MIXTURE)
        width = self._header[0].network.embedding_dim
        if mixture.n_features_in_ != width:
            raise InputError(
                f"The clusters in {self.given} have {mixture.n_features_in_} dimensions, but its embeddings have "
                f"{width}; the files are of two runs: copy the whole folder again."
            )
        return mixture

    @property
    def n_clusters(self) -> int:
        """Clusters, including those without images."""
        return int(self.mixture.n_components_)

    @property
    def mean_KD(self) -> np.ndarray:
        """The mean direction of each cluster."""
        return torch.as_tensor(self.mixture.mean_directions_).double().cpu().numpy()

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
            if table.column("id").null_count or not pa.types.is_string(table.schema.field("id").type):
                raise ValueError("its ids are not text")
            for name in ("cluster", "probability", "outlier_score"):
                column = table.column(name)
                if column.null_count or not pa.types.is_primitive(column.type):
                    raise ValueError(f"{name} is not a number in every row")
        except (OSError, KeyError, ValueError, pa.ArrowException) as error:
            remedy = "copy the whole run folder, or train again"
            raise StoredFileError(f"{path} cannot be read ({one_line(error)}); {remedy}.") from error
        if not len(table):
            raise StoredFileError(f"{path} holds no images; train again.")
        if not 0 <= cluster_N.min() <= cluster_N.max() < n_clusters:
            raise StoredFileError(f"{path} names a cluster that {files.MIXTURE} has not; they are not of one run.")
        return table

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
        return merge_reading(given, self.config.reading, needs_labels=needs_labels)

    def loader(self, data: str | None, reading: DataConfig, *, progress: Progress = silent) -> Loader:
        """The images in ``data``, or else the run's own, ready to be encoded."""
        where = self.data if data is None else data
        if where is None:
            raise InputError(f"{self.given} does not bring images with it; give some with --data.")
        reading = self.reading(reading)
        return image_loader(open_images(where, reading), self.view, reading, self.device, progress=progress)

    @cached_property
    def images(self) -> RunImages:
        """The images that the run was trained on, if they are still there; see ``find_images``."""
        return self.find_images(None, DataConfig())

    def find_images(self, data: str | None, reading: DataConfig) -> RunImages:
        """Find the images of the run in ``data``, by default where they were; they become ``images``."""
        self._progress("looking for the images", 0, 0)
        where = str(self.data if data is None else data)
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
        """What was clustered, in float16, mapped from its file; encoded again if the run did not keep it."""
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


def _natural(label: Any) -> tuple[int, float, str]:
    """Numbers by their value, then text by its letters: "10" comes after "9"."""
    text = str(label)
    return (0, float(text), text) if text.isascii() and text.isdigit() else (1, 0.0, text)
