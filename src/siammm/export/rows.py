"""One pass of images through a network: rows on the disk, and the cluster of each image.

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
from siammm.data.loader import Loader
from siammm.learn.encode import encode_batches
from siammm.mixture import em
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


def encode_to_file(
    rows: Callable[[Tensor], tuple[Tensor, Tensor | None]],
    loader: Loader,
    path: Path,
    *,
    mixture: VonMisesFisherMixture | None = None,
    progress: Progress = silent,
) -> EncodedImages:
    """Show all images to a network, and write its rows to ``path`` as a ``.npy`` file.

    ``rows`` makes of a batch the rows to write, and the unit embeddings that ``mixture`` is of. Bytes are appended and
    not mapped for writing: a full disk is then an error, where a map would end the process.
    """
    if not loader.n_images:
        raise InputError(f"{loader.source.name} has no images that can be read; give another set.")
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    with path.open("wb") as file:
        for first, (row_BD, embedding_BE) in encode_batches(rows, loader):
            if first == 0:
                shape = (loader.n_images, row_BD.shape[1])
                np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
            file.write(row_BD.float().cpu().contiguous().numpy().astype("<f4", copy=False).tobytes())
            if mixture is not None and embedding_BE is not None:
                parts.append(assign(mixture, embedding_BE))
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
    )


@torch.no_grad()
def assign(mixture: VonMisesFisherMixture, embedding_BE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The cluster of each embedding, the share that it has, and the log density under the whole mixture."""
    samples, components = mixture._ready(embedding_BE)
    index_BH, weight_BH, _ = em.assignments(samples, components, mixture._assignment())
    return index_BH[:, 0], weight_BH[:, 0], em.log_likelihoods(samples, components)
