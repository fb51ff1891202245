"""Everything on the page, gathered from a run folder.

    run = open_run(Path("my-run"), data=None, reading=DataConfig(), device=torch.device("cpu"), tell=quiet)
    gathered = gather(run, GatherSettings())
    render(gathered.contents, gathered.sheets)

Legend:  K clusters, D dimensions, M rows of the page's table.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import siammm
from siammm.core.text import counted
from siammm.report import assessments, comparison, examples, history, projection, thumbnails, tree
from siammm.report.examples import Measured, Rows, Shown
from siammm.report.json_numbers import number, numbers
from siammm.report.projection import MapMethod
from siammm.report.schema import FORMAT, Cluster, Contents, Images
from siammm.report.thumbnails import Layout
from siammm.runs.opened import Assigned, OpenRun, Tell, n_set_aside

_NEAREST = 8
# Thumbnails of a sheet that is made while somebody waits for it.
_THUMBNAILS_ASKED = 128
# Clusters mean little where images are in theirs with less than so many times what chance gives.
_DOUBTFUL = 1.5


def quiet(what: str, done: int, total: int) -> None:
    """Tells nobody."""


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


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """The page's contents, and what belongs to them but is no JSON."""

    contents: Contents
    sheets: list[bytes]
    """All sheets; none for a page that is served. The first ``n_within`` are the page's own."""
    n_within: int
    image_M: np.ndarray
    """The image of the run in each row of the table."""
    layout: Layout
    measured: Measured

    @property
    def beside(self) -> dict[str, bytes]:
        """Names and contents of the files that lie beside the page."""
        listed = self.contents["thumbnails"]["sheets"][self.n_within :]
        return {
            Path(str(one["url"])).name: data for one, data in zip(listed, self.sheets[self.n_within :], strict=True)
        }


def gather(run: OpenRun, settings: GatherSettings, tell: Tell = quiet) -> Gathered:
    """Gather all that the page shows."""
    projection.check_map(settings.map)
    found, notes = run.found, list(run.notes)
    seed = settings.random_state
    labels = assessments.Labels(None if found.label_names is None else list(found.label_names))
    rows = Rows(found.n_images)
    measured = examples.measure(run, tell)
    _doubt(found, notes)
    clusters = _clusters(run, measured, examples.choose(run, measured, seed=seed), rows)
    suspects = assessments.read_suspects(found, settings.audit, labels, rows, notes)
    figures = assessments.read_figures(found, settings.evaluation, notes)
    beside = None if settings.compare is None else comparison.compare(found, settings.compare, notes)
    joined = tree.build_tree(run, measured, rows, seed=seed, tell=tell)
    if joined is None:
        notes.append(
            f"{found.n_clusters:,} clusters are too many for a tree, which has at most {tree.MOST_CLUSTERS:,}."
        )
    rows.fill(examples.MOST_ROWS, seed=seed)
    image_M = rows.image_M
    if len(image_M) < found.n_images:
        notes.append(
            f"This page knows {len(image_M):,} of {found.n_images:,} images: those that stand for a cluster, and a "
            + ("random sample." if settings.live else "random sample; `siammm explore` shows all of them.")
        )
    tell("drawing the map", 0, 0)
    place_M2, share, method = projection.project(run.embedding_ND, image_M, settings.map, seed=seed)
    layout, number_M, sheets, n_within, urls = _pictures(run, image_M, settings, notes, tell)
    n_aside = n_set_aside(found)
    if n_aside:
        notes.append(f"{n_aside:,} images could not be read when the run was trained, and are not in it.")
    contents = Contents(
        format=FORMAT,
        title=f"{found.name}: {counted(found.n_clusters, 'cluster')} of {counted(found.n_images, 'image')}",
        made=datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        version=siammm.__version__,
        run=history.described(found, data=run.data, image_size=run.image_size),
        label_names=labels.names,
        curves=history.curves_of(found),
        merge_rounds=history.merge_rounds(found),
        map_method=method,
        map_share=None if share is None else number(share, 4),
        clusters=clusters,
        images=Images(
            id=[found.ids[i] for i in image_M.tolist()],
            cluster=found.cluster_N[image_M].tolist(),
            probability=numbers(np.clip(found.probability_N[image_M], 0.0, 1.0)),
            outlier_score=numbers(np.clip(found.outlier_N[image_M], 0.0, 1.0)),
            label=found.label_N[image_M].tolist(),
            x=numbers(place_M2[:, 0]),
            y=numbers(place_M2[:, 1]),
            thumbnail=number_M,
        ),
        thumbnails=thumbnails.sheets_entry(layout, max(number_M, default=-1) + 1, urls),
        tree=joined,
        figures=figures,
        suspects=suspects,
        comparison=beside,
        live=settings.live,
        notes=notes,
    )
    return Gathered(
        contents=contents, sheets=sheets, n_within=n_within, image_M=image_M, layout=layout, measured=measured
    )


def _doubt(found: Assigned, notes: list[str]) -> None:
    """Say so where images are hardly more in their own cluster than in others: then it is chance that shows."""
    most = min(int(found.mixture.n_neighbours), found.n_clusters)
    middle = float(np.median(found.probability_N))
    if most > 1 and middle < _DOUBTFUL / most:
        notes.append(
            f"The clusters are hardly different from each other: half of the images are in theirs with a probability "
            f"of at most {middle:.2f}, where chance is {1 / most:.2f}; train for longer, or on more images."
        )


def _clusters(run: OpenRun, measured: Measured, shown: list[Shown], rows: Rows) -> list[Cluster]:
    found = run.found
    merged = history.merges_of_clusters(found)
    nearest = _nearest(found.mean_KD)
    concentration_K, weight_K = found.concentration_K, found.weight_K
    sum_K = np.bincount(found.cluster_N, weights=measured.cosine_N, minlength=found.n_clusters)
    cohesion_K = sum_K / np.maximum(measured.count_K, 1)
    clusters: list[Cluster] = []
    # The central images of all clusters come first: these have their thumbnails within the page before any others.
    central = [rows.of(one.central) for one in shown]
    for k, one in enumerate(shown):
        n_labelled = sum(times for _, times in one.label_counts)
        clusters.append(
            Cluster(
                size=int(measured.count_K[k]),
                weight=number(weight_K[k]),
                concentration=number(concentration_K[k]),
                cohesion=number(np.clip(cohesion_K[k], -1.0, 1.0), 4),
                label=one.label_counts[0][0] if one.label_counts else -1,
                purity=number(one.label_counts[0][1] / n_labelled, 4) if n_labelled else None,
                label_counts=one.label_counts,
                central=central[k],
                boundary=rows.of(one.boundary),
                outliers=rows.of(one.outliers),
                sample=rows.of(one.sample),
                by_label=[(code, rows.of(images)) for code, images in one.by_label],
                nearest=nearest[k],
                n_merged=merged[k][0],
                merges=merged[k][1],
            )
        )
    return clusters


def _nearest(mean_KD: np.ndarray) -> list[list[tuple[int, float]]]:
    """For each cluster the others whose mean directions are nearest."""
    k = len(mean_KD)
    count = min(_NEAREST, k - 1)
    found: list[list[tuple[int, float]]] = []
    for start in range(0, k, 1024):
        cosine_BK = mean_KD[start : start + 1024] @ mean_KD.T
        at = np.arange(len(cosine_BK))
        cosine_BK[at, start + at] = -np.inf
        order_BH = np.argsort(-cosine_BK, axis=1, kind="stable")[:, :count]
        value_BH = np.take_along_axis(cosine_BK, order_BH, axis=1)
        found += [
            [(int(other), number(np.clip(value, -1.0, 1.0), 4)) for other, value in zip(others, values, strict=True)]
            for others, values in zip(order_BH, value_BH, strict=True)
        ]
    return found


def _pictures(
    run: OpenRun, image_M: np.ndarray, settings: GatherSettings, notes: list[str], tell: Tell
) -> tuple[Layout, list[int], list[bytes], int, list[str | None]]:
    """The layout of thumbnails, each row's number, the sheets, how many the page holds, and where the others are."""
    position_M = run.position_N[image_M]
    layout = thumbnails.layout(run.source, int((position_M >= 0).sum()), settings.thumbnail_size)
    if settings.live:
        layout = replace(layout, most=_THUMBNAILS_ASKED)
    if run.source is None:
        return layout, [-1] * len(image_M), [], 0, []
    if settings.live:
        there = position_M >= 0
        number_M = np.where(there, np.cumsum(there) - 1, -1).tolist()
        n_sheets = -(-int(there.sum()) // layout.per_sheet)
        return layout, number_M, [], 0, [f"{settings.sheets_beside}/{i}" for i in range(n_sheets)]
    sheets, number_M = thumbnails.make_sheets(
        run.source, position_M.tolist(), layout, lambda done, total: tell("making thumbnails", done, total)
    )
    n_bad = number_M.count(-1)
    if n_bad:
        notes.append(f"{n_bad:,} of the {len(image_M):,} images on this page can no longer be read.")
    n_within = thumbnails.n_within(sheets, layout, max(number_M) + 1, settings.max_thumbnails)
    urls = [None if i < n_within else f"{settings.sheets_beside}/sheet-{i}.webp" for i in range(len(sheets))]
    return layout, number_M, sheets, n_within, urls
