"""The names that a person gives to the groups of a run, in a small file in its folder."""

from __future__ import annotations

import hashlib
import json
import threading
from functools import cached_property
from pathlib import Path

import numpy as np

from siammm.core.errors import InputError, StoredFileError
from siammm.core.files import unwritable, write_text
from siammm.core.locks import FolderLock
from siammm.core.text import one_line, printable
from siammm.runs import files

LONGEST = 100
"""Characters of a name, at most."""


class GroupNames:
    """The names of a run's groups. They are kept with a digest of the groups, and are not used for others.

    Threads may ask at the same time.

    Legend:  N images.
    """

    def __init__(self, folder: Path, group_N: np.ndarray, n_groups: int) -> None:
        self.path, self.n_groups = folder / files.GROUP_NAMES, n_groups
        self._group_N = group_N
        self._writing = threading.Lock()

    @cached_property
    def digest(self) -> str:
        """What the names are of: the group of each image."""
        return hashlib.sha256(self._group_N.astype("<i8").tobytes()).hexdigest()

    def read(self) -> tuple[list[str], bool]:
        """The name of each group, empty if it has none, and whether there are names of groups that are no more."""
        names = [""] * self.n_groups
        try:
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            given = {int(group): str(name) for group, name in stored["names"].items()}
            if stored["groups"] != self.digest:
                return names, bool(given)
            for group, name in given.items():
                if not 0 <= group < self.n_groups:
                    raise ValueError(f"there is no group {group}")
                names[group] = _tidy(name)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StoredFileError(f"{self.path} cannot be read ({one_line(error)}); remove it.") from error
        return names, False

    def give(self, group: int, name: str) -> str:
        """Name a group, or take its name away with an empty one; the name as it is kept."""
        if not 0 <= group < self.n_groups:
            raise InputError(f"There is no group {group}; they are 0 to {self.n_groups - 1}.")
        name = _tidy(name)
        if len(name) > LONGEST:
            raise InputError(f"The name has {len(name):,} characters, but at most {LONGEST} are kept; shorten it.")
        with self._writing:
            FolderLock(self.path.parent, files.LOCK, remedy="give the name later").check_free()
            names, _ = self.read()
            names[group] = name
            stored = {"groups": self.digest, "names": {str(i): one for i, one in enumerate(names) if one}}
            try:
                write_text(self.path, json.dumps(stored, indent=2) + "\n")
            except OSError as error:
                raise unwritable(f"The name in {self.path}", error, "make room, or allow writing there") from error
        return name


def _tidy(name: str) -> str:
    """The name in one line, as valid Unicode."""
    return " ".join(printable(name).split())
