"""``siammm explore``: a run in; its report served on this machine, with all images and a search by picture, out."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.markup import escape

from siammm.commands.next_steps import next_steps
from siammm.commands.process import one_process
from siammm.core.progress import Bar
from siammm.report import projection
from siammm.report.browser import open_page
from siammm.report.explorer import Explorer
from siammm.report.gather import GatherSettings, gather
from siammm.report.serve import Server
from siammm.runs.run import Run
from siammm.settings.commands import ExploreConfig


def explore(config: ExploreConfig) -> None:
    """Run the command: serve until Ctrl-C, which is how it ends well."""
    projection.check_map(config.map)
    console = Console(highlight=False)
    with one_process("explore", config.device) as device, Server(config.port) as server:
        server.show(_prepared(config, device))
        for note in server.notes:
            console.print(escape(note), style="yellow", soft_wrap=True)
        console.print(f"Serving {escape(str(config.run))} at [bold]{server.url}[/]; stop with Ctrl-C.", soft_wrap=True)
        if config.open and not open_page(server.url):
            console.print("No browser was found here; open this address in one.", style="dim")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            console.print("\nStopped.")
            next_steps(console, ("report", config.run, *(() if config.data is None else ("--data", config.data))))


def _prepared(config: ExploreConfig, device: torch.device) -> Explorer:
    with Bar() as bar:
        run = Run.open(config.run, device=device, progress=bar.show)
        run.find_images(config.data, config.reading)
        gathered = gather(run, GatherSettings.of(config, live=True), bar.show)
        bar.show("getting ready", 0, 0)
        return Explorer(run, gathered)
