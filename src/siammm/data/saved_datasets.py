"""Data sets as Hugging Face saves them: which files of a folder make a split, and what is written beside the tables."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from siammm.core.errors import InputError, StoredFileError
from siammm.core.reading import read_regular
from siammm.core.text import listed, one_line, shown
from siammm.data.labels import SPLITS

# Descriptions of data sets are kilobytes, or megabytes where they name many classes.
_LARGEST_JSON = 2**28

_SHARD = re.compile(r"(?P<split>.+?)-\d{3,}(-of-\d{3,}.*)?")


def choose_split(paths: Sequence[str], split: str | None, name: str) -> list[str]:
    """Those of a folder's Parquet files (relative paths) that belong to one split, by their names or folders.

    Files called ``train-00000-of-00004.parquet``, ``train.parquet`` or ``train/x.parquet`` belong to ``train``. Where
    there are several splits, one must be chosen: training on the test images by accident is worth a question.
    """
    by_split: dict[str, list[str]] = {}
    for path in paths:
        by_split.setdefault(_split_of(path), []).append(path)
    if split is not None:
        if split not in by_split:
            known = [known for known in by_split if known]
            raise InputError(f"{shown(name)} has no split {split!r}; it has: {listed(known) or '(none)'}.")
        return by_split[split]
    if len(by_split) > 1 and sum(known in SPLITS for known in by_split) > 0:
        first = next(known for known in by_split if known in SPLITS)
        raise InputError(
            f"{shown(name)} holds several splits ({listed(known or 'unnamed' for known in by_split)}); "
            f"choose one, for example {shown(name)}::{first}."
        )
    return list(paths)


def _split_of(path: str) -> str:
    *folders, file = path.split("/")
    stem = file.rpartition(".")[0]
    match = _SHARD.fullmatch(stem)
    stem = match["split"] if match else stem
    if stem in SPLITS:
        return stem
    return next((folder for folder in reversed(folders) if folder in SPLITS), "")


def saved_dataset_files(folder: Path, name: str) -> list[Path]:
    """The Arrow files of a folder that ``save_to_disk`` wrote, in order."""
    state = _json_file(folder / "state.json")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise InputError(
            f"{shown(name)} is saved with an indices mapping, which is not supported; "
            "save it again after dataset.flatten_indices()."
        )
    entries = state.get("_data_files") or []
    files: list[Path] = []
    for entry in entries if isinstance(entries, list) else []:
        file = entry.get("filename") if isinstance(entry, dict) else None
        # Only files of this folder: what is written in a file of data does not decide what else is opened.
        if not isinstance(file, str) or Path(file).name != file:
            raise StoredFileError(
                f"{shown(folder / 'state.json')} names the file {file!r}, which is not in its folder; save it again."
            )
        files.append(folder / file)
    if not files:
        raise StoredFileError(f"{shown(folder / 'state.json')} names no Arrow files; save the data set again.")
    return files


def saved_splits(folder: Path) -> list[str]:
    """The splits of a folder that ``DatasetDict.save_to_disk`` wrote."""
    splits = _json_file(folder / "dataset_dict.json").get("splits")
    return [str(split) for split in splits] if isinstance(splits, list) else []


def class_names(metadata: dict[bytes, bytes] | None, column: str | None) -> list[str] | None:
    """The names of classes that ``datasets`` keeps in a table's metadata."""
    try:
        return _names_in(json.loads((metadata or {})[b"huggingface"])["info"], column)
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


def class_names_beside(table: Path, column: str) -> list[str] | None:
    """The names of classes in the file that is saved beside the tables."""
    path = table.with_name("dataset_info.json")
    return _names_in(_json_file(path), column) if path.is_file() else None


def _names_in(info: Any, column: str | None) -> list[str] | None:
    try:
        names = info["features"][column]["names"]
    except (KeyError, TypeError):
        return None
    return [str(name) for name in names] if isinstance(names, list) else None


def _json_file(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_regular(path, most=_LARGEST_JSON))
    except OSError as error:
        raise StoredFileError(f"{shown(path)} cannot be read ({one_line(error)}); check the folder.") from error
    except (ValueError, RecursionError) as error:
        raise StoredFileError(f"{shown(path)} is damaged ({one_line(error)}); save the data set again.") from error
    if not isinstance(value, dict):
        raise StoredFileError(f"{shown(path)} is damaged (it holds no table of keys); save the data set again.")
    return value
