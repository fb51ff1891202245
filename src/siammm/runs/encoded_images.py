"""One pass of images through a network: rows on the disk, and the cluster and group of each image.

Rows go to a file as they are made, so that memory holds one batch of them, however many images there are.

Legend:  N images, B images of a batch, D columns of a row, E dimensions of the embedding that is clustered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from siammm.core.errors import InputError
from siammm.core.progress import Progress, silent
from siammm.data.array_files import npy_header
from siammm.data.loader import Loader
from siammm.learn.encode import encode_batches
from siammm.mixture.estimator import VonMisesFisherMixture


@dataclass(frozen=True, kw_only=True)
class EncodedImages:
    """One row for each image that could be read, in the order of the source."""

    row_ND: np.ndarray
    """float32, mapped read-only from the file that the pass wrote."""
    cluster_N: np.ndarray | None = None
    """int32; None without a mixture, as the next two."""
    probability_N: np.ndarray | None = None
    """float32: the share of the image that its cluster has."""
    log_density_N: np.ndarray | None = None
    """float64: under the whole mixture."""
    group_N: np.ndarray | None = None
    """int32; None also if the mixture knows no groups."""
    group_probability_N: np.ndarray | None = None
    """float32: the probability of that group."""


def encode_to_file(
    rows: Callable[[Tensor], tuple[Tensor, Tensor | None]],
    loader: Loader,
    path: Path,
    *,
    mixture: VonMisesFisherMixture | None = None,
    resume: bool = False,
    progress: Progress = silent,
) -> EncodedImages:
    """Show all images to a network, and write its rows to ``path`` as a ``.npy`` file.

    ``rows`` makes of a batch the rows to write, and the unit embeddings that ``mixture`` is of. Bytes are appended and
    not mapped for writing: a full disk is then an error, where a map would end the process. With ``resume`` the rows
    that ``path`` has are those of the same images by the same network, and only the others are made; without a mixture.
    """
    assert mixture is None or not resume, "the clusters of earlier rows are not kept"
    if not loader.n_images:
        raise InputError(f"{loader.source.name} has no images that can be read; give another set.")
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    groups, group_parts = None if mixture is None else mixture.groups_, list[tuple[np.ndarray, np.ndarray]]()
    done, size = _rows_there(path, loader) if resume else (0, 0)
    with path.open("r+b" if done else "wb") as file:
        file.truncate(size)
        file.seek(size)
        progress("images", done, loader.n_images)
        for first, (row_BD, embedding_BE) in encode_batches(rows, loader, first=done):
            if first == 0:
                shape = (loader.n_images, row_BD.shape[1])
                np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
            file.write(row_BD.float().cpu().contiguous().numpy().astype("<f4", copy=False).tobytes())
            file.flush()  # what is interrupted keeps its rows
            if mixture is not None and embedding_BE is not None:
                parts.append(mixture.assign(embedding_BE))
                if groups is not None:
                    group_parts.append(groups.assign(embedding_BE, *parts[-1][:2]))
            progress("images", first + len(row_BD), loader.n_images)
    row_ND = np.lib.format.open_memmap(path, mode="r")
    if not parts:
        return EncodedImages(row_ND=row_ND)
    cluster_N, probability_N, log_density_N = (torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True))
    return EncodedImages(
        row_ND=row_ND,
        cluster_N=cluster_N.astype(np.int32),
        probability_N=probability_N.astype(np.float32),
        log_density_N=log_density_N.astype(np.float64),
        group_N=np.concatenate([group for group, _ in group_parts]).astype(np.int32) if group_parts else None,
        group_probability_N=np.concatenate([share for _, share in group_parts]) if group_parts else None,
    )


def _rows_there(path: Path, loader: Loader) -> tuple[int, int]:
    """How many rows an earlier pass has left, in whole batches, and the size of the file with these."""
    try:
        with path.open("rb") as file:
            (n, width), dtype = npy_header(file, str(path))
            start, size = file.tell(), file.seek(0, 2)
    except (OSError, ValueError):
        return 0, 0
    if n != loader.n_images or dtype != np.dtype("<f4"):
        return 0, 0
    done = min(n, (size - start) // (4 * width))
    if done < n:  # so that the batches are those of a pass that was never interrupted
        done -= done % loader.clean_batch_size
    return (done, start + 4 * width * done) if done else (0, 0)
