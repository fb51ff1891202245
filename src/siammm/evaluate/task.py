"""What a protocol works on: an encoder or a table of embeddings, the training set and the test set, and their features.

Features are computed when they are first needed and kept, so that protocols share one pass over the images.

Legend:  N images, D features, E dimensions of the embedding that is clustered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from siammm.core.errors import InputError
from siammm.data.source import Source
from siammm.evaluate.subject import Subject, TableSubject
from siammm.evaluate.training import LabelledSource
from siammm.metrics.labels import matrix
from siammm.runs import models
from siammm.runs.images import image_loader
from siammm.runs.models import Model
from siammm.settings.training import DataConfig

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and the total."""


@dataclass(frozen=True)
class Features:
    """Features of the images that could be read."""

    row_ND: Tensor
    """The backbone's output."""
    label_N: Tensor
    """Labels, on the same device."""
    kept_N: np.ndarray
    """The position of each image in its set: some cannot be read."""
    embedding_NE: Tensor | None = None
    """The embeddings that the run's mixture clusters, where there is one."""

    @property
    def labels(self) -> np.ndarray:
        """The labels as an array."""
        return self.label_N.cpu().numpy()


@dataclass
class LabelledSet:
    """Images, or rows of a table, with labels from 0 that mean the same in all sets of a task."""

    name: str
    """What the images are for: used in messages and progress."""
    labels: np.ndarray
    source: Source | None = None
    rows: np.ndarray | None = None
    targets: np.ndarray | None = None
    """Where an image has several classes: N x C, 1 there, 0 not there, -1 ignored; the labels then mean nothing."""
    class_names: list[str] | None = None
    """The names of the targets' columns."""
    table: str | None = None
    """The file that the rows come from."""
    n_unlabelled: int = 0
    """Rows of a table that are left out because they have no label."""
    _features: Features | None = field(default=None, repr=False)

    @property
    def images(self) -> LabelledSource:
        """The images and their labels."""
        assert self.source is not None, "protocols that need images are refused for tables"
        return self.source, self.labels


@dataclass
class Task:
    """An encoder or table, with the sets that it is measured on."""

    subject: Subject
    train: LabelledSet
    test: LabelledSet
    class_names: list[str]
    device: torch.device
    data: dict[str, Any]
    """What the evaluation records about the sets."""
    test_images: dict[str, Any]
    """What it records about whether the test images were seen in training."""
    reading: DataConfig = field(default_factory=DataConfig)
    progress: Progress = lambda what, done, total: None
    transfer: tuple[LabelledSet, LabelledSet] | None = None
    """The training set and the test set of another data set."""
    set_aside: dict[str, dict[str, str]] = field(default_factory=dict)
    """Images that could not be read, with the reason, by the name of the set."""

    @property
    def n_classes(self) -> int:
        """Classes of the training images."""
        return len(self.class_names)

    @property
    def encoder(self) -> Model:
        """The subject, for protocols that need an encoder."""
        assert isinstance(self.subject, Model), "protocols that need images are refused for tables"
        return self.subject

    def features(self, part: LabelledSet) -> Features:
        """The features of a set, computed once."""
        if part._features is None:
            part._features = self._from_table(part) if isinstance(self.subject, TableSubject) else self._encoded(part)
        return part._features

    def _from_table(self, part: LabelledSet) -> Features:
        assert part.rows is not None
        row_ND = matrix(f"The {part.name} embeddings", np.array(part.rows, dtype=np.float32)).to(self.device)
        return Features(row_ND, torch.from_numpy(part.labels).to(self.device), np.arange(len(row_ND)))

    def _encoded(self, part: LabelledSet) -> Features:
        assert part.source is not None
        subject = self.encoder
        reading = f"reading {part.name} images"
        loader = image_loader(
            part.source, subject.view, self.reading, self.device, progress=self.progress, what=reading
        )
        try:
            if len(loader.set_aside):
                self.set_aside[part.name] = dict(loader.set_aside.reasons)
            row_ND, embedding_NE = models.features(
                subject,
                loader,
                progress=lambda done, total: self.progress(f"encoding {part.name} images", done, total),
            )
            kept_N = loader.sample_N.numpy()
        finally:
            loader.close()
        if not bool(row_ND.isfinite().all()):
            raise InputError(f"{subject.name} gives NaN or infinity for some images; its weights are damaged.")
        return Features(row_ND, torch.from_numpy(part.labels[kept_N]).to(self.device), kept_N, embedding_NE)
