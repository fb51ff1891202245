"""Images in a folder for each group or cluster: links to their files, or copies, and a list of all of them.

Originals are read at most. Names are made safe for any file system, and no two in a folder are equal, in any case.
"""

from __future__ import annotations

import csv
import re
import shutil
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np

from siammm.core.errors import InputError
from siammm.core.progress import Progress, silent
from siammm.core.text import one_line, printable, shown
from siammm.data.folder_source import FolderSource
from siammm.runs.run import Run

By = Literal["group", "cluster", "selection"]

LIST = "images.csv"
_COLUMNS = ("file", "sorted_as", "group", "group_name", "cluster", "probability", "outlier_rank")
_UNSAFE = re.compile(r'[<>:"/\\|?*]')
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\.|$)", re.IGNORECASE)
# Bytes of a name; most file systems take 255, and a number may be added.
_LONGEST = 200


@dataclass(frozen=True, kw_only=True)
class Sorted:
    """What was sorted."""

    n_images: int
    n_folders: int
    n_missing: int
    """Images of the run whose files are gone."""


def image_folder(run: Run) -> FolderSource:
    """The folder of a run's images; refuses images that are no files of their own."""
    images = run.images
    if images.source is None:
        missing = f"The images of {run.given} were not found; give their location with --data."
        raise InputError(images.notes[0] if images.notes else missing)
    if not isinstance(images.source, FolderSource):
        raise InputError(
            f"The images of {run.given} are in {shown(images.source.name)}, not separate files, so they cannot be "
            f"linked or copied; siammm export {run.given} --formats tables lists them with their clusters."
        )
    return images.source


def sort_images(run: Run, folder: Path, *, by: By = "group", copy: bool = False, progress: Progress = silent) -> Sorted:
    """Fill an empty folder. It may be moved before anybody uses it: links hold absolute paths."""
    source, position_N = image_folder(run), run.images.position_N
    names_G, _ = run.group_names.read()
    rank_N = np.empty(run.n_images, dtype=np.int64)
    rank_N[np.argsort(-run.outlier_N, kind="stable")] = np.arange(1, run.n_images + 1)
    wanted = _of_selections(run) if by == "selection" else _of_numbers(run, by)
    of_folder = {name: [image for image in images if position_N[image] >= 0] for name, images in wanted.items()}
    n_wanted, n_there = (sum(map(len, folders.values())) for folders in (wanted, of_folder))
    done = 0
    with (folder / LIST).open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(_COLUMNS)
        for name, images in of_folder.items():
            if not images:
                continue
            (folder / name).mkdir()
            positions = [int(position_N[image]) for image in images]
            names = safe_names([source.identifier(position) for position in positions])
            for image, position, own in zip(images, positions, names, strict=True):
                original = source.path(position)
                _put(original, folder / name / own, copy=copy)
                share, rank = f"{float(run.probability_N[image]):.4f}", int(rank_N[image])
                group = int(run.group_N[image])
                numbers = (group, names_G[group], int(run.cluster_N[image]), share, rank)
                rows.writerow((printable(original), f"{name}/{own}", *numbers))
                done += 1
                progress("copying" if copy else "linking", done, n_there)
    return Sorted(n_images=done, n_folders=sum(bool(own) for own in of_folder.values()), n_missing=n_wanted - done)


def _of_numbers(run: Run, by: By) -> dict[str, list[int]]:
    """The images of each group or cluster, by the name of its folder."""
    number_N = run.group_N if by == "group" else run.cluster_N
    width = len(str(int(number_N.max())))
    # Without groups every cluster is its own, and its name is that of the cluster.
    named = run.group_names.read()[0] if by == "group" or not run.is_grouped else []
    of_folder: dict[str, list[int]] = defaultdict(list)
    for image in np.argsort(number_N, kind="stable").tolist():
        number = int(number_N[image])
        name = f"-{_safe(named[number])}" if named and named[number] else ""
        of_folder[f"{by}-{number:0{width}}{name}"].append(image)
    return of_folder


def _of_selections(run: Run) -> dict[str, list[int]]:
    """The images of each selection that was kept, by the name of its folder."""
    kept = run.selections.read()
    if not kept:
        raise InputError(
            f"{run.given} has no selections; select images on the map of siammm explore {run.given}, and keep them."
        )
    return dict(zip(safe_names(list(kept)), kept.values(), strict=True))


def _put(original: Path, place: Path, *, copy: bool) -> None:
    try:
        if copy:
            shutil.copy2(original, place)
        else:
            place.symlink_to(original)
    except OSError as error:
        how, remedy = ("copied", "check the file, or make room") if copy else ("linked to", "add --copy")
        raise InputError(f"{shown(printable(original))} cannot be {how} ({one_line(error)}); {remedy}.") from error


def safe_names(paths: Sequence[str]) -> list[str]:
    """A name for each of these relative paths, all for one folder: that of the file, or of its folders too if taken."""
    short = [_safe(PurePosixPath(path).name) for path in paths]
    often = Counter(_folded(name) for name in short)
    taken: set[str] = set()
    names: list[str] = []
    for path, name in zip(paths, short, strict=True):
        wanted = name if often[_folded(name)] == 1 else _safe("-".join(PurePosixPath(path).parts))
        number, chosen = 1, wanted
        while _folded(chosen) in taken or (chosen != name and often[_folded(chosen)] == 1):
            number += 1
            stem, dot, suffix = wanted.rpartition(".")
            chosen = f"{stem or suffix}-{number}{dot}{suffix if stem else ''}"
        taken.add(_folded(chosen))
        names.append(chosen)
    return names


def _safe(name: str) -> str:
    """The name with what some file system refuses, or a shell takes for something else, replaced by _."""
    visible = "".join("_" if unicodedata.category(letter)[0] == "C" else letter for letter in name)
    plain = _UNSAFE.sub("_", visible).rstrip(". ")
    if not plain or plain[0] in "-." or _RESERVED.match(plain):
        plain = f"_{plain}"
    suffix = PurePosixPath(plain).suffix
    suffix = suffix if len(suffix.encode()) <= 16 else ""
    stem = plain.removesuffix(suffix).encode()[: _LONGEST - len(suffix.encode())].decode(errors="ignore")
    return stem + suffix


def _folded(name: str) -> str:
    """What names have in common that a file system may not tell apart."""
    return unicodedata.normalize("NFC", name).casefold()
