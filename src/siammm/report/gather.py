"""Everything on the page, gathered from a run folder.

    run = Run.open("my-run")
    gathered = gather(run, GatherSettings())
    render(gathered.contents, gathered.sheets)

Legend:  K clusters, D dimensions, M rows of the page's table.
"""

from __future__ import annotations

import datetime
import functools
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from siammm.core.progress import Progress, silent
from siammm.core.text import counted
from siammm.core.version import __version__
from siammm.report import assessments, catch_alls, clusters, comparison, history, projection, quality, thumbnails, tree
from siammm.report.clusters import Measured, Rows
from siammm.report.image_quality import LOOKED_AT_SIDE, Look, look
from siammm.report.json_numbers import number, numbers
from siammm.report.projection import MapMethod
from siammm.report.schema import FORMAT, Contents, Images, Selection, Thumbnails
from siammm.report.thumbnails import Layout
from siammm.runs.run import Run
from siammm.settings.commands import ExploreConfig, ReportConfig

MOST_OF_A_SELECTION = 500
"""Images of a kept selection that are certainly on the page."""
# Thumbnails of a sheet that is made while the user waits for it.
_THUMBNAILS_ASKED = 128
# Clusters mean little where the probability of images is less than this many times chance.
_DOUBTFUL = 1.5


@dataclass(frozen=True, kw_only=True)
class GatherSettings:
    """What is asked of a report besides the run."""

    audit: Path | None = None
    """The folder of an audit; by default that of this run, here, if it exists."""
    evaluation: Path | None = None
    """The folder of an evaluation; by default that of this run, here, if it exists."""
    compare: Path | None = None
    """Another run to put beside this one."""
    map: MapMethod = "pca"
    """How the map is drawn."""
    max_thumbnails: int = 10_000
    """Thumbnails within the page."""
    thumbnail_size: int | None = None
    """Pixels of a thumbnail's longer side."""
    random_state: int = 0
    """Seed of what is drawn at random."""
    sheets_beside: str = "sheets"
    """Where the page looks for sheets that it does not hold."""
    live: bool = False
    """Whether the page is served: then sheets are made when they are asked for."""

    @classmethod
    def of(cls, config: ReportConfig | ExploreConfig, **others: Any) -> GatherSettings:
        """The settings of a command, and others."""
        shared = {field.name: getattr(config, field.name) for field in fields(cls) if hasattr(config, field.name)}
        return cls(**shared | others)


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """The contents of the page, and what belongs to them but is not JSON."""

    contents: Contents
    sheets: list[bytes]
    """All sheets; none for a page that is served."""
    image_M: np.ndarray
    """The image of the run in each row of the table."""
    layout: Layout
    measured: Measured

    @property
    def within(self) -> list[bytes]:
        """The sheets that the page holds itself."""
        return self.sheets[: len(self.sheets) - len(self.beside)]

    @property
    def beside(self) -> dict[str, bytes]:
        """Names and contents of the files that lie beside the page."""
        listed = zip(self.contents["thumbnails"]["sheets"], self.sheets, strict=False)
        return {Path(sheet["url"]).name: data for sheet, data in listed if sheet["url"] is not None}


def gather(run: Run, settings: GatherSettings, tell: Progress = silent) -> Gathered:
    """Gather all that the page shows."""
    projection.check_map(settings.map)
    notes = list(run.images.notes)
    seed = settings.random_state
    labels = assessments.Labels(run.label_names)
    rows = Rows(run.n_images)
    measured = clusters.measure(run, tell)
    _note_doubt(run, notes)
    central_G = clusters.central_of_groups(run, measured, rows)
    of_clusters, of_groups = catch_alls.mixing(run, measured.sum_GD, seed=seed)
    found_clusters = clusters.build_clusters(run, measured, of_clusters, rows, seed=seed)
    names, are_old = run.group_names.read()
    groups = clusters.build_groups(run, found_clusters, of_groups, names, central_G)
    if are_old:
        notes.append("Groups were named, but in an earlier result of this run, so these names are not shown.")
    selected = run.selections.read()
    for images in selected.values():  # the first of many: a page has room for others too
        rows.of(images[:MOST_OF_A_SELECTION])
    suspects = assessments.read_suspects(run, settings.audit, labels, rows, notes)
    figures = assessments.read_figures(run, settings.evaluation, notes)
    beside = None if settings.compare is None else comparison.compare(run, settings.compare, notes)
    joined = tree.build_tree(run, measured, rows, seed=seed, tell=tell)
    if joined is None:
        notes.append(f"{run.n_clusters:,} clusters are too many for a tree, which has at most {tree.MOST_CLUSTERS:,}.")
    rows.fill(clusters.MOST_ROWS, seed=seed)
    image_M = rows.image_M
    if len(image_M) < run.n_images:
        notes.append(
            f"This page has {len(image_M):,} of {run.n_images:,} images: examples of each cluster, and a random "
            + ("sample." if settings.live else "sample; `siammm explore` shows all of them.")
        )
    tell("drawing the map", 0, 0)
    place_M2, share, method = projection.project(run.embeddings, image_M, settings.map, seed=seed)
    looks: list[Look | None] = [None] * len(image_M)
    layout, sheets, number_M, entry = _make_thumbnails(run, image_M, settings, notes, looks, tell)
    seen = None if settings.live or run.images.source is None else quality.quality(run, image_M, looks)
    n_aside, sure_N = run.n_set_aside, run.group_probability_N
    if n_aside:
        are = "is" if n_aside == 1 else "are"
        notes.append(f"{counted(n_aside, 'image')} could not be read when the run was made, and {are} not in it.")
    contents = Contents(
        format=FORMAT,
        title=f"{run.name}: {_counted_levels(run)} of {counted(run.n_images, 'image')}",
        made=datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        version=__version__,
        run=history.run_summary(run, data=run.images.data, image_size=run.image_size),
        label_names=labels.names,
        curves=history.curves_of(run),
        merge_rounds=history.merge_rounds(run),
        how_found=history.how_found(run),
        map_method=method,
        map_share=None if share is None else number(share, 4),
        groups=groups,
        selections=as_rows(selected, image_M),
        clusters=found_clusters,
        images=Images(
            id=[run.ids[i] for i in image_M.tolist()],
            cluster=run.cluster_N[image_M].tolist(),
            group=run.group_N[image_M].tolist(),
            probability=numbers(np.clip(run.probability_N[image_M], 0.0, 1.0)),
            group_probability=[] if sure_N is None else numbers(np.clip(sure_N[image_M], 0.0, 1.0)),
            outlier_score=numbers(np.clip(run.outlier_N[image_M], 0.0, 1.0)),
            label=run.label_N[image_M].tolist(),
            x=numbers(place_M2[:, 0]),
            y=numbers(place_M2[:, 1]),
            thumbnail=number_M,
            position=image_M.tolist() if settings.live else [],
        ),
        thumbnails=entry,
        tree=joined,
        figures=figures,
        suspects=suspects,
        quality=seen,
        comparison=beside,
        live=settings.live,
        notes=notes,
    )
    return Gathered(contents=contents, sheets=sheets, image_M=image_M, layout=layout, measured=measured)


def as_rows(selected: dict[str, list[int]], image_M: np.ndarray) -> list[Selection]:
    """Selections by the rows of the page's table; images that are not on the page are left out."""
    row_of = {image: row for row, image in enumerate(image_M.tolist())}
    return [
        Selection(name=name, images=[row_of[image] for image in images if image in row_of])
        for name, images in selected.items()
    ]


def _counted_levels(run: Run) -> str:
    clusters = counted(run.n_clusters, "cluster")
    return f"{counted(run.n_groups, 'group')} and {clusters}" if run.is_grouped else clusters


def _note_doubt(run: Run, notes: list[str]) -> None:
    """Add a note where images belong to their own cluster hardly more than to others."""
    most = min(int(run.mixture.n_neighbours), run.n_clusters)
    middle = float(np.median(run.probability_N))
    if most > 1 and middle < _DOUBTFUL / most:
        notes.append(
            f"The clusters hardly differ from each other: half of the images belong to theirs with a share of at "
            f"most {middle:.2f}, where chance is {1 / most:.2f}; {run.how_to_improve}."
        )


def _make_thumbnails(
    run: Run,
    image_M: np.ndarray,
    settings: GatherSettings,
    notes: list[str],
    looks: list[Look | None],
    tell: Progress,
) -> tuple[Layout, list[bytes], list[int], Thumbnails]:
    """The layout of the thumbnails, the sheets, the number of each row's thumbnail, and what the page says of them.

    An image that is read for its thumbnail is looked at too, because decoding takes the most time.
    """

    def look_at(row: int, image: np.ndarray, shape: tuple[int, int]) -> None:
        looks[row] = look(image, shape)

    position_M = run.images.position_N[image_M]
    there_M = position_M >= 0
    layout = thumbnails.layout(run.images.source, int(there_M.sum()), settings.thumbnail_size)
    number_M, sheets, urls = [-1] * len(image_M), list[bytes](), list[str | None]()
    if settings.live:
        layout = replace(layout, most=_THUMBNAILS_ASKED)
    if settings.live and run.images.source is not None:
        number_M = np.where(there_M, np.cumsum(there_M) - 1, -1).tolist()
        urls += [f"{settings.sheets_beside}/{i}" for i in range(-(-int(there_M.sum()) // layout.per_sheet))]
    elif run.images.source is not None:
        told = functools.partial(tell, "making thumbnails")
        sheets, number_M = thumbnails.make_sheets(
            run.images.source, position_M.tolist(), layout, told, look_at, LOOKED_AT_SIDE
        )
        n_bad = number_M.count(-1)
        if n_bad:
            notes.append(f"{n_bad:,} of the {len(image_M):,} images on this page can no longer be read.")
        n_within = thumbnails.n_within(sheets, layout, max(number_M) + 1, settings.max_thumbnails)
        urls += [None if i < n_within else f"{settings.sheets_beside}/sheet-{i}.webp" for i in range(len(sheets))]
    return layout, sheets, number_M, thumbnails.sheets_entry(layout, max(number_M, default=-1) + 1, urls)
