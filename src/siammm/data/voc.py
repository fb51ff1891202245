"""Images with several labels each: PASCAL VOC's layout, and tables of targets.

    VOC2007/
      Annotations/000005.xml          the objects of an image, some of them marked as difficult
      JPEGImages/000005.jpg
      ImageSets/Main/trainval.txt     the images of a split, one per line

Targets are 1 for a class that an image shows, 0 for one that it does not, and -1 for one of which it shows only
difficult objects: VOC ignores these.

Legend:  N images, C classes.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from siammm.core.errors import InputError, StoredFileError
from siammm.core.reading import read_regular
from siammm.core.text import listed, one_line, shown
from siammm.data import decode
from siammm.data.array_files import parquet_columns, parquet_file
from siammm.data.folder_source import FolderSource
from siammm.data.source import Source
from siammm.data.subset import ABSENT, AMBIGUOUS, matched, read_names

VOC_CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog",
    "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
"""VOC's 20 classes, in its order."""

NAME_KEYS = ("image", "images", "filename", "file_name", "file", "path", "name", "id")
"""Usual names of a table's column of image names; the first that exists is used."""
LIST_KEYS = ("labels", "label", "classes", "tags", "targets")
"""Usual names of a column with all classes of an image."""

# Annotations are a few kilobytes; a larger file is something else.
_LARGEST_ANNOTATION = 2**24
_LARGEST_TABLE = 2**30
_SEPARATORS = (";", "|", ",")


@dataclass(frozen=True, kw_only=True)
class MultiLabelSet:
    """Images with any number of classes each."""

    source: Source
    targets: np.ndarray
    """int8, N x C: 1 for a class that is there, 0 for one that is not, -1 for one that is ignored."""
    class_names: list[str]
    """The names of the columns."""


# -- VOC's layout ------------------------------------------------------------------------------------------------------


def find_voc(root: Path) -> list[Path]:
    """The folders in VOC's layout: this one, or those up to two levels below."""
    try:
        for pattern in ("JPEGImages", "*/JPEGImages", "*/*/JPEGImages"):
            found = sorted(path.parent for path in root.glob(pattern) if path.is_dir())
            if found:
                return found
    except OSError as error:
        raise InputError(f"The folder {shown(root)} cannot be read ({one_line(error)}); make it readable.") from error
    return []


def open_voc(
    root: str | Path,
    split: str = "trainval",
    *,
    class_names: Sequence[str] | None = None,
    max_pixels: int = decode.MAX_PIXELS,
) -> MultiLabelSet:
    """The images of a split and what they show; nothing is decoded yet.

    ``root`` is the folder with Annotations, JPEGImages and ImageSets, or one that holds a single such folder. Without
    ``class_names`` the columns are VOC's 20 classes if there are no others, otherwise the classes of the split in
    alphabetical order: give those of the training split when opening the test split.
    """
    folder = _voc_folder(Path(root).expanduser())
    names = _split_names(folder, split)
    files = _files(folder / "JPEGImages")
    if (absent := next((name for name in names if name not in files), None)) is not None:
        raise InputError(
            f"{shown(absent)} is in the split {split}, but {shown(folder / 'JPEGImages')} has no such image; add it "
            "or remove it from the list."
        )
    objects = [_annotated(folder / "Annotations" / f"{name}.xml", name) for name in names]
    seen = {label for found in objects for label in found}
    if class_names is None:
        class_names = VOC_CLASSES if seen <= set(VOC_CLASSES) else sorted(seen)
    targets = _targets(objects, class_names, names)
    paths = [f"JPEGImages/{files[name]}" for name in names]
    source = FolderSource(folder, paths, name=f"{root}::{split}", max_pixels=max_pixels)
    source.labels = source.label_names = None
    return MultiLabelSet(source=source, targets=targets, class_names=list(class_names))


def _voc_folder(root: Path) -> Path:
    if not root.is_dir():
        raise InputError(f"{shown(root)} is not a folder; give the folder that holds Annotations and JPEGImages.")
    found = find_voc(root)
    if len(found) != 1:
        several = f"{len(found)} folders of VOC ({listed(path.name for path in found)})" if found else "no JPEGImages"
        raise InputError(f"{shown(root)} holds {several}; give the one folder with Annotations and JPEGImages.")
    for part in ("Annotations", "ImageSets/Main"):
        if not (found[0] / part).is_dir():
            raise InputError(f"{shown(found[0])} has no folder {part}; give a whole folder of VOC.")
    return found[0]


def _split_names(folder: Path, split: str) -> list[str]:
    lists = folder / "ImageSets" / "Main"
    path = lists / f"{split}.txt"
    if Path(split).name != split or not path.is_file():
        # Beside the splits there are lists of single classes, such as dog_trainval.
        there = sorted(file.stem for file in lists.glob("*.txt") if "_" not in file.stem)
        raise InputError(f"{shown(folder)} has no split {split!r}; it has: {listed(there) or '(none)'}.")
    names = read_names(path)
    if odd := [name for name in names if Path(name).name != name or name.startswith(".")]:
        raise InputError(f"{odd[0]!r} in {shown(path)} is not the name of an image, such as 000005; correct the list.")
    if (twice := _repeated(names)) is not None:
        raise InputError(f"{twice!r} is in {shown(path)} twice; remove one.")
    return names


def _repeated(names: Sequence[str]) -> str | None:
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)


def _files(folder: Path) -> dict[str, str]:
    """The image files of a folder by their names without extension; .jpg is preferred where there are two."""
    try:
        files = sorted(file.name for file in folder.iterdir() if file.suffix.lower() in decode.SUFFIXES)
    except OSError as error:
        raise InputError(f"The folder {shown(folder)} cannot be read ({one_line(error)}); make it readable.") from error
    return {Path(file).stem: file for file in sorted(files, key=lambda file: file.lower().endswith(".jpg"))}


def _annotated(path: Path, name: str) -> dict[str, int]:
    """The classes that an image shows: 1, or -1 where all objects of the class are difficult."""
    try:
        text = read_regular(path, most=_LARGEST_ANNOTATION)
    except FileNotFoundError:
        raise InputError(f"The image {shown(name)} has no annotation {shown(path)}; add it.") from None
    except OSError as error:
        raise InputError(f"The annotation {shown(path)} cannot be read ({one_line(error)}); check the file.") from error
    found: dict[str, int] = {}
    for thing in _parse_xml(text, path).iter("object"):
        label = (thing.findtext("name") or "").strip()
        if not label:
            raise InputError(f"An object in {shown(path)} has no name; correct the annotation.")
        difficult = (thing.findtext("difficult") or "0").strip()
        if difficult not in ("0", "1"):
            raise InputError(f"{shown(path)} marks an object as difficult by {difficult!r}, but it must be 0 or 1.")
        found[label] = max(found.get(label, -1), 1 if difficult == "0" else -1)
    return found


class _PlainTree(ElementTree.TreeBuilder):
    """A tree without a document type, in which entities could grow without bound or name files."""

    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        raise InputError("declares a document type (<!DOCTYPE>), which is not read for safety; take it out.")


def _parse_xml(text: bytes, path: Path) -> ElementTree.Element:
    """The root of an untrusted XML document."""
    parser = ElementTree.XMLParser(target=_PlainTree())
    try:
        parser.feed(text)
        return parser.close()
    except InputError as error:
        raise InputError(f"{shown(path)} {error}") from None
    # An unknown encoding is a LookupError or a ValueError.
    except (ElementTree.ParseError, LookupError, ValueError) as error:
        raise InputError(f"{shown(path)} is not well-formed XML ({one_line(error)}); correct it.") from error


def _targets(rows: Sequence[dict[str, int]], classes: Sequence[str], images: Sequence[str]) -> np.ndarray:
    """Targets of the classes that each image shows."""
    column = {name: i for i, name in enumerate(classes)}
    targets = np.zeros((len(rows), len(classes)), dtype=np.int8)
    for row, (found, image) in enumerate(zip(rows, images, strict=True)):
        if unknown := sorted(set(found) - set(column)):
            raise InputError(
                f"The image {shown(image)} shows the class {unknown[0]!r}, which is none of the {len(classes)} known "
                f"({listed(classes)}); correct its annotation or add the class."
            )
        for name, value in found.items():
            targets[row, column[name]] = value
    return targets


# -- tables ------------------------------------------------------------------------------------------------------------


def open_targets(source: Source, table: str | Path, *, class_names: Sequence[str] | None = None) -> MultiLabelSet:
    """The images of a source with targets from a Parquet or CSV table, one row per image, in any order.

    A column with a usual name (``NAME_KEYS``) holds the names of the images, relative to their source or base names;
    rows for other images are ignored. The classes are either in one column (``LIST_KEYS``) as lists (in CSV as text,
    separated by ; or | or a comma, or as a JSON list), or every other column is a class and holds 1, 0 or -1, true or
    false, where nothing means -1. ``class_names`` chooses and orders the columns, so that two sets have the same.
    """
    path = Path(table).expanduser()
    columns = _read_table(path)
    name_column = next((key for key in NAME_KEYS if key in columns), None)
    if name_column is None:
        raise InputError(
            f"{shown(path)} has no column of image names by a usual name ({', '.join(NAME_KEYS)}); it has: "
            f"{listed(columns)}."
        )
    images = [source.identifier(i) for i in range(len(source))]
    row_N = _rows_of(images, [str(name) for name in columns[name_column]], path, name_column)
    label_column = next((key for key in LIST_KEYS if key in columns and _holds_lists(columns[key])), None)
    if label_column is not None:
        rows = [dict.fromkeys(_listed_classes(columns[label_column][row]), 1) for row in row_N]
        classes = sorted({name for row in rows for name in row}) if class_names is None else list(class_names)
        if not classes:
            raise InputError(f"None of the {len(rows)} images of {shown(source.name)} has a class; check the table.")
        return MultiLabelSet(source=source, targets=_targets(rows, classes, images), class_names=classes)
    others = [name for name in columns if name != name_column]
    classes = others if class_names is None else [str(name) for name in class_names]
    missing = [name for name in classes if name not in others]
    if missing or not classes:
        raise InputError(
            f"{shown(path)} has no column for the class {missing[0] if missing else '(any)'!r}; it has: "
            f"{listed(others) or '(none)'}."
        )
    targets = np.stack([_from_column(columns[name], name, path)[row_N] for name in classes], axis=1)
    return MultiLabelSet(source=source, targets=targets, class_names=classes)


def _read_table(path: Path) -> dict[str, Sequence[Any]]:
    import pyarrow as pa

    suffix = path.suffix.lower()
    try:
        if suffix in (".parquet", ".pq"):
            with parquet_file(path) as file:
                header = list(file.schema_arrow.names)
                table: pa.Table = parquet_columns(file, header, path)
            columns = [column.to_pylist() for column in table.columns]
        elif suffix in (".csv", ".tsv"):
            text = io.StringIO(read_regular(path, most=_LARGEST_TABLE).decode("utf-8-sig"), newline="")
            with text as file:
                reader = csv.reader(file, delimiter="\t" if suffix == ".tsv" else ",", strict=True)
                header, *rows = [row for row in reader if row] or [[]]
            columns = list(zip(*rows, strict=True)) or [()] * len(header)
            if len(columns) != len(header):
                raise ValueError(f"{len(header)} names for {len(columns)} columns")
        else:
            raise InputError(f"{shown(path)} ends in {suffix!r}, but targets are read from .parquet, .csv or .tsv.")
    except (InputError, StoredFileError):
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{shown(path)} cannot be read ({one_line(error)}); check the file.") from error
    except (pa.ArrowException, csv.Error, ValueError) as error:
        raise InputError(f"{shown(path)} is not a complete table ({one_line(error)}); write it again.") from error
    if len(set(header)) < len(header):
        raise InputError(f"{shown(path)} has two columns of the same name; save it with different names.")
    if not columns or not len(columns[0]):
        raise InputError(f"{shown(path)} has 0 rows; a row for each image is needed.")
    return dict(zip(header, columns, strict=True))


def _holds_lists(values: Sequence[Any]) -> bool:
    """Whether a column holds lists, or text that is no target."""
    return any(isinstance(value, list) or (isinstance(value, str) and _target(value) is None) for value in values)


def _rows_of(images: list[str], names: list[str], path: Path, column: str) -> np.ndarray:
    """The row of each image."""
    if (twice := _repeated(names)) is not None:
        raise InputError(f"{twice!r} is in the column {column!r} of {shown(path)} twice; keep one row for each image.")
    row_N = matched(images, names)
    for code, problem in ((ABSENT, "has no row"), (AMBIGUOUS, "could be several rows")):
        if (row_N == code).any():
            first = images[int(np.argmax(row_N == code))]
            raise InputError(
                f"The image {shown(first)} {problem} in {shown(path)} ({int((row_N == code).sum())} of "
                f"{len(row_N)} images); name each image in the column {column!r}."
            )
    return row_N


def _listed_classes(value: Any) -> set[str]:
    if isinstance(value, str):
        text = value.strip()
        if text.startswith("["):
            try:
                value = json.loads(text)
            except json.JSONDecodeError as error:
                raise InputError(f"{text!r} in the table is not a list ({one_line(error)}); correct it.") from error
        else:
            separator = next((mark for mark in _SEPARATORS if mark in text), None)
            value = text.split(separator) if separator else [text]
    values = value if isinstance(value, list) else [value]
    return {str(part).strip() for part in values if part is not None and str(part).strip()}


def _from_column(values: Sequence[Any], name: str, path: Path) -> np.ndarray:
    targets = [_target(value) for value in values]
    if None in targets:
        row = targets.index(None)
        raise InputError(
            f"Row {row} of the column {name!r} in {shown(path)} holds {values[row]!r}, but a class is 1, 0 or -1; "
            "correct it, or put the classes into one column of lists."
        )
    return np.asarray(targets, dtype=np.int8)


def _target(value: Any) -> int | None:
    """1, 0 or -1, or None for anything else."""
    if value is None or value != value:
        return -1
    if isinstance(value, str):
        known = {"": -1, "1": 1, "0": 0, "-1": -1, "true": 1, "false": 0, "1.0": 1, "0.0": 0, "-1.0": -1}
        return known.get(value.strip().lower())
    return int(value) if isinstance(value, bool | int | float) and value in (1, 0, -1) else None
