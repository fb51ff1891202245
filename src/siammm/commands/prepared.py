"""A training that can begin or go on, where it is written, and what a run keeps of its images."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from siammm.data.sources import Source, from_anywhere
from siammm.learn.start import Start
from siammm.runs.writer import RunWriter
from siammm.settings.training import TrainConfig


@dataclass(frozen=True, kw_only=True)
class PreparedTraining:
    """A training that can begin or go on: everything has been checked that can be before images are read."""

    config: TrainConfig
    source: Source
    folder: RunWriter | None
    """Where it is written; the first process alone has one."""
    start: Start | None = None
    """The weights that a new training starts from; one that goes on has those of its checkpoint."""
    checkpoint: tuple[dict[str, torch.Tensor], dict[str, Any]] | None = None
    carry_over: bool = False
    notes: list[str] = field(default_factory=list)


def output_folder(config: TrainConfig) -> Path:
    """The run folder, by default named after the data."""
    if config.output is not None:
        return config.output
    name = re.sub(r"[^\w.-]+", "-", Path(str(config.data).replace("::", "-")).stem).strip("-.")
    return Path(f"{name or 'images'}-run")


def facts_of_images(source: Source, data: str) -> dict[str, Any]:
    """What a run keeps of its images."""
    facts = {"data_path": from_anywhere(data), "fingerprint": source.fingerprint()}
    return facts | {"n_images": len(source), "kind": source.kind}
