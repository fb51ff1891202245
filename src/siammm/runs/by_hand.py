"""What a person has typed or selected in the folder of a result, when another result takes its place.

Legend:  N images of the earlier result, M of the new one; G groups.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from siammm.core.errors import InputError, SiamMMError
from siammm.core.text import counted, listed, one_line, shown
from siammm.data.embedding_table import EmbeddingTable
from siammm.runs import files
from siammm.runs.run import Run
from siammm.runs.summary import is_clustered


def check_by_hand(folder: Path, data: str) -> None:
    """Refuse to replace names of groups and selections that are of other data, or that cannot be read."""
    run = _earlier(folder)
    if run is None:
        return
    earlier = run.table or run.data
    if (any(run.group_names.read()[0]) or run.selections.read()) and earlier != data:
        raise InputError(
            f"The output folder {folder} holds names of groups or selections of {shown(earlier)}; choose "
            f"another --output, or remove {files.GROUP_NAMES} and {files.SELECTIONS} there."
        )


def check_same_rows(folder: Path, table: EmbeddingTable) -> None:
    """Refuse to replace names and selections of rows that have only numbers, if the table has changed."""
    run = _earlier(folder) if table.ids is None else None
    if run is not None and run.ids == _numbers(run.n_images) and run.fingerprint != table.fingerprint():
        raise InputError(
            f"The output folder {folder} holds names of groups or selections of rows of {table.source}, which has "
            "changed since and has no ids by which to know its rows again; choose another --output, or remove "
            f"{files.GROUP_NAMES} and {files.SELECTIONS} there."
        )


def carry_over(folder: Path, new: Path) -> str:
    """Keep the names and selections of the result in ``folder`` for the one in ``new``; a sentence about both.

    A selection is of images, and keeps those that are still there. A name goes to the group that holds most of the
    images that had it, if most of the images there had it; images that the earlier result did not have do not count.
    """
    earlier, run = _earlier(folder), None if not is_clustered(new) else Run.open(new)
    if earlier is None or run is None:
        return ""
    if not _are_known_again(earlier, run):
        place_N = np.full(earlier.n_images, -1)
    else:
        position = {name: place for place, name in enumerate(run.ids)}
        place_N = np.array([position.get(name, -1) for name in earlier.ids])
    kept, lost = list[str](), list[str]()
    names, are_old = earlier.group_names.read()
    selections = earlier.selections.read()
    for name, is_hidden in ((files.GROUP_NAMES, are_old), (files.SELECTIONS, not selections)):
        # Of other groups or images than the earlier result's, but still somebody's work.
        if is_hidden and (folder.expanduser() / name).is_file():
            shutil.copyfile(folder.expanduser() / name, new / name)
    group_of = _same_groups(earlier.group_N, run.group_N, place_N, len(names), run.n_groups)
    for name, group in zip(names, group_of, strict=True):
        if name and group >= 0:
            run.group_names.give(group, name)
        (kept if group >= 0 else lost).extend([name] if name else [])
    sentence = _sentence("name", "of groups", kept, lost, "whose images are now spread over other groups")
    kept, lost = [], []
    for name, images in selections.items():
        left = [place for place in place_N[images].tolist() if place >= 0]
        if left:
            run.selections.keep(name, left)
        (kept if left else lost).append(name)
    sentences = [sentence, _sentence("selection", "", kept, lost, "whose images are no longer there")]
    return " ".join(one for one in sentences if one)


def _earlier(folder: Path) -> Run | None:
    """The result in a folder, if there is anything in it that a person has made."""
    folder = folder.expanduser()
    if not any((folder / name).is_file() for name in (files.GROUP_NAMES, files.SELECTIONS)):
        return None
    try:
        run = Run.open(folder)
        _ = run.ids, run.group_N
    except SiamMMError as error:
        raise InputError(
            f"The output folder {folder} holds names of groups or selections of a result that cannot be read "
            f"({one_line(error).partition(';')[0]}); choose another --output, or remove {files.GROUP_NAMES} and "
            f"{files.SELECTIONS} there."
        ) from error
    return run


def _are_known_again(earlier: Run, run: Run) -> bool:
    """Whether a name says which image is meant: the number of a row does only in the same table."""
    return run.ids != _numbers(run.n_images) or earlier.fingerprint == run.fingerprint


def _numbers(n: int) -> list[str]:
    """The ids of rows that have none of their own."""
    return [str(number) for number in range(n)]


def _same_groups(earlier_N: np.ndarray, group_M: np.ndarray, place_N: np.ndarray, g: int, new_g: int) -> list[int]:
    """For each earlier group the new one that is mostly the same images; -1 if there is none."""
    there = place_N >= 0
    table_GG = np.zeros((g, new_g), dtype=np.int64)
    np.add.at(table_GG, (earlier_N[there], group_M[place_N[there]]), 1)
    best_G = table_GG.argmax(axis=1)
    shared_G = table_GG[np.arange(g), best_G]
    is_same_G = (2 * shared_G > table_GG.sum(axis=1)) & (2 * shared_G > table_GG.sum(axis=0)[best_G])
    return np.where(is_same_G, best_G, -1).tolist()


def _sentence(what: str, of: str, kept: Sequence[str], lost: Sequence[str], why: str) -> str:
    """What became of some names, in a sentence; nothing if there were none."""
    each = f" {of}" if of else ""
    parts = [f"kept {counted(len(kept), what)}{each}"] if kept else []
    parts += [f"dropped {counted(len(lost), what)}{each} {why}: {listed(shown(name) for name in lost)}"] if lost else []
    sentence = ", and ".join(parts)
    return f"{sentence[0].upper()}{sentence[1:]}." if sentence else ""
