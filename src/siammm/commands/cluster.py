"""``siammm cluster``: fit a mixture to images or a table of embeddings, and write clusters, the model and a summary."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.markup import escape

from siammm.cluster.find_clusters import check_before_encoding, find_clusters, timed
from siammm.cluster.shards import refused_together
from siammm.commands.cluster_tables import show
from siammm.commands.process import one_process
from siammm.core import lost_ranks, processes, ranks
from siammm.core.errors import InputError, Stopped
from siammm.core.folders import check_new_folder
from siammm.core.progress import Bar
from siammm.core.text import left_out, shown
from siammm.data.contents import holds_images
from siammm.data.embedding_table import EmbeddingTable, Share
from siammm.data.embeddings import read_embeddings, several_tables
from siammm.data.sources import from_anywhere
from siammm.runs import files
from siammm.runs.by_hand import check_by_hand, check_same_rows
from siammm.runs.clustered_writer import write_clustered
from siammm.runs.image_table import ImageTable
from siammm.runs.images import open_images
from siammm.runs.models import open_model
from siammm.runs.pretrained import default_encoder
from siammm.runs.summary import noted_of_images, table_path
from siammm.runs.unfinished_embeddings import Embedded, embed_and_keep, forget, rows_kept
from siammm.settings.commands import ClusterConfig


def cluster(config: ClusterConfig) -> None:
    """Run the command. Bad settings are refused before the work starts.

    Under ``torchrun`` each rank has its share of a table's rows, and the first writes and prints.
    """
    output = config.output or default_output(config.data)
    with _joined(config.device):
        with refused_together():
            if ranks.is_writer():
                check_new_folder(output, overwrite=config.overwrite, ours=files.CLUSTERED_NAMES)
            of_images = _is_of_images(config)
            if ranks.is_writer():
                check_by_hand(output, from_anywhere(config.data) if of_images else table_path(config.data))
            if of_images and ranks.active():
                raise InputError(
                    f"cluster encodes images in one process, but {ranks.world_size()} were started; run it without "
                    "torchrun, or cluster a table of their embeddings."
                )
            if not of_images:
                _refuse_for_tables(config)
        if of_images:
            _cluster_images(config, output, Console(highlight=False))
            return
        seconds: dict[str, float] = {}
        with timed(seconds, "read"), refused_together():
            table = read_embeddings(
                config.data,
                key=config.key,
                id_column=config.id_column,
                label_column=config.label_column,
                share=Share(ranks.rank(), ranks.world_size()),
            )
            if not ranks.active():  # one rank has only a share of the rows
                check_same_rows(output, table)
        found = find_clusters(table, config, seconds)
        by_hand = write_clustered(found, config, output)
        if ranks.is_writer():
            show(found, output, Console(), by_hand=by_hand)


@contextlib.contextmanager
def _joined(device: str) -> Iterator[None]:
    """Together with the other ranks, if ``torchrun`` started any."""
    if processes.started_together() == 1:
        yield
        return
    with processes.setup(device) as context, lost_ranks.noticed(context):
        yield


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
        with timed(seconds, "encode"):
            embedded, encoder = _embedded(config, output, kept, console)
        table = _as_embeddings(embedded.table, config.data)
        found = find_clusters(table, config, seconds)
        images = noted_of_images(embedded.facts, config.data, encoder)
        by_hand = write_clustered(found, config, output, images=images, embedded=embedded.table)
    except KeyboardInterrupt:
        if not rows_kept(kept):
            raise
        kept_in = f"the embeddings so far are kept in {kept}"
        raise Stopped(f"interrupted; {kept_in}, and the same command continues from there.", signal.SIGINT) from None
    try:
        set_aside = embedded.facts["set_aside"]
        if set_aside:
            console.print(f"{left_out(len(set_aside))}; {files.SUMMARY} says why.", style="yellow")
        show(found, output, console, of_images=True, by_hand=by_hand)
    finally:
        del found, table, embedded  # a file that is mapped cannot be removed everywhere
        forget(kept)


def _embedded(config: ClusterConfig, output: Path, kept: Path, console: Console) -> tuple[Embedded, dict[str, Any]]:
    """The embeddings of the images, and what is to be known of the encoder.

    They are those of the result that is replaced, or of the usual one, if only other settings have changed.
    """
    source = open_images(config.data, config.reading)
    check_before_encoding(config, len(source))
    with one_process("cluster", config.device) as device, Bar() as bar:
        bar.show("opening the encoder")
        model = open_model(config.encoder or default_encoder(), image_size=config.image_size, device=device)
        if model.warning is not None:
            console.print(escape(model.warning), style="yellow")
        console.print(f"[bold]siammm[/] encodes {len(source):,} images with {escape(model.name)} on {device}.")
        earlier = [output, default_output(config.data)]
        found = embed_and_keep(model, source, kept, config.reading, device, earlier=earlier, progress=bar.show)
        if found.earlier is not None:
            of = escape(shown(found.earlier))
            console.print(f"[dim]The images have not changed since {of} was made, so its embeddings are reused.[/]")
        # An earlier result lends the encoder that it was clustered with.
        lent = None if model.run is None else model.run.encoder_record
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
            f"{config.data} is a result of siammm cluster or train, not a folder of images; give the images."
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
