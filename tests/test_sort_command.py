"""``siammm sort``: a folder for each group, of links or copies, and the images themselves as they were."""

from __future__ import annotations

import csv
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from siammm.cli import main
from siammm.export.sorted_folders import safe_names
from siammm.report.gather import GatherSettings, gather
from siammm.runs.run import Run
from siammm.settings.training import DataConfig
from tests.clustered import QUICK, N, clustered_run, four_kinds, write_photos
from tests.commands import refused
from tests.export.runs import trained_run
from tests.report.made_runs import made_run, rewrite

pytestmark = pytest.mark.usefixtures("one_thread", "here")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clustered run with two groups of two clusters each."""
    result = clustered_run(tmp_path_factory.mktemp("sorted"))
    rewrite(result, group=[cluster // 2 for cluster in Run.open(result).cluster_N.tolist()])
    return result


def rows_of(folder: str) -> list[dict[str, str]]:
    with (Path(folder) / "images.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def state_of(folder: Path) -> dict[str, Any]:
    """Everything about the files of a folder that must not change."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_mode) for path in files}


def test_links_into_a_folder_for_each_group(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = result.parent / "photos"
    before, run = state_of(photos), Run.open(result)
    capsys.readouterr()
    assert main(["sort", str(result), "--to", "sorted"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    said = " ".join(printed.out.split())
    assert said.startswith(f"{N} images linked into 2 folders, one for each group: sorted; images.csv lists them.")
    assert said.endswith(f"Next: siammm report {result} or siammm explore {result}")
    assert sorted(path.name for path in Path("sorted").iterdir()) == ["group-0", "group-1", "images.csv"]
    assert state_of(photos) == before
    rows = rows_of("sorted")
    assert list(rows[0]) == ["file", "sorted_as", "group", "group_name", "cluster", "probability", "outlier_rank"]
    assert sorted(row["file"] for row in rows) == sorted(before)
    place = {str(photos / name): i for i, name in enumerate(run.ids)}
    for row in rows:
        link, image = Path("sorted") / row["sorted_as"], place[row["file"]]
        assert link.is_symlink()
        assert os.readlink(link) == row["file"]
        assert link.name == Path(row["file"]).name
        assert link.parent.name == f"group-{row['group']}"
        assert (int(row["group"]), int(row["cluster"])) == (run.group_N[image], run.cluster_N[image])
        assert abs(float(row["probability"]) - run.probability_N[image]) < 1e-4
    assert sorted(int(row["outlier_rank"]) for row in rows) == list(range(1, N + 1))
    first = next(row for row in rows if row["outlier_rank"] == "1")
    assert run.outlier_N[place[first["file"]]] == run.outlier_N.max()


def test_folders_have_the_names_that_were_given(tmp_path: Path) -> None:
    result = clustered_run(tmp_path)
    rewrite(result, group=[cluster // 2 for cluster in Run.open(result).cluster_N.tolist()])
    Run.open(result).group_names.give(1, "../small: birds \u05d0")
    assert main(["sort", str(result), "--to", "named"]) == 0
    folders = {"group-0", "group-1-_.._small_ birds \u05d0"}
    assert {path.name for path in Path("named").iterdir() if path.is_dir()} == folders
    names = {(row["group"], row["group_name"]) for row in rows_of("named")}
    assert names == {("0", ""), ("1", "../small: birds \u05d0")}
    assert {row["sorted_as"].partition("/")[0] for row in rows_of("named")} == folders
    assert main(["sort", str(result), "--to", "clusters", "--by", "cluster"]) == 0
    assert {path.name for path in Path("clusters").iterdir() if path.is_dir()} == {f"cluster-{k}" for k in range(4)}


def test_an_image_is_in_the_folder_of_its_own_group(tmp_path: Path) -> None:
    """Also where most images of its cluster are in another; the page says the same."""
    result = clustered_run(tmp_path)
    group_N = np.array([cluster // 2 for cluster in Run.open(result).cluster_N.tolist()])
    group_N[:3] = 1 - group_N[:3]
    rewrite(result, group=group_N.tolist())
    assert main(["sort", str(result), "--to", "sorted"]) == 0
    run = Run.open(result)
    run.find_images(None, DataConfig())
    contents = gather(run, GatherSettings()).contents
    on_page = dict(zip(contents["images"]["id"], contents["images"]["group"], strict=True))
    photos = result.parent / "photos"
    assert {str(Path(row["file"]).relative_to(photos)): int(row["group"]) for row in rows_of("sorted")} == on_page
    sizes = [len(list((Path("sorted") / f"group-{g}").iterdir())) for g in range(2)]
    assert sizes == [group["size"] for group in contents["groups"]] == np.bincount(group_N).tolist()


def test_copies_into_a_folder_for_each_cluster(result: Path) -> None:
    assert main(["sort", str(result), "--to", "out/sorted", "--copy", "--by", "cluster"]) == 0
    rows = rows_of("out/sorted")
    assert {row["sorted_as"].partition("/")[0] for row in rows} == {f"cluster-{k}" for k in range(4)}
    for row in rows:
        copy = Path("out/sorted") / row["sorted_as"]
        assert not copy.is_symlink()
        assert copy.read_bytes() == Path(row["file"]).read_bytes()


def test_a_folder_for_each_selection(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "has no selections; select images on the map of siammm explore" in refused(
        ["sort", str(result), "--to", "sorted", "--by", "selection"], capsys
    )
    run = Run.open(result)
    run.selections.keep("best of: all", [3, 1, 1])
    run.selections.keep("others", [3, 5])
    assert main(["sort", str(result), "--to", "sorted", "--by", "selection"]) == 0
    assert "4 images linked into 2 folders, one for each selection" in " ".join(capsys.readouterr().out.split())
    assert sorted(path.name for path in Path("sorted").iterdir()) == ["best of_ all", "images.csv", "others"]
    names = {path.name for path in Path("sorted/best of_ all").iterdir()}
    assert names == {Path(run.ids[i]).name for i in (1, 3)}
    (result / "selections.json").unlink()


def test_a_trained_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained_run(tmp_path / "trained")
    assert " or siammm sort " in capsys.readouterr().out.splitlines()[-1]
    assert main(["sort", str(run), "--to", "sorted"]) == 0
    rows = rows_of("sorted")
    assert len(rows) == Run.open(run).n_images
    assert all((Path("sorted") / row["sorted_as"]).read_bytes() == Path(row["file"]).read_bytes() for row in rows)


def test_a_table_with_paths(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--n-components", "4", "--merge", "none"]
    assert main(["cluster", str(result / "embeddings.parquet"), *flags, "--output", "out"]) == 0
    sentence = refused(["sort", "out", "--to", "sorted"], capsys)
    assert "has paths of images: show these with --data FOLDER" in sentence
    assert main(["sort", "out", "--to", "sorted", "--data", str(result.parent / "photos")]) == 0
    assert len(rows_of("sorted")) == N


# -- what is refused


def test_nothing_is_replaced(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine").mkdir()
    Path("mine/thesis.tex").write_text("mine")
    Path("file").write_text("mine")
    Path("empty").mkdir()
    photos = result.parent / "photos"
    for to, sentence in {
        "mine": "The output folder mine is not empty; choose another --to.",
        "file": "The output file is a file, but a folder is needed; choose another --to.",
        str(photos): "is not empty; choose another --to.",
        str(photos / "kind0" / "sorted"): "is inside the folder of the images",
        "/proc/nothing": "cannot be written",
    }.items():
        assert sentence in refused(["sort", str(result), "--to", to], capsys)
    assert Path("mine/thesis.tex").read_text() == "mine"
    assert not (photos / "kind0" / "sorted").exists()
    assert main(["sort", str(result), "--to", "empty"]) == 0
    assert refused(["sort", str(result), "--to", "empty"], capsys)


def test_images_that_are_no_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_run(tmp_path, n=20)
    sentence = refused(["sort", str(run), "--to", "sorted"], capsys)
    assert "made-images.npy, not separate files, so they cannot be linked or copied; siammm export" in sentence
    np.save("x.npy", four_kinds())
    assert main(["cluster", "x.npy", *QUICK, "--output", "out"]) == 0
    assert "siammm sort" not in capsys.readouterr().out
    assert "not separate files" in refused(["sort", "out", "--to", "sorted"], capsys)
    assert not Path("sorted").exists()


def test_a_run_without_clusters_or_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere does not exist; give a run folder" in refused(["sort", "nowhere", "--to", "sorted"], capsys)
    result = clustered_run(tmp_path / "first")
    shutil.rmtree(tmp_path / "first" / "photos")
    assert "say where they are with --data" in refused(["sort", str(result), "--to", "sorted"], capsys)


def test_a_failure_leaves_nothing(result: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("siammm.export.sorted_folders.shutil.copy2", full)
    sentence = refused(["sort", str(result), "--to", "sorted", "--copy"], capsys)
    assert "cannot be copied (No space left on device); check the file, or make room" in sentence
    monkeypatch.setattr(Path, "symlink_to", full)
    assert "cannot be linked to (No space left on device); add --copy" in refused(
        ["sort", str(result), "--to", "sorted"], capsys
    )
    assert list(Path().iterdir()) == []


# -- names


def test_images_that_are_gone_or_new(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = clustered_run(tmp_path / "first")
    photos = tmp_path / "first" / "photos"
    (photos / "kind0" / "00.png").unlink()
    (photos / "kind1" / "01.png").rename(photos / "kind1" / "new.png")
    assert main(["sort", str(result), "--to", "sorted"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "have changed since the run (2 are gone)" in said
    assert "2 images of the run left out: not found." in said
    assert len(rows_of("sorted")) == N - 2


def test_bad_names_become_safe_ones(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "first")
    image = Image.fromarray(four_kinds()[0])
    for name in (b"-rf.png", b"=cmd.png", b"a\nb.png", b"\xff.png", b"con.png", b"00.png", b"x:y.png"):
        with open(bytes(photos) + b"/kind1/" + name, "wb") as file:
            image.save(file, format="png")
    assert main(["cluster", str(photos), *QUICK, "--n-components", "1", "--output", "out"]) == 0
    assert main(["sort", "out", "--to", "sorted"]) == 0
    names = {path.name for path in Path("sorted/group-0").iterdir()}
    assert len(names) == N + 7
    assert {"_-rf.png", "=cmd.png", "a_b.png", "_xff.png", "_con.png", "x_y.png"} <= names
    assert {"kind0-00.png", "kind1-00.png"} <= names
    files = [row["file"] for row in rows_of("sorted")]
    assert len(files) == N + 7
    assert all(file.startswith("/") for file in files)  # which no spreadsheet takes for a formula
    assert all(path.resolve().is_file() for path in Path("sorted/group-0").iterdir())


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a/1.png", "b/2.png"], ["1.png", "2.png"]),
        (["a/1.png", "b/1.png"], ["a-1.png", "b-1.png"]),
        (["a/1.png", "b/1.PNG"], ["a-1.png", "b-1.PNG"]),
        (["1.png", "a/1.png"], ["1.png", "a-1.png"]),
        (["a/1.png", "b/1.png", "c/a-1.png"], ["a-1-2.png", "b-1.png", "a-1.png"]),
        (["a/b/1.png", "a-b/1.png"], ["a-b-1.png", "a-b-1-2.png"]),
        (["a/é.png", "b/e\u0301.png"], ["a-é.png", "b-e\u0301.png"]),
        (["a/x?.png", "a/x*.png"], ["a-x_.png", "a-x_-2.png"]),
        (["a/no suffix", "b/no suffix."], ["a-no suffix", "b-no suffix"]),
    ],
)
def test_names_in_one_folder(paths: list[str], names: list[str]) -> None:
    assert safe_names(paths) == names


def test_long_names_fit() -> None:
    (name,) = safe_names([f"{'ä' * 150}.jpeg"])
    assert len(name.encode()) <= 200
    assert name.endswith(".jpeg")
    two = safe_names([f"{'x' * 240}1.png", f"{'x' * 240}2.png"])
    assert len(set(two)) == 2
    assert all(len(name.encode()) < 255 for name in two)
