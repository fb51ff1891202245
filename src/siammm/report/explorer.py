"""What ``siammm explore`` knows and answers, without the wire: clusters, groups, thumbnails, search by picture, names.

Legend:  N images of the run, D dimensions, K clusters.
"""

from __future__ import annotations

import functools
import io
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from siammm.core.errors import InputError
from siammm.data import decode
from siammm.data.decode import BadImage
from siammm.data.loader import open_loader
from siammm.data.sources import open_source
from siammm.learn.encode import encode
from siammm.metrics.kmeans import without_zero_warnings
from siammm.report import thumbnails
from siammm.report.clusters import chunks
from siammm.report.gather import Gathered, as_rows
from siammm.report.json_numbers import number
from siammm.report.quality import look_at_all, quality
from siammm.report.schema import ImagePage, Keeping, Naming, Neighbour, Quality, Search
from siammm.runs.run import Run

Order = Literal["central", "outlying"]

MOST_AT_ONCE = 500
"""Images in one answer, at most."""
MOST_BYTES = 32 * 2**20
"""Of a picture to search by, at most."""
_MOST_PIXELS = 64_000_000
_NEIGHBOURS, _LIKELY = 48, 8
# Embeddings of up to so many numbers are kept in memory as they are multiplied; more stay in their file.
_KEPT_NUMBERS = 2**29
# Log densities that an outlier score is a rank among.
_DENSITIES = 20_000
_THUMBNAILS_KEPT = 4096
# Images up to this size are sent without loss: a reader enlarges them until each pixel is seen.
_SEEN_PIXELS = 256


class Missing(InputError):  # noqa: N818 - an answer, not a fault
    """What was asked for does not exist."""


class Explorer:
    """All questions that the served page asks. Threads may ask at the same time."""

    def __init__(self, run: Run, gathered: Gathered) -> None:
        self.run, self.gathered = run, gathered
        cosine_N = gathered.measured.cosine_N
        self._clusters = _Parts(run.cluster_N, run.n_clusters, cosine_N, run.outlier_N)
        self._groups = _Parts(run.group_N, run.n_groups, cosine_N, run.outlier_N) if run.is_grouped else self._clusters
        self._folded = [name.casefold() for name in run.ids]
        self._looking = threading.Lock()
        self._quality: Quality | None = None
        self._computing = threading.Lock()  # networks and mixtures are not made for several threads
        self._embedding_ND = _kept(run.embeddings, run.device)
        self._density_S = self._densities()
        there = np.flatnonzero(run.images.position_N[gathered.image_M] >= 0)
        self._pictured = run.images.position_N[gathered.image_M[there]]
        self._sheets: dict[int, bytes] = {}
        self._sheet_locks = [threading.Lock() for _ in gathered.contents["thumbnails"]["sheets"]]
        self._layout = thumbnails.layout(run.images.source, 1, None)
        self._thumbnail = functools.lru_cache(_THUMBNAILS_KEPT)(self._made_thumbnail)

    # -- images of clusters, and by name ------------------------------------------------------------------------------

    def cluster(self, index: int, offset: int = 0, limit: int = 60, order: Order = "central") -> ImagePage:
        """Some of a cluster's images."""
        if not 0 <= index < self.run.n_clusters:
            raise Missing(f"There is no cluster {index}; they are 0 to {self.run.n_clusters - 1}.")
        return self._page(self._clusters.images(index, order), offset, limit)

    def group(self, index: int, offset: int = 0, limit: int = 60, order: Order = "central") -> ImagePage:
        """Some of a group's images; the central ones are those that are most central in their clusters."""
        self._check_group(index)
        return self._page(self._groups.images(index, order), offset, limit)

    def _page(self, images: np.ndarray, offset: int, limit: int) -> ImagePage:
        some = images[offset : offset + limit].tolist()
        return ImagePage(total=len(images), images=[self._neighbour(image) for image in some])

    def _check_group(self, index: int) -> None:
        if not 0 <= index < self.run.n_groups:
            raise Missing(f"There is no group {index}; they are 0 to {self.run.n_groups - 1}.")

    def find(self, query: str, limit: int = 60) -> ImagePage:
        """Images whose names hold a text, in any case."""
        wanted = query.casefold()
        images = [i for i, name in enumerate(self._folded) if wanted in name]
        return ImagePage(total=len(images), images=[self._neighbour(i) for i in images[:limit]])

    def _neighbour(self, image: int, similarity: float | None = None) -> Neighbour:
        run = self.run
        cosine = self.gathered.measured.cosine_N[image] if similarity is None else similarity
        return Neighbour(
            position=int(image),
            id=run.ids[image],
            cluster=int(run.cluster_N[image]),
            group=int(run.group_N[image]),
            label=int(run.label_N[image]),
            similarity=number(np.clip(cosine, -1.0, 1.0), 4),
        )

    # -- names of groups ----------------------------------------------------------------------------------------------

    def name_group(self, index: int, name: str) -> Naming:
        """Keep the name that a person gives to a group, in the run and in the contents of the page."""
        self._check_group(index)
        groups = self.gathered.contents["groups"]
        groups[index]["name"] = self.run.group_names.give(index, name)
        return Naming(name=groups[index]["name"])

    # -- selections ---------------------------------------------------------------------------------------------------

    def keep_selection(self, name: str, images: list[int]) -> Keeping:
        """Keep what a person has selected, in the run and in the contents of the page."""
        kept = as_rows(self.run.selections.keep(name, images), self.gathered.image_M)
        self.gathered.contents["selections"] = kept
        return Keeping(selections=kept)

    # -- pictures -----------------------------------------------------------------------------------------------------

    def thumbnail(self, image: int) -> bytes:
        """One image, small, as WebP."""
        self._check_image(image)
        data = self._thumbnail(image)
        if data is None:
            raise Missing(f"Image {image} is not there any more, or cannot be read.")
        return data

    def _made_thumbnail(self, image: int) -> bytes | None:
        if self.run.images.source is None:
            return None
        cell = thumbnails.read_thumbnail(self.run.images.source, int(self.run.images.position_N[image]), self._layout)
        return None if cell is None else thumbnails.encoded(cell, self._layout)

    def sheet(self, index: int) -> bytes:
        """A sheet of thumbnails, made when it is first asked for."""
        if not 0 <= index < len(self._sheet_locks) or self.run.images.source is None:
            raise Missing(f"There is no sheet {index}; there are {len(self._sheet_locks)}.")
        source, layout = self.run.images.source, self.gathered.layout
        with self._sheet_locks[index]:
            if index not in self._sheets:
                part = self._pictured[index * layout.per_sheet : (index + 1) * layout.per_sheet].tolist()
                with ThreadPoolExecutor(decode.default_threads(), thread_name_prefix="siammm-sheet") as pool:
                    cells = list(pool.map(lambda i: thumbnails.read_thumbnail(source, i, layout), part))
                self._sheets[index] = thumbnails.sheet(cells, layout)
            return self._sheets[index]

    def image(self, image: int) -> bytes:
        """One image at its full size, in a format that every browser shows: JPEG, or PNG where pixels can be seen."""
        pixels = self._pixels(image)
        stream = io.BytesIO()
        if max(pixels.shape[:2]) <= _SEEN_PIXELS:
            Image.fromarray(pixels).save(stream, "PNG")
        else:
            Image.fromarray(pixels).save(stream, "JPEG", quality=92)
        return stream.getvalue()

    def _pixels(self, image: int) -> np.ndarray:
        self._check_image(image)
        source, position = self.run.images.source, int(self.run.images.position_N[image])
        pixels = None if source is None else thumbnails.read_image(source, position)
        if pixels is None:
            raise Missing(f"Image {image} is not there any more, or cannot be read.")
        return pixels

    def _check_image(self, image: int) -> None:
        if not 0 <= image < self.run.n_images:
            raise Missing(f"There is no image {image}; they are 0 to {self.run.n_images - 1}.")

    # -- image quality ------------------------------------------------------------------------------------------------

    def quality(self) -> Quality:
        """The images that somebody should look at; all images of the page are read when this is first asked for."""
        with self._looking:
            if self._quality is None:
                source, image_M = self.run.images.source, self.gathered.image_M
                if source is None:
                    raise Missing("The images of this run are not there, so none was looked at.")
                looks = look_at_all(source, self.run.images.position_N[image_M].tolist())
                self._quality = quality(self.run, image_M, looks)
            return self._quality

    # -- search by picture --------------------------------------------------------------------------------------------

    def search(self, file: bytes) -> Search:
        """The likely clusters of a picture, and the images most like it; ``InputError`` for what is no picture."""
        try:
            pixels = decode.decode(file, max_pixels=_MOST_PIXELS)
        except BadImage as error:
            raise InputError(f"The picture {error}; give another.") from error
        with self._computing:
            return self._searched(self._embedded(pixels))

    def similar(self, image: int) -> Search:
        """The same for an image of the run, without that image itself."""
        self._check_image(image)
        with self._computing:
            row_1D = np.array(self.run.embeddings[image : image + 1], dtype=np.float32)
            return self._searched(torch.from_numpy(row_1D).to(self.run.device), without=image)

    def _searched(self, embedding_1D: Tensor, *, without: int | None = None) -> Search:
        run, mixture = self.run, self.run.mixture
        with without_zero_warnings():
            share = mixture.predict_proba(embedding_1D.cpu().numpy())
            density = float(np.asarray(mixture.score_samples(embedding_1D.cpu().numpy()))[0])
        images, cosines = self._most_similar(embedding_1D[0], without=without)
        order = np.argsort(-share.data, kind="stable")[:_LIKELY]
        likeliest = int(share.indices[order[0]])
        below = len(self._density_S) - int(np.searchsorted(self._density_S, density, side="right"))
        return Search(
            id="" if without is None else self.run.ids[without],
            group=self._group(embedding_1D, likeliest) if without is None else int(run.group_N[without]),
            clusters=[(int(share.indices[i]), number(share.data[i], 4)) for i in order],
            outlier_score=number(below / max(1, len(self._density_S)), 4),
            neighbours=[self._neighbour(i, cosine) for i, cosine in zip(images, cosines, strict=True)],
        )

    def _group(self, embedding_1D: Tensor, cluster: int) -> int:
        """The group of a picture; where no rule was kept, that of most images of its cluster."""
        groups = self.run.groups
        if not self.run.is_grouped or groups is None or groups.n_groups != self.run.n_groups:
            return int(self.run.group_K[cluster])
        return int(groups.predict(embedding_1D.cpu().numpy(), np.array([cluster]))[0])

    def _embedded(self, pixels: np.ndarray) -> Tensor:
        """A picture as the run's own images were shown to its encoder."""
        views, source = (self.run.view, self.run.view), open_source(pixels[None])
        with closing(open_loader(source, views, self.run.device, seed=0, workers=0, limit=0.0)) as loader:
            return encode(self.run.network, loader, "embeddings")

    @torch.no_grad()
    def _most_similar(self, embedding_D: Tensor, *, without: int | None = None) -> tuple[list[int], list[float]]:
        """The images whose embeddings are nearest, and their cosines, nearest first; ``without`` one of them."""
        count = min(_NEIGHBOURS, self.run.n_images - (without is not None))
        if self._embedding_ND is not None:
            cosine_N = self._embedding_ND @ embedding_D.to(self._embedding_ND.dtype)
        else:
            query_D = embedding_D.float().cpu().numpy()
            cosine_N = torch.from_numpy(np.concatenate([x @ query_D for _, x in chunks(self.run.embeddings)]))
        cosine_N = cosine_N.float()
        if without is not None:
            cosine_N[without] = -torch.inf
        top = torch.topk(cosine_N, count)
        return top.indices.tolist(), top.values.tolist()

    def _densities(self) -> np.ndarray:
        """Log densities of images spread over the run, ascending."""
        n = self.run.n_images
        spread = np.unique(np.linspace(0, n - 1, min(n, _DENSITIES)).astype(np.int64))
        with without_zero_warnings():
            density_S = self.run.mixture.score_samples(np.asarray(self.run.embeddings[spread], np.float32))
        return np.sort(np.asarray(density_S))


class _Parts:
    """The images of each of many parts, in two orders.

    Legend:  N images, P parts.
    """

    def __init__(self, part_N: np.ndarray, n_parts: int, cosine_N: np.ndarray, outlier_N: np.ndarray) -> None:
        self._start_P = np.concatenate([[0], np.cumsum(np.bincount(part_N, minlength=n_parts))])
        self._order: dict[Order, np.ndarray] = {
            "central": np.lexsort((-cosine_N, part_N)),
            "outlying": np.lexsort((cosine_N, -outlier_N, part_N)),
        }

    def images(self, part: int, order: Order) -> np.ndarray:
        """All images of a part."""
        return self._order[order][self._start_P[part] : self._start_P[part + 1]]


def _kept(embedding_ND: np.ndarray, device: torch.device) -> Tensor | None:
    """The embeddings as they are multiplied, where they fit into memory."""
    if embedding_ND.size > _KEPT_NUMBERS:
        return None
    dtype = np.float16 if device.type == "cuda" else np.float32
    return torch.from_numpy(np.array(embedding_ND, dtype=dtype)).to(device)
