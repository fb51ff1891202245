"""What is evaluated: a model, as ``runs.models`` opens it, or a table of embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from siammm.core.errors import InputError
from siammm.data.embedding_table import EmbeddingTable
from siammm.data.embeddings import SUFFIXES, read_embeddings
from siammm.runs.models import Model, open_model
from siammm.runs.pretrained import EncoderChoice, is_foreign


@dataclass(frozen=True, kw_only=True)
class TableSubject:
    """Embeddings that somebody made; there is no encoder to show other images to."""

    name: str
    table: EmbeddingTable
    record: dict[str, Any]
    """What the evaluation says about it."""


Subject = TableSubject | Model


def open_subject(
    given: str,
    *,
    encoder: EncoderChoice = "online",
    image_size: int | None = None,
    key: str | None = None,
    label_column: str | None = None,
    device: torch.device | str = "cpu",
) -> Subject:
    """Open what is to be evaluated; ``key`` and ``label_column`` are for tables, the others for models."""
    path = Path(given).expanduser()
    if is_foreign(given) or path.is_dir():
        return open_model(given, encoder=encoder, image_size=image_size, device=device)
    if path.suffix.lower() in SUFFIXES:
        table = read_embeddings(path, key=key, label_column=label_column)
        n, d = table.embeddings.shape
        return TableSubject(
            name=given, table=table, record={"kind": "embeddings", "name": given, "n_samples": n, "n_features": d}
        )
    what = "cannot be evaluated" if path.exists() else "does not exist"
    raise InputError(
        f"{given} {what}; give a run folder, timm:MODEL, timm:MODEL:WEIGHTS, torchvision:MODEL:WEIGHTS, lite, or a "
        f"table of embeddings ({', '.join(SUFFIXES)})."
    )
