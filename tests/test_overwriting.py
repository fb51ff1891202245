"""``--overwrite`` keeps what a person has typed and selected, where it still makes sense."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from siammm.cli import main
from siammm.runs.run import Run
from tests.commands import refused

pytestmark = pytest.mark.usefixtures("one_thread", "here")

FLAGS = ["--n-components", "4", "--merge", "none", "--device", "cpu"]


def blobs(n: int = 80, kinds: int = 4, *, first: int = 0) -> tuple[np.ndarray, list[str]]:
    """Rows of clear kinds, with names that begin with the kind's letter."""
    rng = np.random.default_rng(0)
    y = np.arange(n) % kinds
    x = 3 * np.eye(kinds, 8)[y] + 0.2 * rng.normal(size=(n, 8))
    return x[first:], [f"{'abcdefgh'[kind]}{i}" for i, kind in enumerate(y)][first:]


def cluster(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["cluster", "x.npz", "--output", "out", *(flags or FLAGS), "--overwrite"]) == 0
    return " ".join(capsys.readouterr().out.split())


def save(x: np.ndarray, ids: list[str] | None = None) -> None:
    arrays = {"embeddings": x} if ids is None else {"embeddings": x, "ids": np.array(ids)}
    np.savez("x.npz", **arrays)  # pyright: ignore[reportArgumentType] - its allow_pickle is no array


def name_all(run: Run) -> None:
    """Name each group by the letter of its images."""
    for group in range(run.n_groups):
        letters = {run.ids[i][0] for i in np.flatnonzero(run.group_N == group)}
        assert len(letters) == 1
        run.group_names.give(group, f"kind {letters.pop()}")


def names(run: Run) -> dict[str, set[str]]:
    """The letters of the images of each named group."""
    return {
        name: {run.ids[i][0] for i in np.flatnonzero(run.group_N == group)}
        for group, name in enumerate(run.group_names.read()[0])
        if name
    }


def test_names_go_with_their_images_whatever_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    x, ids = blobs()
    save(x, ids)
    cluster(capsys)
    name_all(Run.open("out"))
    Run.open("out").selections.keep("mine", [3, 4, 79])
    # Others in another order, some gone, some new, and of unequal numbers, so that groups have other numbers.
    x, ids = blobs(100)
    order = np.random.default_rng(1).permutation(np.r_[4:40, [i for i in range(40, 100) if i % 4 < 2]])
    save(x[order], [ids[i] for i in order])
    assert "Kept 4 names of groups. Kept 1 selection. Next:" in cluster(capsys)
    run = Run.open("out")
    assert names(run) == {f"kind {letter}": {letter} for letter in "abcd"}
    assert [run.ids[i] for i in run.selections.read()["mine"]] == ["a4"], "those that are still there"


def test_what_makes_no_sense_any_more_is_dropped_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    x, ids = blobs()
    save(x, ids)
    cluster(capsys)
    name_all(Run.open("out"))
    Run.open("out").selections.keep("gone", [3])
    Run.open("out").selections.keep("here", [5])
    # Two kinds become one: neither name is that of both. The image of a selection is no longer there.
    x[np.arange(80) % 4 == 1, :2] += (2.6, -2.6)
    save(np.delete(x, 3, axis=0), ids[:3] + ids[4:])
    said = cluster(capsys, "--n-components", "3", "--merge", "none", "--device", "cpu")
    assert re.search(
        "Kept 2 names of groups, and dropped 2 names of groups whose images are now spread over other groups: "
        "kind [ab], kind [ab]. Kept 1 selection, and dropped 1 selection whose images are no longer there: gone. ",
        said,
    )
    run = Run.open("out")
    assert names(run) == {"kind c": {"c"}, "kind d": {"d"}}
    assert list(run.selections.read()) == ["here"]


def test_numbers_of_rows_are_names_in_the_same_table_only(capsys: pytest.CaptureFixture[str]) -> None:
    x, _ = blobs()
    save(x)
    cluster(capsys)
    Run.open("out").group_names.give(0, "first")
    Run.open("out").selections.keep("mine", [1])
    assert "Kept 1 name of groups. Kept 1 selection." in cluster(capsys, *FLAGS, "--random-state", "3")
    assert Run.open("out").selections.read() == {"mine": [1]}
    save(x[::-1])
    message = refused(["cluster", "x.npz", "--output", "out", *FLAGS, "--overwrite"], capsys)
    assert re.search("selections of rows of .*x.npz, which has changed since and has no ids", message)
    assert Run.open("out").selections.read() == {"mine": [1]}
    for name in ("names.json", "selections.json"):
        Path("out", name).unlink()
    cluster(capsys)


def test_those_of_other_data_are_not_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    x, ids = blobs()
    save(x, ids)
    np.savez("other.npz", embeddings=x, ids=np.array(ids))
    cluster(capsys)
    again = ["cluster", "other.npz", "--output", "out", *FLAGS, "--overwrite"]
    Run.open("out").group_names.give(0, "first")
    message = refused(again, capsys)
    assert re.search(
        r"out holds names of groups or selections of .*x\.npz; choose another --output, or remove", message
    )
    assert "first" in Run.open("out").group_names.read()[0]
    Run.open("out").group_names.give(0, "")
    assert main(again) == 0, "a name that was taken away is nothing to keep"


@pytest.mark.parametrize("missing", ["summary.json", "assignments.parquet"])
def test_those_of_half_a_result_are_not_replaced(capsys: pytest.CaptureFixture[str], missing: str) -> None:
    x, ids = blobs()
    save(x, ids)
    cluster(capsys)
    Run.open("out").group_names.give(0, "first")
    kept = Path("out/names.json").read_bytes()
    Path("out", missing).unlink()
    message = refused(["cluster", "x.npz", "--output", "out", *FLAGS, "--overwrite"], capsys)
    assert "names of groups or selections of a result that cannot be read" in message
    assert Path("out/names.json").read_bytes() == kept


def test_those_of_a_damaged_result_are_not_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    x, ids = blobs()
    save(x, ids)
    cluster(capsys)
    Run.open("out").group_names.give(0, "first")
    Path("out/summary.json").write_text("{")
    message = refused(["cluster", "x.npz", "--output", "out", *FLAGS, "--overwrite"], capsys)
    assert "names of groups or selections of a result that cannot be read" in message
    assert json.loads(Path("out/names.json").read_text())["names"] == {"0": "first"}
    Path("out/names.json").unlink()
    assert "Kept" not in cluster(capsys)
