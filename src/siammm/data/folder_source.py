"""A folder of image files, at any depth."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from siammm.core.errors import InputError
from siammm.core.text import one_line, shown
from siammm.data import decode, labels
from siammm.data.source import EncodedSource, Names, content_digest


@dataclass
class FolderContents:
    """What a walk through a folder found, as sorted relative paths with forward slashes."""

    images: list[str] = field(default_factory=list)
    parquet: list[str] = field(default_factory=list)
    tar: list[str] = field(default_factory=list)
    n_others: int = 0
    n_outside: int = 0
    """Images among them that are reached through a link out of the folder."""


def walk(root: Path) -> FolderContents:
    """Look through a folder and all below it. Hidden files and folders (.name) are passed over.

    Links are followed, but a folder that is reached twice is read once, so that loops end. A link to anything but a
    file or a folder is an image that cannot be read, if it has the name of one: that is to be reported.
    """
    found = FolderContents()
    seen: set[tuple[int, int]] = set()
    real_root = os.path.realpath(root)
    pending = [("", False)]
    while pending:
        below, outside = pending.pop()
        folder = root / below
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(folder) as entries:
                children = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            raise InputError(
                f"The folder {shown(folder)} cannot be read ({one_line(error)}); make it readable or move it away."
            ) from error
        folders: list[tuple[str, bool]] = []
        for entry in children:
            if entry.name.startswith("."):
                continue
            path = f"{below}{entry.name}"
            is_folder, is_file = _kind(entry)
            leaves = outside or (entry.is_symlink() and not _is_within(os.path.realpath(entry.path), real_root))
            if is_folder:
                folders.append((path + "/", leaves))
            elif is_file:
                n_images = len(found.images)
                _sort_in(found, path)
                found.n_outside += leaves and len(found.images) > n_images
            elif entry.is_symlink() and _suffix(path) in decode.SUFFIXES:
                found.images.append(path)
        pending.extend(reversed(folders))
    for paths in (found.images, found.parquet, found.tar):
        paths.sort()
    return found


def _kind(entry: os.DirEntry[str]) -> tuple[bool, bool]:
    """Whether an entry, or what it links to, is a folder, and whether it is a file."""
    try:
        return entry.is_dir(), entry.is_file()
    except OSError:  # a link to itself, or to what may not be looked at
        return False, False


def _is_within(path: str, root: str) -> bool:
    return path == root or path.startswith(os.path.join(root, ""))


def _sort_in(found: FolderContents, path: str) -> None:
    suffix = _suffix(path)
    if suffix in decode.SUFFIXES:
        found.images.append(path)
    elif suffix in (".parquet", ".pq"):
        found.parquet.append(path)
    elif suffix == ".tar":
        found.tar.append(path)
    else:
        found.n_others += 1


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


class FolderSource(EncodedSource):
    """The image files below a folder, in the order of their relative paths.

    Labels come from the folders; ``labels.from_paths`` says how.
    """

    kind = "folder"
    has_own_files = True

    def __init__(self, root: Path, paths: list[str], *, name: str, max_pixels: int = decode.MAX_PIXELS) -> None:
        self.name, self.max_pixels = name, max_pixels
        self.root = root.absolute()
        self._paths = Names(os.fsencode(path) for path in paths)
        self.labels, self.label_names = labels.from_paths([self._paths.text(i) for i in range(len(paths))])

    def __len__(self) -> int:
        return len(self._paths)

    def path(self, i: int) -> Path:
        """The file of image ``i``."""
        return self.root / os.fsdecode(self._paths[self._check_position(i)])

    def encoded(self, i: int) -> bytes:
        """See ``EncodedSource.encoded``."""
        content = decode.read_file(self.path(i), max_pixels=self.max_pixels)
        if self.digest_N is not None:
            self.digest_N[self._check_position(i)] = content_digest(content)
        return content

    def stored_in(self) -> Iterator[tuple[str, str]]:
        """See ``Source.stored_in``: by their identifiers."""
        root = os.path.join(self.root, "")
        for i in range(len(self)):
            yield self._paths.text(i), root + os.fsdecode(self._paths[i])

    def identifier(self, i: int) -> str:
        r"""See ``Source.identifier``: the relative path; bytes that are no Unicode are written like ``\xff``."""
        return self._paths.text(self._check_position(i))
