"""Whether data are images or a table of embeddings: by what is inside, from headers alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from siammm.core.errors import SiamMMError
from siammm.data import decode, tar_source
from siammm.data.array_files import npy_header, npz_headers, parquet_file
from siammm.data.embeddings import SUFFIXES, is_vector
from siammm.data.table_source import is_image

_OF_IMAGES_ALONE = (*decode.SUFFIXES, ".tar", ".arrow", *tar_source.COMPRESSED_SUFFIXES)


def holds_images(data: str) -> bool:
    """Whether ``open_source`` is to read this, and not ``read_embeddings``.

    A file that holds both is a table. Of a table that cannot be read at all, its reader says so.
    """
    path = Path(os.path.expanduser(data))
    try:
        if not os.path.isfile(path):
            return os.path.isdir(path) or path.suffix.lower() not in SUFFIXES or _are_several(data)
        look = {".npy": _npy, ".npz": _npz, ".parquet": _parquet, ".pq": _parquet}.get(path.suffix.lower())
        return path.name.lower().endswith(_OF_IMAGES_ALONE) if look is None else look(path)
    except (SiamMMError, OSError, ValueError):
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
