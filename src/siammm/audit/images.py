"""What an audit reads: the features, ids and labels of a run's images or of a table of embeddings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import torch

from siammm.audit.suspects import check_classes
from siammm.core.errors import InputError, StoredFileError
from siammm.core.reading import open_regular
from siammm.core.text import one_line, shown
from siammm.data.array_files import map_npy, npy_header, parquet_columns, parquet_file
from siammm.data.embedding_table import ID_KEYS
from siammm.data.embeddings import read_embeddings
from siammm.data.labels import LABEL_KEYS
from siammm.data.loader import Loader
from siammm.learn.encode import encode
from siammm.metrics.kmeans import clusters_of
from siammm.metrics.labels import label_codes
from siammm.mixture.estimator import VonMisesFisherMixture
from siammm.mixture.group_rule import Groups
from siammm.runs.images import image_loader, open_images
from siammm.runs.run import Run
from siammm.settings.commands import AuditConfig

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class AuditedImages:
    """What is known of the images before their labels are questioned."""

    name: str
    features: np.ndarray | torch.Tensor
    ids: np.ndarray
    labels: np.ndarray
    """The number of a class per image, -1 where there is none."""
    classes: list[Any]
    clusters: np.ndarray | None
    """The cluster of each image, where a mixture is known; shown beside the labels."""
    n_clusters: int | None
    groups: np.ndarray | None = None
    """The group of each image, if groups are known that are not the clusters; shown too."""
    n_groups: int | None = None
    n_unreadable: int = 0


def read_images(config: AuditConfig, device: torch.device, progress: Progress) -> AuditedImages:
    """Read a run's images or a table, with the labels that are to be audited."""
    images = _from_run(config, device, progress) if config.subject.is_dir() else _from_table(config)
    if config.labels is not None:
        images = _with_labels(images, config.labels, config)
    labelled = images.labels[images.labels >= 0]
    if not len(labelled):
        raise InputError(
            f"{images.name} has no labels, or not for all images; an audit needs them: give --labels, or name "
            "them with --label-column (of a table) or --label-key (of a run's images)."
        )
    check_classes(labelled, images.classes)
    return images


def _from_table(config: AuditConfig) -> AuditedImages:
    if config.data is not None:
        raise InputError(f"{config.subject} is a table, which holds its own images; leave --data out.")
    # Labels from another file replace those of the table.
    label_column = config.label_column if config.labels is None else ""
    id_column = config.id_column if config.labels is None else None
    table = read_embeddings(config.subject, key=config.key, id_column=id_column, label_column=label_column)
    n, n_features = table.embeddings.shape
    if n_zero := n - int(np.any(table.embeddings, axis=1).sum()):
        raise InputError(
            f"{n_zero} of the {n} rows of {config.subject} hold only zeros, and a zero vector has no direction; remove "
            "these rows."
        )
    codes, classes = (np.full(n, -1), []) if table.labels is None else _coded(table.labels)
    mixture = clusters = None
    if config.mixture is not None:
        mixture = VonMisesFisherMixture.load(config.mixture)
        if mixture.n_features_in_ != n_features:
            raise InputError(
                f"The mixture {config.mixture} has {mixture.n_features_in_} dimensions, but the embeddings have "
                f"{n_features}; use the one that siammm cluster found in them."
            )
        clusters = np.asarray(mixture.predict(table.embeddings))
    ids = np.arange(n) if table.ids is None else table.ids
    groups = None if mixture is None else _found(mixture.groups_)
    return AuditedImages(
        name=str(config.subject), features=table.embeddings, ids=ids, labels=codes, classes=classes,
        clusters=clusters,
        n_clusters=None if mixture is None else int(mixture.n_components_),
        groups=None if groups is None else groups.predict(table.embeddings, clusters),
        n_groups=None if groups is None else groups.n_groups,
    )  # fmt: skip


def _found(groups: Groups | None) -> Groups | None:
    """Groups that are not simply the clusters."""
    return groups if groups is not None and groups.is_found else None


def _from_run(config: AuditConfig, device: torch.device, progress: Progress) -> AuditedImages:
    """The labelled images through the run's encoder: features to compare, embeddings to find clusters and groups."""
    for flag, value in (("--key", config.key), ("--mixture", config.mixture)):
        if value is not None:
            raise InputError(f"{config.subject} is a run, which has its own; leave {flag} out.")
    run = Run.open(config.subject, device=device)
    if run.table is not None:
        raise InputError(
            f"{run.given} was clustered from a table of embeddings; audit that table, with its clusters: siammm audit "
            f"{shown(run.table)} --mixture {shown(run.mixture_file)}."
        )
    data = config.data or run.data
    if data is None:
        raise InputError(f"{run.given} does not say what it was trained on; give the labelled images with --data.")
    # A run that read no labels can still be audited with the labels of its images.
    reading = config.reading if config.data is not None else run.reading(config.reading, needs_labels=True)
    source = open_images(data, reading)
    loader = image_loader(
        source,
        run.view,
        reading,
        device,
        progress=lambda what, done, total: progress(f"reading {done:,} of {total:,} images"),
    )
    try:
        progress("features")
        features = encode(run.network, loader, "features")
        embeddings = _embeddings(run, loader, features) if run.has_clusters else None
        clusters = None if embeddings is None else clusters_of(run.mixture, embeddings)
        groups = _found(run.groups)
        labels = loader.labels
        numbers = np.full(loader.n_images, -1) if labels is None else np.asarray(labels, dtype=np.int64)
        return AuditedImages(
            name=data,
            features=features,
            ids=np.array(loader.identifiers(), dtype=object),
            labels=numbers,
            classes=list(source.label_names or range(int(numbers.max()) + 1)),
            clusters=clusters,
            n_clusters=run.n_clusters if run.has_clusters else None,
            groups=None if groups is None else groups.predict(embeddings, clusters),
            n_groups=None if groups is None else groups.n_groups,
            n_unreadable=len(loader.set_aside),
        )
    finally:
        loader.close()


def _embeddings(run: Run, loader: Loader, features: torch.Tensor) -> torch.Tensor:
    """What the run clusters; a pretrained encoder's features are that already."""
    has_projector = any(True for _ in run.embedding_encoder.projector.parameters())
    return encode(run.network, loader, "embeddings") if has_projector else features


# -- labels ------------------------------------------------------------------------------------------------------------


def _coded(labels: np.ndarray) -> tuple[np.ndarray, list[Any]]:
    """Numbers of classes in the order of their names; a missing label, or a number below 0, is -1."""
    codes, classes = label_codes(labels)
    kept = [c for c, name in enumerate(classes) if not (isinstance(name, (int, float)) and name < 0)]
    with contextlib.suppress(TypeError):  # names of different types have no order, and stay as they come
        kept.sort(key=lambda c: classes[c])
    renumbered = np.full(len(classes) + 1, -1)  # the last entry is for the missing label, -1
    renumbered[kept] = np.arange(len(kept))
    return renumbered[codes], [classes[c] for c in kept]


def _with_labels(images: AuditedImages, path: Path, config: AuditConfig) -> AuditedImages:
    """The images with labels from a file of their own, by id, or in order where the file has no ids."""
    ids, labels = _read_labels(path, config.id_column, config.label_column)
    codes, classes = _coded(labels)
    n = len(images.ids)
    if ids is None:
        if len(labels) != n:
            raise InputError(f"{path} holds {len(labels)} labels for {n} images; give one for each.")
        return replace(images, labels=codes, classes=classes)
    known = {str(name): at for at, name in enumerate(ids.tolist())}
    if len(known) < len(ids):
        raise InputError(f"{path} has two rows for one id; keep one label for each.")
    at = np.array([known.get(str(name), -1) for name in images.ids.tolist()], dtype=np.int64)
    if (at < 0).all():
        raise InputError(
            f"None of the {len(ids)} ids in {path} is that of an image, such as {str(images.ids[0])!r}; use the same "
            "ids."
        )
    return replace(images, labels=np.where(at >= 0, codes[at], -1), classes=classes)


def _read_labels(path: Path, id_column: str | None, label_column: str | None) -> tuple[np.ndarray | None, np.ndarray]:
    suffix = path.suffix.lower()
    if not path.is_file():
        raise InputError(f"The file of labels {path} does not exist; check the path.")
    if suffix not in (".csv", ".parquet", ".pq", ".npy"):
        raise InputError(f"{path} ends in {suffix!r}, but labels are read from .csv, .parquet and .npy files.")
    try:
        if suffix == ".csv":
            # Ids are read as text: 000123 is not the number 123.
            text = dict.fromkeys([id_column] if id_column else ID_KEYS, pa.string())
            with open_regular(path) as file:
                table = pyarrow.csv.read_csv(file, convert_options=pyarrow.csv.ConvertOptions(column_types=text))
        elif suffix == ".npy":
            with open_regular(path) as file:
                _, dtype = npy_header(file, str(path))
            if dtype.kind not in "biufUS":
                raise InputError(f"{path} is an array of {dtype.name}, but labels are numbers or strings; save these.")
            table = np.array(map_npy(path))
        else:
            with parquet_file(path) as file:
                table = parquet_columns(file, file.schema_arrow.names, path)
        if not isinstance(table, np.ndarray):
            return _label_columns(table, path, id_column, label_column)
    except (InputError, StoredFileError):
        raise
    except (OSError, ValueError, pa.ArrowException) as error:
        raise StoredFileError(f"{path} cannot be read ({one_line(error)}).") from error
    if table.ndim != 1:
        raise InputError(f"{path} has the shape {table.shape}, but one label per image is needed.")
    return None, table


def _label_columns(
    table: pa.Table, path: Path, id_column: str | None, label_column: str | None
) -> tuple[np.ndarray, np.ndarray]:
    """The columns of ids and of labels."""
    columns: list[np.ndarray] = []
    for given, usual, flag in ((id_column, ID_KEYS, "--id-column"), (label_column, LABEL_KEYS, "--label-column")):
        name = next((name for name in ([given] if given else usual) if name in table.column_names), None)
        if name is None:
            raise InputError(
                f"{path} has no column {given or ' or '.join(usual[:4])}; give {flag} one of: "
                f"{', '.join(table.column_names[:12])}."
            )
        values = np.empty(len(table), dtype=object)
        values[:] = table.column(name).to_pylist()
        columns.append(values)
    return columns[0], columns[1]
