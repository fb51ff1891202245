"""``siammm report``: a run in; one page on which a person sees what it found out."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from urllib.parse import quote

from rich.console import Console
from rich.markup import escape

from siammm.commands.next_steps import next_steps
from siammm.commands.process import one_process
from siammm.core.checks import check_at_least
from siammm.core.errors import InputError
from siammm.core.files import check_new_file, unwritable, write_text
from siammm.core.folders import check_new_folder, new_folder
from siammm.core.progress import Bar
from siammm.core.text import counted
from siammm.data.folder_source import FolderSource
from siammm.report import projection
from siammm.report.browser import open_page
from siammm.report.gather import Gathered, GatherSettings, gather
from siammm.report.render import render
from siammm.runs.run import Run
from siammm.settings.commands import ReportConfig

_SHEET = re.compile(r"sheet-\d+\.webp")
_LARGEST_THUMBNAIL = 512


def report(config: ReportConfig) -> None:
    """Run the command. Whatever can be refused is refused before the work starts."""
    check_at_least("--max-thumbnails", config.max_thumbnails, 0)
    if config.thumbnail_size is not None and not 8 <= config.thumbnail_size <= _LARGEST_THUMBNAIL:
        raise InputError(f"--thumbnail-size is {config.thumbnail_size}, but it must be from 8 to {_LARGEST_THUMBNAIL}.")
    projection.check_map(config.map)
    output = config.output or Path(f"{config.run.expanduser().resolve().name}-report.html")
    output = output.expanduser()
    beside = _check_output(output, overwrite=config.overwrite)
    console = Console(highlight=False)
    with one_process("report", config.device) as device, Bar() as bar:
        run = Run.open(config.run, device=device, progress=bar.show)
        run.find_images(config.data, config.reading)
        settings = GatherSettings.of(config, sheets_beside=quote(os.fsencode(beside.name), safe=""))
        gathered = gather(run, settings, bar.show)
        bar.show("writing the page", 0, 0)
        _write(gathered, output, beside, overwrite=config.overwrite)
    size = output.stat().st_size / 1e6
    more = f" and {counted(len(gathered.beside), 'sheet')} of thumbnails in {beside}" if gathered.beside else ""
    for note in gathered.contents["notes"]:
        console.print(escape(note), style="yellow", soft_wrap=True)
    console.print(f"Written to [bold]{escape(str(output))}[/] ({size:.1f} MB){escape(more)}.", soft_wrap=True)
    if config.open and not open_page(output.resolve().as_uri()):
        console.print("No browser was found here; open the file in one.", style="dim")
    data = () if config.data is None else ("--data", config.data)
    sort = [("sort", config.run, "--to", "FOLDER", *data)] if isinstance(run.images.source, FolderSource) else []
    next_steps(console, ("explore", config.run, *data), *sort)


def _check_output(output: Path, *, overwrite: bool) -> Path:
    """Refuse a page that could not be written; the folder beside it, for what does not fit into it."""
    check_new_file(output, overwrite=overwrite)
    if output.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"The output {output} does not end in .html, which the report needs; choose another --output.")
    beside = output.with_name(f"{output.stem}_files")
    if beside.exists():
        check_new_folder(beside, overwrite=overwrite, ours=_sheets_in(beside))
    return beside


def _sheets_in(folder: Path) -> frozenset[str]:
    """The files of an earlier report in the folder beside it."""
    if not folder.is_dir():
        return frozenset()
    return frozenset(entry.name for entry in folder.iterdir() if _SHEET.fullmatch(entry.name))


def _write(gathered: Gathered, output: Path, beside: Path, *, overwrite: bool) -> None:
    """The sheets first: a page never looks for what is not there yet."""
    text = render(gathered.contents, gathered.within)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if gathered.beside:
            with new_folder(beside, overwrite=overwrite, ours=_sheets_in(beside)) as folder:
                for name, data in gathered.beside.items():
                    (folder / name).write_bytes(data)
        write_text(output, text)
        # Those of an earlier report that needed more, and nothing else.
        if not gathered.beside and overwrite:
            for name in _sheets_in(beside):
                (beside / name).unlink()
            with contextlib.suppress(OSError):  # where there is none, or more than sheets in it
                beside.rmdir()
    except OSError as error:
        raise unwritable(f"The output {output}", error, "choose another --output") from error
