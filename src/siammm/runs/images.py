"""The images of a run: opened by its settings, and found again where they have moved or changed.

Legend:  N images of the run, in the order of its table.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from siammm.core.errors import InputError, SiamMMError
from siammm.core.progress import Progress, silent
from siammm.core.text import one_line, printable, shown
from siammm.data import decode
from siammm.data.loader import Loader, open_loader
from siammm.data.sources import Source, open_source
from siammm.data.view_settings import ViewSettings
from siammm.settings.training import DataConfig


@dataclass(frozen=True, kw_only=True)
class RunImages:
    """The source of a run's images and the place of each image in it."""

    source: Source | None
    """None if the images are gone, or others have taken their place."""
    data: str
    """Where they are, or were; the table where its rows were clustered."""
    position_N: np.ndarray
    """The position of each image in the source, -1 if it is not there."""
    reading: DataConfig
    notes: list[str]
    """What a reader should know about them."""

    @property
    def is_whole(self) -> bool:
        """Whether all images are there."""
        return bool((self.position_N >= 0).all())


def open_images(data: str, reading: DataConfig) -> Source:
    """A source of images by the given settings; refuses one that is empty."""
    source = open_source(data, image_key=reading.image_key, label_key=reading.label_key, max_pixels=reading.max_pixels)
    if not len(source):
        raise InputError(f"{data} holds no images; give a folder or file that does.")
    return source


def image_loader(
    source: Source,
    view: ViewSettings,
    reading: DataConfig,
    device: torch.device,
    *,
    limit: float | None = None,
    known_bad: Mapping[str, str] | None = None,
    progress: Progress = silent,
    what: str = "reading",
) -> Loader:
    """A source's images, ready to be encoded.

    ``limit`` is the share of images that may be unreadable, ``known_bad`` those that an earlier look set aside.
    """
    return open_loader(
        source,
        (view, view),
        device,
        kind=reading.loader,
        seed=0,
        workers=reading.workers,
        limit=reading.max_bad_images if limit is None else limit,
        known_bad=known_bad,
        progress=lambda done, total: progress(what, done, total),
    )


def merge_reading(given: DataConfig, own: DataConfig, *, needs_labels: bool = False) -> DataConfig:
    """The given settings, with a run's own names of columns where none are given.

    ``needs_labels`` ignores that a run was told to read no labels.
    """
    own_label_key = own.label_key or None if needs_labels else own.label_key
    return replace(
        given,
        image_key=own.image_key if given.image_key is None else given.image_key,
        label_key=own_label_key if given.label_key is None else given.label_key,
        max_pixels=own.max_pixels if given.max_pixels == DataConfig().max_pixels else given.max_pixels,
    )


def find_images(
    ids: Sequence[str], fingerprint: str | None, data: str, reading: DataConfig, *, was_given: bool
) -> RunImages:
    """Find a run's images in ``data``. Images that the user gave must be there; the run's own may be gone."""
    found = RunImages(source=None, data=printable(data), position_N=np.full(len(ids), -1), reading=reading, notes=[])
    try:
        source = open_images(data, reading)
    except SiamMMError as error:
        if was_given:
            raise
        found.notes.append(
            f"The images of this run could not be opened, so none are shown; say where they are with --data "
            f"({printable(one_line(error))})."
        )
        return found
    positions = {printable(source.identifier(i)): i for i in range(len(source))}
    position_N = np.array([positions.get(name, -1) for name in ids], dtype=np.int64)
    if source.fingerprint() != fingerprint:
        n_there = int((position_N >= 0).sum())
        # A file that has kept its name is likely the same, but the number of a row says nothing about its contents.
        if n_there == 0 or all(source.identifier(int(i)) == str(i) for i in source.spread(16)):
            sentence = f"The images in {shown(found.data)} are not those of the run"
            if was_given:
                raise InputError(f"{sentence}; give --data their present place, or leave it out.")
            found.notes.append(f"{sentence}, so none are shown; say where these are with --data.")
            return found
        gone = f" ({len(ids) - n_there:,} are gone)" if n_there < len(ids) else ""
        found.notes.append(
            f"The images in {shown(found.data)} have changed since the run{gone}; what is shown is found by name."
        )
    return replace(found, source=source, position_N=position_N)


def find_rows(names: Sequence[Sequence[str | None]], table: str, data: str | None, reading: DataConfig) -> RunImages:
    """Find the images of a table's rows in ``data``: by the column of ``names`` that names most of them.

    A name may be the file's path below ``data``, or a longer path that ends in it: the table may have been made
    elsewhere. What has to be left out at its beginning is the same for all.
    """
    n = len(names[0])
    found = RunImages(source=None, data=printable(table), position_N=np.full(n, -1), reading=reading, notes=[])
    if data is None:
        named = "has paths of images: show these with --data FOLDER"
        unnamed = "names no images: add a column of their paths to it, such as filepath, and cluster it again"
        has_paths = len(names) > 1 or os.path.splitext(str(names[0][0]))[1].lower() in decode.SUFFIXES
        found.notes.append(f"A table of embeddings was clustered, which {named if has_paths else unnamed}.")
        return found
    source = open_images(data, reading)
    positions = {printable(source.identifier(i)): i for i in range(len(source))}
    candidates = [] if all(source.identifier(int(i)) == str(i) for i in source.spread(16)) else names
    best_N = max(
        (_positions_of(column, positions) for column in candidates),
        key=lambda position_N: int((position_N >= 0).sum()),
        default=found.position_N,
    )
    n_there = int((best_N >= 0).sum())
    if not n_there:
        raise InputError(
            f"None of the images in {shown(printable(data))} is named by the table that was clustered; give the "
            "folder that its paths lead to."
        )
    if n_there < n:
        found.notes.append(f"{n - n_there:,} of the {n:,} rows name no image in {shown(printable(data))}.")
    return replace(found, source=source, position_N=best_N)


def _positions_of(names: Sequence[str | None], positions: Mapping[str, int]) -> np.ndarray:
    """The position of the image that each name stands for, -1 for none."""
    split = [("", "")] * len(names)  # what a name begins with, and the name of the image
    for row, name in enumerate(names):
        whole = printable(name or "")
        if "/" not in whole and whole not in positions:
            whole = whole.replace("\\", "/")  # of a table that was made on Windows
        starts = [0, *(at + 1 for at, letter in enumerate(whole) if letter == "/")]
        known = next((at for at in starts if whole[at:] in positions), None)
        if known is not None:
            split[row] = (whole[:known], whole[known:])
    counts = Counter(beginning for beginning, image in split if image)
    usual = counts.most_common(1)[0][0] if counts else None
    return np.array([positions[image] if image and beginning == usual else -1 for beginning, image in split])
