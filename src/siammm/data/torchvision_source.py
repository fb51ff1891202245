"""Data sets that torchvision knows how to read and that are on the disk already; nothing is ever downloaded."""

from __future__ import annotations

import difflib
import inspect
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from siammm.core.errors import InputError
from siammm.core.text import one_line, shown
from siammm.data import decode
from siammm.data import labels as labelling
from siammm.data.array_source import ArraySource
from siammm.data.decode import BadImage
from siammm.data.folder_source import FolderSource
from siammm.data.source import Source

PREFIX = "torchvision:"
# Sets whose readers unpickle a file of the folder, which can run any program, without knowing its checksum.
_UNPICKLING = frozenset({"LSUN", "LSUNClass"})
_SPLIT = re.compile(r"(?P<root>.+):(?P<split>[A-Za-z0-9_+-]+)", re.DOTALL)


class TorchvisionArrays(ArraySource):
    """A torchvision set that keeps its pixels in one array, such as CIFAR-10, MNIST, SVHN and STL-10."""

    kind = "torchvision"


class TorchvisionFiles(FolderSource):
    """A torchvision set whose images are files, such as ImageNet."""

    kind = "torchvision"


class TorchvisionItems(Source):
    """Any other torchvision set; its images are asked for one at a time."""

    kind = "torchvision"

    def __init__(self, dataset: Any, *, name: str) -> None:
        self.name, self._dataset = name, dataset
        self._open_again()

    def _not_sent(self) -> tuple[str, ...]:
        return ("_lock",)

    def _open_again(self) -> None:
        # The set may not be safe to read from several threads.
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._dataset)

    def image(self, i: int) -> np.ndarray:
        """See ``Source.image``."""
        i = self._check_position(i)
        try:
            with self._lock:
                item: Any = self._dataset[i]
                picture = item[0] if isinstance(item, tuple) else item
                return np.array(picture.convert("RGB"))
        except Exception as error:
            # Whatever the set's own reader raises; it is not ours.
            raise BadImage(f"cannot be read ({one_line(error)})") from error


def open_torchvision(given: str, *, with_labels: bool = True, max_pixels: int = decode.MAX_PIXELS) -> Source:
    """The set that ``torchvision:CIFAR10:/path`` names; the training part, unless ``:test`` or another part follows."""
    set_name, _, root = given.removeprefix(PREFIX).partition(":")
    if not set_name or not root:
        raise InputError(
            f"{shown(given)} does not name a set and a folder; write torchvision:CIFAR10:/path, "
            "or torchvision:CIFAR10:/path:test for its test images."
        )
    split = "train"
    match = _SPLIT.fullmatch(root)
    # A folder may have a colon in its name; it is then given as it is.
    if match and not Path(root).exists():
        root, split = match["root"], match["split"]
    dataset = _dataset(set_name, Path(root).expanduser(), split, given)
    labels, label_names = _labels(dataset) if with_labels else (None, None)
    pixels: Any = getattr(dataset, "data", None)
    # Some keep a tensor.
    pixels = pixels.numpy() if hasattr(pixels, "numpy") else pixels
    if isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8:
        return TorchvisionArrays(pixels, name=given, labels=labels, label_names=label_names)
    samples = getattr(dataset, "samples", None)
    paths = [sample[0] for sample in samples] if samples else getattr(dataset, "_image_files", None)
    if paths is not None and len(paths) == len(dataset):
        files, folder = [Path(path).absolute() for path in paths], Path(dataset.root).absolute()
        below = [(path.relative_to(folder) if path.is_relative_to(folder) else path).as_posix() for path in files]
        source: Source = TorchvisionFiles(folder, below, name=given, max_pixels=max_pixels)
    else:
        source = TorchvisionItems(dataset, name=given)
    source.labels, source.label_names = labels, label_names
    return source


def _dataset(set_name: str, root: Path, split: str, given: str) -> Any:
    from torchvision import datasets

    maker = getattr(datasets, set_name, None) if set_name in datasets.__all__ else None
    if not (inspect.isclass(maker) and issubclass(maker, datasets.VisionDataset)):
        near = difflib.get_close_matches(set_name, datasets.__all__, n=3, cutoff=0.4)
        remedy = f"did you mean {' or '.join(near)}?" if near else "check the name."
        raise InputError(f"torchvision has no set called {set_name!r}; {remedy}")
    if set_name in _UNPICKLING:
        raise InputError(
            f"torchvision reads {set_name} through a cache that it unpickles, which can run any program; export the "
            "images to a folder and give that."
        )
    if not root.is_dir():
        raise InputError(f"The folder {shown(root)} of {shown(given)} does not exist; download the set there first.")
    parameters = inspect.signature(maker).parameters
    arguments: dict[str, Any] = {}
    if "train" in parameters:
        if split not in ("train", "test"):
            raise InputError(f"{set_name} has the parts train and test, not {split!r}; choose one of them.")
        arguments["train"] = split == "train"
    elif "split" in parameters:
        arguments["split"] = split
    elif split != "train":
        raise InputError(f"{set_name} has only one part, so there is no {split!r}; leave it out.")
    if "download" in parameters:
        arguments["download"] = False
    try:
        return maker(root, **arguments)
    except Exception as error:
        # Every set has its own ways of not finding its files.
        raise InputError(
            f"torchvision cannot read {set_name} in {shown(root)} ({one_line(error)}); "
            "put its files there first: nothing is downloaded."
        ) from error


def _labels(dataset: Any) -> labelling.Labels:
    values: Any = None
    for attribute in ("targets", "labels", "_labels"):
        values = getattr(dataset, attribute, None)
        if values is not None and len(values) == len(dataset):
            break
    else:
        return None, None
    values = values.numpy() if hasattr(values, "numpy") else np.asarray(values)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        return None, None
    classes: Sequence[Any] | None = getattr(dataset, "classes", None)
    # ImageNet gives several words for a class.
    names = classes and [name if isinstance(name, str) else ", ".join(map(str, name)) for name in classes]
    return labelling.from_values(values, names)
