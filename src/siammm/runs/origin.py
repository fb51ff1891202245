"""How a run came about, by what its folder says: settings, facts, measurements. Networks and clusters stay unopened."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from siammm.core.progress import Progress, silent
from siammm.core.text import printable, shown
from siammm.data.inventory import Inventory
from siammm.data.view_settings import ViewSettings
from siammm.learn import checkpoint
from siammm.learn.start import NO_WEIGHTS
from siammm.runs import files, records
from siammm.runs.network_file import read_header
from siammm.settings.stored import as_plain
from siammm.settings.training import ClusteringConfig, TrainConfig


class RunOrigin:
    """The part of ``Run`` that asks neither its networks nor its clusters."""

    def __init__(self, given: str | Path, *, device: torch.device | str = "cpu", progress: Progress = silent) -> None:
        self.given, self.path = shown(given), Path(given).expanduser()
        """The run as the user named it, for messages, and its folder."""
        self.device, self._progress = torch.device(device), progress

    @property
    def name(self) -> str:
        """The name of the folder."""
        return printable(self.path.resolve().name)

    @cached_property
    def config(self) -> TrainConfig:
        """The settings of the training."""
        return self._stored[0] if self._has_own_config else self._header[0]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings of the command that wrote it, as JSON holds them."""
        return as_plain(self.config)

    @cached_property
    def merging(self) -> ClusteringConfig:
        """How clusters were merged, in the words of the settings of training, whichever command wrote the run."""
        return self.config.clustering

    @cached_property
    def backbone(self) -> str:
        """The name of the network; empty where a table was clustered."""
        return self.config.network.backbone

    @cached_property
    def started_from(self) -> str | None:
        """The weights that its training started from; None for random ones, and where nothing was trained."""
        weights = self.config.network.weights
        return None if weights == NO_WEIGHTS else printable(weights)

    @cached_property
    def method(self) -> str:
        """How it came about: a method of training, or clustering alone."""
        return self.config.method

    @cached_property
    def epochs(self) -> int:
        """Epochs of training; 0 where there was none."""
        return self.config.optimisation.epochs

    @cached_property
    def random_state(self) -> int:
        """The seed of everything random."""
        return self.config.run.random_state

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What training or clustering noted besides its settings, such as versions; empty where it kept none."""
        return self._stored[1] if self._has_own_config else {}

    @cached_property
    def data(self) -> str | None:
        """Its images: those that it was trained on, or that were clustered; None if the folder does not say."""
        return self.facts.get("data_path", self.config.data) if self._has_own_config else None

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of these images."""
        return self.facts.get("fingerprint")

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """What was measured, one row per epoch."""
        return records.read_metrics(self.path)

    @cached_property
    def merges(self) -> dict[str, Any]:
        """The tree of merges; empty if the run kept none."""
        return records.read_merges(self.path)

    @cached_property
    def n_set_aside(self) -> int:
        """Images that could not be read."""
        return records.count_set_aside(self.path)

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
        return records.read_config(self.path)

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
