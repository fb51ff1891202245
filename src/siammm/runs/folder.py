"""The run folder: everything that training leaves, readable by people and by programs.

config.json           the settings, the data's fingerprint, versions
metrics.jsonl         one line an epoch
tensorboard/          the same, where tensorboard is installed
checkpoints/          what a stopped run goes on from
set_aside.json        images that could not be read, with reasons
mixture.safetensors   the clusters
encoder.safetensors   the networks
assignments.parquet   the cluster of every image
embeddings.npy        what was clustered: float16, of unit length, one row for each of assignments.parquet
merges.json           the tree of merges, the node of each cluster in it, and K after each epoch
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from siammm.core import files
from siammm.core.errors import InputError, StoredFileError
from siammm.core.files import write_text
from siammm.core.folders import check_new_folder
from siammm.data.decode import SetAside
from siammm.learn import checkpoint
from siammm.settings.stored import as_plain, from_plain
from siammm.settings.training import TrainConfig

CONFIG, METRICS, CHECKPOINTS = "config.json", "metrics.jsonl", "checkpoints"
MIXTURE, ENCODER, ASSIGNMENTS, MERGES = (
    "mixture.safetensors",
    "encoder.safetensors",
    "assignments.parquet",
    "merges.json",
)
EMBEDDINGS = "embeddings.npy"
SET_ASIDE, TENSORBOARD = "set_aside.json", "tensorboard"
NAMES = frozenset(
    {CONFIG, METRICS, CHECKPOINTS, MIXTURE, ENCODER, ASSIGNMENTS, EMBEDDINGS, MERGES, SET_ASIDE, TENSORBOARD}
    | {"losses.svg", "clusters.svg"}  # of earlier versions
)


class RunFolder:
    """The files of one run, written by the first process: a ``Recorder`` of ``learn.observers``."""

    def __init__(self, path: Path, *, tensorboard: bool = True) -> None:
        self.path, self.tensorboard = path, tensorboard
        self._board: Any = None
        self._new: tuple[TrainConfig, dict[str, Any]] | None = None

    @classmethod
    def planned(cls, path: Path, config: TrainConfig, facts: dict[str, Any]) -> RunFolder:
        """A new run, whose folder is made when training begins: a wrong setting must not cost an earlier run."""
        check_new_folder(path, overwrite=config.overwrite, ours=NAMES)
        folder = cls(path, tensorboard=config.run.tensorboard)
        folder._new = (config, facts)
        return folder

    @classmethod
    def create(cls, path: Path, config: TrainConfig, facts: dict[str, Any]) -> RunFolder:
        """A new run: its folder with its settings. An earlier run is replaced only if the settings say so."""
        folder = cls.planned(path, config, facts)
        folder._make()
        return folder

    def begin(self, set_aside: SetAside) -> None:
        """Make the folder of a new run, and list the images that could not be read."""
        self._make()
        if len(set_aside):
            set_aside.write(self.path)

    def _make(self) -> None:
        if self._new is None:
            return
        (config, facts), self._new, path = self._new, None, self.path
        try:
            # The folder itself stays: it may be a link, or a volume that cannot be removed.
            for name in NAMES if path.exists() else ():
                earlier = path / name
                if earlier.is_dir() and not earlier.is_symlink():
                    shutil.rmtree(earlier)
                else:
                    earlier.unlink(missing_ok=True)
            path.mkdir(parents=True, exist_ok=True)
            write_text(path / CONFIG, json.dumps({"settings": as_plain(config), **facts}, indent=2) + "\n")
        except OSError as error:
            raise unwritable(path, error) from error

    @classmethod
    def open(cls, path: Path) -> tuple[RunFolder, TrainConfig, dict[str, Any]]:
        """A run that was begun before: its folder, settings and facts."""
        file = path / CONFIG
        if not file.is_file():
            raise InputError(
                f"{path} is not a run folder: it has no {CONFIG}; give the folder that siammm train wrote."
            )
        try:
            facts = dict(json.loads(file.read_text(encoding="utf-8")))
            settings = facts.pop("settings")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoredFileError(f"{file} cannot be read ({error}); start the run anew.") from error
        return cls(path), from_plain(settings, file), facts

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / CHECKPOINTS

    def metrics(self) -> list[dict[str, Any]]:
        """What was measured so far, one entry an epoch."""
        file = self.path / METRICS
        if not file.exists():
            return []
        rows: list[dict[str, Any]] = []
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:  # a line that was being written when the machine went down
                break
        return rows

    def truncate_metrics(self, epochs: int) -> list[dict[str, Any]]:
        """Forget the metrics after so many epochs, from where the run continues; the rows that are left."""
        rows = [row for row in self.metrics() if row["epoch"] <= epochs]
        try:
            write_text(self.path / METRICS, "".join(json.dumps(row) + "\n" for row in rows))
        except OSError as error:
            raise unwritable(self.path, error) from error
        return rows

    def save_checkpoint(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Keep what the run can be resumed from."""
        checkpoint.save(self.checkpoints, tensors, facts)

    def add_metrics(self, row: dict[str, Any]) -> None:
        """Add the metrics of an epoch."""
        try:
            with (self.path / METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise unwritable(self.path, error) from error
        board = self._tensorboard(row["epoch"]) if self.tensorboard else None
        if board is not None:
            for name, value in row.items():
                if name != "epoch" and isinstance(value, (int, float)):
                    board.add_scalar(name, value, row["epoch"])
            board.flush()

    def close(self) -> None:
        """Let open files go."""
        if self._board:
            self._board.close()
        self._board = None

    def _tensorboard(self, epoch: int) -> Any:
        if self._board is None:
            try:
                from torch.utils.tensorboard import SummaryWriter  # pyright: ignore[reportPrivateImportUsage]
            except ImportError:
                self._board = False  # not installed, and not asked for again
            else:
                self._board = SummaryWriter(str(self.path / TENSORBOARD), purge_step=epoch)
        return self._board or None


def unwritable(path: Path, error: Exception) -> InputError:
    """The error for a run folder that cannot be written."""
    return files.unwritable(f"The run folder {path}", error, "make room, or choose another --output")
