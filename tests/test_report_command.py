"""``siammm report``: what it takes, what it writes and prints, and what it refuses."""

from __future__ import annotations

import re
import shutil
import webbrowser
from pathlib import Path
from typing import Any

import pytest

from siammm.cli import main
from siammm.report import thumbnails
from siammm.report.browser import open_page
from siammm.report.gather import gather
from tests.data.image_sets import write_npz
from tests.report.made_runs import made_run, small_set, trained_run

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    return trained_run(folder, write_npz(folder, small_set(folder)))


def report(*arguments: object) -> int:
    return main(["report", *map(str, arguments), "--device", "cpu", "--no-open"])


def test_a_report(run: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(run) == 0
    printed = capsys.readouterr()
    assert re.search(r"Written to run-report.html \(\d\.\d MB\)\.", printed.out)
    assert printed.err == ""
    assert sorted(path.name for path in here.iterdir()) == ["run-report.html"]
    text = (here / "run-report.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "siammm audit" in text
    assert "</html>" in text


def test_an_earlier_report_is_kept(run: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "r.html").write_text("mine")
    assert report(run, "--output", "r.html") == 2
    assert capsys.readouterr().err == "siammm: The output r.html exists; choose another --output, or add --overwrite.\n"
    assert (here / "r.html").read_text() == "mine"
    assert report(run, "--output", "r.html", "--overwrite") == 0
    assert (here / "r.html").stat().st_size > 10_000


def test_sheets_beside_the_page(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(thumbnails, "_SHEET_SIDE", 160)
    folder = made_run(tmp_path, n=90)
    assert report(folder, "--output", "out/my report#.html", "--max-thumbnails", 50) == 0
    assert "and 2 sheets of thumbnails in out/my report#_files" in " ".join(capsys.readouterr().out.split())
    assert sorted(path.name for path in (here / "out" / "my report#_files").iterdir()) == [
        "sheet-2.webp",
        "sheet-3.webp",
    ]
    text = (here / "out" / "my report#.html").read_text()
    assert '"url":"my%20report%23_files/sheet-2.webp","n_thumbnails":25' in text
    assert 'id="sheet-1"' in text
    assert 'id="sheet-2"' not in text
    # A later report needs less, and takes what is not needed with it.
    assert report(folder, "--output", "out/my report#.html", "--overwrite") == 0
    assert [path.name for path in (here / "out").iterdir()] == ["my report#.html"]


def test_a_folder_that_is_not_ours(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made_run(tmp_path, n=20)
    (here / "r_files").mkdir()
    (here / "r_files" / "thesis.tex").write_text("mine")
    assert report(folder, "--output", "r.html", "--overwrite") == 2
    assert "holds 'thesis.tex', which is not part of an earlier result" in capsys.readouterr().err
    assert (here / "r_files" / "thesis.tex").read_text() == "mine"
    assert not (here / "r.html").exists()


def test_what_is_put_beside_the_page_meanwhile_stays(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = here / "r_files"
    beside.mkdir()
    (beside / "sheet-2.webp").write_bytes(b"of an earlier report")

    def slowly(*arguments: Any) -> Any:
        (beside / "thesis.tex").write_text("mine")
        return gather(*arguments)

    monkeypatch.setattr("siammm.commands.report.gather", slowly)
    assert report(made_run(tmp_path, n=20), "--output", "r.html", "--overwrite") == 0
    assert [path.name for path in beside.iterdir()] == ["thesis.tex"]


def test_a_size_for_thumbnails(run: Path, here: Path) -> None:
    assert report(run, "--thumbnail-size", 64, "--output", "r.html") == 0
    assert '"thumbnails":{"width":64,"height":64' in (here / "r.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["nowhere"],
            "nowhere does not exist; give a run folder that siammm train or siammm cluster",
        ),
        (["no-summary"], "no-summary is not a run folder: it has no encoder.safetensors and no summary.json of"),
        (["empty"], "empty is not a run folder: it has no encoder.safetensors"),
        (["unfinished"], "The run unfinished has not finished; continue with: siammm train --resume unfinished."),
        (["RUN", "--data", "gone"], "gone does not exist; check the path."),
        (["RUN", "--data", "digits"], "The images in digits are not those of the run"),
        (["RUN", "--compare", "nowhere"], "nowhere does not exist"),
        (["RUN", "--audit", "empty"], "There is no audit in empty"),
        (["RUN", "--evaluation", "empty"], "There is no evaluation of empty"),
        (["RUN", "--output", "empty"], "The output empty is a folder, but this command writes a file"),
        (["RUN", "--output", "r.pdf"], "The output r.pdf does not end in .html"),
        (["RUN", "--output", "/proc/nothing/r.html"], "The output /proc/nothing/r.html cannot be written"),
        (["RUN", "--max-thumbnails", "-1"], "--max-thumbnails is -1"),
        (["RUN", "--thumbnail-size", "4"], "--thumbnail-size is 4, but it must be from 8 to 512."),
        (["RUN", "--device", "cuda:99"], "cuda:99"),
    ],
)
def test_what_cannot_be_shown_is_said_in_one_sentence(
    arguments: list[str], message: str, run: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "empty").mkdir()
    for name, gone in (("no-summary", ["config.json", "encoder.safetensors"]), ("unfinished", ["encoder.safetensors"])):
        shutil.copytree(run, here / name)
        for file in gone:
            (here / name / file).unlink()
    words = [str(run) if word == "RUN" else word for word in arguments]
    device = [] if "--device" in words else ["--device", "cpu"]
    assert main(["report", *words, *device, "--no-open"]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not list(here.glob("*.html"))


def test_umap_without_its_package(
    run: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert report(run, "--map", "umap") == 2
    assert "pip install umap-learn" in capsys.readouterr().err


def test_images_that_are_gone_leave_a_report(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made_run(tmp_path)
    (tmp_path / "made-images.npy").unlink()
    assert report(folder) == 0
    assert "so none are shown; say where they are with --data" in capsys.readouterr().out
    assert (here / "made-report.html").exists()


# -- the browser


def test_a_browser_is_asked(run: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setenv("BROWSER", "something")
    monkeypatch.setattr(webbrowser, "open", lambda url: asked.append(url) or True)
    assert main(["report", str(run), "--device", "cpu", "--output", "a b.html"]) == 0
    assert asked == [(here / "a b.html").resolve().as_uri()]


def test_no_browser_is_no_fault(
    run: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(url: str) -> bool:
        raise webbrowser.Error("no browser")

    monkeypatch.setenv("BROWSER", "something")
    monkeypatch.setattr(webbrowser, "open", broken)
    assert main(["report", str(run), "--device", "cpu"]) == 0
    assert "No browser was found here" in capsys.readouterr().out
    with pytest.raises(ValueError, match="javascript"):
        open_page("javascript:alert(1)")


def test_ten_thousand_images_and_three_hundred_clusters_fit(here: Path, tmp_path: Path) -> None:
    """With noise for pixels, which no encoder makes small, the page stays within its size."""
    folder = made_run(tmp_path, n=10_000, k=300, d=16, size=32, n_labels=10)
    assert report(folder) == 0
    assert (here / "made-report.html").stat().st_size < 25e6
