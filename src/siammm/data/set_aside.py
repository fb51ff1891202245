"""Reading all images of a source: those that cannot be read are set aside, with the reason, up to a limit."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from siammm.core.errors import InputError
from siammm.core.files import unwritable, write_text
from siammm.core.text import shown
from siammm.data.decode import BadImage, default_threads, fit
from siammm.data.source import Source

MAX_BAD_IMAGES = 0.01
"""The default share of images that may be set aside before a run stops."""

_IMAGES_A_TASK = 64


class SetAside:
    """The images that could not be read, each with the reason; an image counts once however often it is met."""

    def __init__(self, total: int, reasons: dict[str, str] | None = None) -> None:
        self.total, self.reasons = total, reasons or {}

    def __len__(self) -> int:
        return len(self.reasons)

    def add(self, identifier: str, reason: str) -> None:
        """Set one image aside. Threads may call this at the same time."""
        self.reasons.setdefault(identifier, reason)

    def check(self, limit: float = MAX_BAD_IMAGES) -> None:
        """Raise ``InputError`` where more than this share of all images is set aside."""
        bad = len(self)
        if bad > limit * self.total:
            first, reason = next(iter(self.reasons.items()))
            raise InputError(
                f"{bad} of {self.total} images ({100 * bad / self.total:.2g} %) cannot be read, and the limit is "
                f"{100 * limit:g} %; the first is {first!r}, which {reason}; remove them or raise --max-bad-images."
            )

    def write(self, path: Path) -> None:
        """Write them as JSON."""
        rows = [{"image": identifier, "reason": reason} for identifier, reason in self.reasons.items()]
        try:
            write_text(path, json.dumps({"total": self.total, "set_aside": rows}, indent=1) + "\n")
        except OSError as error:
            raise unwritable(path, error, "make room or check the folder") from error


@dataclass(frozen=True)
class Decoded:
    """A whole source in memory."""

    images: np.ndarray
    """uint8, N' x H x W x 3."""
    kept: np.ndarray
    """int64, N' positions in the source, ascending: those that are not set aside."""
    set_aside: SetAside


def decode_all(
    source: Source,
    shape: tuple[int, int] | None = None,
    *,
    threads: int | None = None,
    limit: float = MAX_BAD_IMAGES,
    progress: Callable[[int, int], None] | None = None,
) -> Decoded:
    """Read all images of a source into one array.

    Images that are not of ``shape`` (height, width; by default the source's own, where it has one) are resized and
    cropped by ``fit``. Unreadable ones are set aside; the first one above the share ``limit`` of all images stops the
    reading with an ``InputError``. ``progress`` is called from this thread with images done and in all.
    """
    shape = shape or source.uniform_shape()
    if shape is None:
        raise _without_shape(source)
    whole = source.images() if tuple(shape) == source.uniform_shape() else None
    if whole is not None:
        return Decoded(images=whole, kept=np.arange(len(source)), set_aside=SetAside(len(source)))
    n = len(source)
    try:
        images = np.empty((n, *shape, 3), np.uint8)
    except MemoryError as error:
        raise InputError(
            f"{n} images of {shape[0]} x {shape[1]} need {n * shape[0] * shape[1] * 3 / 2**30:.1f} GiB of memory, "
            "more than there is; choose a smaller --image-size or read them from the disk as they are needed."
        ) from error

    def read(i: int) -> None:
        images[i] = fit(source.image(i), shape)

    kept, set_aside = read_all(source, read, threads=threads, limit=limit, progress=progress)
    if len(kept) == 0:
        raise InputError(f"None of the {n} images of {shown(source.name)} can be read; check the data.")
    return Decoded(images=_compact(images, kept), kept=kept, set_aside=set_aside)


def read_all(
    source: Source,
    read: Callable[[int], Any],
    *,
    threads: int | None = None,
    limit: float = MAX_BAD_IMAGES,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[np.ndarray, SetAside]:
    """Call ``read`` for every image in threads: the positions that could be read, and the images that are set aside.

    Pillow releases the interpreter while it decodes, so threads are enough, and need no copies of the source.
    """
    n, set_aside = len(source), SetAside(len(source))
    good = np.ones(n, bool)

    def read_some(start: int) -> list[tuple[int, str]]:
        bad: list[tuple[int, str]] = []
        for i in range(start, min(start + _IMAGES_A_TASK, n)):
            try:
                read(i)
            except BadImage as problem:
                bad.append((i, str(problem)))
        return bad

    with ThreadPoolExecutor(threads or default_threads(), thread_name_prefix="siammm-decode") as pool:
        tasks = [(start, pool.submit(read_some, start)) for start in range(0, n, _IMAGES_A_TASK)]
        try:
            for start, task in tasks:
                for i, reason in task.result():
                    good[i] = False
                    set_aside.add(source.identifier(i), reason)
                set_aside.check(limit)
                if progress is not None:
                    progress(min(start + _IMAGES_A_TASK, n), n)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return np.flatnonzero(good), set_aside


def _without_shape(source: Source) -> InputError:
    """Why the source has no shape: its images differ, or none of those looked at can be read."""
    reason = ""
    for i in source.spread(64):
        try:
            source.size(int(i))
        except BadImage as problem:
            reason = reason or f"{source.identifier(int(i))!r} {problem}"
        else:
            return InputError(
                f"The images of {shown(source.name)} differ in size; choose one for all with --image-size."
            )
    return InputError(
        f"None of the images of {shown(source.name)} that were checked can be read: {reason}; check the data."
    )


def _compact(images: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """The kept rows, moved together in place: a second array of this size may not fit."""
    if len(kept) < len(images):
        first = int(np.argmax(kept != np.arange(len(kept)))) if kept[-1] != len(kept) - 1 else len(kept)
        for start in range(first, len(kept), _IMAGES_A_TASK):
            images[start : start + _IMAGES_A_TASK][: len(kept) - start] = images[kept[start : start + _IMAGES_A_TASK]]
    return images[: len(kept)]
