"""``siammm compare``: show evaluations in one table, with the best of each figure marked."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from siammm.commands.evaluate import figure_text
from siammm.commands.next_steps import next_steps
from siammm.core.errors import InputError
from siammm.core.files import check_new_file, new_file
from siammm.evaluate import comparison as comparisons
from siammm.evaluate.comparison import Comparison, Row
from siammm.runs.evaluation import read_evaluation
from siammm.settings.commands import CompareConfig


def compare(config: CompareConfig) -> None:
    """Run the command."""
    if len(config.evaluations) < 2:
        given = "1 was given" if config.evaluations else "none was given"
        raise InputError(f"siammm compare needs at least two evaluations, but {given}.")
    if config.output is not None:
        check_new_file(config.output, overwrite=config.overwrite)
    comparison = comparisons.compare([read_evaluation(path) for path in config.evaluations])
    if not comparison.rows:
        raise InputError("The evaluations contain no scores; evaluate again.")
    console = Console(highlight=False)
    console.print(_table(comparison))
    for warning in comparison.warnings:
        console.print(escape(warning), style="yellow")
    if config.output is not None:
        with new_file(config.output, overwrite=config.overwrite) as (file, _):
            file.write_text(markdown(comparison), encoding="utf-8")
        console.print(f"Written to [bold]{escape(str(config.output))}[/].")
    next_steps(console, ("report", "RUN", "--compare", "OTHER"))


def _table(comparison: Comparison) -> Table:
    table = Table(title="The best of each figure is marked with *", title_justify="left")
    table.add_column("protocol")
    table.add_column("figure")
    for name in comparison.names:
        table.add_column(escape(name), justify="right", overflow="fold")
    last = None
    for row in comparison.rows:
        if last not in (None, row.protocol):
            table.add_section()
        cells = [f"[bold green]{text} *[/]" if best else text for text, best in zip(_texts(row), row.best, strict=True)]
        table.add_row("" if row.protocol == last else row.protocol, escape(row.name), *cells)
        last = row.protocol
    return table


def markdown(comparison: Comparison) -> str:
    """The same table in Markdown, with the best in bold and the warnings below."""
    lines = [
        "| protocol | figure | " + " | ".join(_cell(name) for name in comparison.names) + " |",
        "|---|---|" + "---:|" * len(comparison.names),
    ]
    for row in comparison.rows:
        cells = [f"**{text}**" if best else text for text, best in zip(_texts(row), row.best, strict=True)]
        lines.append("| " + " | ".join([row.protocol, _cell(row.name), *cells]) + " |")
    text = "\n".join(lines) + "\n"
    if comparison.warnings:
        text += "\n" + "\n".join(f"- {_cell(warning)}" for warning in comparison.warnings) + "\n"
    return text


def _texts(row: Row) -> list[str]:
    return ["" if figure is None else figure_text(figure, counts=row.neutral) for figure in row.figures]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
