"""A part of a source, and the images that a list of names means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from siammm.core.errors import InputError
from siammm.core.reading import read_regular
from siammm.core.text import one_line, shown
from siammm.data import decode
from siammm.data.source import DerivedSource, Source

ABSENT, AMBIGUOUS = -1, -2
"""What ``matched`` gives for a name that means no image, and for one that means several."""

# A list of names is text; anything larger is something else.
_LARGEST_LIST = 2**30


class SourceSubset(DerivedSource):
    """Some images of a source, in the order of their given positions."""

    kind = "subset"

    def __init__(self, source: Source, positions: Sequence[int] | np.ndarray) -> None:
        super().__init__(source)
        self.positions = np.asarray(positions, dtype=np.int64)
        if self.positions.ndim != 1 or len(self.positions) == 0:
            raise InputError(f"A part of {shown(source.name)} was asked for that holds no images; choose one or more.")
        if int(self.positions.min()) < 0 or int(self.positions.max()) >= len(source):
            raise InputError(
                f"A part of {shown(source.name)} was asked for that holds image {int(self.positions.max())}, but the "
                f"images are 0 to {len(source) - 1}; choose among these."
            )
        self.labels = None if source.labels is None else np.asarray(source.labels)[self.positions]

    def __len__(self) -> int:
        return len(self.positions)

    def images(self) -> np.ndarray | None:
        """See ``Source.images``."""
        images = self.source.images()
        return None if images is None else images[self.positions]

    def _position(self, i: int) -> int:
        return int(self.positions[self._check_position(i)])


def read_names(path: str | Path) -> list[str]:
    """The names in a text file, one a line, such as SimCLR's ``1percent.txt``; empty lines are passed over."""
    path = Path(path).expanduser()
    try:
        lines = read_regular(path, most=_LARGEST_LIST).decode("utf-8-sig").splitlines()
    except OSError as error:
        raise InputError(f"The list {shown(path)} cannot be read ({one_line(error)}); check the path.") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{shown(path)} is not text, but a list of names is needed, one per line; check it."
        ) from error
    names = [line.strip() for line in lines if line.strip()]
    if not names:
        raise InputError(f"The list {shown(path)} holds no names; write one per line.")
    return names


def positions_of(source: Source, names: Iterable[str]) -> np.ndarray:
    """The positions of the images with these names, ascending and each once; all names must be found."""
    names = list(names)
    found = matched(names, [source.identifier(i) for i in range(len(source))])
    for code, problem in ((ABSENT, "is no image of"), (AMBIGUOUS, "could be several images of")):
        if (found == code).any():
            first = names[int(np.argmax(found == code))]
            count = int((found == code).sum())
            more = f", and so are {count - 1} more of {len(names)}" if count > 1 and code == ABSENT else ""
            raise InputError(
                f"{first!r} in the list {problem} {shown(source.name)}{more}; give names relative to it, such as "
                f"{source.identifier(0)!r}."
            )
    return np.unique(found)


def matched(wanted: Sequence[str], available: Sequence[str]) -> np.ndarray:
    """For each wanted name the position of the available one that it means, or ``ABSENT`` or ``AMBIGUOUS``.

    The same name wins. Otherwise two names mean the same where one is the end of the other, folder by folder, so that
    ``x.jpg`` and ``train/dog/x.jpg`` both mean ``dog/x.jpg``; an extension may be missing from either.
    """
    exact = {name: i for i, name in enumerate(available)}
    by_stem: dict[str, list[int]] = {}
    found = np.full(len(wanted), ABSENT, dtype=np.int64)
    for row, name in enumerate(wanted):
        position = exact.get(name)
        if position is None:
            if not by_stem:  # only made where it is needed
                for i, other in enumerate(available):
                    by_stem.setdefault(_stem(other), []).append(i)
            candidates = [i for i in by_stem.get(_stem(name), ()) if _same_end(name, available[i])]
            position = candidates[0] if len(candidates) == 1 else AMBIGUOUS if candidates else ABSENT
        found[row] = position
    return found


def _parts(name: str) -> list[str]:
    return [part for part in name.replace("\\", "/").split("/") if part not in ("", ".")]


def _split(file: str) -> tuple[str, str]:
    """A file's name without the extension of an image, and that extension."""
    stem, dot, suffix = file.rpartition(".")
    return (stem, suffix.lower()) if stem and f"{dot}{suffix}".lower() in decode.SUFFIXES else (file, "")


def _stem(name: str) -> str:
    parts = _parts(name)
    return _split(parts[-1])[0] if parts else ""


def _same_end(one: str, other: str) -> bool:
    ones, others = _parts(one), _parts(other)
    if not ones or not others:
        return False
    (stem, suffix), (other_stem, other_suffix) = _split(ones[-1]), _split(others[-1])
    if stem != other_stem or (suffix and other_suffix and suffix != other_suffix):
        return False
    shared = min(len(ones), len(others)) - 1
    return shared == 0 or ones[-1 - shared : -1] == others[-1 - shared : -1]
