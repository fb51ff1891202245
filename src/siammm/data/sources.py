"""The front door to images: folders, arrays, tables, tar shards and known data sets behind one indexable source.

    folder/                     images at any depth; classes from folders
    x.npy, x.npz                uint8 pixels, N x H x W x 3 and the like
    x.parquet, folder/, *.parquet   encoded images in a column
    folder/                     what ``datasets``' save_to_disk wrote; folder::train picks a split
    x.tar, folder/, x-{000..146}.tar, *.tar   WebDataset shards
    torchvision:CIFAR10:/path   a set that torchvision reads and that is there already
    digits                      scikit-learn's handwritten digits

The same images give the same pixels in the same order, whichever of these they are stored in.
"""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any

import numpy as np

from siammm.core.errors import InputError, StoredFileError
from siammm.core.text import counted, shape_text, shown
from siammm.data import decode, saved_datasets, tar_source, torchvision_source
from siammm.data.array_source import ArraySource, DigitsSource, open_npy, open_npz
from siammm.data.folder_source import FolderContents, FolderSource, walk
from siammm.data.source import EncodedSource, Source
from siammm.data.table_source import ArrowSource, ParquetSource
from siammm.data.tar_source import TarSource

__all__ = ["EncodedSource", "Source", "from_anywhere", "open_source"]

_TABLES_AND_SHARDS: dict[str, type[ParquetSource | ArrowSource | TarSource]] = {
    ".parquet": ParquetSource, ".pq": ParquetSource, ".arrow": ArrowSource, ".tar": TarSource
}  # fmt: skip
_WHAT_IS_READ = (
    "images are read from a folder, from .npy, .npz, .parquet or .tar files, or from a folder saved by datasets"
)


def open_source(
    data: str | Path | np.ndarray | Source,
    *,
    image_key: str | None = None,
    label_key: str | None = None,
    max_pixels: int = decode.MAX_PIXELS,
) -> Source:
    """Open images, whatever they are stored in; nothing is decoded yet.

    ``image_key`` and ``label_key`` name the array, column or extension to use in place of those found by their usual
    names; an empty ``label_key`` reads no labels. Images of more than ``max_pixels`` are bad images. A folder that is
    called ``digits`` is given as ``./digits``.
    """
    if isinstance(data, Source):
        return data
    if isinstance(data, np.ndarray):
        return ArraySource(data, name=f"the array {shape_text(data.shape)}")
    if not isinstance(data, str | Path):
        raise InputError(f"Images cannot be read from a {type(data).__name__}; give a path or a NumPy array of uint8.")
    if max_pixels < 1:
        raise InputError(f"max_pixels={max_pixels} would refuse every image; give 1 or more.")
    return _Opener(name=str(data), image_key=image_key, label_key=label_key, max_pixels=max_pixels).open(data)


def from_anywhere(data: str) -> str:
    """The name of images as it opens them from any folder: with an absolute path."""
    if data == "digits":
        return data
    *before, path = data.split(":", 2) if data.startswith(torchvision_source.PREFIX) else [data]
    path, mark, split = path.partition("::")
    return ":".join([*before, f"{os.path.abspath(os.path.expanduser(path))}{mark}{split}"])


class _Opener:
    """What the user asked for, and the ways to it."""

    def __init__(self, *, name: str, image_key: str | None, label_key: str | None, max_pixels: int) -> None:
        self.name, self.image_key, self.label_key, self.max_pixels = name, image_key, label_key, max_pixels
        self.keys: dict[str, Any] = {"name": name, "image_key": image_key, "label_key": label_key}

    def open(self, data: str | Path) -> Source:
        if data == "digits":
            self._refuse_keys("scikit-learn's digits")
            return self._without_labels(DigitsSource())
        if self.name.startswith(torchvision_source.PREFIX):
            self._refuse_keys("a torchvision set")
            return torchvision_source.open_torchvision(
                self.name, with_labels=self.label_key != "", max_pixels=self.max_pixels
            )
        try:
            path = Path(data).expanduser()
            exists = path.exists()
        except (OSError, ValueError, RuntimeError) as error:
            raise InputError(f"{shown(data)} is not a path ({error}); check it.") from error
        if exists:
            return self._folder(path, None) if path.is_dir() else self._files([path])
        if tar_source.has_range(self.name):
            return self._files([Path(name).expanduser() for name in tar_source.expand(self.name)])
        before, separator, split = self.name.rpartition("::")
        if separator and split and Path(before).expanduser().is_dir():
            return self._folder(Path(before).expanduser(), split)
        if "*" in self.name and (found := sorted(glob.glob(str(path)))):
            return self._files([Path(name) for name in found])
        raise InputError(f"{shown(data)} does not exist; check the path.")

    def _files(self, paths: list[Path]) -> Source:
        """One file, or several of one kind."""
        for path in paths:
            if not path.is_file():
                what = "is not a file" if path.exists() else "does not exist"
                raise InputError(f"{shown(path)} {what}; check {shown(self.name)}.")
            if path.stat().st_size == 0:
                raise StoredFileError(f"{shown(path)} is empty (0 bytes); write it again.")
        first, suffix = paths[0], paths[0].suffix.lower()
        if len(paths) == 1 and suffix == ".npy":
            return self._without_labels(open_npy(first, **self.keys))
        if len(paths) == 1 and suffix == ".npz":
            return open_npz(first, **self.keys)
        kinds = {_TABLES_AND_SHARDS.get(path.suffix.lower()) for path in paths}
        if len(kinds) == 1 and (kind := kinds.pop()) is not None:
            return kind(paths, **self.keys, max_pixels=self.max_pixels)
        if any(path.name.lower().endswith(tar_source.COMPRESSED_SUFFIXES) for path in paths):
            raise InputError(
                f"{shown(self.name)} is compressed, so no image in it can be reached directly; decompress it to .tar."
            )
        if suffix in decode.SUFFIXES:
            raise InputError(
                f"{shown(self.name)} is a single image; give the folder {shown(first.parent)} to read all images in it."
            )
        raise InputError(f"{shown(self.name)} ends in {suffix!r}, but {_WHAT_IS_READ}; choose one of these.")

    def _folder(self, folder: Path, split: str | None) -> Source:
        if (folder / "dataset_dict.json").is_file():
            splits = saved_datasets.saved_splits(folder)
            if split is None:
                raise InputError(
                    f"{shown(self.name)} holds the splits {', '.join(splits)}; choose one, for example "
                    f"{shown(self.name)}::{splits[0] if splits else 'train'}."
                )
            if split not in splits:
                raise InputError(f"{shown(folder)} has no split {split!r}; it has: {', '.join(splits)}.")
        if split is not None and (folder / split).is_dir() and Path(split).name == split:
            return self._folder(folder / split, None)
        if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
            files = saved_datasets.saved_dataset_files(folder, self.name)
            return ArrowSource(files, **self.keys, max_pixels=self.max_pixels)
        found = walk(folder)
        shards = found.parquet or found.tar
        if found.parquet and not found.images and not found.tar:
            files = saved_datasets.choose_split(found.parquet, split, str(folder))
            return self._files([folder / file for file in files])
        if split is not None:
            raise InputError(f"{shown(folder)} has no split {split!r}; give the folder of the images itself.")
        if found.tar and not found.images and not found.parquet:
            return self._files([folder / file for file in found.tar])
        # Lists of an image folder's contents are often tables, so a few files of another kind do not matter.
        if found.images and len(found.images) >= len(shards):
            self._refuse_keys("an image folder")
            source = FolderSource(folder, found.images, name=self.name, max_pixels=self.max_pixels)
            if found.n_outside:
                source.note = (
                    f"{counted(found.n_outside, 'image')} of {len(source):,} in {shown(self.name)} "
                    f"{'is' if found.n_outside == 1 else 'are'} read through links that lead out of it."
                )
            return self._without_labels(source)
        raise self._nothing_found(folder, found)

    def _nothing_found(self, folder: Path, found: FolderContents) -> InputError:
        if found.parquet or found.tar:
            return InputError(
                f"{shown(self.name)} holds {len(found.images)} image, {len(found.parquet)} Parquet and "
                f"{len(found.tar)} tar files, so it is not clear which are meant; put one kind into its own folder."
            )
        if any(folder.glob("*.arrow")):
            return InputError(
                f"{shown(self.name)} holds Arrow files but no state.json; save the data set with save_to_disk."
            )
        return InputError(
            f"{shown(self.name)} holds no images ({found.n_others} other files); {_WHAT_IS_READ}; check the folder."
        )

    def _refuse_keys(self, what: str) -> None:
        if self.image_key or self.label_key:
            flag = "--image-key" if self.image_key else "--label-key"
            raise InputError(
                f"{shown(self.name)} is {what}, which has no column {self.image_key or self.label_key!r}; "
                f"leave {flag} out."
            )

    def _without_labels(self, source: Source) -> Source:
        if self.label_key == "":
            source.labels = source.label_names = None
        return source
