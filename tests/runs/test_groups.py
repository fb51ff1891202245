"""The groups of a run's clusters, and the names that people give to them."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from siammm.core.errors import InputError, StoredFileError
from siammm.core.locks import FolderLock
from siammm.runs import files
from siammm.runs.group_names import LONGEST
from siammm.runs.run import Run
from tests.report.made_runs import made_run, rewrite, without_groups
from tests.runs.parts import begun


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return made_run(tmp_path, n=60, k=5, groups=[0, 1, 0, 2, 1])


# -- which cluster is in which


def test_the_column_says_so(folder: Path) -> None:
    run = Run.open(folder)
    assert run.group_K.tolist() == [0, 1, 0, 2, 1]
    assert run.n_groups == 3


def test_a_cluster_is_in_the_group_of_most_of_its_images(folder: Path) -> None:
    """Borders between groups are drawn anew, so a few images of a cluster may be in another group."""
    run = Run.open(folder)
    group_N = run.group_K[run.cluster_N]
    group_N[[np.flatnonzero(run.cluster_N == k)[0] for k in range(5)]] = 10**9
    rewrite(folder, group=group_N.tolist())
    run = Run.open(folder)
    assert run.group_K.tolist() == [0, 1, 0, 2, 1]
    assert run.n_groups == 4
    assert run.group_N.tolist() == np.where(group_N < 10**9, group_N, 3).tolist(), "numbered without gaps"


def test_groups_are_not_told_by_their_number(folder: Path) -> None:
    """As many groups as clusters are groups all the same, if they are others."""
    assert not Run.open(made_run(folder.parent, n=60, k=5, name="plain")).is_grouped
    run = Run.open(folder)
    rewrite(folder, group=((run.cluster_N + (np.arange(60) % 4 == 0)) % 5).tolist())
    run = Run.open(folder)
    assert (run.is_grouped, run.n_groups, run.group_K.tolist()) == (True, 5, [0, 1, 2, 3, 4])


def test_a_name_is_of_the_images(folder: Path) -> None:
    """If other images are in the groups, they are others, even if the clusters stay."""
    run = Run.open(folder)
    run.group_names.give(1, "birds")
    group_N = run.group_N.copy()
    group_N[0] = (group_N[0] + 1) % 3
    rewrite(folder, group=group_N.tolist())
    assert Run.open(folder).group_names.read() == (["", "", ""], True)


def test_a_run_of_an_earlier_version_has_clusters_only(folder: Path) -> None:
    run = Run.open(without_groups(folder))
    assert run.group_K.tolist() == [0, 1, 2, 3, 4]
    assert run.n_groups == 5
    assert not run.looked_for_groups


def test_how_probable_a_group_is(folder: Path) -> None:
    run = Run.open(folder)
    assert run.group_probability_N is not None
    assert run.group_probability_N.shape == (run.n_images,)
    table = pq.read_table(folder / files.ASSIGNMENTS)
    pq.write_table(table.drop_columns(["group_probability"]), folder / files.ASSIGNMENTS)
    earlier = Run.open(folder)  # as an earlier version left it
    assert earlier.is_grouped
    assert earlier.group_probability_N is None
    rewrite(folder, group_probability=["high"] * run.n_images)
    with pytest.raises(StoredFileError, match="group_probability is not a number in every row"):
        _ = Run.open(folder).group_N
    rewrite(folder, group=run.cluster_N, group_probability=np.ones(run.n_images))
    assert Run.open(folder).group_probability_N is None, "these are clusters, whose share is another column"


def test_numbers_without_gaps(folder: Path) -> None:
    run = Run.open(folder)
    rewrite(folder, group=[[7, 3, 7, 900, 3][k] for k in run.cluster_N])
    assert Run.open(folder).group_K.tolist() == [1, 0, 1, 2, 0]


def test_clusters_without_images(folder: Path) -> None:
    """In one level each is its own group; otherwise it is in that of the nearest cluster."""
    rewrite(folder, cluster=[0] * 20 + [2] * 20 + [3] * 20, group=[0] * 20 + [2] * 20 + [3] * 20)
    assert Run.open(folder).group_K.tolist() == [0, 1, 2, 3, 4]
    mean_KD = Run.open(folder).mean_KD
    nearest = {empty: max((0, 2, 3), key=lambda k: mean_KD[empty] @ mean_KD[k]) for empty in (1, 4)}
    for alone in (0, 2, 3):
        rewrite(folder, group=[int(k != alone) for k in Run.open(folder).cluster_N])
        group_K = Run.open(folder).group_K
        assert group_K[[0, 2, 3]].tolist() == [int(k != alone) for k in (0, 2, 3)]
        assert {empty: group_K[empty] for empty in (1, 4)} == {e: int(k != alone) for e, k in nearest.items()}


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ([-1] * 60, r"cannot be read \(a group is below 0\)"),
        ([None] * 60, r"cannot be read \(group is not a number in every row\)"),
        (["a"] * 60, r"cannot be read \(group is not a number in every row\)"),
        ([float("nan")] * 60, "cannot be read"),
    ],
)
def test_a_damaged_column(group: list[object], message: str, folder: Path) -> None:
    rewrite(folder, group=group)
    with pytest.raises(StoredFileError, match=message):
        _ = Run.open(folder).group_K


# -- names


def test_names_are_kept(folder: Path) -> None:
    names = Run.open(folder).group_names
    assert names.read() == (["", "", ""], False)
    assert not (folder / files.GROUP_NAMES).exists()
    assert names.give(1, "  small\n brown\tbirds ") == "small brown birds"
    assert names.give(2, "\u05d0 <b> \ud800") == "\u05d0 <b> \\ud800"
    assert Run.open(folder).group_names.read() == (["", "small brown birds", "\u05d0 <b> \\ud800"], False)
    assert names.give(1, " ") == ""
    stored = json.loads((folder / files.GROUP_NAMES).read_text())
    assert stored["names"] == {"2": "\u05d0 <b> \\ud800"}


def test_what_is_refused(folder: Path) -> None:
    names = Run.open(folder).group_names
    for group in (-1, 3):
        with pytest.raises(InputError, match=f"There is no group {group}; they are 0 to 2"):
            names.give(group, "x")
    assert names.give(0, "x" * LONGEST) == "x" * LONGEST
    with pytest.raises(InputError, match="The name has 101 characters, but at most 100 are kept; shorten it"):
        names.give(0, "x" * (LONGEST + 1))
    assert names.read()[0][0] == "x" * LONGEST


def test_names_of_other_groups_are_not_used(folder: Path) -> None:
    """A run that was trained again has other groups under the same numbers."""
    run = Run.open(folder)
    run.group_names.give(1, "birds")
    swapped = np.array([1, 0, 1, 2, 0])[run.cluster_N]
    rewrite(folder, group=swapped.tolist())
    names = Run.open(folder).group_names
    assert names.read() == (["", "", ""], True)
    names.give(0, "fish")
    assert names.read() == (["fish", "", ""], False)
    moved = run.cluster_N.copy()
    moved[0] = (moved[0] + 1) % 5
    rewrite(folder, cluster=moved.tolist(), group=np.array([1, 0, 1, 2, 0])[moved].tolist())
    assert Run.open(folder).group_names.read() == (["", "", ""], True)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"names": 1}', "null", "[" * 100_000, '{"groups": 1, "names": {"x": "a"}}']
)
def test_a_damaged_file(text: str, folder: Path) -> None:
    (folder / files.GROUP_NAMES).write_text(text)
    names = Run.open(folder).group_names
    with pytest.raises(StoredFileError, match=r"names\.json cannot be read \(.*\); remove it\."):
        names.read()
    with pytest.raises(StoredFileError, match="remove it"):
        names.give(0, "x")
    assert (folder / files.GROUP_NAMES).read_text() == text


def test_a_name_for_a_group_that_is_not_there(folder: Path) -> None:
    names = Run.open(folder).group_names
    names.give(0, "x")
    stored = json.loads((folder / files.GROUP_NAMES).read_text())
    (folder / files.GROUP_NAMES).write_text(json.dumps(stored | {"names": {"3": "x"}}))
    with pytest.raises(StoredFileError, match="there is no group 3"):
        names.read()


def test_a_run_that_is_being_written_gets_no_names(folder: Path) -> None:
    names = Run.open(folder).group_names
    with (
        FolderLock(folder, files.LOCK, remedy="wait"),
        pytest.raises(InputError, match=f"written by process {os.getpid()} of this machine; .* give the name later"),
    ):
        names.give(0, "x")
    assert names.give(0, "x") == "x"


def test_a_folder_that_cannot_be_written(folder: Path) -> None:
    names = Run.open(folder).group_names
    shutil.rmtree(folder)
    with pytest.raises(InputError, match=r"names\.json cannot be written \(.*\); make room, or allow writing there"):
        names.give(0, "x")


def test_many_at_once(tmp_path: Path) -> None:
    names = Run.open(made_run(tmp_path, n=60, k=20, groups=[*range(19), 0])).group_names
    threads = [threading.Thread(target=names.give, args=(g, f"name {g}")) for g in range(19)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names.read() == ([f"name {g}" for g in range(19)], False)
    assert [path.name for path in names.path.parent.iterdir() if "partial" in path.name] == []


def test_a_new_run_in_the_folder_leaves_the_names(folder: Path) -> None:
    run = Run.open(folder)
    run.group_names.give(0, "x")
    begun(folder, dataclasses.replace(run.config, overwrite=True))
    # They are used if its groups are the same, and hidden if not; but they are somebody's work.
    assert json.loads((folder / files.GROUP_NAMES).read_text())["names"] == {"0": "x"}
