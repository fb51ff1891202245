"""``siammm cluster``: fit a mixture to images or a table of embeddings, and write clusters, the model and a summary."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from sklearn.exceptions import ConvergenceWarning

import siammm
from siammm.commands.next_steps import next_steps
from siammm.commands.process import one_process
from siammm.commands.shards import labelled_rows, outlier_scores, rows_of_all
from siammm.core import processes, ranks
from siammm.core.errors import InputError, Stopped, ZeroRowWarning
from siammm.core.folders import check_new_folder, new_folder
from siammm.core.progress import Bar
from siammm.core.text import counted, shown
from siammm.data import decode
from siammm.data.contents import holds_images
from siammm.data.embeddings import PATH_KEYS, EmbeddingTable, Share, read_embeddings, several_tables
from siammm.data.sources import from_anywhere
from siammm.export.kept_rows import Embedded, embed_and_keep, forget, rows_kept
from siammm.export.tables import ImageTable, write_parquet
from siammm.metrics.clustering import ClusteringScores, clustering_scores, label_codes
from siammm.mixture.groups import Groups, of_these_components
from siammm.mixture.numbering import number_by_size
from siammm.mixture.seeding import default_n_components
from siammm.mixture.shard import Shard, gathered
from siammm.runs import files
from siammm.runs.clustered import write_clustered
from siammm.runs.images import open_images
from siammm.runs.models import open_model
from siammm.runs.pretrained import default_encoder
from siammm.settings.commands import ClusterConfig

_ROWS_SHOWN = 12
# Where clusters must be finer than groups: so many for each, of at least so many samples on average.
_PARTS, _SAMPLES_PER_PART = 8, 20
# Rows, as many as a pass takes at a time.
_DESCRIBED_AT_ONCE = 2**21


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clustering:
    """Everything that was found, before it is written or shown: of this rank's rows, unless it says otherwise."""

    table: EmbeddingTable
    mixture: Any
    clusters: np.ndarray
    probability: np.ndarray
    outlier_score: np.ndarray
    groups: Groups
    group_labels: np.ndarray
    n_start: int
    n_merged: int | None
    """The clusters that merging ended with, where these were fewer than the groups and were replaced by finer ones."""
    sizes: np.ndarray
    """How many of all ranks' rows each cluster has."""
    labelled: tuple[np.ndarray, np.ndarray] | None
    """The labels and clusters of all ranks' rows, in any order; None without labels."""
    scores: ClusteringScores | None
    """Of all ranks' rows; only the rank that writes has them."""
    group_scores: ClusteringScores | None
    seconds: dict[str, float]


def cluster(config: ClusterConfig) -> None:
    """Run the command. Bad settings are refused before the work starts.

    Under ``torchrun`` each rank has its share of a table's rows, and the first writes and prints.
    """
    output = config.output or default_output(config.data)
    with _joined(config.device):
        with _refused_together():
            if ranks.is_writer():
                check_new_folder(output, overwrite=config.overwrite, ours=files.CLUSTERED_NAMES)
            of_images = _is_of_images(config)
            if of_images and ranks.active():
                raise InputError(
                    f"cluster encodes images in one process, but {ranks.world_size()} were started; start it by "
                    "itself, or cluster a table of their embeddings."
                )
            if not of_images:
                _refuse_for_tables(config)
        if of_images:
            _cluster_images(config, output, Console(highlight=False))
            return
        seconds: dict[str, float] = {}
        with _timed(seconds, "read"), _refused_together():
            table = read_embeddings(
                config.data,
                key=config.key,
                id_column=config.id_column,
                label_column=config.label_column,
                share=Share(ranks.rank(), ranks.world_size()),
            )
        found = find_clusters(table, config, seconds)
        write(found, config, output)
        if ranks.is_writer():
            show(found, output, Console())


@contextlib.contextmanager
def _joined(device: str) -> Iterator[None]:
    """Together with the other ranks, if ``torchrun`` started any."""
    if processes.started_together() == 1:
        yield
        return
    with processes.setup(device), ranks.ended_together():
        yield


def _refused_together(what: str = "use its input") -> contextlib.AbstractContextManager[None]:
    """See ``ranks.refused_together``; alone, what is raised goes on as it is."""
    return ranks.refused_together(ranks.transport(), what)


def _is_of_images(config: ClusterConfig) -> bool:
    """Whether images are meant; where a file has both, the name of a column decides."""
    is_named = config.key is not None or config.reading.image_key is not None
    if is_named and os.path.isfile(os.path.expanduser(config.data)):
        return config.key is None
    return holds_images(config.data)


def default_output(data: str) -> Path:
    """The folder that is written to by default: named after the data, in the working directory."""
    path = os.path.expanduser(data)
    name = Path(path).resolve().name if os.path.isdir(path) else Path(path).stem
    return Path(f"{re.sub(r'[:*{}]+', '-', name)}-clusters")


def _cluster_images(config: ClusterConfig, output: Path, console: Console) -> None:
    """Encode images, and cluster the embeddings; those that are done outlive an interruption."""
    _refuse_for_images(config)
    kept, seconds = output.with_name(f"{output.name}-unfinished"), dict[str, float]()
    try:
        with _timed(seconds, "encode"):
            embedded, encoder = _embedded(config, kept, console)
        table = _as_embeddings(embedded.table, config.data)
        found = find_clusters(table, config, seconds)
        images = {
            "path": from_anywhere(config.data),
            "fingerprint": embedded.fingerprint,
            "encoder": encoder | {"digest": embedded.network},
            "set_aside": embedded.set_aside,
        }
        write(found, config, output, images=images, embedded=embedded.table)
    except KeyboardInterrupt:
        if not rows_kept(kept):
            raise
        kept_in = f"what is encoded is kept in {kept}"
        raise Stopped(f"interrupted; {kept_in}, and the same command goes on from there.", signal.SIGINT) from None
    try:
        if embedded.set_aside:
            left_out = f"{len(embedded.set_aside):,} images could not be read and were left out"
            console.print(f"{left_out}; {files.SUMMARY} lists them.", style="yellow")
        show(found, output, console, of_images=True)
    finally:
        del found, table, embedded  # a file that is mapped cannot be removed everywhere
        forget(kept)


def _embedded(config: ClusterConfig, kept: Path, console: Console) -> tuple[Embedded, dict[str, Any]]:
    """The embeddings of the images, and what is to be known of the encoder."""
    source = open_images(config.data, config.reading)
    with one_process("cluster", config.device) as device, Bar() as bar:
        bar.show("opening the encoder")
        model = open_model(config.encoder or default_encoder(), image_size=config.image_size, device=device)
        if model.warning is not None:
            console.print(escape(model.warning), style="yellow")
        console.print(f"[bold]siammm[/] encodes {len(source):,} images with {escape(model.name)} on {device}.")
        found = embed_and_keep(model, source, kept, config.reading, device, progress=bar.show)
        # An earlier result lends the encoder that it was clustered with.
        lent = None if model.run is None or model.run.clustering is None else model.run.clustering.encoder
        return found, lent or model.record


def _as_embeddings(images: ImageTable, data: str) -> EmbeddingTable:
    """Images with their embeddings as what is read from a table."""
    columns = dict(images.columns)
    names = ("id", "label")
    ids, labels = (columns.pop(name).to_numpy(zero_copy_only=False) if name in columns else None for name in names)
    others = pa.table(columns) if columns else None
    return EmbeddingTable(embeddings=images.rows, ids=ids, labels=labels, source=Path(data), columns=others)


def _refuse_for_images(config: ClusterConfig) -> None:
    """Refuse settings of tables, and folders that are not of images."""
    if os.path.isfile(os.path.join(os.path.expanduser(config.data), files.MIXTURE)):
        raise InputError(
            f"{config.data} is a result with clusters of its own, not a folder of images; give the images."
        )
    given = {"--key": config.key, "--id-column": config.id_column, "--label-column": config.label_column}
    flag = next((flag for flag, value in given.items() if value is not None), None)
    if flag is not None:
        remedy = "use --label-key" if flag == "--label-column" else f"leave {flag} out"
        raise InputError(f"{config.data} holds images, and {flag} is for a table of embeddings; {remedy}.")


def _refuse_for_tables(config: ClusterConfig) -> None:
    """Refuse settings of images."""
    given = {"--encoder": config.encoder, "--image-size": config.image_size, "--label-key": config.reading.label_key}
    flag = next((flag for flag, value in given.items() if value is not None), None)
    is_there = os.path.exists(os.path.expanduser(config.data)) or several_tables(config.data) is not None
    if flag is not None and is_there:
        remedy = "use --label-column" if flag == "--label-key" else f"leave {flag} out, or give images"
        raise InputError(f"{config.data} is a table of embeddings, and {flag} is for images; {remedy}.")


def write(
    found: Clustering,
    config: ClusterConfig,
    output: Path,
    *,
    images: dict[str, Any] | None = None,
    embedded: ImageTable | None = None,
) -> None:
    """Write the result; for images also their embeddings, and what is known of their encoder."""
    facts = summary(found, config)
    facts["input"] |= images or {
        "path": os.path.abspath(os.path.expanduser(config.data)),
        "fingerprint": found.table.fingerprint(gathered),
    }
    failing = "write the result"
    with contextlib.ExitStack() as stack:
        folder, writer = None, None
        with _refused_together(failing):
            if ranks.is_writer():
                new = new_folder(output, overwrite=config.overwrite, ours=files.CLUSTERED_NAMES)
                folder = stack.enter_context(new)
        for piece in rows_of_all(assignments(found)):
            with _refused_together(failing):
                if folder is not None:
                    if writer is None:
                        writer = pq.ParquetWriter(folder / files.ASSIGNMENTS, piece.schema)
                        stack.callback(writer.close)
                    writer.write_table(piece)
        with _refused_together(failing):
            if folder is not None:
                rows = None if embedded is None else embedded.rows
                write_clustered(folder, found.mixture, facts, rows)
                if embedded is not None:
                    write_parquet(folder / files.IMAGES_TABLE, embedded)
        with _refused_together(failing):
            stack.close()


def find_clusters(table: EmbeddingTable, config: ClusterConfig, seconds: dict[str, float]) -> Clustering:
    """Fit the mixture and describe every sample; ``seconds`` is told how long each step took."""
    X, n_total = table.embeddings, table.n_samples
    with _refused_together():
        mixture = _mixture(config, n_total, X.shape[1])
    with _timed(seconds, "fit"):
        _fit(mixture, table)
    groups, n_merged, n_start = Groups.none(int(mixture.n_components_)), None, mixture.n_components
    if config.merge == "auto":  # a number that was given is not questioned
        with _timed(seconds, "group"):
            with _told("looking for groups"):
                groups = mixture.groups(X, together=True)
            if groups.n_groups > mixture.n_components_:
                # Clusters that overlap were merged across groups: take finer ones, so that each is in one group.
                n_merged, n = int(mixture.n_components_), max(groups.n_groups, n_total // _SAMPLES_PER_PART)
                finer = {"merge": None, "init": "k-means++", "n_components": min(_PARTS * groups.n_groups, n)}
                mixture = mixture.set_params(**finer)
                _fit(mixture, table)
    k = int(mixture.n_components_)
    sizes = Shard.of(len(X), together=True).summed(np.bincount(mixture.labels_, minlength=k))
    if not isinstance(config.init, Path):  # clusters that went on from others keep their numbers
        sizes = sizes[number_by_size(mixture, sizes)]
    clusters = np.ascontiguousarray(mixture.labels_)
    # A few more passes over the samples, with the fitted components.
    with _timed(seconds, "describe"), _told("describing every sample"):
        if config.merge == "auto":
            groups = of_these_components(groups, X, clusters, k, together=True)
        mixture.groups_ = groups  # to be saved with it
        with _refused_together():
            probability, log_density = _described(mixture, X, clusters)
            group_labels = groups.predict(X, clusters)
        unusual = outlier_scores(log_density)
    labelled, scores, group_scores = None, None, None
    if table.labels is not None:
        with _timed(seconds, "score"):
            labels, *found = labelled_rows(table.labels, clusters, group_labels)
            labelled = (labels, found[0])
            with _refused_together():
                if ranks.is_writer():
                    scores = clustering_scores(labels, found[0])
                    group_scores = clustering_scores(labels, found[1]) if groups.is_found else None
    return Clustering(
        table=table,
        mixture=mixture,
        clusters=clusters,
        probability=probability,
        outlier_score=unusual,
        groups=groups,
        group_labels=group_labels,
        n_merged=n_merged,
        n_start=n_start,
        sizes=sizes,
        labelled=labelled,
        scores=scores,
        group_scores=group_scores,
        seconds={step: round(value, 3) for step, value in seconds.items()},
    )


def _described(mixture: Any, X: np.ndarray, clusters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The share of its cluster in each row, and its log density; many rows at a time, for each has several shares."""
    probability, log_density = [], []
    for start in range(0, max(1, len(X)), _DESCRIBED_AT_ONCE):
        part, cluster = (values[start : start + _DESCRIBED_AT_ONCE] for values in (X, clusters))
        share = mixture.predict_proba(part)[np.arange(len(part)), cluster] if len(part) else []  # a rank without rows
        probability.append(np.asarray(share, dtype=np.float32).ravel())
        log_density.append(np.asarray(mixture.score_samples(part)))
    return np.concatenate(probability), np.concatenate(log_density)


def _fit(mixture: Any, table: EmbeddingTable) -> None:
    """Fit, and report failures in terms of the command's flags and of the whole table."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # ``show`` says it in a sentence
            # The estimator accepts rows of zeros; in a file of embeddings they are a mistake.
            warnings.simplefilter("error", ZeroRowWarning)
            mixture.fit(table.embeddings)
    except ZeroRowWarning as error:
        text = str(error).replace("use GaussianMixture", "use --family gaussian")
        raise InputError(_of_the_table(text, table)) from error
    except InputError as error:
        raise InputError(_of_the_table(str(error), table)) from error
    except torch.OutOfMemoryError as error:
        raise InputError("The GPU does not have enough memory; use fewer components or --device cpu.") from error


def _of_the_table(text: str, table: EmbeddingTable) -> str:
    """What is wrong with a row, with its number in the whole table."""
    return re.sub(r"\b([Rr]ow) (\d+)", lambda match: f"{match[1]} {int(match[2]) + table.first_row}", text)


def assignments(found: Clustering) -> pa.Table:
    """The table of results: one row per sample, in the order of the input."""
    table = found.table
    numbers = np.arange(table.first_row, table.first_row + len(found.clusters))
    columns = {
        "id": pa.array(numbers if table.ids is None else table.ids),
        "cluster": pa.array(found.clusters.astype(np.int32)),
        "group": pa.array(found.group_labels.astype(np.int32)),
        "probability": pa.array(found.probability),
        "outlier_score": pa.array(found.outlier_score),
    }
    if table.labels is not None:
        columns["label"] = pa.array(table.labels)
    for name in [] if table.columns is None else table.columns.column_names:
        ours = name
        while ours in columns:
            # If the input is itself a result, its old clusters are kept under another name.
            ours = f"input_{ours}"
        columns[ours] = table.columns.column(name)  # pyright: ignore[reportOptionalMemberAccess]
    return pa.table(columns)


def summary(found: Clustering, config: ClusterConfig) -> dict[str, Any]:
    """The result and its settings as plain values."""
    mixture, merges = found.mixture, found.mixture.merges_
    n, d = found.table.n_samples, found.table.embeddings.shape[1]
    spread = "concentrations" if config.family == "von-mises-fisher" else "variances"
    return {
        "input": {"file": str(found.table.source), "n_samples": n, "n_dimensions": d},
        "n_components": int(mixture.n_components_),
        "n_groups": found.groups.n_groups,
        "groups": found.groups.label_K.tolist(),
        "ratio_of_groups": found.groups.ratio,
        "n_merged": found.n_merged,
        "converged": bool(mixture.converged_),
        "n_iter": int(mixture.n_iter_),
        "lower_bound": float(mixture.lower_bound_),
        "sizes": found.sizes.tolist(),
        "weights": np.asarray(mixture.weights_, dtype=float).tolist(),
        spread: _spread(mixture).tolist(),
        "n_components_by_round": None if merges is None else [int(k) for k in merges.n_components],
        "scores": None if found.scores is None else dataclasses.asdict(found.scores),
        "scores_of_groups": None if found.group_scores is None else dataclasses.asdict(found.group_scores),
        "seconds": found.seconds,
        "settings": dataclasses.asdict(config) | {"n_components": found.n_start},
        "versions": {"siammm": siammm.__version__, "torch": str(torch.__version__), "numpy": np.__version__},
    }


def show(found: Clustering, output: Path, console: Console, *, of_images: bool = False) -> None:
    """Print the summary that a person reads."""
    mixture, merges = found.mixture, found.mixture.merges_
    n, d = found.table.n_samples, found.table.embeddings.shape[1]
    started = "" if merges is None else f", merged from {merges.n_components[0]:,}"
    what = "images" if of_images else f"embeddings of {d:,} dimensions"
    clusters_found = counted(int(mixture.n_components_), "cluster")
    console.print(
        f"\n[bold green]{clusters_found}[/]{in_groups(found.groups)} in {n:,} {what}{started} "
        f"[dim]({sum(found.seconds.values()):.1f} s)[/]\n"
    )
    spread_name = "concentration" if hasattr(mixture, "concentrations_") else "variance"
    labels, clusters = found.labelled or (None, found.clusters)
    console.print(cluster_table(found.sizes, _spread(mixture), spread_name, clusters, labels))
    if found.n_merged is not None and found.groups.is_found:
        console.print(
            f"[dim]Merging ended with {found.n_merged:,} clusters that overlap the groups, so these are finer ones.[/]"
        )
    if mixture.n_components_ == 1 and merges is not None:
        console.print(
            "[yellow]Nothing was found that stands apart; if you know how many kinds there are, add --merge none "
            "--n-components NUMBER.[/]"
        )
    if not mixture.converged_:
        console.print("[yellow]EM did not converge within --max-iter steps; raise it for more stable clusters.[/]")
    if found.scores is not None:
        console.print(score_table(found.scores, found.group_scores))
    of_the_images = [files.EMBEDDINGS, files.IMAGES_TABLE] if of_images else []
    written = [files.ASSIGNMENTS, files.MIXTURE, files.SUMMARY, *of_the_images]
    console.print(f"\nWritten to [bold]{escape(str(output))}[/]: {', '.join(written)}")
    next_steps(console, *_next(found, output, of_images=of_images))


def _next(found: Clustering, output: Path, *, of_images: bool) -> list[tuple[object, ...]]:
    """What to do with the result; pages need von Mises-Fisher clusters, and folders need files."""
    can_be_shown = hasattr(found.mixture, "concentrations_")
    columns = [] if found.table.columns is None else found.table.columns.column_names
    # A table's ids may be the paths of images.
    first = "" if found.table.ids is None or of_images else str(found.table.ids[0])
    has_files = any(name in columns for name in PATH_KEYS) or Path(first).suffix.lower() in decode.SUFFIXES
    # The images of a table's rows are found if somebody says where they are.
    data = ("--data", "FOLDER") if has_files and not of_images else ()
    steps: list[tuple[object, ...]] = [("report", output, *data), ("explore", output, *data)] if can_be_shown else []
    return [*steps, *([("sort", output, "--to", "FOLDER", *data)] if has_files else [])]


def in_groups(groups: Groups | None) -> str:
    """How many groups the clusters form, if any."""
    return f" [bold green]in {groups.n_groups:,} groups[/]" if groups is not None and groups.is_found else ""


def cluster_table(
    sizes: np.ndarray, spread: np.ndarray, spread_name: str, clusters: np.ndarray, labels: np.ndarray | None
) -> Table:
    """The largest clusters: size, spread and, with labels, their most frequent label."""
    order = np.argsort(-sizes, kind="stable")[:_ROWS_SHOWN]
    table = Table(title="The largest clusters" if len(sizes) > _ROWS_SHOWN else None, title_justify="left")
    for heading in ("cluster", "size", "share", spread_name):
        table.add_column(heading, justify="right")
    if labels is not None:
        table.add_column("mostly")
        table.add_column("purity", justify="right")
    codes, names = (None, []) if labels is None else label_codes(labels)
    for k in order.tolist():
        row = [str(k), f"{sizes[k]:,}", f"{sizes[k] / max(1, sizes.sum()):.1%}", f"{spread[k]:.4g}"]
        if codes is not None:
            inside = codes[(clusters == k) & (codes >= 0)]
            if len(inside):
                counts = np.bincount(inside)
                row += [escape(shown(names[counts.argmax()])), f"{counts.max() / len(inside):.0%}"]
        table.add_row(*row)
    if len(sizes) > _ROWS_SHOWN:
        rest, more = sizes.sum() - sizes[order].sum(), f"in {len(sizes) - _ROWS_SHOWN:,} more"
        table.add_row("...", f"{rest:,}", f"{rest / sizes.sum():.1%}", more, style="dim")
    return table


def score_table(scores: ClusteringScores, of_groups: ClusteringScores | None = None) -> Table:
    """Agreement of clusters and groups with the labels."""
    left_out = f", {scores.n_unlabelled:,} without a label not counted" if scores.n_unlabelled else ""
    title = f"Against the labels: {scores.n_classes:,} classes, {scores.n_samples:,} samples{left_out}"
    table = Table(title=title, title_justify="left")
    names = {"AMI": "ami", "NMI": "nmi", "ARI": "ari"}
    names |= {"Hungarian": "hungarian_accuracy", "majority": "majority_accuracy"}
    every = {"clusters": scores} | ({} if of_groups is None else {"groups": of_groups})
    if of_groups is not None:
        table.add_column("of")
    for heading in names:
        table.add_column(heading, justify="right")
    for name, one in every.items():
        figures = [f"{getattr(one, field):.3f}" for field in names.values()]
        table.add_row(*([name] if of_groups is not None else []), *figures)
    return table


def _mixture(config: ClusterConfig, n_samples: int, n_dimensions: int) -> Any:
    """The estimator that the settings describe."""
    vmf = config.family == "von-mises-fisher"
    if vmf and n_dimensions < 2:
        raise InputError("The embeddings have 1 column, but a direction needs at least 2; use --family gaussian.")
    kind: Any = siammm.VonMisesFisherMixture if vmf else siammm.GaussianMixture
    # The settings have the names of the estimator's parameters; a few have other values in a command.
    settings = {name: getattr(config, name) for name in kind().get_params() if hasattr(config, name)}
    settings["merge"] = None if config.merge == "none" else config.merge
    settings["progress"] = sys.stderr.isatty()
    if isinstance(config.init, Path):
        start = kind.load(config.init)
        if start.n_features_in_ != n_dimensions:
            raise InputError(
                f"The mixture {config.init} has {start.n_features_in_} dimensions, but the embeddings have "
                f"{n_dimensions}; use a mixture of the same embeddings."
            )
        if config.n_components not in (None, start.n_components_):
            what = f"--n-components is {config.n_components}, but the mixture {config.init} has {start.n_components_}"
            raise InputError(f"{what}; leave out one of the two.")
        settings |= {"init": start, "n_components": start.n_components_}
    elif config.n_components is None:
        if config.merge == "none":
            raise InputError("With --merge none the number of clusters is needed; add --n-components.")
        settings["n_components"] = default_n_components(n_samples)
    return kind(**settings)


def _spread(mixture: Any) -> np.ndarray:
    """One number per component: its concentration, or its variance averaged over dimensions."""
    if hasattr(mixture, "concentrations_"):
        return np.asarray(mixture.concentrations_, dtype=float)
    variances = np.asarray(mixture.variances_, dtype=float)
    return variances if variances.ndim == 1 else variances.mean(axis=1)


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Say on a terminal what is being done."""
    with Bar(enabled=sys.stderr.isatty() and ranks.is_writer()) as bar:
        bar.show(what)
        yield


@contextlib.contextmanager
def _timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[step] = time.perf_counter() - start
