"""``siammm export``: a run in; an encoder for timm and the hub, an ONNX file and tables out."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from rich.console import Console
from rich.markup import escape

from siammm.commands.next_steps import next_steps
from siammm.commands.process import one_process
from siammm.core.errors import InputError, SiamMMError
from siammm.core.folders import check_new_folder, new_folder
from siammm.core.progress import Bar
from siammm.core.text import left_out
from siammm.data.loader import Loader
from siammm.export import hub
from siammm.export.encoder import kept_card, write_card, write_encoder
from siammm.export.onnx_file import missing_packages, require_packages, write_onnx
from siammm.export.tables import clusters_table, run_table
from siammm.runs import files
from siammm.runs.encoded_images import EncodedImages, encode_to_file
from siammm.runs.image_table import ImageTable, image_table, write_parquet
from siammm.runs.run import Run
from siammm.settings.commands import ExportConfig, ExportFormat

ALL: tuple[ExportFormat, ...] = ("encoder", "onnx", "tables")


def export(config: ExportConfig) -> None:
    """Run the command. Whatever can be refused is refused before the work starts."""
    output = config.output or Path(f"{config.run.expanduser().resolve().name}-export")
    check_new_folder(output, overwrite=config.overwrite, ours=files.EXPORT_NAMES)
    console = Console(highlight=False)
    run = Run.open(config.run)
    formats = _formats(config, run, console)
    if config.hub is not None:
        if "encoder" not in formats:
            raise InputError("--hub pushes the encoder, but --formats leaves it out; add encoder to --formats.")
        hub.check_repository(config.hub)
    with one_process("export", config.device) as device:
        run = Run.open(config.run, device=device)
        if not run.keeps_rows or formats != ("tables",):
            run.encoder(config.encoder)
        with Bar() as bar, new_folder(output, overwrite=config.overwrite, ours=files.EXPORT_NAMES) as folder:
            exporting = _Exporting(config, run, formats, bar, folder)
            exporting.write(kept_card(output))
    for line in exporting.lines:
        console.print(line)
    console.print(f"\nWritten to [bold]{escape(str(output))}[/].")
    if config.hub is not None:
        console.print(f"Pushed to [bold]{escape(hub.push(output, config.hub))}[/].")
    if "encoder" in formats:
        next_steps(console, ("embed", output, "--data", "FOLDER"))
    elif "tables" in formats:
        next_steps(console, ("cluster", output / files.IMAGES_TABLE))
    else:
        next_steps(console, ("evaluate", config.run))


def _formats(config: ExportConfig, run: Run, console: Console) -> tuple[ExportFormat, ...]:
    if not run.is_exportable:
        wanted = [f"--formats {name}" for name in config.formats if name != "tables"]
        wanted += ["--hub"] if config.hub is not None else []
        if wanted:
            theirs = "" if run.table is not None else ", so it contains no encoder to export"
            raise InputError(f"{run.given} {run.sentence}{theirs}; leave {wanted[0]} out to write the tables.")
        return ("tables",)
    if config.formats:
        if "onnx" in config.formats:
            require_packages()
        return tuple(name for name in ALL if name in config.formats)
    missing = missing_packages()
    if missing:
        note = f"No ONNX file: {' and '.join(missing)} not installed; pip install {' '.join(missing)}."
        console.print(note, style="yellow", markup=False)
    return tuple(name for name in ALL if name != "onnx" or not missing)


@dataclass
class _Exporting:
    """One export: what was asked for, where it is written, and what is said at its end."""

    config: ExportConfig
    run: Run
    formats: tuple[ExportFormat, ...]
    bar: Bar
    folder: Path
    lines: list[str] = field(default_factory=list)
    """In rich's markup."""

    def write(self, card: str | None) -> None:
        """Write all formats; ``card`` is an edited model card to keep."""
        reference_N: np.ndarray | None = None
        wants_scale = "onnx" in self.formats and self.run.has_clusters
        spools = [self.folder / f".{name}.spool" for name in ("images", "reference")]
        if "tables" in self.formats and self.run.keeps_rows and self.config.data is None:
            self._write_tables(run_table(self.run))  # as it was clustered: neither images nor encoder are needed
        elif "tables" in self.formats:
            loader, found = self._encoded(self.config.data, spools[0])
            self._write_tables(image_table(loader, found))
            # Outliers are measured against the images of training, which other images cannot stand for.
            if wants_scale and self.config.data is None:
                reference_N = found.log_density_N
            del found  # a file that is mapped cannot be removed everywhere
        if wants_scale and reference_N is None:
            reference_N = self._reference(spools[1])
        if "onnx" in self.formats:
            self.bar.show("ONNX")
            outputs = write_onnx(self.folder / files.ONNX, self.run, reference_N)
            self.lines.append(f"[bold]onnx[/]     {files.ONNX}: {', '.join(outputs)}")
        for spool in spools:
            spool.unlink(missing_ok=True)
        if "encoder" in self.formats:
            self.bar.show("encoder")
            self._write_encoder(card)
        elif card is not None:
            write_card(self.folder, card)  # without an encoder it is of no use to us, but it is somebody's work
        if card is not None:
            self.lines.append(f"{files.CARD} was edited, so it was not replaced.")

    def _encoded(self, data: str | None, spool: Path) -> tuple[Loader, EncodedImages]:
        """Show images to the run's networks."""
        run, lines = self.run, self.lines
        try:
            loader = run.loader(data, self.config.reading, progress=self.bar.show)
        except SiamMMError as error:
            if data is not None:
                raise
            raise InputError(
                f"The export needs the images of the run, which cannot be read "
                f"({str(error).rstrip('.')}); give images with --data, or --formats encoder onnx."
            ) from error
        try:
            mixture = run.mixture if run.has_clusters else None
            found = encode_to_file(run.embedding_rows, loader, spool, mixture=mixture, progress=self.bar.show)
        finally:
            loader.close()
        if loader.set_aside:
            lines.append(f"[yellow]{left_out(len(loader.set_aside))}.[/]")
        if data is None and run.fingerprint is not None and loader.source.fingerprint() != run.fingerprint:
            name = escape(loader.source.name)
            lines.append(f"[yellow]The images in {name} have changed since the run was trained.[/]")
        return loader, found

    def _reference(self, spool: Path) -> np.ndarray | None:
        """Log densities of the images that outliers are measured against: the run's own, or what stands for them."""
        run, other = self.run, self.config.data
        gone = "[yellow]The run's own images were not found: the ONNX file measures outliers against"
        try:
            return self._encoded(None, spool)[1].log_density_N
        except SiamMMError:
            if not run.has_embeddings and other is None:
                raise
        if not run.has_embeddings:
            self.lines.append(f"{gone} {escape(str(other))}.[/]")
            return self._encoded(other, spool)[1].log_density_N
        self.lines.append(f"{gone} the embeddings that the run kept, which are rounded.[/]")
        return np.asarray(run.mixture.score_samples(np.asarray(run.embeddings, np.float32)))

    def _write_tables(self, table: ImageTable) -> None:
        self.bar.show("tables")
        written = files.IMAGES_TABLE
        write_parquet(self.folder / files.IMAGES_TABLE, table)
        if self.run.has_clusters:
            pq.write_table(clusters_table(self.run.mixture, table), self.folder / files.CLUSTERS_TABLE)
            written += f", {files.CLUSTERS_TABLE}"
        self.lines.append(f"[bold]tables[/]   {len(table):,} images: {written}")

    def _write_encoder(self, card: str | None) -> None:
        run, choice = self.run, self.config.encoder
        timm_model = write_encoder(self.folder, run, choice=choice, card=card)
        if timm_model is None:
            self.lines.append(
                f"[yellow]timm has no arguments for {escape(run.config.network.backbone)} at {run.view.size} pixels: "
                "the encoder can only be loaded with SiamMM.from_pretrained.[/]"
            )
            return
        repeat = "" if timm_model.repeat == 1 else f", pixels repeated {timm_model.repeat} times (see {files.CARD})"
        self.lines.append(
            f"[bold]encoder[/]  the {choice} backbone as timm's {escape(timm_model.architecture)}, "
            f"{run.network.encoder.num_features:,} features{repeat}; fill in {files.CARD} before you share it"
        )
