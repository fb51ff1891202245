"""The history of a run: what it measured, and which components were merged into which cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from siammm.core.text import counted, printable
from siammm.report import schema
from siammm.report.json_numbers import is_number, number
from siammm.runs.run import Run

Curves = dict[str, list[tuple[float, float]]]

# About the machine, not about the model.
_TIMINGS = frozenset({"epoch", "seconds", "images_per_second", "probe_seconds"})
# A screen has no more columns than this.
_POINTS = 2000


def run_summary(run: Run, *, data: str, image_size: int) -> schema.Run:
    """What was trained or clustered, and on what."""
    seconds = [row["seconds"] for row in run.metrics if is_number(row.get("seconds"))]
    return schema.Run(
        name=run.name,
        data=data,
        n_images=run.n_images,
        n_clusters=run.n_clusters,
        n_groups=run.n_groups,
        has_groups=run.is_grouped,
        image_size=image_size,
        backbone=printable(run.backbone),
        method=printable(run.method),
        epochs=run.epochs,
        seconds=number(sum(seconds)) if seconds else None,
        random_state=run.random_state,
        settings=_settings(run.settings),
    )


def _settings(plain: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Group, name and value of each setting, as text."""
    groups = [(name, value) if isinstance(value, Mapping) else ("", {name: value}) for name, value in plain.items()]
    return [(group, name, _setting_text(value)) for group, settings in groups for name, value in settings.items()]


def _setting_text(value: Any) -> str:
    if value is None:
        return "by default"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(printable, value)) or "none"
    return printable(value)


def curves(metrics: Sequence[Mapping[str, Any]]) -> Curves:
    """Epoch and value of each metric; a very long run is thinned to about two thousand points."""
    found: Curves = {}
    for row in metrics:
        if not is_number(row.get("epoch")):
            continue
        for name, value in row.items():
            if name not in _TIMINGS and is_number(value):
                found.setdefault(printable(name), []).append((number(row["epoch"]), number(value)))
    return {name: _thinned(points) for name, points in found.items()}


def curves_of(run: Run) -> Curves:
    """The curves of a run. Clusters may merge after the last epoch: the last number is that of the finished run."""
    measured = curves(run.metrics)
    points = measured.get("n_clusters")
    if points and points[-1][1] != run.n_clusters:
        points.append((number(run.epochs), float(run.n_clusters)))
    return measured


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    step = -(-len(points) // _POINTS)
    thin = points[::step] if step > 1 else points
    return thin if thin[-1] == points[-1] else [*thin, points[-1]]


def merge_rounds(run: Run) -> list[tuple[float, int, int]]:
    """Epoch, clusters before and after of each round that merged some, with the one after the last epoch.

    Without training there are no epochs, and none of these.
    """
    if not run.epochs:
        return []
    n_before = starting_clusters(run)
    rounds: list[tuple[float, int, int]] = []
    for epoch, after in [*_by_epoch(run), (float(run.epochs), run.n_clusters)]:
        if after < n_before:
            rounds.append((epoch, n_before, after))
        n_before = after
    return rounds


def _by_epoch(run: Run) -> list[tuple[float, int]]:
    try:
        rows = [(float(epoch), int(k)) for epoch, k in run.merges.get("n_clusters_by_epoch", [])]
    except (TypeError, ValueError, OverflowError):
        return []
    return rows if all(math.isfinite(epoch) for epoch, _ in rows) else []


def starting_clusters(run: Run) -> int:
    """Components at the start of training."""
    try:
        return max(run.n_clusters, *map(int, run.merges.get("n_components") or [0]))
    except (TypeError, ValueError, OverflowError):
        return run.n_clusters


def how_found(run: Run) -> schema.HowFound:
    """Where the number of clusters comes from, and that of groups, in plain sentences."""
    given, k, n_start = run.merging, run.n_clusters, starting_clusters(run)
    start = f"There were {n_start:,} clusters at the start"
    if given.merge == "none":
        size = "the default of --n-components" if given.n_components is None else f"--n-components {given.n_components}"
        number_of = f"The number of clusters was not found but fixed, by --merge none and {size}."
    elif run.n_merged is not None:
        number_of = (
            f"Merging ended with {counted(run.n_merged, 'cluster')}, fewer than there are groups. So the "
            "groups were found first, and the clusters are parts of them."
        )
    elif n_start > k and k <= given.merge_floor:
        number_of = (
            f"The number of clusters was held by --merge-floor {given.merge_floor}. {start}, and merging stopped at "
            "this limit; without it there might be fewer."
        )
    elif given.merge == "paper":
        number_of = (
            f"The number of clusters follows from --merge paper. {start}, and pairs nearer than --merge-threshold "
            f"{given.merge_threshold:g} were merged until the end; this rule does not stop by itself."
        )
    else:
        then = "those that a test could not tell apart were merged" if n_start > k else "a test told all apart"
        number_of = f"The number of clusters was found, by --merge auto. {start}, and {then}."
    if run.is_grouped:
        elsewhere = float((run.group_N != run.group_K[run.cluster_N]).mean())
        asked = "" if given.n_groups is None else ", as --n-groups asked"
        levels = f"The images form {counted(run.n_groups, 'group')}{asked}. "
        levels += "A cluster is shown with the group that most of its "
        levels += "images are in" + (f"; {elsewhere:.1%} of all images are in another one." if elsewhere else ".")
    elif not run.looked_for_groups:
        levels = "The version that made this run did not look for groups."
    elif given.merge != "auto":
        levels = "Groups are looked for only with --merge auto."
    elif run.n_clusters == 1:
        levels = "Nothing stands apart from the rest. The merge tree divides the images into any number of parts."
    else:
        levels = "No groups other than the clusters were found: each cluster is a group."
    return schema.HowFound(number=number_of, levels=levels)


def merges_of_clusters(run: Run) -> list[tuple[int, list[tuple[int, int, int]]]]:
    """For each cluster the starting components in it, and its merges: epoch and the components on either side.

    The merges form one tree per cluster. Runs of earlier versions did not store which tree is whose: there, clusters
    are in the order of the first component in each.
    """
    k = run.n_clusters
    try:
        n_made = int(run.merges["n_merges"])
        rows = [(int(a), int(b)) for a, b, *_ in run.merges["linkage"][:n_made]]
        if len(rows) != n_made:
            raise ValueError
        n_start = n_made + k
        first, inside = list(range(n_start)), [1] * n_start
        for a, b in rows:
            first.append(min(first[a], first[b]))
            inside.append(inside[a] + inside[b])
        joined = {child for row in rows for child in row}
        roots = [node for node in range(n_start + n_made) if node not in joined]
        nodes = run.merges.get("nodes")
        order = sorted(roots, key=lambda node: first[node]) if nodes is None else [int(node) for node in nodes]
        if len(order) != k or set(order) != set(roots):
            raise ValueError
    except (
        KeyError,
        IndexError,
        TypeError,
        ValueError,
        OverflowError,
    ):  # no tree, or one that is not of these clusters
        return [(1, []) for _ in range(k)]
    epochs = _epochs_of_rows(run, n_start, n_made)
    return [(inside[root], _below(root, rows, n_start, inside, epochs)) for root in order]


def _below(
    root: int, rows: Sequence[tuple[int, int]], n_start: int, inside: Sequence[int], epochs: Sequence[int]
) -> list[tuple[int, int, int]]:
    """The merges below a node, the latest first."""
    below, pending = [], [root]
    while pending:
        node = pending.pop()
        if node >= n_start:
            below.append(node - n_start)
            pending += rows[node - n_start]
    return [(epochs[row], inside[rows[row][0]], inside[rows[row][1]]) for row in sorted(below, reverse=True)]


def _epochs_of_rows(run: Run, n_start: int, n_made: int) -> list[int]:
    """The epoch of each merge: the first after which no more clusters were left than after this merge."""
    by_epoch, last = _by_epoch(run), run.epochs
    epochs, at = [], 0
    for row in range(n_made):
        while at < len(by_epoch) and by_epoch[at][1] > n_start - row - 1:
            at += 1
        epochs.append(int(by_epoch[at][0]) if at < len(by_epoch) else last)
    return epochs
