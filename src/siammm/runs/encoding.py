"""A run or a model, and one pass of images through it: rows on the disk, and the cluster of each image.

Rows go to a file as they are made, so that memory holds one batch of them, however many images there are.

Legend:  N images, B images of a batch, D columns of a row, E dimensions of the embedding that is clustered,
         H neighbours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from siammm.core.errors import InputError
from siammm.data.folder_source import FolderSource
from siammm.data.loader import Loader, open_loader
from siammm.data.source import Source
from siammm.data.sources import open_source
from siammm.data.view_settings import ViewSettings
from siammm.learn.networks import Encoder, SiameseNetwork
from siammm.mixture import em
from siammm.mixture.estimator import VonMisesFisherMixture
from siammm.runs import folder, results
from siammm.runs.folder import RunFolder
from siammm.runs.names import MIXTURE, NETWORKS
from siammm.settings.training import DataConfig, TrainConfig

What = Literal["embeddings", "features"]
Progress = Callable[[str, int, int], None]


# -- what is exported --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """What a run left that other tools can use."""

    name: str
    network: SiameseNetwork
    config: TrainConfig
    view: ViewSettings
    mixture: VonMisesFisherMixture | None
    """None for a run that trained without clusters."""
    data: str | None = None
    """The images that it was trained on."""
    fingerprint: str | None = None
    reading: DataConfig | None = None
    """How it read them."""
    n_images: int | None = None
    stored_embeddings: Path | None = None
    """What it clustered, rounded to float16, where it kept that."""

    @property
    def clustered(self) -> Encoder:
        """The encoder whose embeddings are clustered: the momentum encoder, or the only one."""
        return self.network.momentum_encoder or self.network.encoder

    def on(self, device: torch.device) -> FinishedRun:
        """The same with its networks on a device."""
        self.network.to(device).eval()
        if device.type == "cuda":
            self.network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        return self


def open_run(given: str | Path) -> FinishedRun:
    """What ``siammm train``, ``SiamMM.save``, ``save_pretrained`` or ``siammm export`` left in a folder."""
    path = Path(given).expanduser()
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise InputError(f"{given} {what}, but a run is a folder; give one that siammm train wrote.")
    if (path / NETWORKS).is_file():
        return _opened(given, path / NETWORKS, path / MIXTURE)
    if not (path / folder.ENCODER).is_file():
        if (path / folder.CONFIG).is_file() and (path / folder.CHECKPOINTS).is_dir():
            raise InputError(f"The run {given} has not finished; go on with: siammm train --resume {given}.")
        raise InputError(
            f"{given} is a folder, but no run: it has no {folder.ENCODER}; give one that siammm train wrote."
        )
    finished = _opened(given, path / folder.ENCODER, path / folder.MIXTURE)
    if not (path / folder.CONFIG).is_file():
        return finished
    _, stored, facts = RunFolder.open(path)
    return replace(
        finished,
        data=facts.get("data_path", stored.data),
        fingerprint=facts.get("fingerprint"),
        reading=stored.reading,
        n_images=facts.get("n_images"),
        stored_embeddings=path / folder.EMBEDDINGS if (path / folder.EMBEDDINGS).is_file() else None,
    )


def _opened(given: str | Path, networks: Path, mixture: Path) -> FinishedRun:
    network, config, view = results.load_network(networks)
    found = VonMisesFisherMixture.load(mixture) if mixture.is_file() else None
    if found is not None and found.n_features_in_ != network.encoder.embedding_dim:
        raise InputError(
            f"The clusters in {given} have {found.n_features_in_} dimensions, but its embeddings have "
            f"{network.encoder.embedding_dim}; the files are of two runs: export the run again."
        )
    return FinishedRun(name=str(given), network=network, config=config, view=view, mixture=found)


# -- images ------------------------------------------------------------------------------------------------------------


def open_images(
    data: str | None,
    own: FinishedRun | None,
    view: ViewSettings,
    reading: DataConfig,
    device: torch.device,
    *,
    name: str,
    progress: Progress | None = None,
) -> Loader:
    """The images that were asked for, or else the run's own, ready to be shown to a network."""
    where = data if data is not None else None if own is None else own.data
    if where is None:
        raise InputError(f"{name} does not bring images with it; give some with --data.")
    if own is not None and own.reading is not None:
        # The names of a run's columns, unless others are given.
        reading = replace(
            reading,
            image_key=reading.image_key if reading.image_key is not None else own.reading.image_key,
            label_key=reading.label_key if reading.label_key is not None else own.reading.label_key,
        )
    source = open_source(where, image_key=reading.image_key, label_key=reading.label_key, max_pixels=reading.max_pixels)
    if not len(source):
        raise InputError(f"{where} holds no images; give a folder or file that does.")
    return open_loader(
        source,
        (view, view),
        device,
        kind=reading.loader,
        seed=0,
        workers=reading.workers,
        limit=reading.max_bad_images,
        progress=None if progress is None else lambda done, total: progress("reading", done, total),
    )


def file_paths(source: Source, samples: np.ndarray) -> list[str | None] | None:
    """The file of each image where images are files; None for a name that is no Unicode, which no table can hold."""
    if not isinstance(source, FolderSource):
        return None
    paths = [str(source.path(i)) for i in samples.tolist()]
    return [path if _is_unicode(path) else None for path in paths]


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


# -- one pass ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """What a pass leaves: one row an image that could be read, in the order of the source."""

    row_ND: np.ndarray
    """float32, a read-only map of the file that the pass wrote."""
    cluster_N: np.ndarray | None = None
    """int32; None without a mixture, as the next two."""
    probability_N: np.ndarray | None = None
    """float32: the share of the image that its cluster has."""
    log_density_N: np.ndarray | None = None
    """float64: under the whole mixture."""


def run_rows(own: FinishedRun, what: What) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """What a run makes of images: the rows that were asked for, and the unit embeddings that its mixture is of.

    Features are those of the online encoder, as the backbone leaves them.
    """

    def rows(x: Tensor) -> tuple[Tensor, Tensor]:
        embedding_BE = functional.normalize(own.clustered(x).float(), dim=1)
        return (embedding_BE if what == "embeddings" else own.network.encoder.features(x).float()), embedding_BE

    return rows


def model_rows(backbone: nn.Module) -> Callable[[Tensor], tuple[Tensor, None]]:
    """What somebody else's model makes of images: its features, and nothing that is clustered."""
    return lambda x: (backbone(x).float(), None)


@torch.no_grad()
def encoded(
    rows: Callable[[Tensor], tuple[Tensor, Tensor | None]],
    loader: Loader,
    path: Path,
    *,
    mixture: VonMisesFisherMixture | None = None,
    progress: Progress | None = None,
    what: str = "images",
) -> Encoded:
    """Show all images to a network; its rows are written to ``path`` as a ``.npy`` file.

    Bytes are appended and not mapped for writing: a full disk is then an error, where a map would end the process.
    """
    if not loader.n_images:
        raise InputError(f"{loader.source.name} has no images that can be read; give another set.")
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    with path.open("wb") as file, _full_precision(loader.device):
        for first, x in loader.clean(0, loader.n_images):
            if x.is_cuda:
                x = x.to(memory_format=torch.channels_last)
            row_BD, embedding_BE = rows(x)
            if first == 0:
                _write_header(file, (loader.n_images, row_BD.shape[1]))
            file.write(row_BD.cpu().contiguous().numpy().astype("<f4", copy=False).tobytes())
            if mixture is not None and embedding_BE is not None:
                parts.append(described(mixture, embedding_BE))
            if progress is not None:
                progress(what, first + x.shape[0], loader.n_images)
    row_ND = np.lib.format.open_memmap(path, mode="r")
    if not parts:
        return Encoded(row_ND=row_ND)
    cluster_N, probability_N, log_density_N = (torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True))
    return Encoded(
        row_ND=row_ND,
        cluster_N=cluster_N.astype(np.int32),
        probability_N=probability_N.astype(np.float32),
        log_density_N=log_density_N.astype(np.float64),
    )


def described(mixture: VonMisesFisherMixture, embedding_BE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The cluster of each embedding, the share that it has, and the log density under the whole mixture."""
    samples, components = mixture._ready(embedding_BE)
    index_BH, weight_BH, _ = em.assignments(samples, components, mixture._assignment())
    return index_BH[:, 0], weight_BH[:, 0], em.log_likelihoods(samples, components)


@contextlib.contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Convolutions in float32: by default a GPU rounds their inputs to 10 bits, and other tools do not."""
    if device.type != "cuda":
        yield
        return
    cudnn: Any = torch.backends.cudnn  # only partly typed
    convolutions = cudnn.conv
    before = convolutions.fp32_precision
    convolutions.fp32_precision = "ieee"
    try:
        yield
    finally:
        convolutions.fp32_precision = before


def _write_header(file: Any, shape: tuple[int, int]) -> None:
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
