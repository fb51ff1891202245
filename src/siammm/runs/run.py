"""A finished run: the one door to what training, or ``siammm cluster``, left. Its files are read by the modules here.

    run = Run.open("my-run")
    run.config, run.metrics, run.mixture, run.groups, run.cluster_N, run.embeddings, run.images

Legend:  N images of the run, in the order of its table; B images of a batch, D dimensions.
"""

from __future__ import annotations

import shlex
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
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
from siammm.mixture.group_rule import Groups
from siammm.runs import files
from siammm.runs.assignments import named_labels
from siammm.runs.clustered_rows import path_columns, table_again
from siammm.runs.findings import RunFindings
from siammm.runs.images import RunImages, find_images, find_rows, image_loader, merge_reading, open_images
from siammm.runs.kept_embeddings import check_all_there, encode_again, map_embeddings
from siammm.runs.mixture_file import load_clustered
from siammm.runs.network_file import load_network, network_digest
from siammm.runs.pretrained import Backbone, EncoderChoice, name_of, open_pretrained
from siammm.runs.summary import is_clustered, read_summary
from siammm.settings.training import DataConfig, TrainConfig


class Run(RunFindings):
    """What ``siammm train``, ``SiamMM.save``, ``save_pretrained`` or ``siammm export`` left, or ``siammm cluster``.

    Each part is read when it is first asked for. A part that is missing or damaged raises an error of one sentence.
    What ``siammm cluster`` left is a ``ClusteredRun``. Nobody has to ask which of the two a run is: what one has and
    the other has not is None, 0 or empty there.
    """

    sentence = "was trained"
    """How it came about, to begin a sentence with after its name."""
    took_images, images_key = "was trained on", "trained_on"
    """What it did with its images, in a sentence and as a key in records."""
    how_to_improve = "train longer, or on more images"
    """What to do about clusters that hardly differ."""
    is_exportable = True
    """Whether its encoder is ours, of this run or another, so that it can be exported."""
    keeps_rows = False
    """Whether its files hold all that an exported table has, so that this needs neither its images nor an encoder."""
    table: str | None = None
    """The table of embeddings that was clustered; None where images were."""
    n_merged: int | None = None
    """The clusters that merging ended with, where these were fewer than the groups and were replaced by finer ones."""
    encoder_record: dict[str, Any] | None = None
    """What is noted of the encoder that images were clustered with; None where it was trained on them."""
    encoder_name: str | None = None
    """This encoder, as the user named it."""

    @classmethod
    def open(cls, given: str | Path, *, device: torch.device | str = "cpu", progress: Progress = silent) -> Run:
        """Open a finished run; its networks will be on ``device``."""
        run = Run(given, device=device, progress=progress)
        if not run.path.is_dir():
            what = "is a file" if run.path.exists() else "does not exist"
            how = "give a run folder that siammm train or siammm cluster wrote"
            hint = _how_to_cluster(run.path) if run.path.is_file() and is_data(run.path) else ""
            raise InputError(f"{run.given} {what}; {how}{hint}.")
        if run.is_finished:
            return run
        if run._has_own_config:
            command = f"siammm train --resume {shlex.quote(str(given))}"
            raise InputError(f"The run {run.given} has not finished; continue with: {command}.")
        if is_clustered(run.path):
            return ClusteredRun(given, device=device, progress=progress)
        reason = f"is not a run folder: it has no {files.ENCODER} and no {files.SUMMARY} of siammm cluster"
        hint = _how_to_cluster(run.path) if is_data(run.path) else ""
        raise InputError(f"{run.given} {reason}; give one that siammm train or siammm cluster wrote{hint}.")

    @classmethod
    def unfinished(cls, given: str | Path) -> Self:
        """A run to resume: of its parts there are config, facts, metrics and a checkpoint."""
        run = cls(given)
        if not run._has_own_config:
            reason = f"is not a run folder: it has no {files.CONFIG}" if run.path.exists() else "does not exist"
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
    def network(self) -> SiameseNetwork:
        """Both encoders, in evaluation mode; of a run that was clustered, the one that it was clustered with."""
        return on_device(load_network(self._network_file), self.device)

    @cached_property
    def encoder_run(self) -> Run | None:
        """The run whose encoder images were clustered with, if it is one of ours, and another than this."""
        return None

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
        return self._header[1]

    @cached_property
    def image_size(self) -> int:
        """Width and height of what the encoder sees; 0 where a table was clustered."""
        return self.view.size

    # -- images and embeddings ---------------------------------------------------------------------------------------

    def reading(self, given: DataConfig, *, needs_labels: bool = False) -> DataConfig:
        """How to read images: as given, with the run's own names of columns where none are given."""
        return merge_reading(given, self._own_reading, needs_labels=needs_labels)

    @cached_property
    def _own_reading(self) -> DataConfig:
        return self.config.reading

    def loader(self, data: str | None, reading: DataConfig, *, progress: Progress = silent) -> Loader:
        """The images in ``data``, or else the run's own, ready to be encoded."""
        where = self.data if data is None else data
        if where is None:
            raise InputError(f"{self.given} comes without images; give some with --data.")
        reading = self.reading(reading)
        return image_loader(open_images(where, reading), self.view, reading, self.device, progress=progress)

    @cached_property
    def images(self) -> RunImages:
        """The images of the run, if they are still there; see ``find_images``."""
        return self.find_images(None, DataConfig())

    def find_images(self, data: str | None, reading: DataConfig) -> RunImages:
        """Find the images of the run in ``data``, by default where they were; they become ``images``."""
        self._progress("looking for the images", 0, 0)
        found = self._found(data, self.reading(reading))
        self.images, source = found, found.source
        # Labels that the run was not told of, if the images have them.
        if source is not None and source.labels is not None and self.label_names is None and found.is_whole:
            codes, names = np.asarray(source.labels)[found.position_N].tolist(), source.label_names
            self._labels = named_labels([names[code] if names else str(code) for code in codes])
        return found

    def _found(self, data: str | None, reading: DataConfig) -> RunImages:
        where = str(self.data if data is None else data)
        return find_images(self.ids, self.fingerprint, where, reading, was_given=data is not None)

    @property
    def has_embeddings(self) -> bool:
        """Whether the run kept the embeddings that it clustered."""
        return (self.path / files.EMBEDDINGS).is_file()

    @cached_property
    def embeddings(self) -> np.ndarray:
        """What was clustered, of unit length, in float16, mapped from its file.

        What the run did not keep is made again: by its encoder from its images, or of the rows of its table.
        """
        if not self.has_embeddings:
            check_all_there(self.given, self.images)
            return encode_again(self.given, self.images, self.network, self.view, self._progress)
        shape = (self.n_images, int(self.mixture.n_features_in_))
        return map_embeddings(self.path / files.EMBEDDINGS, shape)


class ClusteredRun(Run):
    """What ``siammm cluster`` left: nothing was trained, and the encoder, if there is one, is not in the folder."""

    took_images, images_key = "clustered", "clustered"
    how_to_improve = "cluster with another --encoder"
    keeps_rows = True
    _again = "cluster again"

    def __init__(self, given: str | Path, *, device: torch.device | str = "cpu", progress: Progress = silent) -> None:
        super().__init__(given, device=device, progress=progress)
        self.summary = found = read_summary(self.path / files.SUMMARY)
        of_images = found.encoder is not None
        self.sentence, self.settings, self.merging = found.sentence, found.settings, found.merging
        self.method, self.epochs, self.started_from = "cluster", 0, None
        self.random_state = int(found.settings["random_state"])
        self.facts = {"fingerprint": found.fingerprint, "n_images": found.n_samples, "versions": found.versions}
        self.data, self.table = (found.data, None) if of_images else (None, found.data)
        self.n_clusters, self.n_merged = found.n_clusters, found.n_merged
        self.merges = {"n_components": found.n_components}
        self.n_set_aside, self._own_reading, self._ids_are_text = found.n_set_aside, found.reading, of_images
        self.encoder_record, self.encoder_name = found.encoder, found.encoder_name
        self.is_exportable = found.encoder is not None and found.encoder["kind"] == "run"
        self.backbone = "" if found.encoder is None else printable(found.encoder["backbone"])

    @cached_property
    def config(self) -> TrainConfig:
        """The settings of the run that it was clustered with."""
        if self.encoder_run is None:
            raise InputError(f"{self.given} {self.sentence}; give a run that siammm train wrote.")
        return self.encoder_run.config

    @cached_property
    def encoder_run(self) -> Run | None:
        """The run that it was clustered with."""
        if self.encoder_record is None or not self.is_exportable:
            return None
        try:
            return Run.open(str(self.encoder_record["path"]), device=self.device)
        except (SiamMMError, KeyError) as error:
            which = f"{self.encoder_name}, which cannot be opened ({one_line(error).partition(';')[0]})"
            raise InputError(
                f"{self.given} was clustered with the run {which}; put it back, or cluster again."
            ) from error

    @cached_property
    def image_size(self) -> int:
        """Width and height of what the encoder saw; 0 where a table was clustered."""
        return 0 if self.encoder_record is None else int(self.encoder_record.get("image_size") or 0)

    @cached_property
    def _pretrained(self) -> Backbone:
        """The pretrained encoder that it was clustered with, opened again by its name."""
        if self.encoder_record is None:
            raise InputError(
                f"{self.given} {self.sentence}; give that table, or an encoder such as lite, to this command."
            )
        try:
            name, size = name_of(self.encoder_record), int(self.encoder_record["image_size"])
        except (KeyError, TypeError, ValueError) as error:
            where = self.path / files.SUMMARY
            raise StoredFileError(f"{where} does not say which encoder it was; cluster again.") from error
        return open_pretrained(name, image_size=size, device=self.device)

    @cached_property
    def view(self) -> ViewSettings:
        """How images were shown to the encoder."""
        return self._pretrained.view if self.encoder_run is None else self.encoder_run.view

    @cached_property
    def network(self) -> SiameseNetwork:
        """The encoder, with an empty projector if it is of timm or torchvision; it must be the one that it was then."""
        if self.encoder_run is not None:
            network = self.encoder_run.network
        else:
            network = SiameseNetwork(Encoder(self._pretrained.backbone, nn.Identity()), momentum=False).eval()
        digest = network_digest(network.momentum_encoder or network.encoder, self.view)
        if self.encoder_record is not None and self.encoder_record.get("digest") not in (None, digest):
            raise InputError(
                f"The encoder {self.encoder_name} has changed since {self.given} was clustered with it; restore the "
                "earlier one, or cluster again."
            )
        return network

    @cached_property
    def mixture(self) -> VonMisesFisherMixture:
        """The clusters."""
        return load_clustered(self.mixture_file, self.given, self.summary)

    @cached_property
    def groups(self) -> Groups | None:
        """The groups; those of Gaussian clusters can be had, too."""
        is_gaussian = self.summary.family == "gaussian"
        return GaussianMixture.load(self.mixture_file).groups_ if is_gaussian else super().groups

    def _found(self, data: str | None, reading: DataConfig) -> RunImages:
        if self.table is None:
            return super()._found(data, reading)
        return find_rows([self.ids, *path_columns(self.assignments)], self.table, data, reading)

    @cached_property
    def embeddings(self) -> np.ndarray:
        """What was clustered; the rows of a table are read from it again."""
        if self.table is None or self.has_embeddings:
            return super().embeddings
        rows_ND = table_again(self.summary, self.given)
        if len(rows_ND) != self.n_images:
            raise StoredFileError(
                f"{self.path / files.ASSIGNMENTS} has {self.n_images:,} rows, but the table has {len(rows_ND):,}; "
                "cluster the table again."
            )
        return rows_ND


def _how_to_cluster(path: Path) -> str:
    """How a run is made of images or a table that were given in its place."""
    return f", or make one with: siammm cluster {shlex.quote(printable(path))}"
