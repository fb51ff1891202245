"""``siammm evaluate``: an encoder or a table of embeddings in; figures that can stand beside those of papers out."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from siammm.commands.progress import Bar
from siammm.core import processes
from siammm.core.errors import InputError, SiamMMError
from siammm.core.folders import check_new_folder, new_folder
from siammm.evaluate.measured import Measured
from siammm.evaluate.prepare import open_transfer, prepared
from siammm.evaluate.protocols import ProtocolSettings, check, chosen, measure
from siammm.runs import evaluation as record
from siammm.runs.evaluation import Evaluation, Figure, Result
from siammm.runs.subject import ImageSubject, TableSubject, open_subject
from siammm.settings.commands import EvaluateConfig

RESULT_NAMES = frozenset({record.FILE})


def evaluate(config: EvaluateConfig) -> None:
    """Run the command. Whatever can be refused is refused before the work starts."""
    output = config.output or record.default_output(config.subject)
    check_new_folder(output, overwrite=config.overwrite, ours=RESULT_NAMES)
    console = Console(highlight=False)
    with processes.setup(config.device) as context:
        if context.world_size > 1:
            raise InputError(f"evaluate runs in one process, but there are {context.world_size}; start it by itself.")
        try:
            found, stopped = evaluated(config, context.device, console)
        except torch.OutOfMemoryError as error:
            raise _no_memory() from error
    with new_folder(output, overwrite=config.overwrite, ours=RESULT_NAMES) as folder:
        found.write(folder)
    show(found, console)
    missing = f" {', '.join(found.unfinished)} not measured." if found.unfinished else ""
    console.print(f"\nWritten to [bold]{escape(str(output / record.FILE))}[/].{missing}")
    if isinstance(stopped, torch.OutOfMemoryError):
        raise _no_memory() from stopped
    if stopped is not None:
        raise stopped


def _no_memory() -> InputError:
    return InputError("The GPU has not enough memory for this; measure with fewer images, or use --device cpu.")


def evaluated(
    config: EvaluateConfig, device: torch.device, console: Console
) -> tuple[Evaluation, BaseException | None]:
    """Open everything, and measure; what is measured is not lost where a later protocol fails or is interrupted."""
    _check_seeds(config.seeds)
    subject = open_subject(
        config.subject,
        encoder=config.encoder,
        image_size=config.image_size,
        key=config.reading.image_key,
        label_column=config.reading.label_key,
        device=device,
    )
    if isinstance(subject, ImageSubject) and subject.warning is not None:
        console.print(escape(subject.warning), style="yellow")
    with Bar() as bars:
        ready = prepared(
            subject,
            data=config.data,
            test=config.test,
            device=device,
            reading=config.reading,
            progress=bars.show,
        )
        measured, data = ready.measured, dict(ready.data)
        if config.transfer is not None:
            data |= open_transfer(measured, config.transfer, config.transfer_test)
        elif config.transfer_test is not None:
            raise InputError("--transfer-test is given without --transfer; give the set that teaches as well.")
        protocols = chosen(config.protocols, measured)
        settings = ProtocolSettings(
            k_means=config.k_means,
            label_shares=config.label_shares,
            label_lists=config.label_lists,
            epochs=config.epochs,
            batch_size=config.batch_size,
            learning_rate=config.learning_rate,
        )
        check(protocols, measured, settings)
        announce(measured, [one.name for one in protocols], data, ready.test_images, console)
        results: list[Result] = []
        stopped: BaseException | None = None
        for protocol in protocols:
            try:
                results.append(measure(protocol, measured, settings, config.seeds))
            except (KeyboardInterrupt, SiamMMError, torch.OutOfMemoryError) as error:
                if not results:
                    raise
                stopped = error
                break
    if measured.set_aside:
        data["set_aside"] = measured.set_aside
        n_bad = sum(len(reasons) for reasons in measured.set_aside.values())
        console.print(f"{n_bad:,} images could not be read and were left out.", style="yellow")
    found = Evaluation(
        subject=subject.record,
        data=data,
        test_images=ready.test_images,
        seeds=list(config.seeds),
        results=results,
        environment=record.environment(shlex.join(["siammm", *sys.argv[1:]])),
        unfinished=[one.name for one in protocols[len(results) :]],
    )
    return found, stopped


def announce(measured: Measured, protocols: Sequence[str], data: dict, test_images: dict, console: Console) -> None:
    """Say what is about to be measured on what, so that a wrong path is seen at once."""
    train, test = data["train"], data["test"]
    what = "embeddings" if isinstance(measured.subject, TableSubject) else "images"
    how = "a tenth, held out" if data["split"]["kind"] == "held out" else escape(str(test["name"]))
    console.print(
        f"[bold]siammm[/] measures {escape(measured.subject.name)} by {', '.join(protocols)}: {train['n_images']:,} "
        f"training and {test['n_images']:,} test {what} ({how}) of {measured.n_classes:,} classes, on "
        f"{measured.device}."
    )
    n_unlabelled = sum(int(part.get("n_unlabelled", 0)) for part in (train, test))
    if n_unlabelled:
        console.print(f"{n_unlabelled:,} rows without a label (missing, or below 0) take no part.", style="yellow")
    console.print(escape(test_images["why"]), style="yellow" if test_images["seen"] else "dim")
    if test_images.get("in_train"):
        console.print(
            f"{test_images['in_train']:,} test images are also training images, byte for byte: figures flatter.",
            style="yellow",
        )


def show(found: Evaluation, console: Console) -> None:
    """Print the figures, and by what recipe each was found."""
    several = any(figure.deviation is not None for result in found.results for figure in result.figures.values())
    over = f", mean and deviation over {len(found.seeds)} seeds" if several else ""
    table = Table(title=f"{escape(str(found.subject['name']))}{over}", title_justify="left")
    for heading in ("protocol", "figure"):
        table.add_column(heading)
    table.add_column("value", justify="right")
    for result in found.results:
        if result.protocol == "clustering":
            continue
        for number, (name, figure) in enumerate(result.figures.items()):
            table.add_row(
                "" if number else result.protocol, escape(name), figure_text(figure, counts=name in result.neutral)
            )
        table.add_section()
    if table.row_count:
        console.print(table)
    for result in found.results:
        if result.protocol == "clustering":
            console.print(_clustering_table(result))
    for result in found.results:
        console.print(f"[bold]{result.protocol}[/]: {escape(result.recipe)}", style="dim")


def _clustering_table(result: Result) -> Table:
    """The scores of each clustering in a column: two dozen rows below each other would not be read."""
    parts = {name: name.partition(": ") for name in result.figures}
    columns = list(dict.fromkeys(which for which, _, _ in parts.values()))
    table = Table(title="Clusters against labels", title_justify="left")
    table.add_column("score")
    for column in columns:
        table.add_column(escape(column), justify="right")
    for score in dict.fromkeys(score for _, _, score in parts.values()):
        names = [f"{column}: {score}" for column in columns]
        table.add_row(
            score,
            *(
                figure_text(result.figures[name], counts=name in result.neutral) if name in result.figures else ""
                for name in names
            ),
        )
    return table


def figure_text(figure: Figure, *, counts: bool = False) -> str:
    """A figure as it is shown: a share to four digits, or a count."""
    if counts:
        return f"{figure.mean:,.4g}" if figure.mean != round(figure.mean) else f"{figure.mean:,.0f}"
    return f"{figure.mean:.4f}" + ("" if figure.deviation is None else f" ± {figure.deviation:.4f}")


def _check_seeds(seeds: Sequence[int]) -> None:
    if not seeds:
        raise InputError("There are no seeds; give --seeds one or more whole numbers.")
    if len(set(seeds)) < len(seeds):
        raise InputError(f"The seeds {', '.join(map(str, seeds))} repeat, which adds nothing; give different ones.")
    odd = [seed for seed in seeds if not 0 <= seed < 2**31]
    if odd:
        raise InputError(f"The seed {odd[0]} is out of range; seeds are from 0 to {2**31 - 1}.")
