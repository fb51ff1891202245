"""From what the user gave to what is measured: the sets are opened, their labels agree, and the test images are known.

Everything that can be refused is refused here, before an image is encoded.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from siammm.core.errors import InputError, SiamMMError
from siammm.data.embeddings import EmbeddingTable, read_embeddings
from siammm.data.source import Source
from siammm.data.sources import open_source
from siammm.data.subset import SourceSubset
from siammm.data.voc import MultiLabelSet, open_targets, open_voc
from siammm.evaluate.measured import Measured, Part, Progress, silent
from siammm.evaluate.split import HELD_OUT, aligned_labels, held_out, n_shared
from siammm.metrics.labels import below_zero, label_codes
from siammm.runs.subject import ImageSubject, Subject, TableSubject
from siammm.settings.training import DataConfig

# One split for all seeds and all subjects: figures are of the same images, and deviations of the protocols alone.
_SPLIT_SEED = 0
# What tables of targets end in.
_TARGETS = (".csv", ".tsv", ".parquet", ".pq")


@dataclass(frozen=True)
class Prepared:
    """What is measured, and what the record says about the images."""

    measured: Measured
    data: dict[str, Any]
    test_images: dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """A set that teaches and a set that tests, with labels that mean the same in both."""

    train: Part
    test: Part
    class_names: list[str]
    split: dict[str, Any]


def prepared(
    subject: Subject,
    *,
    data: str | None,
    test: str | None,
    device: torch.device,
    reading: DataConfig,
    progress: Progress = silent,
) -> Prepared:
    """Open the sets of images, or split the table, and find out what the subject knows of the test images."""
    if isinstance(subject, TableSubject):
        if data is not None:
            raise InputError(f"{subject.name} is a table and brings its own data; leave --data {data} out.")
        pair = _tables(subject.table, test, reading)
        fingerprints = [_rows_fingerprint(part, pair.class_names) for part in (pair.train, pair.test)]
        seen: dict[str, Any] = {
            "seen": None,
            "clustered": None,
            "in_train": None,
            "why": "A table does not say which images its encoder was trained on.",
        }
    else:
        reading = _reading(subject, reading)
        where = data if data is not None else subject.data
        if where is None:
            raise InputError(f"{subject.name} does not bring images with it; give labelled ones with --data.")
        pair, whole = open_pair(where, test, reading)
        assert pair.train.source is not None
        assert pair.test.source is not None
        fingerprints = [part.source.fingerprint() for part in (pair.train, pair.test) if part.source is not None]
        seen = _seen(subject, pair, whole, reading)
    measured = Measured(
        subject=subject,
        train=pair.train,
        test=pair.test,
        class_names=pair.class_names,
        device=device,
        reading=reading,
        progress=progress,
    )
    return Prepared(measured, described(pair, fingerprints), seen)


def described(pair: Pair, fingerprints: list[str], *, names: tuple[str, str] = ("train", "test")) -> dict[str, Any]:
    """What the record says about two sets."""
    return {
        **{
            name: {
                "name": part.source.name if part.source is not None else part.table or part.name,
                "fingerprint": fingerprint,
                "labels": _rows_fingerprint(part, pair.class_names),
                "n_images": len(part.labels),
                "n_classes": len(np.unique(part.labels)) if part.targets is None else part.targets.shape[1],
                **({"n_unlabelled": part.n_unlabelled} if part.n_unlabelled else {}),
            }
            for name, part, fingerprint in zip(names, (pair.train, pair.test), fingerprints, strict=True)
        },
        "split" if names[0] == "train" else f"{names[0]}_split": pair.split,
    }


def open_transfer(measured: Measured, data: str, test: str | None) -> dict[str, Any]:
    """Give what is measured another labelled set; what the record says about it."""
    if isinstance(measured.subject, TableSubject):
        raise InputError(f"{measured.subject.name} is a table, which cannot see other images; leave --transfer out.")
    if is_voc(data):
        pair = _open_voc(data, test, measured.reading)
    elif _targets_table(data) is not None:
        pair = _open_targets(data, test, measured.reading)
    else:
        pair, _ = open_pair(data, test, measured.reading, what="transfer ", flag="--transfer-test")
    measured.transfer = (pair.train, pair.test)
    fingerprints = [part.source.fingerprint() for part in measured.transfer if part.source is not None]
    return described(pair, fingerprints, names=("transfer", "transfer_test"))


def is_voc(data: str) -> bool:
    """Whether this is a folder in VOC's layout, or one that holds such a folder."""
    root = _root_and_split(data, "")[0]
    return root.is_dir() and any(
        path.is_dir() for pattern in ("JPEGImages", "*/JPEGImages", "*/*/JPEGImages") for path in root.glob(pattern)
    )


def _open_voc(data: str, test: str | None, reading: DataConfig) -> Pair:
    """VOC's trainval and test images, or the splits that are named like ``VOC2007::train``."""
    root, split = _root_and_split(data, "trainval")
    teaching = open_voc(root, split, max_pixels=reading.max_pixels)
    root, split = _root_and_split(data if test is None else test, "test")
    split = "test" if test is None else split
    judging = open_voc(root, split, class_names=teaching.class_names, max_pixels=reading.max_pixels)
    # Sets in VOC's layout may be of a few of its 20 classes; those that no image has are nothing to learn or to judge.
    there_C = (teaching.targets != 0).any(axis=0) | (judging.targets != 0).any(axis=0)
    names = [name for name, there in zip(teaching.class_names, there_C, strict=True) if there]
    if not names:
        raise InputError(f"No image of {data} shows anything by its annotations; give a set that does.")
    train, tests = (
        _several(name, images.source, images.targets[:, there_C], names)
        for name, images in (("training", teaching), ("test", judging))
    )
    absent = [name for name in teaching.class_names if name not in names]
    return Pair(train, tests, names, {"kind": "given"} | ({"absent_classes": absent} if absent else {}))


def _open_targets(data: str, test: str | None, reading: DataConfig) -> Pair:
    """Images with a table of their classes, ``FOLDER::TABLE``; a tenth is held out where there are no others."""
    teaching = _with_targets(data, None, reading)
    names = teaching.class_names
    if test is None:
        n = len(teaching.source)
        teach, judging = held_out(np.zeros(n, dtype=np.int64), seed=_SPLIT_SEED, flag="--transfer-test")
        train, tests = (
            _several(name, SourceSubset(teaching.source, rows), teaching.targets[rows], names)
            for name, rows in (("training", teach), ("test", judging))
        )
        return Pair(train, tests, names, {"kind": "held out", "share": 1 / HELD_OUT, "seed": _SPLIT_SEED})
    judged = _with_targets(test, names, reading)
    train, tests = (
        _several(name, images.source, images.targets, names)
        for name, images in (("training", teaching), ("test", judged))
    )
    return Pair(train, tests, names, {"kind": "given"})


def _with_targets(data: str, class_names: list[str] | None, reading: DataConfig) -> MultiLabelSet:
    table = _targets_table(data)
    if table is None:
        raise InputError(f"{data} names no table of classes; give --transfer-test as FOLDER::TABLE, too.")
    images = open_source(data.rpartition("::")[0], label_key="", max_pixels=reading.max_pixels)
    if not len(images):
        raise InputError(f"{data} holds no images; give a folder or file that does.")
    return open_targets(images, table, class_names=class_names)


def _targets_table(data: str) -> Path | None:
    """The table of classes in ``FOLDER::TABLE``."""
    images, _, table = data.rpartition("::")
    return Path(table).expanduser() if images and table.lower().endswith(_TARGETS) else None


def _several(name: str, source: Source, targets: np.ndarray, class_names: list[str]) -> Part:
    """Images of several classes each."""
    labels = np.zeros(len(source), dtype=np.int64)
    return Part(f"transfer {name}", labels, source=source, targets=targets, class_names=class_names)


def _root_and_split(data: str, usual: str) -> tuple[Path, str]:
    before, mark, split = data.rpartition("::")
    return Path(before if mark else data).expanduser(), split if mark and split else usual


# -- images ------------------------------------------------------------------------------------------------------------


def open_pair(
    data: str, test: str | None, reading: DataConfig, *, what: str = "", flag: str = "--test"
) -> tuple[Pair, Source]:
    """Two sets of images, or one with a tenth held out; and the whole of the first as it was opened."""
    source = _labelled(data, reading)
    if test is not None:
        judge = _labelled(test, reading)
        assert source.labels is not None
        assert judge.labels is not None
        train_codes, test_codes, names = aligned_labels(
            source.labels, source.label_names, judge.labels, judge.label_names
        )
        split: dict[str, Any] = {"kind": "given"}
        train, tests = source, judge
    else:
        assert source.labels is not None
        codes, _, names = aligned_labels(source.labels, source.label_names, source.labels, source.label_names)
        teach, judging = _held_out(codes, flag)
        train, tests = SourceSubset(source, teach), SourceSubset(source, judging)
        train_codes, test_codes = codes[teach], codes[judging]
        split = {"kind": "held out", "share": 1 / HELD_OUT, "seed": _SPLIT_SEED}
    _check_classes(names, source.name)
    pair = Pair(
        Part(f"{what}training", train_codes, source=train), Part(f"{what}test", test_codes, source=tests), names, split
    )
    return pair, source


def _labelled(data: str, reading: DataConfig) -> Source:
    source = open_source(data, image_key=reading.image_key, label_key=reading.label_key, max_pixels=reading.max_pixels)
    if not len(source):
        raise InputError(f"{data} holds no images; give a folder or file that does.")
    if source.labels is None:
        raise InputError(
            f"{data} has no labels, or some are missing, and nothing can be measured without; put the images into a "
            "folder for each class, or name the labels with --label-key."
        )
    return source


def _reading(subject: ImageSubject, reading: DataConfig) -> DataConfig:
    """The names of a run's columns, unless others are given. That a run read no labels does not count: these judge."""
    own = subject.reading
    if own is None:
        return reading
    return replace(
        reading,
        image_key=reading.image_key if reading.image_key is not None else own.image_key,
        label_key=reading.label_key if reading.label_key is not None else own.label_key or None,
    )


def _seen(subject: ImageSubject, pair: Pair, whole: Source, reading: DataConfig) -> dict[str, Any]:
    """Whether the subject saw the test images, as far as that can be known."""
    train, test = pair.train.source, pair.test.source
    assert train is not None
    assert test is not None
    found: dict[str, Any] = {"in_train": n_shared(train, test)}
    if subject.fingerprint is None:
        why = f"Nothing is known of the images that {subject.name} was trained on."
        return {"seen": None, "clustered": None, **found, "why": why}
    seen, why = _seen_by_run(subject, test, whole, reading)
    return {"seen": seen, "clustered": seen and subject.mixture is not None, **found, "why": why}


def _seen_by_run(subject: ImageSubject, test: Source, whole: Source, reading: DataConfig) -> tuple[bool | None, str]:
    if subject.fingerprint == test.fingerprint():
        return True, "The test images are those that the run was trained on."
    held = isinstance(test, SourceSubset)
    if held and subject.fingerprint == whole.fingerprint():
        return True, "The test images were held out of those that the run was trained on: it saw them, without labels."
    try:
        own = open_source(str(subject.data), image_key=reading.image_key, label_key="", max_pixels=reading.max_pixels)
        known = own.fingerprint() == subject.fingerprint
        shared = n_shared(own, test) if known else None
    except SiamMMError:
        shared = None
    if shared is None:
        # Another set may still share images with the run's, as a part of it does.
        return None, "The test images are another set than the run's, but single images could not be compared."
    if shared:
        return True, f"{shared:,} of the {len(test):,} test images are among those that the run was trained on."
    return False, "None of the test images is among those that the run was trained on."


def _held_out(codes: np.ndarray, flag: str) -> tuple[np.ndarray, np.ndarray]:
    teach, judging = held_out(codes, seed=_SPLIT_SEED, flag=flag)
    if not len(judging):
        raise InputError(
            f"There are {len(codes)} images of {len(np.unique(codes))} classes, too few to hold some out; give {flag}."
        )
    return teach, judging


def _check_classes(names: list[str], source: str) -> None:
    if len(names) < 2:
        raise InputError(f"{source} has one class, {names[0]!r}, but there is nothing to tell apart below two.")


# -- tables ------------------------------------------------------------------------------------------------------------


def _tables(table: EmbeddingTable, test: str | None, reading: DataConfig) -> Pair:
    rows, labels = _labelled_rows(table)
    n_unlabelled, n_test_unlabelled = len(table.embeddings) - len(rows), 0
    if test is not None:
        other = read_embeddings(test, key=reading.image_key, label_column=reading.label_key)
        test_rows, test_labels = _labelled_rows(other)
        if test_rows.shape[1] != rows.shape[1]:
            raise InputError(
                f"{test} has {test_rows.shape[1]} columns and {table.source} {rows.shape[1]}; embed both with the same "
                "encoder."
            )
        n_test_unlabelled = len(other.embeddings) - len(test_rows)
        labels, test_labels = _comparable(labels, test_labels)
        codes, test_codes, names = aligned_labels(labels, None, test_labels, None)
        split: dict[str, Any] = {"kind": "given"}
    else:
        (labels,) = _comparable(labels)
        every, _, names = aligned_labels(labels, None, labels, None)
        teach, judging = _held_out(every, "--test")
        codes, test_codes, test_rows, rows = every[teach], every[judging], rows[judging], rows[teach]
        split = {"kind": "held out", "share": 1 / HELD_OUT, "seed": _SPLIT_SEED}
    _check_classes(names, str(table.source))
    return Pair(
        Part("training", codes, rows=rows, table=str(table.source), n_unlabelled=n_unlabelled),
        Part("test", test_codes, rows=test_rows, table=test or str(table.source), n_unlabelled=n_test_unlabelled),
        names,
        split,
    )


def _labelled_rows(table: EmbeddingTable) -> tuple[np.ndarray, np.ndarray]:
    """The rows that have a label, and their labels."""
    if table.labels is None:
        raise InputError(
            f"{table.source} has no labels, and nothing can be measured without; name their column with --label-key, "
            "or save the embeddings with labels as .npz or Parquet."
        )
    # A number below 0 is many tables' way of saying that there is none.
    labelled = (label_codes(table.labels)[0] >= 0) & ~below_zero(table.labels)
    if not labelled.any():
        raise InputError(f"None of the {len(labelled)} rows of {table.source} has a label; fill them in.")
    if labelled.all():
        return table.embeddings, table.labels
    return table.embeddings[labelled], table.labels[labelled]


def _comparable(*sets: np.ndarray) -> list[np.ndarray]:
    """Labels of one type, so that they can be sorted, and so that 3, 3.0 and "3" in two files are the same class."""
    if all(labels.dtype.kind in "iub" for labels in sets):
        return list(sets)
    return [np.array([_plain(value) for value in labels.tolist()]) for labels in sets]


def _plain(value: object) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _rows_fingerprint(part: Part, class_names: list[str]) -> str:
    """Which samples these are, whatever encoder embedded them: by their number, order and labels."""
    digest = hashlib.sha256(f"siammm rows 1\n{len(part.labels)}\n".encode())
    if part.targets is not None:
        digest.update("\n".join(class_names).encode("utf-8", "backslashreplace") + part.targets.tobytes())
        return digest.hexdigest()
    for code in part.labels.tolist():
        digest.update(class_names[code].encode("utf-8", "backslashreplace") + b"\n")
    return digest.hexdigest()
