"""Images that a person has selected on the map and named, in a small file in the folder of a run."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from siammm.core.errors import InputError, StoredFileError
from siammm.core.files import unwritable, write_text
from siammm.core.locks import FolderLock
from siammm.core.text import one_line, printable
from siammm.runs import files

LONGEST = 80
"""Characters of a name, at most."""
MOST = 200
"""Selections of a run, at most."""


class Selections:
    """The selections of a run. They are kept with a digest of its images, and are not used for others.

    Threads may ask at the same time.
    """

    def __init__(self, folder: Path, ids: Sequence[str]) -> None:
        self.path, self.n_images = folder / files.SELECTIONS, len(ids)
        self._ids = ids
        self._writing = threading.Lock()

    @cached_property
    def digest(self) -> str:
        """What the selections are of: the names of all images, in order."""
        return hashlib.sha256("\0".join(self._ids).encode("utf-8", "backslashreplace")).hexdigest()

    def read(self) -> dict[str, list[int]]:
        """The positions of the images of each selection, by its name; those of other images are left out."""
        try:
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            if stored["images"] != self.digest:
                return {}
            return {str(name): self._checked(images) for name, images in stored["selections"].items()}
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise StoredFileError(f"{self.path} cannot be read ({one_line(error)}); allow reading there.") from error
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise StoredFileError(f"{self.path} is damaged ({one_line(error)}); remove it.") from error

    def keep(self, name: str, images: Any) -> dict[str, list[int]]:
        """Keep a selection under a name, in place of one of that name; without images, forget it. Returns all."""
        name = " ".join(printable(name).split())
        if not name:
            raise InputError("A selection is kept by its name; type one.")
        if len(name) > LONGEST:
            raise InputError(f"The name has {len(name):,} characters, but at most {LONGEST} are kept; shorten it.")
        try:
            images = self._checked(images)
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError(f"The selection has images that the run has not ({one_line(error)}).") from error
        with self._writing:
            FolderLock(self.path.parent, files.LOCK, remedy="keep the selection later").check_free()
            kept = {other: own for other, own in self.read().items() if other != name}
            if images:
                kept[name] = images
            if len(kept) > MOST:
                raise InputError(f"A run keeps at most {MOST} selections; remove one first.")
            try:
                write_text(self.path, json.dumps({"images": self.digest, "selections": kept}) + "\n")
            except OSError as error:
                raise unwritable(f"The selection in {self.path}", error, "make room, or allow writing there") from error
        return kept

    def _checked(self, images: Any) -> list[int]:
        """Positions of images, ascending, each once."""
        found = sorted({int(image) for image in images})
        if found and not 0 <= found[0] <= found[-1] < self.n_images:
            raise ValueError(f"there is no image {found[-1] if found[0] >= 0 else found[0]}")
        return found
