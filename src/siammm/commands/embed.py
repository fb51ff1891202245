"""``siammm embed``: images in; a table of their embeddings, with the cluster and group of each, out."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from siammm.commands.next_steps import next_steps
from siammm.commands.process import one_process
from siammm.core.errors import InputError
from siammm.core.files import check_new_file, new_file
from siammm.core.progress import Bar
from siammm.core.text import left_out, printable, shown
from siammm.data.contents import is_data
from siammm.data.embeddings import SUFFIXES
from siammm.runs.encoded_images import encode_to_file
from siammm.runs.image_table import image_table, write_npz, write_parquet
from siammm.runs.images import image_loader, open_images
from siammm.runs.models import Model, open_model
from siammm.runs.pretrained import is_foreign
from siammm.runs.records import is_run_folder
from siammm.settings.commands import EmbedConfig

FORMATS = (".parquet", ".npz", ".npy")


def embed(config: EmbedConfig) -> None:
    """Run the command. Whatever can be refused is refused before the work starts."""
    output = config.output or Path(f"{_short_name(config.subject)}-embeddings.parquet")
    if output.suffix.lower() not in FORMATS:
        what, formats = f"The output {output} ends in {output.suffix!r}", ", ".join(FORMATS)
        raise InputError(f"{what}, but a table is written as {formats}; choose one of these.")
    check_new_file(output, overwrite=config.overwrite)
    console = Console(highlight=False)
    with one_process("embed", config.device) as device:
        _embed(config, output, device, console)


def _embed(config: EmbedConfig, output: Path, device: torch.device, console: Console) -> None:
    model = _open(config, device)
    run, suffix = model.run, output.suffix.lower()
    what = config.what or ("features" if run is None else "embeddings")
    if model.warning is not None:
        console.print(escape(model.warning), style="yellow")
    with Bar() as bar:
        if run is not None:
            loader = run.loader(config.data, config.reading, progress=bar.show)
        else:
            source = open_images(str(config.data), config.reading)
            loader = image_loader(source, model.view, config.reading, device, progress=bar.show)
        try:
            with new_file(output, overwrite=config.overwrite) as (scratch, spool):
                # An .npy file is the rows and nothing else: they go there at once.
                plain = suffix == ".npy"
                found = encode_to_file(
                    model.features if run is None or what == "features" else run.embedding_rows,
                    loader,
                    scratch if plain else spool,
                    mixture=None if plain else model.mixture,
                    progress=bar.show,
                )
                if not plain:
                    bar.show("writing")
                    table = image_table(loader, found)
                    if suffix == ".npz":
                        write_npz(scratch, table, name=what)
                    else:
                        write_parquet(scratch, table, name="embedding" if what == "embeddings" else "features")
                n, width = found.row_ND.shape
                del found  # a file that is mapped cannot be removed everywhere
        finally:
            loader.close()
    if loader.set_aside:
        console.print(f"{left_out(len(loader.set_aside))}.", style="yellow")
    clusters = ""
    if not plain and model.mixture is not None:
        groups = model.mixture.groups_
        in_groups = f" in {groups.n_groups:,} groups" if groups is not None and groups.is_found else ""
        clusters = f", in {int(model.mixture.n_components_):,} clusters{in_groups}"
    console.print(
        f"[bold]{what.capitalize()}[/] of {n:,} images, {width:,} numbers each{clusters}, by {escape(config.subject)}."
    )
    if plain:
        note = "A .npy file holds the numbers alone; .parquet and .npz hold names and clusters too."
        console.print(note, style="dim")
    console.print(f"Written to [bold]{escape(str(output))}[/].")
    next_steps(console, ("cluster", output))


def _open(config: EmbedConfig, device: torch.device) -> Model:
    if is_foreign(config.subject):
        if config.what == "embeddings":
            raise InputError(f"{config.subject} has features, and only a run has embeddings; leave --what out.")
        if config.data is None:  # before weights are fetched for nothing
            raise InputError(f"{config.subject} comes without images; give some with --data.")
    path = Path(config.subject).expanduser()
    if path.is_file() and path.suffix.lower() in SUFFIXES:
        raise InputError(f"{config.subject} is a table of embeddings already; give a run, or timm:MODEL.")
    if path.is_dir() and not is_run_folder(path) and is_data(path):
        command = shlex.join(["siammm", "embed", "lite", "--data", printable(config.subject)])
        raise InputError(f"{shown(config.subject)} holds images, but embed takes a model first; use: {command}")
    return open_model(config.subject, image_size=config.image_size, device=device)


def _short_name(subject: str) -> str:
    """The name of a file of embeddings by this model."""
    if is_foreign(subject):
        parts = subject.split(":", 2)
        return "-".join(re.sub(r"[^\w.-]+", "-", part) for part in (*parts[:2], *(Path(p).stem for p in parts[2:])))
    return Path(subject).expanduser().resolve().name or "run"
