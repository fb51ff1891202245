"""What protocols are given: the subject, the images that teach and those that test, and their features when asked.

Features are computed at the first request and kept, so that protocols share one pass over the images.

Legend:  N images, D features, E dimensions of the embedding that is clustered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from siammm.core.errors import InputError
from siammm.data.loader import open_loader
from siammm.data.source import Source
from siammm.runs import subject as subjects
from siammm.runs.subject import ImageSubject, Subject, TableSubject
from siammm.settings.training import DataConfig

Progress = Callable[[str, int, int], None]
"""What is being done, how far it is, and how far it goes."""


def silent(what: str, done: int, total: int) -> None:
    """Tells nobody."""


@dataclass(frozen=True)
class Features:
    """Rows for the images that could be read."""

    row_ND: Tensor
    """Features, as the backbone leaves them."""
    label_N: Tensor
    """Their labels, on the same device."""
    kept_N: np.ndarray
    """The number of each in its part: some images cannot be read."""
    embedding_NE: Tensor | None = None
    """What the run's mixture is of, where there is one."""

    @property
    def labels(self) -> np.ndarray:
        """The labels on the host."""
        return self.label_N.cpu().numpy()


@dataclass
class Part:
    """Images with labels from 0, the same numbers in all parts; or rows of a table in their place."""

    name: str
    """For messages and progress: what the images are for."""
    labels: np.ndarray
    source: Source | None = None
    rows: np.ndarray | None = None
    targets: np.ndarray | None = None
    """For images of several classes each: N x C, 1 there, 0 not there, -1 not counted; the labels then mean nothing."""
    class_names: list[str] | None = None
    """What the columns of the targets are called."""
    table: str | None = None
    """The file that rows are of."""
    n_unlabelled: int = 0
    """Rows of a table that take no part because they have no label."""
    _features: Features | None = field(default=None, repr=False)


@dataclass
class Measured:
    """A subject with the parts it is measured on."""

    subject: Subject
    train: Part
    test: Part
    class_names: list[str]
    device: torch.device
    reading: DataConfig = field(default_factory=DataConfig)
    progress: Progress = silent
    transfer: tuple[Part, Part] | None = None
    """Another labelled set: what teaches and what tests."""
    set_aside: dict[str, dict[str, str]] = field(default_factory=dict)
    """Images that could not be read, with the reason, by the name of the part."""

    @property
    def n_classes(self) -> int:
        """Classes of the images that teach."""
        return len(self.class_names)

    @property
    def images(self) -> ImageSubject:
        """The subject, which a protocol that needs an encoder may rely on."""
        assert isinstance(self.subject, ImageSubject), "protocols that need images are refused for tables"
        return self.subject

    def features(self, part: Part) -> Features:
        """The features of a part, computed once."""
        if part._features is None:
            part._features = self._from_table(part) if isinstance(self.subject, TableSubject) else self._encoded(part)
        return part._features

    def _from_table(self, part: Part) -> Features:
        assert part.rows is not None
        row_ND = torch.from_numpy(np.array(part.rows, dtype=np.float32))
        bad = int((~row_ND.isfinite()).any(dim=1).sum())
        if bad:
            raise InputError(
                f"{bad} of the {len(row_ND)} rows of the {part.name} embeddings hold NaN or infinity; leave them out."
            )
        label_N = torch.from_numpy(part.labels).to(self.device)
        return Features(row_ND.to(self.device), label_N, np.arange(len(row_ND)))

    def _encoded(self, part: Part) -> Features:
        assert part.source is not None
        subject = self.images
        loader = open_loader(
            part.source,
            (subject.view, subject.view),
            self.device,
            kind=self.reading.loader,
            seed=0,
            workers=self.reading.workers,
            limit=self.reading.max_bad_images,
            progress=lambda done, total: self.progress(f"reading {part.name} images", done, total),
        )
        try:
            if len(loader.set_aside):
                self.set_aside[part.name] = dict(loader.set_aside.reasons)
            row_ND, embedding_NE = subjects.features(
                subject,
                loader,
                embeddings=subject.mixture is not None,
                progress=lambda done, total: self.progress(f"encoding {part.name} images", done, total),
            )
            kept_N = loader.sample_N.numpy()
        finally:
            loader.close()
        if not bool(row_ND.isfinite().all()):
            raise InputError(f"{subject.name} makes NaN or infinity of some images; its weights are damaged.")
        return Features(row_ND, torch.from_numpy(part.labels[kept_N]).to(self.device), kept_N, embedding_NE)
