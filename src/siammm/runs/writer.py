"""Writes the folder of a run: its settings, then metrics and checkpoints as it trains, then what it found."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError
from torch import Tensor

from siammm.core.files import is_leftover, unwritable, write_text, written_whole
from siammm.core.folders import check_new_folder
from siammm.core.locks import FolderLock
from siammm.data.inventory import Inventory
from siammm.data.set_aside import SetAside
from siammm.learn import checkpoint
from siammm.learn.loop import Trained
from siammm.runs import files
from siammm.runs.assignments import assignments_table
from siammm.runs.network_file import save_network
from siammm.runs.records import read_metrics
from siammm.settings.stored import as_plain
from siammm.settings.training import TrainConfig


class RunWriter:
    """The ``Recorder`` of a training that is kept on disk; only one process has it."""

    def __init__(
        self,
        path: Path,
        *,
        tensorboard: bool = True,
        lock: FolderLock | None = None,
        inventory: Inventory | None = None,
    ) -> None:
        """``lock`` is the right to write, where others could; ``inventory`` the files to note when training begins."""
        self.path, self.tensorboard, self._lock, self._inventory = path, tensorboard, lock, inventory
        self._board: Any = None
        self._config: tuple[TrainConfig, dict[str, Any]] | None = None
        self._is_new = False

    @classmethod
    def planned(cls, path: Path, config: TrainConfig, facts: dict[str, Any], **more: Any) -> RunWriter:
        """A new run, whose folder is made when training begins: a wrong setting must not cost an earlier run.

        An earlier run is replaced only if the settings say so.
        """
        check_run_folder(path, overwrite=config.overwrite)
        writer = cls.continued(path, config, facts, **more)
        writer._is_new = True
        return writer

    @classmethod
    def continued(cls, path: Path, config: TrainConfig, facts: dict[str, Any], **more: Any) -> RunWriter:
        """A run that goes on, with these settings and facts on disk from when training begins."""
        writer = cls(path, tensorboard=config.run.tensorboard, **more)
        writer._config = (config, facts)
        return writer

    def begin(self, set_aside: SetAside) -> None:
        """Make the folder of a new run, and list its images and those that could not be read."""
        self._prepare()
        with self._writing():
            if self._inventory is not None:
                self._inventory.write(self.path / files.INVENTORY)
            if len(set_aside):
                set_aside.write(self.path / files.SET_ASIDE)

    def _prepare(self) -> None:
        if self._config is None:
            return
        (config, facts), self._config = self._config, None
        with self._writing():
            self._clear()
            self.path.mkdir(parents=True, exist_ok=True)
            write_text(self.path / files.CONFIG, json.dumps({"settings": as_plain(config), **facts}, indent=2) + "\n")

    def _clear(self) -> None:
        """Remove what an earlier run left, if this one is new, and what a process that was killed left half written."""
        # The folder itself stays: it may be a link, or a volume that cannot be removed.
        for earlier in list(self.path.iterdir()) if self.path.exists() else ():
            # What a person has made stays: it is not shown with other groups or images, but nothing else has it.
            is_old = self._is_new and earlier.name in files.RUN_NAMES - {files.GROUP_NAMES, files.SELECTIONS}
            if not is_old and not is_leftover(earlier.name, files.RUN_NAMES | {files.LOCK}):
                continue
            if earlier.is_dir() and not earlier.is_symlink():
                shutil.rmtree(earlier)
            else:
                earlier.unlink(missing_ok=True)
        self._is_new = False

    def add_metrics(self, row: dict[str, Any]) -> None:
        """Add the metrics of an epoch."""
        with self._writing(), (self.path / files.METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        board = self._tensorboard(row["epoch"]) if self.tensorboard else None
        if board is not None:
            for name, value in row.items():
                if name != "epoch" and isinstance(value, (int, float)):
                    board.add_scalar(name, value, row["epoch"])
            board.flush()

    def truncate_metrics(self, epochs: int) -> list[dict[str, Any]]:
        """Forget the metrics after so many epochs, where the run continues; the rows that are left."""
        rows = [row for row in read_metrics(self.path) if row["epoch"] <= epochs]
        with self._writing():
            write_text(self.path / files.METRICS, "".join(json.dumps(row) + "\n" for row in rows))
        return rows

    def save_checkpoint(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Keep what the run can be resumed from."""
        if self._lock is not None:
            self._lock.check_mine()
        checkpoint.save(self.path / files.CHECKPOINTS, tensors, facts)

    @property
    def has_checkpoint(self) -> bool:
        """Whether the run could be resumed if it stopped now."""
        return checkpoint.exists(self.path / files.CHECKPOINTS)

    def write_results(self, trained: Trained) -> None:
        """Write what training found; the metrics and checkpoints are there already.

        The encoder comes last: a run that has one is finished (``Run.open``), and all of it is of one training.
        """
        with self._writing():
            (self.path / files.ENCODER).unlink(missing_ok=True)
            if trained.mixture is not None:
                trained.mixture.save(self.path / files.MIXTURE)
                with written_whole(self.path / files.EMBEDDINGS) as scratch, scratch.open("wb") as file:
                    np.save(file, trained.embeddings.astype(np.float16))
                with written_whole(self.path / files.ASSIGNMENTS) as scratch:
                    pq.write_table(_assignments(trained), scratch)
                write_text(self.path / files.MERGES, json.dumps(_merges(trained)) + "\n")
            save_network(self.path / files.ENCODER, trained.network, trained.config, trained.clean_view)

    def close(self) -> None:
        """Let open files go."""
        if self._board:
            self._board.close()
        self._board = None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        if self._lock is not None:
            self._lock.check_mine()
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise unwritable(f"The run folder {self.path}", error, "make room, or choose another --output") from error

    def _tensorboard(self, epoch: int) -> Any:
        if self._board is None:
            try:
                from torch.utils.tensorboard import SummaryWriter  # pyright: ignore[reportPrivateImportUsage]
            except ImportError:
                self._board = False  # not installed, and not tried again
            else:
                self._board = SummaryWriter(str(self.path / "tensorboard"), purge_step=epoch)
        return self._board or None


def run_lock(path: Path, *, remedy: str, patience: bool = False) -> FolderLock:
    """The right to write into a run folder. Reading a run needs none."""
    return FolderLock(path, files.LOCK, remedy=remedy, patience=patience)


def check_run_folder(path: Path, *, overwrite: bool) -> None:
    """Refuse a folder that a new run may not be written to."""
    check_new_folder(path, overwrite=overwrite, ours=files.RUN_NAMES, passed_over=frozenset({files.LOCK}))


def _assignments(trained: Trained) -> pa.Table:
    assert trained.groups is not None, "a mixture has groups, if only of one cluster each"
    return assignments_table(
        ids=trained.ids,
        clusters=trained.clusters,
        groups=trained.group_labels,
        probability=trained.probability,
        group_probability=trained.group_probability,
        outlier_score=trained.outlier_score,
        labels=trained.label_values,
    )


def _merges(trained: Trained) -> dict[str, Any]:
    assert trained.mixture is not None
    merges = trained.mixture.merges_
    assert merges is not None, "training keeps the history of its merges, even if there were none"
    return {
        "linkage": merges.linkage.tolist(),
        "n_merges": merges.n_merges,
        "n_components": merges.n_components,
        "groups": trained.groups.label_K.tolist() if trained.groups is not None else None,
        "nodes": trained.merge_nodes,
        "n_clusters_by_epoch": [[row["epoch"], row["n_clusters"]] for row in trained.metrics if "n_clusters" in row],
    }
