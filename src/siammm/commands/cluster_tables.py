"""What is printed of groups and clusters: how many there are, the largest, and their agreement with labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from siammm.cluster.find_clusters import Found, spread_of_components
from siammm.commands.next_steps import next_steps
from siammm.core.text import counted, shown
from siammm.data import decode
from siammm.data.embedding_table import PATH_KEYS
from siammm.metrics.clustering import ClusteringScores, label_codes
from siammm.runs import files

# The clusters are many where groups are listed before them.
_ROWS_SHOWN, _ROWS_BESIDE_GROUPS = 12, 5


def show(found: Found, output: Path, console: Console, *, of_images: bool = False, by_hand: str = "") -> None:
    """Print the summary that a person reads; ``by_hand`` says what became of names and selections."""
    mixture, merges = found.mixture, found.mixture.merges_
    n, d = found.table.n_samples, found.table.embeddings.shape[1]
    what = f"{n:,} images" if of_images else f"{n:,} embeddings of {d:,} dimensions"
    took = f"[dim]({sum(found.seconds.values()):.1f} s)[/]"
    labels, clusters, groups = found.labelled or (None, found.clusters, found.group_labels)
    started = "" if merges is None or found.n_merged is not None else f", merged from {merges.n_components[0]:,}"
    clusters_found = counted(int(mixture.n_components_), "cluster")
    if found.groups.is_found:
        console.print(f"\n[bold green]{counted(found.groups.n_groups, 'group')}[/] in {what} {took}\n")
        console.print(size_table("group", found.group_sizes, groups, labels))
        console.print(f"\nThere are also [bold]{clusters_found}[/]{started}:\n")
    else:
        console.print(f"\n[bold green]{clusters_found}[/] in {what}{started} {took}\n")
    spread_name = "concentration" if hasattr(mixture, "concentrations_") else "variance"
    spread = (spread_name, spread_of_components(mixture))
    most = _ROWS_BESIDE_GROUPS if found.groups.is_found else _ROWS_SHOWN
    console.print(size_table("cluster", found.sizes, clusters, labels, spread=spread, most=most))
    if found.n_merged is not None and found.groups.is_found:
        console.print(
            f"[dim]Merging left only {counted(found.n_merged, 'cluster')}, so each group was divided into these "
            "instead.[/]"
        )
    if mixture.n_components_ == 1 and merges is not None:
        console.print(
            "[yellow]No separate clusters were found; if you know how many groups there are, add --n-groups NUMBER "
            "--overwrite, or look at the merge tree of the report.[/]"
        )
    elif of_images and mixture.merge == "auto" and not found.groups.is_found:
        console.print("[dim]No other groups were found: each cluster is a group.[/]")
    # Clusters that groups were divided into are only parts of these: nobody asked for them to be stable.
    if not mixture.converged_ and found.n_merged is None:
        console.print("[yellow]EM did not converge within --max-iter steps; raise it for more stable clusters.[/]")
    if found.scores is not None:
        console.print(score_table(found.scores, found.group_scores))
    of_the_images = [files.EMBEDDINGS, files.IMAGES_TABLE] if of_images else []
    written = [files.ASSIGNMENTS, files.MIXTURE, files.SUMMARY, *of_the_images]
    console.print(f"\nWritten to [bold]{escape(str(output))}[/]: {', '.join(written)}")
    if by_hand:
        console.print(escape(by_hand))
    next_steps(console, *_next(found, output, of_images=of_images))


def _next(found: Found, output: Path, *, of_images: bool) -> list[tuple[object, ...]]:
    """What to do with the result; pages need von Mises-Fisher clusters, and folders need files."""
    can_be_shown = hasattr(found.mixture, "concentrations_")
    columns = [] if found.table.columns is None else found.table.columns.column_names
    # A table's ids may be the paths of images.
    first = "" if found.table.ids is None or of_images else str(found.table.ids[0])
    has_files = any(name in columns for name in PATH_KEYS) or Path(first).suffix.lower() in decode.SUFFIXES
    # The images of a table's rows are found if somebody says where they are.
    data = ("--data", "FOLDER") if has_files and not of_images else ()
    steps: list[tuple[object, ...]] = [("report", output, *data), ("explore", output, *data)] if can_be_shown else []
    return [*steps, *([("sort", output, "--to", "FOLDER", *data)] if has_files else [])]


def size_table(
    what: str,
    sizes: np.ndarray,
    part_N: np.ndarray,
    labels: np.ndarray | None,
    *,
    spread: tuple[str, np.ndarray] | None = None,
    most: int = _ROWS_SHOWN,
) -> Table:
    """The largest clusters or groups: size, spread if there is one and, with labels, their most frequent label.

    ``part_N`` is the cluster or group of each labelled row.
    """
    order = np.argsort(-sizes, kind="stable")[:most]
    more = len(sizes) - len(order)
    table = Table(title=f"The largest {what}s" if more else None, title_justify="left")
    for heading in (what, "size", "share", *([] if spread is None else [spread[0]])):
        table.add_column(heading, justify="right")
    if labels is not None:
        table.add_column("mostly")
        table.add_column("purity", justify="right")
    codes, names = (None, []) if labels is None else label_codes(labels)
    for k in order.tolist():
        row = [str(k), f"{sizes[k]:,}", f"{sizes[k] / max(1, sizes.sum()):.1%}"]
        row += [] if spread is None else [f"{spread[1][k]:.4g}"]
        if codes is not None:
            inside = codes[(part_N == k) & (codes >= 0)]
            if len(inside):
                counts = np.bincount(inside)
                row += [escape(shown(names[counts.argmax()])), f"{counts.max() / len(inside):.0%}"]
        table.add_row(*row)
    if more:
        rest = sizes.sum() - sizes[order].sum()
        table.add_row(f"{more:,} more", f"{rest:,}", f"{rest / sizes.sum():.1%}", style="dim")
    return table


def score_table(scores: ClusteringScores, of_groups: ClusteringScores | None = None) -> Table:
    """Agreement of clusters and groups with the labels."""
    left_out = f", not counting {scores.n_unlabelled:,} without a label" if scores.n_unlabelled else ""
    title = f"Against the labels: {scores.n_classes:,} classes, {scores.n_samples:,} samples{left_out}"
    table = Table(title=title, title_justify="left")
    names = {"AMI": "ami", "NMI": "nmi", "ARI": "ari"}
    names |= {"Hungarian": "hungarian_accuracy", "majority": "majority_accuracy"}
    every = {"clusters": scores} | ({} if of_groups is None else {"groups": of_groups})
    if of_groups is not None:
        table.add_column("of")
    for heading in names:
        table.add_column(heading, justify="right")
    for name, one in every.items():
        figures = [f"{getattr(one, field):.3f}" for field in names.values()]
        table.add_row(*([name] if of_groups is not None else []), *figures)
    return table
