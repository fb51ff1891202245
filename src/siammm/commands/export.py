"""``siammm export``: a run in; an encoder for timm and the hub, an ONNX file and tables out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from rich.console import Console
from rich.markup import escape

from siammm.commands.process import one_process
from siammm.core.errors import InputError, SiamMMError
from siammm.core.folders import check_new_folder, new_folder
from siammm.core.progress import Bar
from siammm.data.loader import Loader
from siammm.export import hub
from siammm.export.encoder import kept_card, write_card, write_encoder
from siammm.export.onnx_file import missing_packages, write_onnx
from siammm.export.rows import EncodedImages, encode_to_file
from siammm.export.tables import clusters_table, image_table, write_parquet
from siammm.runs import files
from siammm.runs.run import Run
from siammm.settings.commands import ExportConfig, ExportFormat

ALL: tuple[ExportFormat, ...] = ("encoder", "onnx", "tables")


@dataclass
class _Exporting:
    """One export: what was asked for, and what is to be said at its end."""

    config: ExportConfig
    run: Run
    formats: tuple[ExportFormat, ...]
    bar: Bar
    lines: list[str]
    """In rich's markup."""


def export(config: ExportConfig) -> None:
    """Run the command. Whatever can be refused is refused before the work starts."""
    output = config.output or Path(f"{config.run.expanduser().resolve().name}-export")
    check_new_folder(output, overwrite=config.overwrite, ours=files.EXPORT_NAMES)
    console = Console(highlight=False)
    formats = _formats(config, console)
    if config.hub is not None:
        if "encoder" not in formats:
            raise InputError("--hub pushes the encoder, but --formats leaves it out; add encoder to --formats.")
        hub.check_repository(config.hub)
    with one_process("export", config.device) as device:
        run = Run.open(config.run, device=device)
        run.encoder(config.encoder)
        with Bar() as bar, new_folder(output, overwrite=config.overwrite, ours=files.EXPORT_NAMES) as folder:
            exporting = _Exporting(config, run, formats, bar, [])
            _write(exporting, folder, kept_card(output))
    for line in exporting.lines:
        console.print(line)
    console.print(f"\nWritten to [bold]{escape(str(output))}[/].")
    if config.hub is not None:
        address = hub.push(output, config.hub)
        console.print(f"Pushed to [bold]{escape(address)}[/].")


def _formats(config: ExportConfig, console: Console) -> tuple[ExportFormat, ...]:
    missing = missing_packages()
    if not config.formats:
        if missing:
            console.print(
                f"No ONNX file: {' and '.join(missing)} not installed; pip install 'siammm[onnx]'.",
                style="yellow",
                markup=False,
            )
        return tuple(name for name in ALL if name != "onnx" or not missing)
    if "onnx" in config.formats and missing:
        raise InputError(
            f"An export to ONNX needs {' and '.join(missing)}, not installed here; pip install 'siammm[onnx]'."
        )
    return tuple(name for name in ALL if name in config.formats)


def _write(exporting: _Exporting, folder: Path, card: str | None) -> None:
    reference_N: np.ndarray | None = None
    wants_scale = "onnx" in exporting.formats and exporting.run.has_clusters
    spools = [folder / f".{name}.spool" for name in ("images", "reference")]
    if "tables" in exporting.formats:
        loader, found = _pass(exporting, exporting.config.data, spools[0])
        _write_tables(exporting, folder, loader, found)
        # Outliers are measured against the images of training, which other images cannot stand for.
        if wants_scale and exporting.config.data is None:
            reference_N = _densities(found)
        del found  # a file that is mapped cannot be removed everywhere
    if wants_scale and reference_N is None:
        reference_N = _reference(exporting, spools[1])
    if "onnx" in exporting.formats:
        exporting.bar.show("ONNX")
        write_onnx(folder / files.ONNX, exporting.run, reference_N)
        exporting.lines.append(_onnx_line(exporting, reference_N is not None))
    for spool in spools:
        spool.unlink(missing_ok=True)
    if "encoder" in exporting.formats:
        exporting.bar.show("encoder")
        _write_encoder(exporting, folder, card)
    elif card is not None:
        write_card(folder, card)  # without an encoder it is of no use to us, but it is somebody's work
    if card is not None:
        exporting.lines.append(f"{files.CARD} had been edited, and was kept.")


def _pass(exporting: _Exporting, data: str | None, spool: Path) -> tuple[Loader, EncodedImages]:
    """Show images to the run's networks."""
    run = exporting.run
    try:
        loader = run.loader(data, exporting.config.reading, progress=exporting.bar.show)
    except SiamMMError as error:
        if data is not None:
            raise
        raise InputError(
            f"The images of the run, which the tables are of, cannot be read "
            f"({str(error).rstrip('.')}); give images with --data, or --formats encoder onnx."
        ) from error
    try:
        mixture = run.mixture if run.has_clusters else None
        found = encode_to_file(run.embedding_rows, loader, spool, mixture=mixture, progress=exporting.bar.show)
    finally:
        loader.close()
    if loader.set_aside:
        exporting.lines.append(f"[yellow]{len(loader.set_aside):,} images could not be read and were left out.[/]")
    if data is None and run.fingerprint is not None and loader.source.fingerprint() != run.fingerprint:
        exporting.lines.append(
            f"[yellow]The images in {escape(loader.source.name)} have changed since the run was trained.[/]"
        )
    return loader, found


def _reference(exporting: _Exporting, spool: Path) -> np.ndarray:
    """Log densities of the images that outliers are measured against: the run's own, or what stands for them."""
    run, other = exporting.run, exporting.config.data
    try:
        return _densities(_pass(exporting, None, spool)[1])
    except SiamMMError:
        if not run.has_embeddings and other is None:
            raise
    if not run.has_embeddings:
        exporting.lines.append(
            f"[yellow]The run's own images are gone: the ONNX file measures outliers against {escape(str(other))}.[/]"
        )
        return _densities(_pass(exporting, other, spool)[1])
    assert run.has_clusters
    exporting.lines.append(
        "[yellow]The run's own images are gone: the ONNX file measures outliers against the embeddings that the run "
        "kept, which are rounded.[/]"
    )
    return np.asarray(run.mixture.score_samples(np.asarray(run.embeddings, np.float32)))


def _densities(found: EncodedImages) -> np.ndarray:
    assert found.log_density_N is not None, "a run with clusters has densities"
    return found.log_density_N


def _write_tables(exporting: _Exporting, folder: Path, loader: Loader, found: EncodedImages) -> None:
    exporting.bar.show("tables")
    table = image_table(loader, found)
    write_parquet(folder / files.IMAGES_TABLE, table)
    written = files.IMAGES_TABLE
    if exporting.run.has_clusters:
        pq.write_table(clusters_table(exporting.run.mixture, table), folder / files.CLUSTERS_TABLE)
        written += f", {files.CLUSTERS_TABLE}"
    exporting.lines.append(f"[bold]tables[/]   {len(table):,} images: {written}")


def _write_encoder(exporting: _Exporting, folder: Path, card: str | None) -> None:
    run, choice = exporting.run, exporting.config.encoder
    timm_model = write_encoder(folder, run, choice=choice, card=card)
    if timm_model is None:
        exporting.lines.append(
            f"[yellow]timm has no arguments for {escape(run.config.network.backbone)} at {run.view.size} pixels: the "
            f"encoder is for SiamMM.from_pretrained alone.[/]"
        )
    else:
        repeat = "" if timm_model.repeat == 1 else f", pixels repeated {timm_model.repeat} times (see {files.CARD})"
        exporting.lines.append(
            f"[bold]encoder[/]  the {choice} backbone as timm's {escape(timm_model.architecture)}, "
            f"{run.network.encoder.num_features:,} features{repeat}; fill in {files.CARD} before you share it"
        )


def _onnx_line(exporting: _Exporting, scaled: bool) -> str:
    outputs = "embedding, features" + (", cluster, probability" if exporting.run.has_clusters else "")
    return f"[bold]onnx[/]     {files.ONNX}: {outputs}{', outlier_score' if scaled else ''}"
