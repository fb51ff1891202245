"""``siammm sort``: a run in; a folder for each group of its images, with links or copies, out."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from siammm.commands.next_steps import next_steps
from siammm.core.errors import InputError
from siammm.core.folders import check_new_folder, new_folder
from siammm.core.progress import Bar
from siammm.core.text import counted, shown
from siammm.export.sorted_folders import LIST, image_folder, sort_images
from siammm.runs.run import Run
from siammm.settings.commands import SortConfig
from siammm.settings.training import DataConfig


def sort(config: SortConfig) -> None:
    """Run the command. Whatever can be refused is refused before the first file is linked."""
    console, to = Console(highlight=False), config.to.expanduser()
    check_new_folder(to, flag="--to")
    with Bar() as bar:
        run = Run.open(config.run, progress=bar.show)
        run.find_images(config.data, DataConfig())
        _refuse_within_images(to, image_folder(run).root)
        with new_folder(to, flag="--to") as folder:
            done = sort_images(run, folder, by=config.by, copy=config.copy, progress=bar.show)
    for note in run.images.notes:
        console.print(escape(note), style="yellow", soft_wrap=True)
    if done.n_missing:
        console.print(f"{counted(done.n_missing, 'image')} of the run left out: not found.", style="yellow")
    how = "copied" if config.copy else "linked"
    console.print(
        f"[bold green]{counted(done.n_images, 'image')}[/] {how} into {counted(done.n_folders, 'folder')}, one for "
        f"each {config.by}: [bold]{escape(str(config.to))}[/]; {LIST} lists them.",
        soft_wrap=True,
    )
    data = () if config.data is None else ("--data", config.data)
    next_steps(console, ("report", config.run, *data), ("explore", config.run, *data))


def _refuse_within_images(to: Path, root: Path) -> None:
    if to.resolve().is_relative_to(root.resolve()):
        raise InputError(
            f"--to {shown(to)} is inside the folder of the images, {shown(root)}, where its links and copies would be "
            "taken for images; choose another."
        )
