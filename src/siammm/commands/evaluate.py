"""``siammm evaluate``: measure an encoder or a table of embeddings by published protocols."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from siammm.commands.next_steps import next_steps
from siammm.commands.process import one_process
from siammm.core.folders import check_new_folder, new_folder
from siammm.core.progress import Bar
from siammm.core.text import left_out
from siammm.evaluate import measure
from siammm.evaluate.protocols import Protocol
from siammm.evaluate.subject import TableSubject, open_subject
from siammm.evaluate.task import Task
from siammm.runs import evaluation as record
from siammm.runs.evaluation import Evaluation, Figure, Result
from siammm.runs.models import Model
from siammm.settings.commands import EvaluateConfig

RESULT_NAMES = frozenset({record.FILE})


def evaluate(config: EvaluateConfig) -> None:
    """Run the command. Whatever can be refused is refused before the work starts."""
    output = config.output or record.default_output(config.subject)
    check_new_folder(output, overwrite=config.overwrite, ours=RESULT_NAMES)
    console = Console(highlight=False)
    with one_process("evaluate", config.device, remedy="measure fewer images, or use --device cpu") as device:
        subject = open_subject(
            config.subject,
            encoder=config.encoder,
            image_size=config.image_size,
            key=config.reading.image_key,
            label_column=config.reading.label_key,
            device=device,
        )
        if isinstance(subject, Model) and subject.warning is not None:
            console.print(escape(subject.warning), style="yellow")
        with Bar() as bars:
            told = functools.partial(announce, console=console)
            found, stopped = measure.evaluate(subject, config, device, progress=bars.show, announce=told)
        with new_folder(output, overwrite=config.overwrite, ours=RESULT_NAMES) as folder:
            found.write(folder)
        show(found, console)
        missing = f" {', '.join(found.unfinished)} not measured." if found.unfinished else ""
        console.print(f"\nWritten to [bold]{escape(str(output / record.FILE))}[/].{missing}")
        if stopped is not None:
            raise stopped
        is_run = isinstance(subject, Model) and subject.run is not None and subject.run.has_clusters
        pages = [("report", config.subject)] if is_run else []
        next_steps(console, *pages, ("compare", output, "OTHER"))


def announce(task: Task, protocols: Sequence[Protocol], console: Console) -> None:
    """Say what is about to be measured on what, so that a wrong path is seen at once."""
    train, test, seen = task.data["train"], task.data["test"], task.test_images
    what = "embeddings" if isinstance(task.subject, TableSubject) else "images"
    how = "a held-out tenth" if task.data["split"]["kind"] == "held out" else escape(str(test["name"]))
    console.print(
        f"[bold]siammm[/] measures {escape(task.subject.name)} by {', '.join(one.name for one in protocols)}: "
        f"{train['n_images']:,} training and {test['n_images']:,} test {what} ({how}) of {task.n_classes:,} classes, "
        f"on {task.device}."
    )
    n_unlabelled = sum(int(part.get("n_unlabelled", 0)) for part in (train, test))
    if n_unlabelled:
        console.print(f"{n_unlabelled:,} rows without a label (missing, or below 0) are left out.", style="yellow")
    console.print(escape(seen["why"]), style="yellow" if seen["seen"] else "dim")
    if seen.get("in_train"):
        note = "test images are also training images, byte for byte: figures are too high."
        console.print(f"{seen['in_train']:,} {note}", style="yellow")


def show(found: Evaluation, console: Console) -> None:
    """Print the figures, and the recipe of each protocol."""
    n_bad = sum(len(reasons) for reasons in found.data.get("set_aside", {}).values())
    if n_bad:
        console.print(f"{left_out(n_bad)}.", style="yellow")
    several = any(figure.deviation is not None for result in found.results for figure in result.figures.values())
    over = f", mean and deviation over {len(found.seeds)} seeds" if several else ""
    table = Table(title=f"{escape(str(found.subject['name']))}{over}", title_justify="left")
    table.add_column("protocol")
    table.add_column("figure")
    table.add_column("value", justify="right")
    clusterings = [result for result in found.results if result.protocol == "clustering"]
    for result in (result for result in found.results if result not in clusterings):
        for number, (name, figure) in enumerate(result.figures.items()):
            text = figure_text(figure, counts=name in result.neutral)
            table.add_row("" if number else result.protocol, escape(name), text)
        table.add_section()
    if table.row_count:
        console.print(table)
    for result in clusterings:
        console.print(_clustering_table(result))
    for result in found.results:
        console.print(f"[bold]{result.protocol}[/]: {escape(result.recipe)}", style="dim")


def _clustering_table(result: Result) -> Table:
    """One column per clustering: two dozen rows in one column would be hard to read."""
    parts = {name: name.partition(": ") for name in result.figures}
    columns = list(dict.fromkeys(which for which, _, _ in parts.values()))
    table = Table(title="Clusters against labels", title_justify="left")
    table.add_column("score")
    for column in columns:
        table.add_column(escape(column), justify="right")
    for score in dict.fromkeys(score for _, _, score in parts.values()):
        figures = {name: result.figures.get(name) for name in (f"{column}: {score}" for column in columns)}
        cells = [figure_text(one, counts=name in result.neutral) if one else "" for name, one in figures.items()]
        table.add_row(score, *cells)
    return table


def figure_text(figure: Figure, *, counts: bool = False) -> str:
    """A figure for display: a share to four digits, or a count."""
    if counts:
        return f"{figure.mean:,.4g}" if figure.mean != round(figure.mean) else f"{figure.mean:,.0f}"
    return f"{figure.mean:.4f}" + ("" if figure.deviation is None else f" ± {figure.deviation:.4f}")
