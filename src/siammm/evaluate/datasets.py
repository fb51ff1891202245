"""Open the sets that a subject is measured on: their labels are aligned, and the record says which images they are.

Whatever can be refused is refused here, before an image is encoded.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from siammm.core.errors import InputError, SiamMMError
from siammm.data.embedding_table import EmbeddingTable
from siammm.data.embeddings import read_embeddings
from siammm.data.source import Source
from siammm.data.sources import open_source
from siammm.data.subset import SourceSubset
from siammm.data.voc import MultiLabelSet, find_voc, open_targets, open_voc
from siammm.evaluate.split import HELD_OUT, aligned_labels, held_out, n_shared
from siammm.evaluate.subject import Subject, TableSubject
from siammm.evaluate.task import LabelledSet, Progress, Task
from siammm.metrics.labels import below_zero, label_codes
from siammm.runs.models import Model
from siammm.runs.run import Run
from siammm.settings.training import DataConfig

# One split for all seeds and all subjects, so that figures are about the same images.
_SPLIT_SEED = 0
_GIVEN = {"kind": "given"}
_HELD_OUT = {"kind": "held out", "share": 1 / HELD_OUT, "seed": _SPLIT_SEED}
# The suffixes of tables of targets.
_TARGETS = (".csv", ".tsv", ".parquet", ".pq")


@dataclass(frozen=True)
class Pair:
    """A training set and a test set with the same classes."""

    train: LabelledSet
    test: LabelledSet
    class_names: list[str]
    split: dict[str, Any]

    def record(self, names: tuple[str, str] = ("train", "test")) -> dict[str, Any]:
        """What the evaluation says about the two sets."""
        found: dict[str, Any] = {}
        for name, part in zip(names, (self.train, self.test), strict=True):
            labels = _labels_fingerprint(part, self.class_names)
            found[name] = {
                "name": part.source.name if part.source is not None else part.table or part.name,
                "fingerprint": labels if part.source is None else part.source.fingerprint(),
                "labels": labels,
                "n_images": len(part.labels),
                "n_classes": len(np.unique(part.labels)) if part.targets is None else part.targets.shape[1],
                **({"n_unlabelled": part.n_unlabelled} if part.n_unlabelled else {}),
            }
        return found | {"split" if names[0] == "train" else f"{names[0]}_split": self.split}


def open_task(
    subject: Subject,
    *,
    data: str | None,
    test: str | None,
    device: torch.device,
    reading: DataConfig,
    progress: Progress | None = None,
) -> Task:
    """Open the sets of images, or split the table, and find out what the subject knows of the test images."""
    if isinstance(subject, TableSubject):
        if data is not None:
            raise InputError(f"{subject.name} is a table, which contains its own data; leave --data {data} out.")
        pair = _open_tables(subject.table, test, reading)
        why = "A table does not say which images its encoder was trained on."
        seen: dict[str, Any] = {"seen": None, "clustered": None, "in_train": None, "why": why}
    else:
        own = None if subject.run is None else subject.run.data
        if subject.run is not None:
            reading = subject.run.reading(reading, needs_labels=True)
        where = own if data is None else data
        if where is None:
            raise InputError(f"{subject.name} comes without images; give labelled ones with --data.")
        pair, whole = open_pair(where, test, reading)
        seen = _seen(subject, pair, whole, reading)
    task = Task(subject, pair.train, pair.test, pair.class_names, device, pair.record(), seen, reading)
    if progress is not None:
        task.progress = progress
    return task


def open_transfer(task: Task, data: str, test: str | None) -> None:
    """Add another labelled data set to a task."""
    if isinstance(task.subject, TableSubject):
        raise InputError(f"{task.subject.name} is a table, which cannot encode other images; leave --transfer out.")
    if find_voc(_root_and_split(data, "")[0]):
        pair = _open_voc(data, test, task.reading)
    elif _targets_table(data) is not None:
        pair = _open_targets(data, test, task.reading)
    else:
        pair, _ = open_pair(data, test, task.reading, what="transfer ", flag="--transfer-test")
    task.transfer = (pair.train, pair.test)
    task.data |= pair.record(("transfer", "transfer_test"))


# -- several classes per image -----------------------------------------------------------------------------------------


def _open_voc(data: str, test: str | None, reading: DataConfig) -> Pair:
    """VOC's trainval and test images, or the splits that are named as in ``VOC2007::train``."""
    root, split = _root_and_split(data, "trainval")
    train = open_voc(root, split, max_pixels=reading.max_pixels)
    test_root, test_split = _root_and_split(test, "test") if test is not None else (root, "test")
    tests = open_voc(test_root, test_split, class_names=train.class_names, max_pixels=reading.max_pixels)
    # Sets in VOC's layout may have a few of its 20 classes only; the others cannot be learned or scored.
    there_C = (train.targets != 0).any(axis=0) | (tests.targets != 0).any(axis=0)
    names = [name for name, there in zip(train.class_names, there_C, strict=True) if there]
    if not names:
        raise InputError(f"No image of {data} shows anything by its annotations; give a set that does.")
    absent = [name for name in train.class_names if name not in names]
    train, tests = (replace(one, targets=one.targets[:, there_C], class_names=names) for one in (train, tests))
    return _several(train, tests, _GIVEN | ({"absent_classes": absent} if absent else {}))


def _open_targets(data: str, test: str | None, reading: DataConfig) -> Pair:
    """Images with a table of their classes, ``FOLDER::TABLE``; a tenth is held out where no test set is given."""
    train = _with_targets(data, None, reading)
    if test is not None:
        return _several(train, _with_targets(test, train.class_names, reading), _GIVEN)
    parts = held_out(np.zeros(len(train.source), dtype=np.int64), seed=_SPLIT_SEED, flag="--transfer-test")
    train, tests = (replace(train, source=SourceSubset(train.source, at), targets=train.targets[at]) for at in parts)
    return _several(train, tests, _HELD_OUT)


def _several(train: MultiLabelSet, test: MultiLabelSet, split: dict[str, Any]) -> Pair:
    def part(name: str, images: MultiLabelSet) -> LabelledSet:
        labels, source = np.zeros(len(images.source), dtype=np.int64), images.source
        return LabelledSet(name, labels, source, targets=images.targets, class_names=images.class_names)

    return Pair(part("transfer training", train), part("transfer test", test), train.class_names, split)


def _with_targets(data: str, class_names: list[str] | None, reading: DataConfig) -> MultiLabelSet:
    table = _targets_table(data)
    if table is None:
        raise InputError(f"{data} names no table of classes; give --transfer-test as FOLDER::TABLE, too.")
    images = _open_images(data.rpartition("::")[0], replace(reading, image_key=None, label_key=""))
    return open_targets(images, table, class_names=class_names)


def _targets_table(data: str) -> Path | None:
    """The table of classes in ``FOLDER::TABLE``."""
    images, _, table = data.rpartition("::")
    return Path(table).expanduser() if images and table.lower().endswith(_TARGETS) else None


def _root_and_split(data: str, default: str) -> tuple[Path, str]:
    before, mark, split = data.rpartition("::")
    return Path(before if mark else data).expanduser(), split if mark and split else default


# -- one class per image -----------------------------------------------------------------------------------------------


def open_pair(
    data: str, test: str | None, reading: DataConfig, *, what: str = "", flag: str = "--test"
) -> tuple[Pair, Source]:
    """Two sets of images, or one with a tenth held out; and the whole of the first as it was opened."""
    source, labels = _open_labelled(data, reading)
    if test is not None:
        train, (tests, test_labels) = source, _open_labelled(test, reading)
        codes, test_codes, names = aligned_labels(labels, source.label_names, test_labels, tests.label_names)
    else:
        every, _, names = aligned_labels(labels, source.label_names, labels, source.label_names)
        at, test_at = held_out(every, seed=_SPLIT_SEED, flag=flag)
        train, tests = SourceSubset(source, at), SourceSubset(source, test_at)
        codes, test_codes = every[at], every[test_at]
    _check_classes(names, source.name)
    sets = LabelledSet(f"{what}training", codes, train), LabelledSet(f"{what}test", test_codes, tests)
    return Pair(*sets, names, _HELD_OUT if test is None else _GIVEN), source


def _open_images(data: str, reading: DataConfig) -> Source:
    source = open_source(data, image_key=reading.image_key, label_key=reading.label_key, max_pixels=reading.max_pixels)
    if not len(source):
        raise InputError(f"{data} holds no images; give a folder or file that does.")
    return source


def _open_labelled(data: str, reading: DataConfig) -> tuple[Source, np.ndarray]:
    source = _open_images(data, reading)
    if source.labels is None:
        raise InputError(
            f"{data} has no labels, or some are missing, but an evaluation needs all of them; put the images into a "
            "folder for each class, or name the labels with --label-key."
        )
    return source, source.labels


def _seen(subject: Model, pair: Pair, whole: Source, reading: DataConfig) -> dict[str, Any]:
    """Whether the subject saw the test images, as far as that can be known."""
    train, test = pair.train.source, pair.test.source
    assert train is not None
    assert test is not None
    seen, why = None, f"Nothing is known of the images that {subject.name} was trained on."
    clustered, run = None, subject.run
    if run is not None and run.fingerprint is not None:
        is_among, how = _among_images(run, test, whole, reading)
        clustered = is_among and run.has_clusters
        if run.encoder_record is None:
            seen, why = is_among, how
        else:  # the images of such a run were clustered, and its encoder was trained on others
            encoder = run.encoder_run
            why = f"Nothing is known of the images that {run.encoder_name} was trained on."
            if encoder is not None and encoder.fingerprint is not None:
                seen, why = _among_images(encoder, test, whole, reading)
            why = f"{why} {how}"
    return {"seen": seen, "clustered": clustered, "in_train": n_shared(train, test), "why": why}


def _among_images(run: Run, test: Source, whole: Source, reading: DataConfig) -> tuple[bool | None, str]:
    """Whether the test images are among those of a run, and what is known of that."""
    those = f"those that the run {run.took_images}"
    if run.fingerprint == test.fingerprint():
        return True, f"The test images are {those}."
    if isinstance(test, SourceSubset) and run.fingerprint == whole.fingerprint():
        return True, f"The test images were held out of {those}: it saw them, without labels."
    try:
        own = open_source(str(run.data), image_key=reading.image_key, label_key="", max_pixels=reading.max_pixels)
        shared = n_shared(own, test) if own.fingerprint() == run.fingerprint else None
    except SiamMMError:
        shared = None
    if shared is None:
        # Another set may still share images with the run's, as a part of it does.
        return None, "The test images are another set than the run's, but single images could not be compared."
    if shared:
        return True, f"{shared:,} of the {len(test):,} test images are among {those}."
    return False, f"None of the test images is among {those}."


def _check_classes(names: list[str], source: str) -> None:
    if len(names) < 2:
        raise InputError(f"{source} has one class, {names[0]!r}, but at least two are needed; give more classes.")


# -- tables ------------------------------------------------------------------------------------------------------------


def _open_tables(table: EmbeddingTable, test: str | None, reading: DataConfig) -> Pair:
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
    else:
        (labels,) = _comparable(labels)
        every, _, names = aligned_labels(labels, None, labels, None)
        at, test_at = held_out(every, seed=_SPLIT_SEED, flag="--test")
        codes, test_codes, test_rows, rows = every[at], every[test_at], rows[test_at], rows[at]
    own = str(table.source)
    _check_classes(names, own)
    train = LabelledSet("training", codes, rows=rows, table=own, n_unlabelled=n_unlabelled)
    tests = LabelledSet("test", test_codes, rows=test_rows, table=test or own, n_unlabelled=n_test_unlabelled)
    return Pair(train, tests, names, _HELD_OUT if test is None else _GIVEN)


def _labelled_rows(table: EmbeddingTable) -> tuple[np.ndarray, np.ndarray]:
    """The rows that have a label, and their labels."""
    if table.labels is None:
        raise InputError(
            f"{table.source} has no labels, but an evaluation needs them; name their column with --label-key, "
            "or save the embeddings with labels as .npz or Parquet."
        )
    # Many tables mark a missing label with a number below 0.
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

    def text(value: object) -> str:
        return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)

    return [np.array([text(value) for value in labels.tolist()]) for labels in sets]


def _labels_fingerprint(part: LabelledSet, class_names: list[str]) -> str:
    """Identifies samples by their number, order and labels, whichever encoder embedded them."""
    digest = hashlib.sha256(f"siammm rows 1\n{len(part.labels)}\n".encode())
    if part.targets is not None:
        digest.update("\n".join(class_names).encode("utf-8", "backslashreplace") + part.targets.tobytes())
        return digest.hexdigest()
    for code in part.labels.tolist():
        digest.update(class_names[code].encode("utf-8", "backslashreplace") + b"\n")
    return digest.hexdigest()
