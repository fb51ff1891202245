"""Embeddings of images for a clustering that is not written yet: kept in a folder, they outlive an interruption.

What is there, or in an earlier result, is used again only if it is of the same images, by the same network, shown at
the same size.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from siammm.core.files import unwritable, write_text
from siammm.core.progress import Progress, silent
from siammm.data.inventory import stamp
from siammm.data.source import Source
from siammm.runs import files
from siammm.runs.encoded_images import encode_to_file
from siammm.runs.image_table import ImageTable, image_table
from siammm.runs.images import image_loader
from siammm.runs.models import Model
from siammm.runs.network_file import network_digest
from siammm.runs.summary import facts_of_images
from siammm.settings.training import DataConfig

# The column of the embeddings in the table of an earlier result, and how many of them are copied at once.
_COLUMN, _ROWS_AT_ONCE = "embedding", 4096
_FORMAT = {"format": 1}


@dataclass(frozen=True, kw_only=True)
class Embedded:
    """The embeddings of a set of images."""

    table: ImageTable
    facts: dict[str, Any]
    """By which they are known again: the images, their files with size and time, the network, what was set aside."""
    earlier: Path | None
    """The earlier result whose embeddings these are, if they were not made anew."""


def embed_and_keep(
    model: Model,
    source: Source,
    folder: Path,
    reading: DataConfig,
    device: torch.device,
    *,
    earlier: Sequence[Path] = (),
    progress: Progress = silent,
) -> Embedded:
    """Encode all images, and keep in ``folder`` what is done; what an interrupted call has left there is used.

    So are the embeddings of the first of these ``earlier`` results of ``siammm cluster`` that has them.
    """
    progress("opening", 0, 0)
    network = network_digest(model.backbone if model.run is None else model.run.embedding_encoder, model.view)
    facts: dict[str, Any] = {"images": source.fingerprint(), "files": stamp(source), "network": network}
    kept, result = _read(folder / files.ROWS_FACTS), None
    goes_on = (facts | _FORMAT).items() <= kept.items()
    if not goes_on:
        noted = ((one, facts_of_images(one)) for one in earlier)
        result, kept = next((pair for pair in noted if facts.items() <= pair[1].items()), (None, {}))
    known_bad = kept.get("set_aside")
    loader = image_loader(source, model.view, reading, device, known_bad=known_bad, progress=progress)
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not goes_on:
                # First the rows: others must never lie beside these facts.
                (folder / files.ROWS).unlink(missing_ok=True)
                set_aside = dict(loader.set_aside.reasons)
                write_text(folder / files.ROWS_FACTS, json.dumps(_FORMAT | facts | {"set_aside": set_aside}))
            if result is not None:
                result = _copy_rows(result / files.IMAGES_TABLE, folder / files.ROWS, result)
            rows = model.features if model.run is None else model.run.embedding_rows
            found = encode_to_file(rows, loader, folder / files.ROWS, resume=True, progress=progress)
        except OSError as error:
            raise unwritable(f"The folder {folder}", error, "choose another --output or make room") from error
        table, facts["set_aside"] = image_table(loader, found), dict(loader.set_aside.reasons)
    finally:
        loader.close()
    return Embedded(table=table, facts=facts, earlier=result)


def forget(folder: Path) -> None:
    """Remove what was kept, and the folder if there is nothing else in it."""
    with contextlib.suppress(OSError):
        for name in (files.ROWS, files.ROWS_FACTS):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def rows_kept(folder: Path) -> bool:
    """Whether there are rows that the next call may use."""
    return (folder / files.ROWS).is_file()


def _copy_rows(table: Path, rows: Path, result: Path) -> Path | None:
    """Write the embeddings of a table as those that are kept; returns the result, or None if they cannot be read."""
    try:
        with pq.ParquetFile(table) as stored, rows.open("wb") as file:
            n, width = stored.metadata.num_rows, stored.schema_arrow.field(_COLUMN).type.list_size
            np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (n, width)})
            for batch in stored.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[_COLUMN]):
                values = batch.column(0).flatten().to_numpy(zero_copy_only=False)
                file.write(values.astype("<f4", copy=False).tobytes())
    except (pa.ArrowException, KeyError, AttributeError, ValueError, OSError):
        rows.unlink(missing_ok=True)  # they are made anew
        return None
    return result


def _read(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}
