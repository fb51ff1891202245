"""A run of ``siammm cluster``: what its summary says, and the rows that it clustered.

The encoder of such a run is not in its folder. The summary names it, with a digest by which it is known again.

Legend:  N images or rows, D dimensions, B rows of a part.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from siammm.core.errors import InputError, SiamMMError, StoredFileError
from siammm.core.text import one_line, shown
from siammm.data.array_files import check_fits
from siammm.data.embedding_table import PATH_KEYS
from siammm.data.embeddings import read_embeddings
from siammm.runs import files
from siammm.settings.stored import reading_from_plain
from siammm.settings.training import DataConfig

_ROWS_AT_ONCE = 32_768
# Nobody has more, and a list of so many names still fits into memory.
_MOST_CLUSTERS = 2**24


@dataclass(frozen=True, kw_only=True)
class Clustered:
    """What ``siammm cluster`` noted of its result, as far as anybody reads it."""

    data: str
    """The images, or the table of embeddings, as they are found from any folder."""
    fingerprint: str | None
    """Of the images or of the table."""
    n_samples: int
    n_dimensions: int
    n_clusters: int
    n_components: list[int]
    """Components after each round of merging, those at the start first; empty where none were merged."""
    n_merged: int | None
    """The clusters that merging ended with, where these were fewer than the groups and were replaced by finer ones."""
    encoder: dict[str, Any] | None
    """What is to be known of the encoder; None where a table was clustered."""
    n_set_aside: int
    """Images that could not be read."""
    settings: dict[str, Any]
    """All settings of the command, as JSON holds them."""
    reading: DataConfig
    versions: dict[str, Any]

    @property
    def encoder_name(self) -> str | None:
        """The encoder as the user named it."""
        return None if self.encoder is None else shown(self.encoder["name"])

    @property
    def sentence(self) -> str:
        """How the run came about, to begin a sentence with: it was clustered and not trained."""
        if self.encoder is None:
            return f"was clustered from the table of embeddings {shown(self.data)}, without an encoder"
        kind = "run" if self.encoder["kind"] == "run" else "pretrained encoder"
        return f"was clustered with the {kind} {self.encoder_name}, and not trained"

    @property
    def family(self) -> str:
        """The kind of its components."""
        return str(self.settings.get("family"))


def is_clustered(folder: Path) -> bool:
    """Whether ``siammm cluster`` wrote this folder."""
    return all((folder / name).is_file() for name in (files.SUMMARY, files.MIXTURE, files.ASSIGNMENTS))


def read_clustered(path: Path) -> Clustered:
    """Read the summary of a result."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        given, settings, encoder = stored["input"], stored["settings"], stored["input"].get("encoder")
        found = Clustered(
            data=given.get("path", given["file"]),
            fingerprint=given.get("fingerprint"),
            n_samples=int(given["n_samples"]),
            n_dimensions=int(given["n_dimensions"]),
            n_clusters=int(stored["n_components"]),
            n_components=[int(k) for k in stored.get("n_components_by_round") or []],
            n_merged=None if stored.get("n_merged") is None else int(stored["n_merged"]),
            encoder=encoder,
            n_set_aside=len(given.get("set_aside") or {}),
            settings=settings,
            reading=reading_from_plain(settings.get("reading") or {}, path),
            versions=dict(stored.get("versions") or {}),
        )
        texts = [found.data, *([] if encoder is None else [encoder["kind"], encoder["name"], encoder["backbone"]])]
        if not all(isinstance(text, str) for text in texts) or not isinstance(found.fingerprint, str | None):
            raise TypeError("a name is no text")
        if not 1 <= found.n_clusters <= _MOST_CLUSTERS:
            raise ValueError(f"n_components is {found.n_clusters}")
        if not isinstance(settings.get("random_state"), int):
            raise TypeError("random_state is no number")
    except StoredFileError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise StoredFileError(f"{path} cannot be read ({one_line(error)}); cluster again.") from error
    return found


def write_clustered(folder: Path, mixture: Any, summary: dict[str, Any], rows: np.ndarray | None = None) -> None:
    """Write a result, except for its assignments, into an existing folder.

    ``rows`` are the embeddings of images, of any length.
    """
    mixture.save(folder / files.MIXTURE)
    if rows is not None:
        with (folder / files.EMBEDDINGS).open("wb") as file:
            np.lib.format.write_array_header_1_0(
                file, {"descr": "<f2", "fortran_order": False, "shape": tuple(rows.shape)}
            )
            for unit_BD in _unit_parts(rows):
                file.write(unit_BD.astype("<f2", copy=False).tobytes())
    text = json.dumps(summary, indent=2, allow_nan=False, default=str)
    (folder / files.SUMMARY).write_text(text + "\n", encoding="utf-8")


def table_again(clustering: Clustered, given: str) -> np.ndarray:
    """The rows of the table that was clustered, of unit length, in float16; ``given`` is the run's name."""
    settings, place = clustering.settings, shown(clustering.data)
    keys: dict[str, Any] = {name: settings.get(name) for name in ("key", "id_column", "label_column")}
    remedy = "put it back, or cluster the table again"
    try:
        table = read_embeddings(clustering.data, **keys)
    except SiamMMError as error:
        reason = f"cannot be read ({one_line(error).partition(';')[0]})"
        raise InputError(f"The table that {given} was clustered from {reason}; {remedy}.") from error
    if clustering.fingerprint not in (None, table.fingerprint()):
        raise InputError(f"The table {place} has changed since {given} was clustered from it; {remedy}.")
    n, d = table.embeddings.shape
    check_fits(2 * n * d, f"The embeddings of {place}", "use a machine with more memory")
    unit_ND = np.empty((n, d), np.float16)
    start = 0
    for unit_BD in _unit_parts(table.embeddings):
        unit_ND[start : start + len(unit_BD)] = unit_BD
        start += len(unit_BD)
    return unit_ND


def path_columns(table: pa.Table) -> list[list[str | None]]:
    """The columns of a result that may hold the files of images."""
    named = [name for name in PATH_KEYS if name in table.column_names]
    return [table.column(name).to_pylist() for name in named if _is_text(table.schema.field(name).type)]


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _unit_parts(rows: np.ndarray) -> Iterator[np.ndarray]:
    """The rows in float16 and of unit length, a few thousand at a time; rows of zeros stay so."""
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part_BD = np.asarray(rows[start : start + _ROWS_AT_ONCE], dtype=np.float64)
        length_B1 = np.linalg.norm(part_BD, axis=1, keepdims=True)
        yield (part_BD / np.where(length_B1 > 0, length_B1, 1.0)).astype(np.float16)
