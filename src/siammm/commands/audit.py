"""``siammm audit``: labelled images in, as a run or as embeddings; the images that look mislabelled out."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import siammm
from siammm.audit import suspects as audits
from siammm.audit.suspects import Audit
from siammm.commands.progress import Bar
from siammm.core import processes
from siammm.core.checks import check_at_least, check_number
from siammm.core.errors import InputError, StoredFileError, ZeroRowWarning
from siammm.core.folders import check_new_folder, new_folder
from siammm.core.text import shown
from siammm.data.embeddings import ID_KEYS, LABEL_KEYS, read_embeddings
from siammm.data.loader import open_loader
from siammm.data.sources import open_source
from siammm.learn.encode import encode
from siammm.metrics.clustering import label_codes
from siammm.mixture.seeding import default_n_components
from siammm.runs import folder as run
from siammm.runs import results
from siammm.runs.folder import RunFolder
from siammm.settings.commands import AuditConfig

SUSPECTS, SUMMARY = "suspects.parquet", "summary.json"
RESULT_NAMES = frozenset({SUSPECTS, SUMMARY})

_CLASSES_SHOWN = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Images:
    """What is known of the images before their labels are questioned."""

    name: str
    features: np.ndarray | torch.Tensor
    ids: np.ndarray
    labels: np.ndarray
    """A number of a class for each image, -1 where there is none."""
    classes: list[Any]
    clusters: tuple[np.ndarray, np.ndarray] | None
    """The numbers and shares of each image's nearest components."""
    n_clusters: int | None
    n_unreadable: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planted:
    """Labels that were made wrong, to see whether they are found."""

    is_planted: np.ndarray
    """Which images' labels, of all images."""
    count: int
    """How many."""
    found: int
    """How many of them are among as many first suspects."""

    @property
    def precision(self) -> float:
        """The share of these suspects that were planted, which is also the share of the planted that is found."""
        return self.found / self.count


def audit(config: AuditConfig) -> None:
    """Run the command. Whatever can be refused is refused before the work starts."""
    if config.n_neighbours is not None:
        check_at_least("--n-neighbours", config.n_neighbours, 1)
    check_at_least("--rounds", config.rounds, 1)
    check_at_least("--show", config.show, 0)
    check_number("--threshold", config.threshold, lambda value: 0 < value < 1, "it is a probability between 0 and 1")
    if config.plant is not None:
        check_number("--plant", config.plant, lambda value: 0 < value < 0.5, "it is a share above 0 and below 0.5")
    output = config.output or _default_output(config.subject)
    check_new_folder(output, overwrite=config.overwrite, ours=RESULT_NAMES)
    console = Console(highlight=False)
    with processes.setup(config.device) as context, Bar() as progress:
        if context.world_size > 1:
            raise InputError(f"audit runs in one process, but there are {context.world_size}; start it by itself.")
        try:
            images, found, planted, seconds = audited(config, context.device, progress)
        except torch.OutOfMemoryError as error:
            raise InputError("The GPU has not enough memory for this; use --device cpu.") from error
    with new_folder(output, overwrite=config.overwrite, ours=RESULT_NAMES) as folder:
        pq.write_table(suspects(images, found, planted), folder / SUSPECTS)
        text = json.dumps(summary(config, images, found, planted, seconds), indent=2, allow_nan=False, default=str)
        (folder / SUMMARY).write_text(text + "\n", encoding="utf-8")
    show(images, found, planted, config.show, seconds, console)
    console.print(f"\nWritten to [bold]{escape(str(output))}[/]: {SUSPECTS}, {SUMMARY}")


def _default_output(subject: Path) -> Path:
    """The folder that an audit goes to when nobody said. A run's name may hold a dot, which begins no extension."""
    whole = subject.expanduser().resolve()
    return Path(f"{whole.name if whole.is_dir() else whole.stem}-audit")


def audited(
    config: AuditConfig, device: torch.device, progress: Bar
) -> tuple[Images, Audit, Planted | None, dict[str, float]]:
    """Read the images, find their clusters where these are not known, and judge every label."""
    seconds: dict[str, float] = {}
    is_run = config.subject.is_dir()
    with _timed(seconds, "read"):
        progress.show("reading")
        images = _of_run(config, device, progress) if is_run else _of_table(config)
        if config.labels is not None:
            images = _labelled(images, config)
        _check_labels(images)
    if images.clusters is None and not is_run:
        with _timed(seconds, "cluster"):
            progress.show("clusters")
            images = _clustered(images, config)
    labels, is_planted = images.labels, None
    if config.plant is not None:
        labels, is_planted = audits.plant_errors(labels, config.plant, seed=config.random_state)
    with _timed(seconds, "audit"):
        found = audits.audit(
            images.features,
            labels,
            clusters=images.clusters,
            class_names=images.classes,
            n_neighbours=config.n_neighbours,
            rounds=config.rounds,
            threshold=config.threshold,
            seed=config.random_state,
            device=device,
            progress=progress.show,
        )
    planted = None
    if is_planted is not None:
        count = int(is_planted.sum())
        first = found.image_N[found.order[:count]]
        planted = Planted(is_planted=is_planted, count=count, found=int(is_planted[first].sum()))
    return images, found, planted, {step: round(value, 3) for step, value in seconds.items()}


def suspects(images: Images, found: Audit, planted: Planted | None) -> pa.Table:
    """The table of results: one row a labelled image, the worst first."""
    order = found.order
    image = found.image_N[order]
    names = _names(found.classes)
    columns: dict[str, Any] = {
        "rank": pa.array(found.rank_N[order]),
        "id": pa.array(images.ids[image]),
        "label": pa.array(names[found.label_N[order]].tolist()),
        "suggested": pa.array(names[found.suggested_N[order]].tolist()),
        "probability": pa.array(found.probability_N[order]),
        "score": pa.array(found.score_N[order]),
    }
    for name, witness_N in found.witness_N.items():
        columns[name] = pa.array(witness_N[order])
    if images.clusters is not None:
        columns["cluster"] = pa.array(images.clusters[0][image, 0].astype(np.int32))
    if planted is not None:
        columns["planted"] = pa.array(planted.is_planted[image])
        columns["label_before"] = pa.array(_names(images.classes)[images.labels[image]].tolist())
    return pa.table(columns)


def summary(
    config: AuditConfig, images: Images, found: Audit, planted: Planted | None, seconds: dict[str, float]
) -> dict[str, Any]:
    """What there is to know about the audit, as plain values."""
    suspect = found.probability_N < found.threshold
    n_classes = len(found.classes)
    count_C, suspects_C = (np.bincount(found.label_N[mask], minlength=n_classes) for mask in (slice(None), suspect))
    return {
        "input": {
            "subject": str(config.subject),
            "data": images.name,
            "n_images": len(images.labels),
            "n_labelled": len(found.label_N),
            "n_unlabelled": found.n_unlabelled,
            "n_unreadable": images.n_unreadable,
        },
        "n_clusters": images.n_clusters,
        "threshold": found.threshold,
        "n_suspects": found.n_suspects,
        "error_rate": found.error_rate,
        "classes": [
            {"label": name, "n": int(n), "suspects": int(few), "error_rate": float(rate)}
            for name, n, few, rate in zip(found.classes, count_C, suspects_C, found.error_rate_C, strict=True)
        ],
        "noise": found.noise,
        "weights": dict(found.weights),
        "planted": None
        if planted is None
        else {"count": planted.count, "found": planted.found, "precision": planted.precision},
        "seconds": seconds,
        "settings": dataclasses.asdict(config),
        "versions": {"siammm": siammm.__version__, "torch": str(torch.__version__), "numpy": np.__version__},
    }


def show(
    images: Images, found: Audit, planted: Planted | None, n_shown: int, seconds: dict[str, float], console: Console
) -> None:
    """Print the worst, and the summary that a person reads."""
    n, few = len(found.label_N), found.n_suspects
    console.print(
        f"\n[bold green]{few:,} suspects[/] among {n:,} labels of {len(found.classes):,} classes: labels that are "
        f"right with a probability below {found.threshold:g}. Estimated share of wrong labels: {found.error_rate:.1%} "
        f"[dim]({sum(seconds.values()):.1f} s)[/]\n"
    )
    if n_shown:
        console.print(_worst(images, found, n_shown))
    console.print(_by_class(found))
    if found.n_unlabelled:
        console.print(f"{found.n_unlabelled:,} images without a label took no part.", style="yellow")
    if images.n_unreadable:
        console.print(f"{images.n_unreadable:,} images could not be read and took no part.", style="yellow")
    if planted is not None:
        console.print(
            f"Of {planted.count:,} labels that were made wrong, {planted.found:,} ({planted.precision:.1%}) are among "
            f"the first {planted.count:,} suspects."
        )


def _worst(images: Images, found: Audit, n_shown: int) -> Table:
    table = Table(title="What looks mislabelled most", title_justify="left")
    table.add_column("rank", justify="right")
    for heading in ("id", "label", "suggested"):
        table.add_column(heading, overflow="fold")
    table.add_column("probability", justify="right")
    if images.clusters is not None:
        table.add_column("cluster", justify="right")
        table.add_column("share there", justify="right")
    for at in found.order[:n_shown].tolist():
        image = int(found.image_N[at])
        given, other = found.classes[found.label_N[at]], found.classes[found.suggested_N[at]]
        row = [
            str(found.rank_N[at]),
            escape(shown(images.ids[image])),
            escape(shown(given)),
            escape(shown(other)) if other != given else "",
            f"{found.probability_N[at]:.3f}" if found.probability_N[at] >= 0.0005 else "< 0.001",
        ]
        if images.clusters is not None:
            row += [str(images.clusters[0][image, 0]), f"{found.witness_N['component'][at]:.1%}"]
        table.add_row(*row)
    return table


def _by_class(found: Audit) -> Table:
    """The classes with the largest share of labels that look wrong."""
    n_classes = len(found.classes)
    count_C = np.bincount(found.label_N, minlength=n_classes)
    suspects_C = np.bincount(found.label_N[found.probability_N < found.threshold], minlength=n_classes)
    order = np.argsort(-found.error_rate_C, kind="stable")[:_CLASSES_SHOWN]
    title = "Labels by class" if n_classes <= _CLASSES_SHOWN else f"The {_CLASSES_SHOWN} classes with most errors"
    table = Table(title=title, title_justify="left")
    table.add_column("label", overflow="fold")
    for heading in ("labels", "suspects", "estimated wrong"):
        table.add_column(heading, justify="right")
    for c in order.tolist():
        table.add_row(
            escape(shown(found.classes[c])), f"{count_C[c]:,}", f"{suspects_C[c]:,}", f"{found.error_rate_C[c]:.1%}"
        )
    return table


# ------------------------------------------------------------------------------------------------------ what is audited


def _of_table(config: AuditConfig) -> Images:
    if config.data is not None:
        raise InputError(f"{config.subject} is a table, which holds its own images; leave --data out.")
    # Labels that come from elsewhere leave those of the table aside.
    label_column = config.label_column if config.labels is None else ""
    id_column = config.id_column if config.labels is None else None
    table = read_embeddings(config.subject, key=config.key, id_column=id_column, label_column=label_column)
    n = len(table.embeddings)
    codes, classes = np.full(n, -1), []
    if table.labels is not None:
        codes, classes = _coded(table.labels)
    mixture = None
    if config.mixture is not None:
        mixture = siammm.VonMisesFisherMixture.load(config.mixture)
        if mixture.n_features_in_ != table.embeddings.shape[1]:
            raise InputError(
                f"The mixture {config.mixture} has {mixture.n_features_in_} dimensions, but the embeddings have "
                f"{table.embeddings.shape[1]}; give the one that siammm cluster found in them."
            )
    return Images(
        name=str(config.subject),
        features=table.embeddings,
        ids=np.arange(n) if table.ids is None else table.ids,
        labels=codes,
        classes=classes,
        clusters=None if mixture is None else _soft(mixture, table.embeddings),
        n_clusters=None if mixture is None else int(mixture.n_components_),
    )


def _of_run(config: AuditConfig, device: torch.device, progress: Bar) -> Images:
    """The labelled images through the run's encoder: features to compare, embeddings to find their clusters."""
    for flag, value in (("--key", config.key), ("--mixture", config.mixture)):
        if value is not None:
            raise InputError(f"{config.subject} is a run, which has its own; leave {flag} out.")
    folder = config.subject
    if not (folder / run.ENCODER).is_file():
        if (folder / run.CONFIG).is_file():
            raise InputError(f"The run {folder} has not finished; go on with: siammm train --resume {folder}.")
        raise InputError(f"{folder} is no run: it has no {run.ENCODER}; give a run or a table of embeddings.")
    network, _, view = results.load_network(folder / run.ENCODER)
    mixture = None
    if (folder / run.MIXTURE).is_file():
        mixture = siammm.VonMisesFisherMixture.load(folder / run.MIXTURE)
    data, reading = config.data, config.reading
    if data is None:
        if not (folder / run.CONFIG).is_file():
            raise InputError(f"{folder} does not say what it was trained on; give the labelled images with --data.")
        _, stored, facts = RunFolder.open(folder)
        data = str(facts.get("data_path", stored.data))
        reading = dataclasses.replace(
            reading,
            image_key=reading.image_key or stored.reading.image_key,
            # That a run read no labels does not count: here they are what it is about.
            label_key=reading.label_key or stored.reading.label_key or None,
        )
    source = open_source(data, image_key=reading.image_key, label_key=reading.label_key, max_pixels=reading.max_pixels)
    if not len(source):
        raise InputError(f"{data} holds no images; give --data a folder or file that does.")
    loader = open_loader(
        source,
        (view, view),
        device,
        kind=reading.loader,
        seed=config.random_state,
        workers=reading.workers,
        limit=reading.max_bad_images,
        progress=lambda done, total: progress.show(f"reading {done:,} of {total:,} images"),
    )
    try:
        progress.show("features")
        network = network.to(device)
        features = encode(network, loader, "features")
        clusters = None
        if mixture is not None:
            progress.show("clusters")
            clusters = _soft(mixture, encode(network, loader, "embeddings").cpu().numpy())
        labels = loader.labels
        numbers = np.full(loader.n_images, -1) if labels is None else np.asarray(labels, dtype=np.int64)
        names: list[Any] = []
        if labels is not None:
            names = list(source.label_names or range(int(numbers.max()) + 1))
        return Images(
            name=data,
            features=features,
            ids=np.array(loader.identifiers(), dtype=object),
            labels=numbers,
            classes=names,
            clusters=clusters,
            n_clusters=None if mixture is None else int(mixture.n_components_),
            n_unreadable=len(loader.set_aside),
        )
    finally:
        loader.close()


def _soft(mixture: Any, embeddings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers and shares of each image's components, both (N, H), the largest share first."""
    table = mixture.predict_proba(embeddings)
    h = table.indptr[1]
    index_NH, weight_NH = (values.reshape(-1, h) for values in (table.indices, table.data))
    order_NH = np.argsort(-weight_NH, axis=1, kind="stable")
    return np.take_along_axis(index_NH, order_NH, axis=1), np.take_along_axis(weight_NH, order_NH, axis=1)


def _clustered(images: Images, config: AuditConfig) -> Images:
    """The clusters of a table, found as ``siammm cluster`` finds them."""
    n, d = images.features.shape
    if d < 2:
        raise InputError("The embeddings have 1 column, but a direction needs at least 2; use embeddings with more.")
    mixture = siammm.VonMisesFisherMixture(
        default_n_components(n), merge="auto", device=config.device, random_state=config.random_state
    )
    embeddings = np.asarray(images.features)
    try:
        with warnings.catch_warnings():
            # A row of zeros in a file of embeddings is a mistake that nobody should miss.
            warnings.simplefilter("error", ZeroRowWarning)
            mixture.fit(embeddings)
    except ZeroRowWarning as error:
        raise InputError(str(error).partition(", or use GaussianMixture")[0].rstrip(".") + ".") from error
    return dataclasses.replace(images, clusters=_soft(mixture, embeddings), n_clusters=int(mixture.n_components_))


# --------------------------------------------------------------------------------------------------------------- labels


def _coded(labels: np.ndarray) -> tuple[np.ndarray, list[Any]]:
    """Numbers of classes in the order of their names; a missing label, or a number below 0, is -1."""
    codes, classes = label_codes(labels)
    missing = [isinstance(name, (int, float)) and name < 0 for name in classes]
    kept = [c for c, gone in enumerate(missing) if not gone]
    names = [classes[c] for c in kept]
    with contextlib.suppress(TypeError):  # names of different types have no order, and stay as they come
        kept = [c for _, c in sorted(zip(names, kept, strict=True), key=lambda pair: pair[0])]
    renumbered = np.full(len(classes) + 1, -1)  # the last place is that of the missing label, -1
    renumbered[kept] = np.arange(len(kept))
    return renumbered[codes], [classes[c] for c in kept]


def _labelled(images: Images, config: AuditConfig) -> Images:
    """The images with labels from a file of their own, by id, or in order where the file has no ids."""
    assert config.labels is not None
    ids, labels = _read_labels(config.labels, config.id_column, config.label_column)
    n = len(images.ids)
    if ids is None:
        if len(labels) != n:
            raise InputError(f"{config.labels} holds {len(labels)} labels for {n} images; give one for each.")
        codes, classes = _coded(labels)
        return dataclasses.replace(images, labels=codes, classes=classes)
    known = {str(name): at for at, name in enumerate(ids.tolist())}
    if len(known) < len(ids):
        raise InputError(f"{config.labels} has two rows for one id; keep one label for each.")
    at = np.array([known.get(str(name), -1) for name in images.ids.tolist()], dtype=np.int64)
    if (at < 0).all():
        raise InputError(
            f"None of the {len(ids)} ids in {config.labels} is that of an image, such as {str(images.ids[0])!r}; "
            "use the same ids."
        )
    codes, classes = _coded(labels)
    return dataclasses.replace(images, labels=np.where(at >= 0, codes[at], -1), classes=classes)


def _read_labels(path: Path, id_column: str | None, label_column: str | None) -> tuple[np.ndarray | None, np.ndarray]:
    suffix = path.suffix.lower()
    if not path.is_file():
        raise InputError(f"The file of labels {path} does not exist; check the path.")
    try:
        if suffix == ".npy":
            labels = np.load(path, allow_pickle=False)
            if labels.ndim != 1:
                raise InputError(f"{path} has the shape {labels.shape}, but one label for each image is needed.")
            return None, labels
        if suffix not in (".csv", ".parquet", ".pq"):
            raise InputError(f"{path} ends in {suffix!r}, but labels are read from .csv, .parquet and .npy files.")
        if suffix == ".csv":
            # Ids are read as text: 000123 is not the number 123.
            as_text = pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys([id_column] if id_column else ID_KEYS, pa.string())
            )
            table = pyarrow.csv.read_csv(path, convert_options=as_text)
        else:
            table = pq.read_table(path)
    except (OSError, ValueError, pa.ArrowException) as error:
        if isinstance(error, InputError):
            raise
        raise StoredFileError(f"{path} cannot be read ({' '.join(str(error).split()).rstrip('.')}).") from error
    columns = []
    for given, usual, flag in ((id_column, ID_KEYS, "--id-column"), (label_column, LABEL_KEYS, "--label-column")):
        name = next((name for name in ([given] if given else usual) if name in table.column_names), None)
        if name is None:
            raise InputError(
                f"{path} has no column {given or ' or '.join(usual)}; give {flag} one of: "
                f"{', '.join(table.column_names[:12])}."
            )
        values = np.empty(len(table), dtype=object)
        values[:] = table.column(name).to_pylist()
        columns.append(values)
    return columns[0], columns[1]


def _check_labels(images: Images) -> None:
    """Refuse before the work starts what the audit would refuse after it."""
    labelled = images.labels[images.labels >= 0]
    if not len(labelled):
        raise InputError(
            f"{images.name} has no labels, or not for all images; an audit needs them: give --labels, or name "
            "them with --label-column (of a table) or --label-key (of a run's images)."
        )
    audits.check_classes(labelled, images.classes)


def _names(classes: Any) -> np.ndarray:
    names = np.empty(len(classes), dtype=object)
    names[:] = list(classes)
    return names


@contextlib.contextmanager
def _timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[step] = time.perf_counter() - start
