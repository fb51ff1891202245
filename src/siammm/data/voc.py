"""Images with several labels each: PASCAL VOC's own layout, and tables of targets.

    VOC2007/
      Annotations/000005.xml          the objects of an image, some of them marked as difficult
      JPEGImages/000005.jpg
      ImageSets/Main/trainval.txt     the images of a split, one a line

Targets are 1 for a class that an image shows, 0 for one that it does not, and -1 for one of which it shows nothing but
difficult objects: VOC counts these neither way.

Legend:  N images, C classes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np

from siammm.core.errors import InputError
from siammm.core.text import listed, one_line, shown
from siammm.data import decode
from siammm.data.folder_source import FolderSource
from siammm.data.source import Source
from siammm.data.subset import ABSENT, AMBIGUOUS, matched, read_names

if TYPE_CHECKING:
    import pyarrow as pa

VOC_CLASSES = (
    "aeroplane",
    "bicycle",
    "bird",
    "boat",
    "bottle",
    "bus",
    "car",
    "cat",
    "chair",
    "cow",
    "diningtable",
    "dog",
    "horse",
    "motorbike",
    "person",
    "pottedplant",
    "sheep",
    "sofa",
    "train",
    "tvmonitor",
)
"""VOC's 20 classes, in its order."""

NAME_KEYS = ("image", "images", "filename", "file_name", "file", "path", "name", "id")
"""What a table's column of image names is usually called; the first that exists wins."""
LIST_KEYS = ("labels", "label", "classes", "tags", "targets")
"""What a column with all classes of an image is usually called."""

# Annotations are a few kilobytes; a file beyond this is something else.
_LARGEST_ANNOTATION = 2**24
_SEPARATORS = (";", "|", ",")


@dataclass(frozen=True, kw_only=True)
class MultiLabelSet:
    """Images with any number of classes each."""

    source: Source
    """The images."""
    targets: np.ndarray
    """int8, N x C: 1 for a class that is there, 0 for one that is not, -1 for one that is not to be counted."""
    class_names: list[str]
    """What the columns are called."""


# -- VOC's layout ------------------------------------------------------------------------------------------------------


def open_voc(
    root: str | Path,
    split: str = "trainval",
    *,
    class_names: Sequence[str] | None = None,
    max_pixels: int = decode.MAX_PIXELS,
) -> MultiLabelSet:
    """The images of a split and what they show; nothing is decoded yet.

    ``root`` is the folder with Annotations, JPEGImages and ImageSets, or one that holds a single such folder. Without
    ``class_names`` the columns are VOC's 20 classes where no other is found, and else the classes of the split in
    alphabetical order: give those of the training split when opening the test split.
    """
    folder = _voc_folder(Path(root).expanduser())
    names = _split_names(folder, split)
    files = _files(folder / "JPEGImages")
    paths: list[str] = []
    objects: list[dict[str, bool]] = []
    for name in names:
        if name not in files:
            raise InputError(
                f"{shown(name)} is in the split {split}, but {shown(folder / 'JPEGImages')} has no such image; add it "
                "or take it off the list."
            )
        paths.append(f"JPEGImages/{files[name]}")
        objects.append(_annotated(folder / "Annotations" / f"{name}.xml", name))
    classes = _columns((set(found) for found in objects), names, class_names)
    targets = np.zeros((len(names), len(classes)), dtype=np.int8)
    column = {name: i for i, name in enumerate(classes)}
    for row, found in enumerate(objects):
        for name, easy in found.items():
            targets[row, column[name]] = 1 if easy else -1
    source = FolderSource(folder, paths, name=f"{root}::{split}", with_labels=False, max_pixels=max_pixels)
    return MultiLabelSet(source=source, targets=targets, class_names=classes)


def _voc_folder(root: Path) -> Path:
    if not root.is_dir():
        raise InputError(f"{shown(root)} is not a folder; give the folder that holds Annotations and JPEGImages.")
    try:
        found = [root] if (root / "JPEGImages").is_dir() else []
        for depth in ("*", "*/*"):
            found = found or sorted(path.parent for path in root.glob(f"{depth}/JPEGImages") if path.is_dir())
    except OSError as error:
        raise InputError(f"The folder {shown(root)} cannot be read ({one_line(error)}); make it readable.") from error
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
    odd = [name for name in names if Path(name).name != name or name.startswith(".")]
    if odd:
        raise InputError(f"{odd[0]!r} in {shown(path)} is no name of an image, such as 000005; correct the list.")
    twice = _repeated(names)
    if twice is not None:
        raise InputError(f"{twice!r} is in {shown(path)} twice; take one off the list.")
    return names


def _repeated(names: Sequence[str]) -> str | None:
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)


def _files(folder: Path) -> dict[str, str]:
    """The image files of a folder by their names without extension; .jpg wins where there are two."""
    try:
        files = sorted(file.name for file in folder.iterdir() if file.suffix.lower() in decode.SUFFIXES)
    except OSError as error:
        raise InputError(f"The folder {shown(folder)} cannot be read ({one_line(error)}); make it readable.") from error
    return {Path(file).stem: file for file in sorted(files, key=lambda file: file.lower().endswith(".jpg"))}


def _annotated(path: Path, name: str) -> dict[str, bool]:
    """The classes that an image shows, and whether any of their objects is not a difficult one."""
    try:
        if path.stat().st_size > _LARGEST_ANNOTATION:
            raise InputError(f"{shown(path)} has {path.stat().st_size:,} bytes, too many for an annotation; check it.")
        text = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"The image {shown(name)} has no annotation {shown(path)}; add it.") from None
    except OSError as error:
        raise InputError(f"The annotation {shown(path)} cannot be read ({one_line(error)}); check the file.") from error
    root = parse_xml(text, path)
    found: dict[str, bool] = {}
    for thing in root.iter("object"):
        label = (thing.findtext("name") or "").strip()
        if not label:
            raise InputError(f"An object in {shown(path)} has no name; correct the annotation.")
        difficult = (thing.findtext("difficult") or "0").strip()
        if difficult not in ("0", "1"):
            raise InputError(f"{shown(path)} says that an object is difficult by {difficult!r}, but it is 0 or 1.")
        found[label] = found.get(label, False) or difficult == "0"
    return found


class _Refused(Exception):  # noqa: N818 - it never leaves this module
    """A document that declares a type."""


class _PlainTree(ElementTree.TreeBuilder):
    """A tree without a document type: entities, which can grow without bound or name files, are declared in one."""

    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        raise _Refused


def parse_xml(text: bytes, path: Path) -> ElementTree.Element:
    """The root of an XML document of which nothing is trusted."""
    parser = ElementTree.XMLParser(target=_PlainTree())
    try:
        parser.feed(text)
        return parser.close()
    except _Refused:
        raise InputError(
            f"{shown(path)} declares a document type (<!DOCTYPE>), which is not read for safety; take it out."
        ) from None
    # An encoding that nobody knows is a LookupError or a ValueError.
    except (ElementTree.ParseError, LookupError, ValueError) as error:
        raise InputError(f"{shown(path)} is not well-formed XML ({one_line(error)}); correct it.") from error


def _columns(found: Iterable[set[str]], names: Sequence[str], given: Sequence[str] | None) -> list[str]:
    """The classes of the columns; with given ones, no other may be found."""
    rows = list(found)
    if given is None:
        seen = set().union(*rows)
        return list(VOC_CLASSES) if seen <= set(VOC_CLASSES) else sorted(seen)
    classes = [str(name) for name in given]
    for name, row in zip(names, rows, strict=True):
        unknown = sorted(row - set(classes))
        if unknown:
            raise InputError(
                f"The image {shown(name)} shows the class {unknown[0]!r}, which is none of the {len(classes)} known "
                f"({listed(classes)}); correct its annotation or add the class."
            )
    return classes


# -- tables ------------------------------------------------------------------------------------------------------------


def open_targets(
    source: Source,
    table: str | Path,
    *,
    name_column: str | None = None,
    label_column: str | None = None,
    class_names: Sequence[str] | None = None,
) -> MultiLabelSet:
    """The images of a source with targets from a Parquet or CSV table, one row an image, in any order.

    ``name_column`` holds what the images are called, relative to their source or by base name; rows for other images
    are passed over. The classes are either in one column, ``label_column``, as lists (in CSV as text, with ; or | or a
    comma between the classes, or as a JSON list), or every other column is a class and holds 1, 0 or -1, true or false,
    where nothing means -1. ``class_names`` chooses and orders the columns, so that two sets have the same.
    """
    path = Path(table).expanduser()
    columns = _read_table(path)
    name_column = _usual(columns, name_column, NAME_KEYS, path, "image names")
    if label_column is None:
        label_column = next((key for key in LIST_KEYS if key in columns and _holds_lists(columns[key])), None)
    elif label_column not in columns:
        raise InputError(f"{shown(path)} has no column {label_column!r}; it has: {listed(columns)}.")
    row_N = _rows_of(source, [str(name) for name in columns[name_column]], path, name_column)
    if label_column is not None:
        classes, targets = _from_lists([columns[label_column][row] for row in row_N], source, class_names)
    else:
        others = [name for name in columns if name != name_column]
        classes = [str(name) for name in class_names] if class_names is not None else others
        missing = [name for name in classes if name not in others]
        if missing or not classes:
            raise InputError(
                f"{shown(path)} has no column for the class {missing[0] if missing else '(any)'!r}; it has: "
                f"{listed(others) or '(none)'}."
            )
        targets = np.stack([_from_column(columns[name], name, path)[row_N] for name in classes], axis=1)
    return MultiLabelSet(source=source, targets=targets, class_names=classes)


def _read_table(path: Path) -> dict[str, list[Any]]:
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    suffix = path.suffix.lower()
    if suffix not in (".parquet", ".pq", ".csv", ".tsv"):
        raise InputError(f"{shown(path)} ends in {suffix!r}, but targets are read from .parquet, .csv or .tsv.")
    try:
        with path.open("rb") as file:
            if suffix in (".parquet", ".pq"):
                table: pa.Table = pyarrow.parquet.read_table(file)
            else:
                # As text: names such as 000005 are not numbers.
                header = _csv_header(path, suffix)
                table = pyarrow.csv.read_csv(
                    file,
                    parse_options=pyarrow.csv.ParseOptions(delimiter="\t" if suffix == ".tsv" else ","),
                    convert_options=pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(header, pa.string())),
                )
    except pa.ArrowException as error:
        raise InputError(f"{shown(path)} is not a whole table ({one_line(error)}); write it again.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{shown(path)} cannot be read ({one_line(error)}); check the file.") from error
    if len(set(table.column_names)) < len(table.column_names):
        raise InputError(f"{shown(path)} has two columns of the same name; save it with different names.")
    if table.num_rows == 0:
        raise InputError(f"{shown(path)} has 0 rows; a row for each image is needed.")
    return {name: table.column(name).to_pylist() for name in table.column_names}


def _csv_header(path: Path, suffix: str) -> list[str]:
    import csv

    with path.open(newline="", encoding="utf-8-sig") as file:
        return next(csv.reader(file, delimiter="\t" if suffix == ".tsv" else ","), [])


def _usual(columns: Mapping[str, list[Any]], given: str | None, usual: Sequence[str], path: Path, what: str) -> str:
    name = given if given is not None else next((key for key in usual if key in columns), None)
    if name is None or name not in columns:
        asked = f"no column {given!r}" if given is not None else f"no column of {what} by a usual name"
        raise InputError(f"{shown(path)} has {asked}; name one of: {listed(columns)}.")
    return name


def _holds_lists(values: list[Any]) -> bool:
    """Whether a column holds lists, or text that is no target."""
    return any(isinstance(value, list) or (isinstance(value, str) and _target(value) is None) for value in values)


def _rows_of(source: Source, names: list[str], path: Path, column: str) -> np.ndarray:
    """The row of each image of the source."""
    twice = _repeated(names)
    if twice is not None:
        raise InputError(f"{twice!r} is in the column {column!r} of {shown(path)} twice; keep one row for each image.")
    identifiers = [source.identifier(i) for i in range(len(source))]
    row_N = matched(identifiers, names)
    for code, problem in ((ABSENT, "has no row"), (AMBIGUOUS, "could be several rows")):
        if (row_N == code).any():
            first = identifiers[int(np.argmax(row_N == code))]
            raise InputError(
                f"The image {shown(first)} {problem} in {shown(path)} ({int((row_N == code).sum())} of "
                f"{len(row_N)} images); name each image in the column {column!r}."
            )
    return row_N


def _from_lists(values: list[Any], source: Source, given: Sequence[str] | None) -> tuple[list[str], np.ndarray]:
    rows = [_listed_classes(value) for value in values]
    classes = (
        sorted(set().union(*rows))
        if given is None
        else _columns(rows, [source.identifier(i) for i in range(len(source))], given)
    )
    if not classes:
        raise InputError(f"None of the {len(rows)} images of {shown(source.name)} has a class; check the table.")
    column = {name: i for i, name in enumerate(classes)}
    targets = np.zeros((len(rows), len(classes)), dtype=np.int8)
    for row, found in enumerate(rows):
        targets[row, [column[name] for name in found]] = 1
    return classes, targets


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
    if value is None:
        return set()
    values = value if isinstance(value, list) else [value]
    return {str(part).strip() for part in values if part is not None and str(part).strip()}


def _from_column(values: list[Any], name: str, path: Path) -> np.ndarray:
    targets = [_target(value) for value in values]
    if None in targets:
        row = targets.index(None)
        raise InputError(
            f"Row {row} of the column {name!r} in {shown(path)} holds {values[row]!r}, but a class is 1, 0 or -1; "
            "correct it, or choose the classes or the column of lists by name."
        )
    return np.asarray(targets, dtype=np.int8)


def _target(value: Any) -> int | None:
    """1, 0 or -1, or None for what is none of these."""
    if value is None or value != value:
        return -1
    if isinstance(value, str):
        known = {"": -1, "1": 1, "0": 0, "-1": -1, "true": 1, "false": 0, "1.0": 1, "0.0": 0, "-1.0": -1}
        return known.get(value.strip().lower())
    return int(value) if isinstance(value, bool | int | float) and value in (1, 0, -1) else None
