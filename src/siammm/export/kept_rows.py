"""Embeddings of images that outlive an interruption: they are kept in a folder until the result is written.

What is there is used again only if it is of the same images, by the same network, shown at the same size.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from siammm.core.files import unwritable, write_text
from siammm.core.progress import Progress, silent
from siammm.data.inventory import stamp
from siammm.data.source import Source
from siammm.export.rows import encode_to_file
from siammm.export.tables import ImageTable, image_table
from siammm.runs import files
from siammm.runs.images import image_loader
from siammm.runs.models import Model
from siammm.runs.network_file import network_digest
from siammm.settings.training import DataConfig


@dataclass(frozen=True, kw_only=True)
class Embedded:
    """The embeddings of a set of images."""

    table: ImageTable
    fingerprint: str
    """Of the images."""
    network: str
    """The digest of the network that encoded them, and of how it was shown them."""
    set_aside: dict[str, str]
    """Images that could not be read, with the reason."""


def embed_and_keep(
    model: Model,
    source: Source,
    folder: Path,
    reading: DataConfig,
    device: torch.device,
    *,
    progress: Progress = silent,
) -> Embedded:
    """Encode all images, and keep in ``folder`` what is done; what an interrupted call has left there is used."""
    progress("opening", 0, 0)
    fingerprint = source.fingerprint()
    network = network_digest(model.backbone if model.run is None else model.run.embedding_encoder, model.view)
    facts = {"format": 1, "images": fingerprint, "files": stamp(source), "network": network}
    earlier = _read(folder / files.ROWS_FACTS)
    goes_on = all(earlier.get(name) == value for name, value in facts.items())
    known_bad = earlier.get("set_aside") if goes_on else None
    loader = image_loader(source, model.view, reading, device, known_bad=known_bad, progress=progress)
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not goes_on:
                # First the rows: others must never lie beside these facts.
                (folder / files.ROWS).unlink(missing_ok=True)
                set_aside = dict(loader.set_aside.reasons)
                write_text(folder / files.ROWS_FACTS, json.dumps(facts | {"set_aside": set_aside}))
            rows = model.features if model.run is None else model.run.embedding_rows
            found = encode_to_file(rows, loader, folder / files.ROWS, resume=True, progress=progress)
        except OSError as error:
            raise unwritable(f"The folder {folder}", error, "choose another --output or make room") from error
        table, set_aside = image_table(loader, found), dict(loader.set_aside.reasons)
    finally:
        loader.close()
    return Embedded(table=table, fingerprint=fingerprint, network=network, set_aside=set_aside)


def forget(folder: Path) -> None:
    """Remove what was kept, and the folder if there is nothing else in it."""
    with contextlib.suppress(OSError):
        for name in (files.ROWS, files.ROWS_FACTS):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def rows_kept(folder: Path) -> bool:
    """Whether there are rows that the next call may use."""
    return (folder / files.ROWS).is_file()


def _read(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}
