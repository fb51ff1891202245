"""Whether data are images or a table of embeddings: by what is inside, from headers alone."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from siammm.core.errors import SiamMMError
from siammm.data import decode, tar_source
from siammm.data.array_files import npy_header, npz_headers, parquet_file
from siammm.data.embeddings import SUFFIXES, several_tables
from siammm.data.parquet_embeddings import is_vector
from siammm.data.table_source import is_image

# Files and folders among which an image is looked for, to say what a folder is that is no run.
_MOST_LOOKED_AT = 1000
_OF_IMAGES_ALONE = (*decode.SUFFIXES, ".tar", ".arrow", *tar_source.COMPRESSED_SUFFIXES)


def holds_images(data: str) -> bool:
    """Whether ``open_source`` is to read this, and not ``read_embeddings``.

    A file that holds both is a table. Of a table that cannot be read at all, its reader says so.
    """
    path = Path(os.path.expanduser(data))
    try:
        if not os.path.isfile(path):
            tables = several_tables(data)
            if tables is not None:
                return _parquet(tables[0])
            return os.path.isdir(path) or path.suffix.lower() not in SUFFIXES or _are_several(data)
        look = {".npy": _npy, ".npz": _npz, ".parquet": _parquet, ".pq": _parquet}.get(path.suffix.lower())
        return path.name.lower().endswith(_OF_IMAGES_ALONE) if look is None else look(path)
    except (SiamMMError, OSError, ValueError):
        return False


def is_data(path: Path) -> bool:
    """Whether this may be what somebody wants to cluster: a table or images, or a folder with an image near its top."""
    if path.is_file():
        return path.suffix.lower() in SUFFIXES or path.name.lower().endswith(_OF_IMAGES_ALONE)
    pending, n_seen = deque([path]), 0
    while pending and n_seen < _MOST_LOOKED_AT:
        with contextlib.suppress(OSError), os.scandir(pending.popleft()) as entries:
            for entry in itertools.islice(entries, _MOST_LOOKED_AT - n_seen):
                n_seen += 1
                if entry.is_dir():
                    pending.append(Path(entry.path))
                elif entry.name.lower().endswith(tuple(decode.SUFFIXES)):
                    return True
    return False


def _are_several(data: str) -> bool:
    """Whether this names a split of a folder, or several files at once."""
    return "::" in data or "*" in data or tar_source.has_range(data)


def _npy(path: Path) -> bool:
    with path.open("rb") as file:
        return _are_pixels(*npy_header(file, str(path)))


def _npz(path: Path) -> bool:
    headers = npz_headers(path).values()
    has_table = any(len(shape) == 2 and dtype.kind == "f" for shape, dtype in headers)
    return not has_table and any(_are_pixels(*header) for header in headers)


def _parquet(path: Path) -> bool:
    with parquet_file(path) as file:
        kinds = [field.type for field in file.schema_arrow]
    return not any(is_vector(kind) for kind in kinds) and any(is_image(kind) for kind in kinds)


def _are_pixels(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    return (dtype == np.uint8 and len(shape) in (3, 4)) or (dtype.kind == "f" and len(shape) == 4)
