"""``siammm audit``: find the images of a run or of a table of embeddings that look mislabelled."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from siammm.audit import suspects
from siammm.audit.images import AuditedImages, read_images
from siammm.audit.results import Planted, group_labels, summary, suspects_table
from siammm.audit.suspects import Audit
from siammm.commands.next_steps import next_steps
from siammm.commands.process import one_process
from siammm.core.checks import check_at_least, check_number
from siammm.core.folders import check_new_folder, new_folder
from siammm.core.progress import Bar
from siammm.core.text import left_out, shown
from siammm.runs import files
from siammm.settings.commands import AuditConfig

_CLASSES_SHOWN = 20


def audit(config: AuditConfig) -> None:
    """Run the command. Whatever can be refused is refused before the work starts."""
    if config.n_neighbours is not None:
        check_at_least("--n-neighbours", config.n_neighbours, 1)
    check_at_least("--rounds", config.rounds, 1)
    check_at_least("--show", config.show, 0)
    check_number(
        "--threshold", config.threshold, lambda value: 0 < value < 1, "it must be a probability between 0 and 1"
    )
    if config.plant is not None:
        check_number("--plant", config.plant, lambda value: 0 < value < 0.5, "it must be above 0 and below 0.5")
    # A run's name may hold a dot, which begins no extension.
    whole = config.subject.expanduser().resolve()
    output = config.output or Path(f"{whole.name if whole.is_dir() else whole.stem}-audit")
    check_new_folder(output, overwrite=config.overwrite, ours=files.AUDIT_NAMES)
    console = Console(highlight=False)
    seconds: dict[str, float] = {}
    with one_process("audit", config.device) as device, Bar() as progress:
        start = time.perf_counter()
        progress.show("reading")
        images = read_images(config, device, progress.show)
        seconds["read"] = time.perf_counter() - start
        labels, is_planted = images.labels, None
        if config.plant is not None:
            labels, is_planted = suspects.plant_errors(labels, config.plant, seed=config.random_state)
        found = suspects.audit(
            images.features,
            labels,
            class_names=images.classes,
            n_neighbours=config.n_neighbours,
            rounds=config.rounds,
            threshold=config.threshold,
            seed=config.random_state,
            device=device,
            progress=progress.show,
        )
        seconds["audit"] = time.perf_counter() - start - seconds["read"]
    planted = None if is_planted is None else Planted.of(is_planted, found)
    with new_folder(output, overwrite=config.overwrite, ours=files.AUDIT_NAMES) as folder:
        pq.write_table(suspects_table(images, found, planted), folder / files.SUSPECTS)
        text = json.dumps(summary(config, images, found, planted, seconds), indent=2, allow_nan=False, default=str)
        (folder / files.SUMMARY).write_text(text + "\n", encoding="utf-8")
    show(images, found, planted, config.show, sum(seconds.values()), console)
    console.print(f"\nWritten to [bold]{escape(str(output))}[/]: {files.SUSPECTS}, {files.SUMMARY}")
    # The report shows the suspects of a run with their pictures; those of a table can be checked.
    next_steps(console, ("report", config.subject, "--audit", output) if whole.is_dir() else _check(config))


def _check(config: AuditConfig) -> tuple[object, ...]:
    return ("audit", config.subject, "--plant", "0.05", "--output", "FOLDER")


def show(
    images: AuditedImages, found: Audit, planted: Planted | None, n_shown: int, seconds: float, console: Console
) -> None:
    """Print the worst, and the summary that a person reads."""
    console.print(
        f"\n[bold green]{found.n_suspects:,} suspects[/] among {len(found.label_N):,} labels of "
        f"{len(found.classes):,} classes: labels that are right with a probability below {found.threshold:g}. "
        f"Estimated share of wrong labels: {found.error_rate:.1%} [dim]({seconds:.1f} s)[/]\n"
    )
    if n_shown:
        console.print(_worst(images, found, n_shown))
    console.print(_by_class(found))
    groups = group_labels(images, found)
    if groups is not None:
        n, among = int(groups.disagrees_N.sum()), int(groups.disagrees_N[found.probability_N < found.threshold].sum())
        console.print(
            f"The images are in {images.n_groups:,} groups. {n:,} of {len(found.label_N):,} labels differ from the "
            f"commonest label of their group; {among:,} of these are suspects."
        )
    if found.n_unlabelled:
        console.print(f"{found.n_unlabelled:,} images without a label were left out.", style="yellow")
    if images.n_unreadable:
        console.print(f"{left_out(images.n_unreadable)}.", style="yellow")
    if planted is not None:
        console.print(
            f"Of {planted.count:,} labels that were made wrong, {planted.found:,} ({planted.precision:.1%}) are among "
            f"the first {planted.count:,} suspects."
        )


def _worst(images: AuditedImages, found: Audit, n_shown: int) -> Table:
    table = Table(title="Most likely mislabelled", title_justify="left")
    table.add_column("rank", justify="right")
    for heading in ("id", "label", "suggested"):
        table.add_column(heading, overflow="fold")
    table.add_column("probability", justify="right")
    groups = group_labels(images, found)
    cluster_N = None if images.clusters is None or groups is not None else images.clusters[found.image_N]
    if groups is not None:
        table.add_column("group", justify="right")
        table.add_column("mostly", overflow="fold")
    elif cluster_N is not None:
        table.add_column("cluster", justify="right")
    if images.clusters is not None:
        table.add_column("share there", justify="right")
    for at in found.order[:n_shown].tolist():
        given, other = found.classes[found.label_N[at]], found.classes[found.suggested_N[at]]
        row = [
            str(found.rank_N[at]),
            escape(shown(images.ids[found.image_N[at]])),
            escape(shown(given)),
            escape(shown(other)) if other != given else "",
            f"{found.probability_N[at]:.3f}" if found.probability_N[at] >= 0.0005 else "< 0.001",
        ]
        # Where it is, and how common its label is there.
        if groups is not None:
            mostly = escape(shown(found.classes[groups.commonest_N[at]]))
            row += [str(groups.group_N[at]), mostly, f"{groups.share_N[at]:.1%}"]
        elif cluster_N is not None:
            share = (found.label_N[cluster_N == cluster_N[at]] == found.label_N[at]).mean()
            row += [str(cluster_N[at]), f"{share:.1%}"]
        table.add_row(*row)
    return table


def _by_class(found: Audit) -> Table:
    """The classes with the largest share of labels that look wrong."""
    n_classes = len(found.classes)
    title = "Labels by class" if n_classes <= _CLASSES_SHOWN else f"The {_CLASSES_SHOWN} classes with most errors"
    table = Table(title=title, title_justify="left")
    table.add_column("label", overflow="fold")
    for heading in ("labels", "suspects", "estimated wrong"):
        table.add_column(heading, justify="right")
    for c in np.argsort(-found.error_rate_C, kind="stable")[:_CLASSES_SHOWN].tolist():
        counts = f"{found.count_C[c]:,}", f"{found.suspects_C[c]:,}"
        table.add_row(escape(shown(found.classes[c])), *counts, f"{found.error_rate_C[c]:.1%}")
    return table
