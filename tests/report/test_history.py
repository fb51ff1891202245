"""How a run came to its clusters: merges put back together, and curves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from siammm.mixture.merge_tree import MergeHistory
from siammm.report import history
from siammm.runs.run import Run
from tests.report.made_runs import made_run
from tests.runs.parts import changed


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three clusters of few images; each test gives them a history of its own."""
    return Run.open(made_run(tmp_path_factory.mktemp("history"), n=30, k=3))


def with_rounds(found: Run, n_start: int, rounds: list[list[int]]) -> tuple[Run, list[int]]:
    """The run with these rounds of merging, one an epoch, and how many components became each cluster.

    A round names for each component the one that it becomes.
    """
    kept = MergeHistory(n_start)
    inside = [1] * n_start
    by_epoch: list[list[int]] = []
    for epoch, groups in enumerate(rounds, 1):
        if groups:
            kept.record_round(torch.tensor(groups), torch.rand(len(groups), generator=torch.Generator().manual_seed(0)))
            inside = [
                sum(n for n, group in zip(inside, groups, strict=True) if group == g) for g in range(max(groups) + 1)
            ]
        by_epoch.append([epoch, len(inside)])
    tree = kept.finished(torch.randn(len(inside), 4, generator=torch.Generator().manual_seed(1)))
    merges = {
        "linkage": tree.linkage.tolist(),
        "n_merges": tree.n_merges,
        "n_components": tree.n_components,
        "nodes": kept.as_tensors()["node"].tolist(),
        "n_clusters_by_epoch": by_epoch,
    }
    return changed(found, merges=merges), inside


def test_merges_of_each_cluster(found: Run) -> None:
    run, inside = with_rounds(found, 7, [[0, 1, 2, 3, 4, 0, 1], [], [0, 1, 2, 0, 1]])
    merged = history.merges_of_clusters(run)
    assert [n for n, _ in merged] == inside == [3, 3, 1]
    assert merged[0][1] == [(3, 2, 1), (1, 1, 1)]
    assert merged[1][1] == [(3, 2, 1), (1, 1, 1)]
    assert merged[2][1] == []
    assert history.merge_rounds(run) == [(1, 7, 5), (3, 5, 3)]
    assert history.starting_clusters(run) == 7


def test_a_cluster_may_be_taken_in_by_a_later_one(found: Run) -> None:
    """Then clusters are not in the order of their first component, and what was stored of it counts."""
    run, inside = with_rounds(found, 5, [[2, 0, 1, 2, 0]])
    assert [n for n, _ in history.merges_of_clusters(run)] == inside == [2, 1, 2]


def test_three_at_once(found: Run) -> None:
    run, inside = with_rounds(found, 6, [[0, 0, 0, 0, 1, 2]])
    merged = history.merges_of_clusters(run)
    assert [n for n, _ in merged] == inside == [4, 1, 1]
    assert merged[0][1] == [(1, 3, 1), (1, 2, 1), (1, 1, 1)]


def test_merges_after_the_last_epoch(found: Run) -> None:
    """The automatic rule settles the clusters when training is over."""
    run, _ = with_rounds(found, 6, [[0, 1, 2, 3, 4, 0], [0, 1, 2, 0, 1]])
    run.merges["n_clusters_by_epoch"] = [[1, 5]]
    merged = history.merges_of_clusters(run)
    assert merged[0][1] == [(2, 2, 1), (1, 1, 1)]
    assert history.merge_rounds(run) == [(1, 6, 5), (2, 5, 3)]


@pytest.mark.parametrize(
    "merges",
    [
        {},
        {"linkage": [], "n_merges": 0},
        {"linkage": [[0, 1, 0.5, 2]], "n_merges": 1, "nodes": [0, 0, 0]},
        {"linkage": [[0, 99, 0.5, 2]], "n_merges": 1},
        {"linkage": "torn", "n_merges": 2},
        {"n_clusters_by_epoch": ["torn"]},
        {"n_clusters_by_epoch": [[float("inf"), 1]]},
    ],
)
def test_a_tree_that_is_not_of_these_clusters(merges: dict[str, Any], found: Run) -> None:
    run = changed(found, merges=merges)
    assert history.merges_of_clusters(run) == [(1, [])] * 3
    assert history.merge_rounds(run) == []


def test_curves() -> None:
    rows = [
        {"epoch": 1, "loss": 2.5, "knn": None, "name": "x", "flag": True, "seconds": 3},
        {"epoch": 2, "loss": 1e999},
    ]
    assert history.curves(rows) == {"loss": [(1.0, 2.5)]}
    assert history.curves([{"loss": 1.0}]) == {}
    long = history.curves([{"epoch": e, "loss": 1 / e} for e in range(1, 10_001)])["loss"]
    assert len(long) <= 2001
    assert (long[0][0], long[-1][0]) == (1, 10_000)


def test_the_curve_of_clusters_ends_at_what_was_found(found: Run) -> None:
    rows = [{"epoch": 1, "n_clusters": 9}, {"epoch": 2, "n_clusters": 7}]
    settled = history.curves_of(changed(found, metrics=rows))["n_clusters"]
    assert settled == [(1.0, 9.0), (2.0, 7.0), (float(found.config.optimisation.epochs), 3.0)]
    rows[-1]["n_clusters"] = 3
    assert history.curves_of(changed(found, metrics=rows))["n_clusters"] == [(1.0, 9.0), (2.0, 3.0)]
    assert history.curves_of(changed(found, metrics=[{"epoch": 1, "loss": 1.0}])) == {"loss": [(1.0, 1.0)]}


@pytest.mark.parametrize(
    ("settings", "n_start", "sentences"),
    [
        ({"merge": "auto"}, 40, ["was found, by --merge auto. There were 40 clusters at the start, and those that"]),
        ({"merge": "auto"}, 3, ["was found, by --merge auto. There were 3 clusters at the start, and a test told all"]),
        ({"merge": "auto", "merge_floor": 3}, 40, ["was held by --merge-floor 3. There were 40", "might be fewer"]),
        ({"merge": "auto", "merge_floor": 3}, 3, ["was found, by --merge auto."]),
        ({"merge": "paper", "merge_floor": 3}, 40, ["was held by --merge-floor 3."]),
        (
            {"merge": "paper", "merge_threshold": -1.2},
            40,
            ["follows from --merge paper.", "threshold -1.2 ", "by itself"],
        ),
        ({"merge": "none", "n_components": 3}, 3, ["not found but fixed, by --merge none and --n-components 3."]),
        ({"merge": "none", "n_components": None}, 3, ["not found but fixed, by --merge none and the default of --n-"]),
    ],
)
def test_where_the_number_of_clusters_comes_from(
    settings: dict[str, Any], n_start: int, sentences: list[str], found: Run
) -> None:
    config = replace(found.config, clustering=replace(found.config.clustering, **settings))
    said = history.how_found(changed(found, config=config, merges={"n_components": [n_start]}))
    assert said["number"].startswith("The number of clusters ")
    for sentence in sentences:
        assert sentence in said["number"]
    reason = (
        "No groups other than the clusters were found"
        if settings["merge"] == "auto"
        else "Groups are looked for only with --merge auto"
    )
    assert said["levels"].startswith(reason)


def test_levels(found: Run) -> None:
    two = changed(found, is_grouped=True, n_groups=2, group_N=found.cluster_N % 2, group_K=np.array([0, 1, 0]))
    assert history.how_found(two)["levels"] == (
        "The images form 2 groups. A cluster is shown with the group that most of its images are in."
    )
    summary = history.run_summary(two, data="here", image_size=8)
    assert (summary["n_groups"], summary["has_groups"]) == (2, True)
    stray_N = two.group_N.copy()
    stray_N[0] = 1 - stray_N[0]
    assert "% of all images are in another one." in history.how_found(changed(two, group_N=stray_N))["levels"]


def test_what_a_run_is(tmp_path: Path) -> None:
    run = history.run_summary(Run.open(made_run(tmp_path, n=20, k=2)), data="here", image_size=8)
    assert (run["name"], run["n_images"], run["n_clusters"], run["seconds"]) == ("made", 20, 2, 3.0)
    groups = [group for group, _, _ in run["settings"]]
    assert {"", "optimisation", "network", "clustering"} <= set(groups)
    assert len({(group, name) for group, name, _ in run["settings"]}) == len(run["settings"])
