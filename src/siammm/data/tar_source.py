"""Images in tar shards, as WebDataset lays them out: a sample is the files of one name, ``0001.jpg`` and ``0001.cls``.

The shards are looked through once, when they are opened; afterwards an image is read by its place in the file. Nothing
is ever unpacked, so names that point elsewhere are only names.
"""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from siammm.core.errors import InputError, StoredFileError
from siammm.core.reading import open_regular
from siammm.core.text import one_line, shown
from siammm.data import decode
from siammm.data import labels as labelling
from siammm.data.decode import BadImage
from siammm.data.labels import LABEL_KEYS
from siammm.data.source import EncodedSource, Names, container_files, located

COMPRESSED_SUFFIXES = (".tgz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tar.lz4")

_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MOST_SHARDS = 100_000
_LARGEST_LABEL = 2**20
_COMPRESSED_STARTS = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd")
# Stands for a size where there are no bytes to read.
_IS_LINK = -1


@dataclass
class _Sample:
    key: str
    offset: int | None = None
    size: int = 0
    label: int | str | None = None


class TarSource(EncodedSource):
    """The samples of one or several tar files that hold an image, in the order of the files and their members.

    The image is the first member of a sample with an image's extension, or the one called ``image_key``. The label is
    the text of its ``.cls``, or the value of ``label_key`` (by default label, y, class, ...) in its ``.json``; where
    no sample has either, folders give the labels as in an image folder. Looking through a shard costs a few tens of
    microseconds a member.
    """

    kind = "tar"

    def __init__(
        self,
        shards: Sequence[Path],
        *,
        name: str,
        image_key: str | None = None,
        label_key: str | None = None,
        max_pixels: int = decode.MAX_PIXELS,
    ) -> None:
        self.name, self.max_pixels = name, max_pixels
        self.shards = [path.absolute() for path in shards]
        samples: list[_Sample] = []
        ends: list[int] = []
        for shard in self.shards:
            samples.extend(sample for sample in _samples(shard, image_key, label_key) if sample.offset is not None)
            ends.append(len(samples))
        if not samples:
            wanted = "with an image's extension" if image_key is None else f"called .{image_key}"
            raise InputError(f"{shown(name)} has no members {wanted}; check that these are shards of images.")
        self._ends = np.array(ends, np.int64)
        self._offsets = np.array([sample.offset for sample in samples], np.int64)
        self._sizes = np.array([sample.size for sample in samples], np.int64)
        keys = [sample.key for sample in samples]
        self._set_labels(samples, keys, label_key)
        if len(self.shards) > 1 and len(set(keys)) < len(keys):
            keys = [f"{self._shard(i).name}:{key}" for i, key in enumerate(keys)]
        self._keys = Names(os.fsencode(key) for key in _distinct(keys))

    def _set_labels(self, samples: list[_Sample], keys: list[str], label_key: str | None) -> None:
        if label_key == "":
            return
        missing = sum(sample.label is None for sample in samples)
        if missing == len(samples) and label_key is None:
            self.labels, self.label_names = labelling.from_paths(keys)
        elif missing and label_key is not None:
            raise InputError(
                f"{missing} of {len(samples)} samples of {shown(self.name)} have no label {label_key!r}; add it, "
                'or leave the labels out with --label-key "".'
            )
        else:
            self.labels, self.label_names = labelling.from_values([sample.label for sample in samples])

    def __len__(self) -> int:
        return len(self._offsets)

    def encoded(self, i: int) -> bytes:
        """See ``EncodedSource.encoded``."""
        i = self._check_position(i)
        offset, size = int(self._offsets[i]), int(self._sizes[i])
        if size == _IS_LINK:
            raise BadImage("is a link or a special file in the tar, not an image")
        # Opened for every read: threads and forked processes then share no place in the file.
        decode.check_bytes(size, self.max_pixels)
        try:
            with open_regular(self._shard(i)) as file:
                file.seek(offset)
                return file.read(size)
        except OSError as error:
            raise BadImage(f"cannot be read ({one_line(error)})") from error

    def _shard(self, i: int) -> Path:
        return self.shards[located(self._ends, i)[0]]

    def stored_in(self) -> Iterator[tuple[str, str]]:
        """See ``Source.stored_in``: the shards."""
        return container_files(self.shards)

    def identifier(self, i: int) -> str:
        """See ``Source.identifier``: the key; with the shard before it where two shards use the same key."""
        return self._keys.text(self._check_position(i))


def _distinct(keys: list[str]) -> list[str]:
    """The keys; from its second time on, a key gets a number, as a name must stand for one image."""
    times: dict[str, int] = {}
    distinct: list[str] = []
    for key in keys:
        times[key] = times.get(key, 0) + 1
        distinct.append(key if times[key] == 1 else f"{key}#{times[key]}")
    return distinct


# ---------------------------------------------------------------------------------------------------- looking through


def _samples(shard: Path, image_key: str | None, label_key: str | None) -> Iterator[_Sample]:
    """The samples of a shard: neighbouring members whose names agree up to the first dot of the base name."""
    sample: _Sample | None = None
    for member, file in _members(shard):
        folder, _, base = member.name.rpartition("/")
        stem, _, extension = base.partition(".")
        if member.isdir() or not stem:
            # A name that starts with a dot is hidden, such as the ._ files that macOS adds.
            continue
        key = f"{folder}/{stem}" if folder else stem
        if sample is None or sample.key != key:
            if sample is not None:
                yield sample
            sample = _Sample(key)
        extension = extension.lower()
        is_image = extension == image_key.lower() if image_key else f".{extension}" in decode.SUFFIXES
        if is_image and sample.offset is None:
            whole = member.isreg() and not member.issparse()
            sample.offset, sample.size = member.offset_data, member.size if whole else _IS_LINK
        elif member.isreg() and label_key != "" and sample.label is None:
            sample.label = _label(member, file, extension, label_key, shard)
    if sample is not None:
        yield sample


def _members(shard: Path) -> Iterator[tuple[tarfile.TarInfo, tarfile.TarFile]]:
    try:
        with open_regular(shard) as opened:
            if opened.read(8).startswith(_COMPRESSED_STARTS):
                raise InputError(
                    f"{shown(shard)} is compressed, so no image in it can be reached directly; decompress it to .tar."
                )
            opened.seek(0)
            with tarfile.open(fileobj=opened, mode="r:") as file:
                while (member := file.next()) is not None:
                    yield member, file
                    # The list that tarfile keeps of them would grow with the shard.
                    file.members = []  # type: ignore[attr-defined]
                _check_end(file, opened, shard)
    except (tarfile.TarError, EOFError, ValueError) as error:
        if isinstance(error, InputError | StoredFileError):
            raise
        raise StoredFileError(
            f"{shown(shard)} is not a complete tar file ({one_line(error)}); write it again."
        ) from error
    except OSError as error:
        raise StoredFileError(f"{shown(shard)} cannot be read ({one_line(error)}); check the file.") from error


def _check_end(file: tarfile.TarFile, opened: IO[bytes], shard: Path) -> None:
    """tarfile takes whatever is no header for the end, but a whole file ends in a block of zeros."""
    opened.seek(file.offset)
    if opened.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
        raise StoredFileError(
            f"{shown(shard)} is damaged or breaks off at byte {file.offset}, where its mark of the end should be; "
            "write it again."
        )


def _label(
    member: tarfile.TarInfo, file: tarfile.TarFile, extension: str, label_key: str | None, shard: Path
) -> int | str | None:
    if extension not in ("cls", "json") or (extension == "cls" and label_key not in (None, "cls")):
        return None
    what = f"{member.name!r} in {shown(shard)}"
    if member.size > _LARGEST_LABEL:
        raise InputError(f'{what} has {member.size} bytes, too many for a label; leave it out with --label-key "".')
    opened = file.extractfile(member)
    text = b"" if opened is None else opened.read()
    if extension == "cls":
        return _number_or_text(text.decode("utf-8", "backslashreplace").strip())
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f'{what} is not JSON ({one_line(error)}); correct it or leave the labels out with --label-key "".'
        ) from error
    if not isinstance(value, dict):
        return None
    keys = LABEL_KEYS if label_key is None else (label_key,)
    found = next((value[key] for key in keys if key in value), None)
    return found if isinstance(found, int | str) else None


def _number_or_text(text: str) -> int | str | None:
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else text or None


# --------------------------------------------------------------------------------------------------------- shard names


def has_range(pattern: str) -> bool:
    """Whether a name holds a range of numbers, as in ``train-{000..146}.tar``."""
    return _BRACES.search(pattern) is not None


def expand(pattern: str) -> list[str]:
    """The names that a pattern with ranges stands for, in order; numbers are as wide as the first is written."""
    match = _BRACES.search(pattern)
    if match is None:
        return [pattern]
    first, last = int(match[1]), int(match[2])
    if not 0 <= last - first < _MOST_SHARDS:
        raise InputError(
            f"The range {match[0]} of {shown(pattern)} must go up, by less than {_MOST_SHARDS:,}; correct it."
        )
    rest = expand(pattern[match.end() :])
    if (last - first + 1) * len(rest) > _MOST_SHARDS:
        raise InputError(f"{shown(pattern)} matches more than {_MOST_SHARDS:,} files; give fewer.")
    start, width = pattern[: match.start()], len(match[1])
    return [f"{start}{number:0{width}d}{end}" for number in range(first, last + 1) for end in rest]
