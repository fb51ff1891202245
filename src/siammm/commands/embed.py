"""``siammm embed``: images in; a table of their embeddings, with the cluster of each, out."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from siammm.commands.process import one_process
from siammm.commands.progress import Bar
from siammm.core.errors import InputError
from siammm.core.files import check_new_file, new_file
from siammm.data.loader import Loader
from siammm.data.view_settings import ViewSettings
from siammm.export.tables import image_table, write_npz, write_parquet
from siammm.runs.encoding import (
    Encoded,
    FinishedRun,
    What,
    encoded,
    model_rows,
    open_images,
    open_run,
    run_rows,
)
from siammm.runs.subject import TABLES, ImageSubject, open_subject
from siammm.settings.commands import EmbedConfig

FORMATS = (".parquet", ".npz", ".npy")


def embed(config: EmbedConfig) -> None:
    """Run the command. Whatever can be refused is refused before the work starts."""
    output = config.output or Path(f"{_short_name(config.subject)}-embeddings.parquet")
    if output.suffix.lower() not in FORMATS:
        raise InputError(
            f"The output {output} ends in {output.suffix!r}, but a table is written as {', '.join(FORMATS)}; choose "
            "one of these."
        )
    check_new_file(output, overwrite=config.overwrite)
    console = Console(highlight=False)
    with one_process("embed", config.device) as device:
        _embed(config, output, device, console)


def _embed(config: EmbedConfig, output: Path, device: torch.device, console: Console) -> None:
    subject, what = _opened(config, device)
    own = subject if isinstance(subject, FinishedRun) else None
    if isinstance(subject, ImageSubject) and subject.warning is not None:
        console.print(escape(subject.warning), style="yellow")
    with Bar() as bar:
        view: ViewSettings = subject.view
        loader = open_images(config.data, own, view, config.reading, device, name=config.subject, progress=bar.show)
        try:
            with new_file(output, overwrite=config.overwrite) as (scratch, spool):
                rows = run_rows(own, what) if own is not None else model_rows(_backbone(subject))
                mixture = None if own is None else own.mixture
                # An .npy file is the rows and nothing else: they go there at once.
                plain = output.suffix.lower() == ".npy"
                found = encoded(
                    rows, loader, scratch if plain else spool, mixture=None if plain else mixture, progress=bar.show
                )
                if not plain:
                    bar.show("writing")
                    _write(scratch, output.suffix.lower(), what, loader, found)
                shape = found.row_ND.shape
                del found  # a file that is mapped cannot be removed everywhere
        finally:
            loader.close()
    _show(config, output, loader, shape, what, own, console)


def _opened(config: EmbedConfig, device: torch.device) -> tuple[FinishedRun | ImageSubject, What]:
    scheme = config.subject.partition(":")[0]
    if scheme in ("timm", "torchvision") and ":" in config.subject:
        if config.what == "embeddings":
            raise InputError(f"{config.subject} has features, and only a run has embeddings; leave --what out.")
        if config.data is None:  # before weights are fetched for nothing
            raise InputError(f"{config.subject} does not bring images with it; give some with --data.")
        subject = open_subject(config.subject, image_size=config.image_size, device=device)
        assert isinstance(subject, ImageSubject), "a table has no scheme"
        return subject, "features"
    path = Path(config.subject).expanduser()
    if path.is_file() and path.suffix.lower() in TABLES:
        raise InputError(f"{config.subject} is a table of embeddings already; give a run, or timm:MODEL.")
    if config.image_size is not None:
        raise InputError(f"{config.subject} is a run, which sees its own size of images; leave --image-size out.")
    return open_run(config.subject).on(device), config.what or "embeddings"


def _backbone(subject: FinishedRun | ImageSubject) -> torch.nn.Module:
    assert isinstance(subject, ImageSubject)
    return subject.backbone


def _write(path: Path, suffix: str, what: What, loader: Loader, found: Encoded) -> None:
    table = image_table(loader, found)
    if suffix == ".npz":
        write_npz(path, table, name=what)
    else:
        write_parquet(path, table, name="embedding" if what == "embeddings" else "features")


def _show(
    config: EmbedConfig,
    output: Path,
    loader: Loader,
    shape: tuple[int, ...],
    what: What,
    own: FinishedRun | None,
    console: Console,
) -> None:
    if loader.set_aside:
        console.print(f"{len(loader.set_aside):,} images could not be read and were left out.", style="yellow")
    clusters = ""
    if own is not None and own.mixture is not None and output.suffix.lower() != ".npy":
        clusters = f", in {int(own.mixture.n_components_):,} clusters"
    console.print(
        f"[bold]{what.capitalize()}[/] of {shape[0]:,} images, {shape[1]:,} numbers each{clusters}, by "
        f"{escape(config.subject)}."
    )
    if output.suffix.lower() == ".npy":
        console.print(
            "A .npy file holds the numbers alone; .parquet and .npz hold names and clusters too.", style="dim"
        )
    console.print(f"Written to [bold]{escape(str(output))}[/].")


def _short_name(subject: str) -> str:
    """What a file is called that came from this subject."""
    scheme = subject.partition(":")[0]
    if scheme in ("timm", "torchvision") and ":" in subject:
        parts = subject.split(":", 2)
        return "-".join(re.sub(r"[^\w.-]+", "-", part) for part in (*parts[:2], *(Path(p).stem for p in parts[2:])))
    return Path(subject).expanduser().resolve().name or "run"
