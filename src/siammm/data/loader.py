"""Batches of two views, from images that stay on the device or that worker processes read.

Both loaders have one interface. ``batches`` brings what a step needs onto the device: for the *resident* loader the
numbers of the images, for the *streaming* one also the two crops that the workers cut. ``views`` does the rest on the
device, in fixed shapes and without making the host wait, so that it can be compiled or captured with the step. Random
numbers depend on the seed, the epoch and the image alone; the two loaders differ only in that streamed crops are
rounded to bytes.

An image that cannot be read is set aside before training, with its reason; *positions* number the images that are left.

Legend:  N images, B images of a batch, S pixels of a view's side.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from siammm.core.errors import InputError, SiamMMError
from siammm.core.memory import free_memory
from siammm.core.signals import STOPPING
from siammm.data import augment, decode, view_settings
from siammm.data.decode import BadImage, SetAside
from siammm.data.image_cache import CachedSource
from siammm.data.sources import Source
from siammm.data.view_settings import ViewSettings

LoaderKind = Literal["auto", "resident", "streaming"]
Progress = Callable[[int, int], None]
_Handler = Callable[[int, FrameType | None], Any]

# Which images stay on the device by default is a matter of its memory, not of their sides: 9,469 images of 128 pixels
# (465 MB) trained at 17,000 images/s from an H200's memory, and at 3,700 to 4,900 by way of worker processes. Views are
# cut there from whole images in float32, though, so images much larger than a view are better cropped by workers.
# A CPU gains nothing: its memory is the workers' memory too, and only they crop images of this size beside an update.
SMALL = 96
# At most this share of the device's free memory goes to resident images; by default less, for the sake of the
# activations, which come after them and grow with the images.
_RESIDENT_SHARE, _DEFAULT_SHARE = 0.4, 0.25
# An image that is kept by default has at most so many times the pixels that a clean view is cut from.
_MOST_TIMES_LARGER = 4
# A file that was readable at the start is tried again this often: network drives have moments.
_TRIES = 3
# Images without augmentation go through a network in batches of so many pixels, at most so many images. On a CPU larger
# ones cost memory and time: 500 images of 224 pixels through EfficientNet-Lite0 took 9.8 GiB in batches of 512. In
# batches of 32, half as much time again went to the system, which made room for tensors that it had just taken back.
_CLEAN_PIXELS = {"cpu": 16 * 224**2, "cuda": 256 * 224**2}
_MOST_CLEAN = 512
# The batches of an epoch, as (epoch, position) of each image: what the workers are asked for.
_Plan = list[list[tuple[int, int]]]


@dataclass(frozen=True)
class Batch:
    """The images of one step, on the device; crops only where workers cut them."""

    position_B: Tensor
    crops: tuple[Tensor, Tensor] | None = None

    def parts(self, n: int) -> Iterator[Batch]:
        """The batch in ``n`` parts."""
        if n == 1:
            yield self
            return
        crops = [None] * n if self.crops is None else zip(*(c.chunk(n) for c in self.crops), strict=True)
        for position_B, crop in zip(self.position_B.chunk(n), crops, strict=True):
            yield Batch(position_B, crop)


class Loader(ABC):
    """The images that can be read, as batches of views."""

    def __init__(
        self,
        source: Source,
        kept: np.ndarray,
        views: tuple[ViewSettings, ViewSettings],
        device: torch.device,
        set_aside: SetAside,
        image_size: int | None,
    ) -> None:
        self.source, self.set_aside, self.view_settings, self.device = source, set_aside, views, device
        self._size = image_size or views[0].size  # of an image without augmentation
        self.sample_N = torch.from_numpy(np.asarray(kept, dtype=np.int64))
        """The number, in the source, of each image that can be read."""
        self._sample_on_device = self.sample_N.to(device)

    @property
    def n_images(self) -> int:
        """Images that can be read."""
        return len(self.sample_N)

    @property
    def labels(self) -> np.ndarray | None:
        """Labels of the images that can be read, for judging."""
        return None if self.source.labels is None else np.asarray(self.source.labels)[self.sample_N.numpy()]

    def identifiers(self) -> list[str]:
        """What the images are called in their source."""
        return [self.source.identifier(i) for i in self.sample_N.tolist()]

    @abstractmethod
    def batches(self, epoch: int, positions: Sequence[Tensor]) -> Iterator[Batch]:
        """What a step needs for each of these groups of images, on the device."""

    @abstractmethod
    def views(self, batch: Batch, seed: int, epoch: Tensor | int) -> tuple[Tensor, Tensor]:
        """The two augmented views, (B, 3, S, S) each: the part that runs on the device."""

    @property
    def clean_batch_size(self) -> int:
        """Images without augmentation that are encoded at once, by their pixels and the device."""
        pixels = _CLEAN_PIXELS.get(self.device.type, _CLEAN_PIXELS["cpu"])
        return max(1, min(_MOST_CLEAN, pixels // self._size**2))

    @abstractmethod
    def clean(self, first: int, last: int, batch_size: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """These images without augmentation, in order: the position of the first in a batch, and the images.

        A batch has ``batch_size`` images, by default ``clean_batch_size``.
        """

    def close(self) -> None:  # noqa: B027 - only one of the loaders has anything to let go
        """Let worker processes go."""


class ResidentLoader(Loader):
    """All images as bytes on the device."""

    def __init__(
        self,
        source: Source,
        views: tuple[ViewSettings, ViewSettings],
        device: torch.device,
        *,
        shape: tuple[int, int],
        image_size: int | None = None,
        limit: float = decode.MAX_BAD_IMAGES,
        progress: Progress | None = None,
    ) -> None:
        decoded = decode.decode_all(source, shape, limit=limit, progress=progress)
        super().__init__(source, decoded.kept, views, device, decoded.set_aside, image_size)
        # torch warns of arrays that it may not write to, such as a user's own that is mapped from a file.
        images = np.require(decoded.images, requirements="W")
        self.image_N3HW = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous().to(device)

    def batches(self, epoch: int, positions: Sequence[Tensor]) -> Iterator[Batch]:
        """The numbers alone: the images are there already."""
        for position_B in positions:
            yield Batch(position_B.to(self.device, non_blocking=True))

    def views(self, batch: Batch, seed: int, epoch: Tensor | int) -> tuple[Tensor, Tensor]:
        """Crop, flip and recolour."""
        x_B3HW = self.image_N3HW[batch.position_B]
        sample_B = self._sample_on_device[batch.position_B]
        height, width = x_B3HW.shape[2:]
        first, second = (
            augment.apply(x_B3HW, view_settings.draw(settings, height, width, seed, epoch, sample_B, view), settings)
            for view, settings in enumerate(self.view_settings)
        )
        return first, second

    def clean(self, first: int, last: int, batch_size: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Straight from the device."""
        batch_size = batch_size or self.clean_batch_size
        for start in range(first, last, batch_size):
            x_B3HW = self.image_N3HW[start : min(start + batch_size, last)]
            yield start, augment.clean(x_B3HW, self._size, self.view_settings[0])


class StreamingLoader(Loader):
    """Worker processes decode and crop; everything else runs on the device.

    Every image is read once at the start, unless ``known_bad`` says, by name, which an earlier look set aside.
    """

    def __init__(
        self,
        source: Source,
        views: tuple[ViewSettings, ViewSettings],
        device: torch.device,
        *,
        seed: int,
        workers: int,
        image_size: int | None = None,
        limit: float = decode.MAX_BAD_IMAGES,
        known_bad: Mapping[str, str] | None = None,
        progress: Progress | None = None,
    ) -> None:
        if known_bad is None:
            # The workers are not there yet, and neither is anything that they leave a core to.
            kept, set_aside = decode.read_all(
                source, _first_look(source), threads=workers + 1, limit=limit, progress=progress
            )
        else:
            set_aside = SetAside(len(source), dict(known_bad))
            kept = np.flatnonzero([source.identifier(i) not in known_bad for i in range(len(source))])
        super().__init__(source, kept, views, device, set_aside, image_size)
        self._plan: _Plan = []
        self._workers = workers
        self._loader: Any = self._started(_Crops(source, self.sample_N.numpy(), views, seed), self._plan)

    def batches(self, epoch: int, positions: Sequence[Tensor]) -> Iterator[Batch]:
        """Cut by the workers, a few batches ahead."""
        self._plan[:] = [[(epoch, position) for position in group.tolist()] for group in positions]
        for batch in _in_one_sentence(self._loader):
            position_B, first, second = (part.to(self.device, non_blocking=True) for part in batch)
            yield Batch(position_B, (first, second))

    def views(self, batch: Batch, seed: int, epoch: Tensor | int) -> tuple[Tensor, Tensor]:
        """Recolour what the workers have cropped and flipped."""
        assert batch.crops is not None, "a streamed batch brings its crops"
        sample_B = self._sample_on_device[batch.position_B]
        # The crops are cut already, so the size that new ones would be drawn from does not matter.
        first, second = (
            augment.colour(crop, view_settings.draw(settings, 1, 1, seed, epoch, sample_B, view), settings)
            for view, (settings, crop) in enumerate(zip(self.view_settings, batch.crops, strict=True))
        )
        return first, second

    def clean(self, first: int, last: int, batch_size: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Resized and cropped by the workers."""
        batch_size = batch_size or self.clean_batch_size
        plan: _Plan = [
            [(0, position) for position in range(start, min(start + batch_size, last))]
            for start in range(first, last, batch_size)
        ]
        images = _Clean(self.source, self.sample_N.numpy(), augment.clean_side(self._size))
        for position_B, x_B3SS in _in_one_sentence(self._started(images, plan, keep=False)):
            yield int(position_B[0]), augment.clean(x_B3SS.to(self.device), self._size, self.view_settings[0])

    def close(self) -> None:
        """Let worker processes go."""
        self._loader = None

    def _started(self, images: Dataset[Any], plan: _Plan, *, keep: bool = True) -> Any:
        return DataLoader(
            images,
            batch_sampler=plan,  # pyright: ignore[reportArgumentType] - pairs of epoch and position, not integers
            num_workers=self._workers,
            persistent_workers=keep and self._workers > 0,
            prefetch_factor=4 if self._workers else None,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_prepared_worker,
        )


class _Images(Dataset[Any]):
    """Images by (epoch, position), read again if a drive has a moment of weakness."""

    def __init__(self, source: Source, sample_N: np.ndarray) -> None:
        self._source, self._sample_N = source, sample_N

    def _image(self, position: int, least_side: int | None = None) -> np.ndarray:
        """An image, as large as it is, or perhaps smaller with sides of at least so many pixels."""
        number = int(self._sample_N[position])
        for attempt in range(_TRIES):
            try:
                return self._source.image(number) if least_side is None else self._source.reduced(number, least_side)[0]
            except BadImage as error:
                if attempt == _TRIES - 1:
                    raise InputError(
                        f"{self._source.identifier(number)} could be read when training began, but no longer "
                        f"({error}); put it back and resume."
                    ) from error
                time.sleep(0.2 * (attempt + 1))
        raise AssertionError("the last try returns or raises")


class _Crops(_Images):
    """Both views of an image, cropped and flipped, as bytes."""

    def __init__(
        self, source: Source, sample_N: np.ndarray, views: tuple[ViewSettings, ViewSettings], seed: int
    ) -> None:
        super().__init__(source, sample_N)
        self._views, self._seed = views, seed

    def __getitem__(self, item: tuple[int, int]) -> tuple[int, Tensor, Tensor]:
        epoch, position = item
        x_CHW = _channels_first(self._image(position))
        sample_1 = torch.tensor([int(self._sample_N[position])])
        height, width = x_CHW.shape[1:]

        def crop(settings: ViewSettings, view: int) -> Tensor:
            drawn = view_settings.draw(settings, height, width, self._seed, epoch, sample_1, view)
            return augment.crop_bytes(x_CHW, drawn, settings.size)

        return position, crop(self._views[0], 0), crop(self._views[1], 1)


class _Clean(_Images):
    """Images of one size without augmentation."""

    def __init__(self, source: Source, sample_N: np.ndarray, side: int) -> None:
        super().__init__(source, sample_N)
        self._side = side

    def __getitem__(self, item: tuple[int, int]) -> tuple[int, Tensor]:
        position = item[1]
        return position, _channels_first(decode.fit(self._image(position, self._side), (self._side, self._side)))


def _first_look(source: Source) -> Callable[[int], Any]:
    """What tells whether an image can be read: no pixels are needed, but all of its bytes; copies are made by it."""
    return source.image if isinstance(source, CachedSource) else lambda i: source.reduced(i, 1)


def open_loader(
    source: Source,
    views: tuple[ViewSettings, ViewSettings],
    device: torch.device,
    *,
    kind: LoaderKind = "auto",
    seed: int,
    image_size: int | None = None,
    workers: int | None = None,
    limit: float = decode.MAX_BAD_IMAGES,
    known_bad: Mapping[str, str] | None = None,
    image_cache: str | None = None,
    progress: Progress | None = None,
) -> Loader:
    """The loader that suits the source: resident where the images fit (see ``suits_resident``), streaming otherwise.

    ``image_size`` is that of images without augmentation; by default the views'. ``image_cache`` is a folder for
    small copies of large images, which are then streamed instead.
    """
    size = max(image_size or 0, views[0].size)
    shape = source.uniform_shape()
    if kind == "auto":
        stays = shape is not None and suits_resident(len(source), shape, size, device)
        uses_cache = image_cache is not None and shape is not None and max(shape) > SMALL  # whose copies must be made
        kind = "resident" if stays and not uses_cache else "streaming"
    if kind == "resident":
        # Images of different sizes are brought to the size that a clean view is cut from.
        stored = shape or (augment.clean_side(size), augment.clean_side(size))
        if not _fits(len(source), stored, device):
            raise InputError(
                f"{len(source):,} images of {stored[0]} x {stored[1]} pixels do not fit into the memory of {device}; "
                "use --loader streaming."
            )
        return ResidentLoader(
            source, views, device, shape=stored, image_size=image_size, limit=limit, progress=progress
        )
    if workers is None:
        # Under torchrun the processes of a machine share its cores.
        neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        workers = max(0, decode.default_threads() // neighbours - 1)
    if image_cache is not None:
        source = CachedSource(source, Path(image_cache), view_size=size)
    return StreamingLoader(
        source, views, device, seed=seed, workers=workers, image_size=image_size, limit=limit, known_bad=known_bad,
        progress=progress,
    )  # fmt: skip


def suits_resident(n_images: int, shape: tuple[int, int], size: int, device: torch.device) -> bool:
    """Whether images of one shape are kept on the device by default, for views of ``size`` pixels."""
    if max(shape) <= SMALL:
        return _fits(n_images, shape, device)
    is_far_larger = shape[0] * shape[1] > _MOST_TIMES_LARGER * augment.clean_side(size) ** 2
    return device.type != "cpu" and not is_far_larger and _fits(n_images, shape, device, share=_DEFAULT_SHARE)


def _fits(n_images: int, shape: tuple[int, int], device: torch.device, *, share: float | None = None) -> bool:
    """Whether the images take at most this share of the device's free memory, by default the largest."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    return n_images * shape[0] * shape[1] * 3 <= (_RESIDENT_SHARE if share is None else share) * free


class ReaderError(SiamMMError):
    """A worker process was killed. Raised between two batches, so everything is as after the last one."""


def _in_one_sentence(batches: Iterable[Any]) -> Iterator[Any]:
    """The same batches; what a worker refuses, or its death, is said without torch's traceback."""
    iterator: Iterator[Any] | None = None
    while True:
        try:
            with _deaths.heard():
                if iterator is None:
                    iterator = iter(batches)
                    _readers.update(getattr(iterator, "_workers", ()))
                batch = next(iterator)
        except StopIteration:
            return
        except InputError as error:
            raise InputError(str(error).rsplit(f"{InputError.__name__}: ", 1)[-1].strip()) from error
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise ReaderError(
                "A process that reads images was killed, which often means that memory ran out; use fewer --workers."
            ) from error
        yield batch


class _Deaths:
    """Worker processes that die, noticed while a batch is waited for.

    torch raises an error wherever the main thread is when a worker dies, also in the middle of an update, which could
    not be saved then. So its handler is in place only while a batch is waited for, where it also looks for workers that
    have died before. At all other times the handler is that of whoever uses this library, which torch's calls as well.
    """

    def __init__(self) -> None:
        self._torchs: _Handler | None = None
        self._theirs: _Handler | None = None

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Deaths before and during the block raise in it."""
        if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
            yield  # torch hears nothing there either
            return
        before: Any = signal.getsignal(signal.SIGCHLD)
        if _is_torchs(before):  # since before we came; it knows of theirs, if there is one
            self._torchs, before = before, self._quietly
        self._theirs = before if callable(before) and before != self._quietly else None
        # torch sets its handler once, when it starts its first workers, and calls after it what it finds there.
        signal.signal(signal.SIGCHLD, self._pass_on if self._torchs is None else self._hear)
        try:
            self._look()
            yield
        finally:
            now: Any = signal.getsignal(signal.SIGCHLD)
            if _is_torchs(now):
                self._torchs = now
            signal.signal(signal.SIGCHLD, signal.SIG_DFL if before is None else before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        assert self._torchs is not None
        try:
            self._torchs(number, frame)  # which passes it on, unless it raises
        except RuntimeError:
            self._pass_on(number, frame)
            raise

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self._theirs is not None:
            self._theirs(number, frame)

    def _quietly(self, number: int, frame: FrameType | None) -> None:
        with suppress(RuntimeError):
            self._hear(number, frame)

    def _look(self) -> None:
        """Raise if a worker has died. Theirs was told when it did."""
        if self._torchs is not None:
            theirs, self._theirs = self._theirs, None
            try:
                self._torchs(signal.SIGCHLD, None)
            finally:
                self._theirs = theirs


def _is_torchs(handler: Any) -> bool:
    return getattr(handler, "__module__", None) == "torch.utils.data._utils.signal_handling"


_deaths = _Deaths()


def _channels_first(image: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)


def _prepared_worker(worker: int) -> None:
    """One thread each; and a signal to all processes of a run is for the one that saves it, which ends its workers."""
    torch.set_num_threads(1)
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


# Worker processes that this process has started. One that it was forked from has others.
_readers: WeakSet[Any] = WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_readers.clear)


@atexit.register
def _end_readers() -> None:
    """What still reads when the program ends, because an error holds on to it, ends with it.

    multiprocessing would ask by the signal that workers ignore, and wait for ever.
    """
    for reader in _readers:
        reader.kill()
