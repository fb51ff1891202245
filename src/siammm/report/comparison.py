"""Comparison with another run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from siammm.core.text import printable, shown
from siammm.metrics.clustering import clustering_scores
from siammm.report import assessments, history
from siammm.report.json_numbers import number
from siammm.report.schema import Comparison, Matching
from siammm.runs.run import Run

_MATCHES = 6


def compare(run: Run, path: Path, notes: list[str]) -> Comparison:
    """Compare a run with another one; images are the same where they have the same names."""
    other = Run.open(path)
    at_N = _match_images(run, other)
    shared = np.flatnonzero(at_N >= 0)
    scores: list[tuple[str, float]] = []
    clusters: list[Matching] = []
    if len(shared):
        mine, theirs = run.cluster_N[shared], other.cluster_N[at_N[shared]]
        agreement = clustering_scores(theirs, mine)
        scores = [(name.upper(), number(getattr(agreement, name))) for name in ("ami", "nmi", "ari")]
        clusters = _matchings(mine, theirs, run.n_clusters, other.n_clusters)
    else:
        notes.append(f"The run {shown(other.name)} is of other images, so clusters cannot be matched.")
    return Comparison(
        name=other.name,
        other=history.run_summary(other, data=printable(other.data), image_size=other.image_size),
        curves=history.curves_of(other),
        n_shared=len(shared),
        scores=scores,
        figures=assessments.read_figures(other, None, notes=[]),
        clusters=clusters,
        other_sizes=np.bincount(other.cluster_N, minlength=other.n_clusters).tolist(),
    )


def _match_images(run: Run, other: Run) -> np.ndarray:
    """The position of each image in the other run, -1 where it is not there."""
    position = {name: at for at, name in enumerate(other.ids)}
    at_N = np.array([position.get(name, -1) for name in run.ids], dtype=np.int64)
    same = run.facts.get("fingerprint") == other.facts.get("fingerprint")
    # Rows of arrays are named by their number, so the names are the same in every data set.
    return np.full_like(at_N, -1) if not same and all(name.isdecimal() for name in run.ids) else at_N


def _matchings(mine: np.ndarray, theirs: np.ndarray, n_mine: int, n_theirs: int) -> list[Matching]:
    """For each cluster, the clusters of the other run with which it shares most images."""
    pairs, counts = np.unique(mine * n_theirs + theirs, return_counts=True)
    others: list[list[tuple[int, int]]] = [[] for _ in range(n_mine)]
    for at in np.argsort(-counts, kind="stable").tolist():
        cluster, other = divmod(int(pairs[at]), n_theirs)
        if len(others[cluster]) < _MATCHES:
            others[cluster].append((other, int(counts[at])))
    total_K = np.bincount(mine, minlength=n_mine).tolist()
    return [
        Matching(cluster=cluster, n_shared=total_K[cluster], others=matches)
        for cluster, matches in enumerate(others)
        if matches
    ]
