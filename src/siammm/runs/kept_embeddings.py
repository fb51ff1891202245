"""The embeddings that a run clustered: mapped from the file that it kept, or computed again from its images."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from siammm.core.errors import InputError, StoredFileError
from siammm.core.progress import Progress
from siammm.core.reading import open_regular
from siammm.core.text import one_line, shown
from siammm.data.array_files import map_npy, npy_header
from siammm.data.subset import SourceSubset
from siammm.data.view_settings import ViewSettings
from siammm.learn.encode import encode
from siammm.learn.networks import SiameseNetwork
from siammm.runs.images import RunImages, image_loader


def map_embeddings(path: Path, shape: tuple[int, int]) -> np.ndarray:
    """Map the file, which must have this shape."""
    try:
        with open_regular(path) as file:
            npy_header(file, str(path))
        embeddings = map_npy(path)
    except (OSError, StoredFileError) as error:
        raise StoredFileError(f"{path} cannot be read ({one_line(error)}); remove it to embed again.") from error
    if embeddings.shape != shape or embeddings.dtype.kind != "f":
        found = embeddings.shape
        raise StoredFileError(f"{path} has the shape {found}, but the run has {shape}; remove it to embed again.")
    return embeddings


def check_all_there(given: str, images: RunImages) -> None:
    """Refuse to compute embeddings without every image; ``given`` is the run's name."""
    if images.source is None or not images.is_whole:
        raise InputError(
            f"The run {given} kept no embeddings, and its images are no longer all in {shown(images.data)}; say with "
            "--data where they are."
        )


def encode_again(
    given: str, images: RunImages, network: SiameseNetwork, view: ViewSettings, progress: Progress
) -> np.ndarray:
    """The embeddings of all images of the run ``given``, of unit length, in float16."""
    assert images.source is not None
    subset, device = SourceSubset(images.source, images.position_N), next(network.parameters()).device
    try:
        # No image may be unreadable: a row that is missing would shift all others.
        loader = image_loader(
            subset, view, images.reading, device, limit=0.0, progress=progress, what="reading the images again"
        )
    except InputError as error:
        raise InputError(
            f"The run {given} kept no embeddings, and not all of its images can be read again "
            f"({one_line(error).partition('; remove them')[0]}); put them back, or say with --data where they are."
        ) from error
    try:
        progress("embedding the images again", 0, 0)
        return encode(network, loader, "embeddings").cpu().numpy().astype(np.float16)
    finally:
        loader.close()
