"""What ``siammm cluster`` leaves is a run: it opens as one, and every command takes it."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siammm import SiamMM
from siammm.cli import main
from siammm.core.errors import InputError, StoredFileError
from siammm.learn.encode import encode
from siammm.report.explorer import Explorer
from siammm.report.gather import GatherSettings, gather
from siammm.runs.run import Run
from siammm.settings.training import DataConfig
from tests.clustered import QUICK, N, clustered_run
from tests.commands import refused
from tests.export.runs import trained_run
from tests.report.browser import Watched, chromium
from tests.report.made_runs import check_contents, opened

pytestmark = pytest.mark.usefixtures("one_thread", "here")

CLUSTER = ["--n-components", "4", "--merge", "none"]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clustered_run(tmp_path_factory.mktemp("clustered"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def table(result: Path) -> Path:
    """The embeddings of the photographs, as somebody else may have them: with paths of another machine."""
    rows = pq.read_table(result / "embeddings.parquet")
    paths = [f"/old/place/photos/{name}" for name in rows.column("id").to_pylist()]
    pq.write_table(pa.table({"file": paths, "vector": rows.column("embedding"), "label": rows.column("label")}), "t.pq")
    return Path("t.pq")


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


# -- the run


def test_it_opens_as_a_run(result: Path) -> None:
    run = Run.open(result)
    assert (run.n_images, run.n_clusters, run.image_size, run.epochs, run.method) == (N, 4, 32, 0, "cluster")
    assert run.backbone == "tf_efficientnet_lite0"
    assert (run.merging.merge, run.merging.n_components) == ("none", 4)
    assert run.metrics == []
    assert run.data == str(result.parent / "photos")
    assert run.label_names == ["kind0", "kind1", "kind2", "kind3"]
    assert run.images.is_whole
    assert run.images.notes == []
    rows = pq.read_table(result / "assignments.parquet")
    assert run.ids == rows.column("id").to_pylist()
    assert run.group_N.tolist() == rows.column("group").to_pylist()
    features = np.stack(pq.read_table(result / "embeddings.parquet").column("embedding").to_pylist())
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    np.testing.assert_allclose(run.embeddings, unit, atol=1e-3)
    np.testing.assert_array_equal(run.mixture.predict(np.asarray(run.embeddings, np.float32)), run.cluster_N)
    with pytest.raises(InputError, match="was clustered with the pretrained encoder lite, and not trained; give a run"):
        _ = run.config


def test_its_encoder_is_loaded_again_by_its_name(result: Path) -> None:
    run = Run.open(result)
    with closing(run.loader(None, DataConfig())) as loader:
        again = encode(run.network, loader, "embeddings").numpy()
    np.testing.assert_allclose(again, run.embeddings, atol=1e-3)
    assert run.view.size == 32


def test_embeddings_that_were_not_kept_are_made_again(result: Path, here: Path) -> None:
    shutil.copytree(result, "copy")
    Path("copy/embeddings.npy").unlink()
    np.testing.assert_allclose(Run.open("copy").embeddings, Run.open(result).embeddings, atol=1e-3)


def test_an_encoder_that_has_changed_is_refused(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(result, "copy")
    _edit("copy", lambda summary: summary["input"]["encoder"].update(digest="0" * 64))
    sentence = "The encoder lite has changed since copy was clustered with it; restore the earlier one"
    assert sentence in refused(["embed", "copy", "--device", "cpu"], capsys)
    assert main(["report", "copy", "--no-open"]) == 0  # which needs none


def _edit(folder: str, change: Any) -> None:
    path = Path(folder) / "summary.json"
    summary = json.loads(path.read_text())
    change(summary)
    path.write_text(json.dumps(summary))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda summary: summary.pop("input"), "cannot be read"),
        (lambda summary: summary["input"].update(encoder=[3]), "cannot be read"),
        (lambda summary: summary["input"].update(encoder={"kind": "lite", "name": 1, "backbone": ""}), "no text"),
        (lambda summary: summary["settings"].update(random_state=None), "random_state is no number"),
        (lambda summary: summary["settings"].update(reading={"loader": 3}), "does not say how images were read"),
        (lambda summary: summary.update(n_components="many"), "cannot be read"),
        (lambda summary: summary.update(n_components=10**20), "n_components is 1000"),
        (lambda summary: summary.update(n_components=-1), "n_components is -1"),
    ],
)
def test_a_damaged_summary_is_said_in_one_sentence(change: Any, sentence: str, result: Path) -> None:
    shutil.copytree(result, "copy")
    _edit("copy", change)
    with pytest.raises(StoredFileError, match=rf"summary\.json.*{sentence}.*; cluster again"):
        Run.open("copy")


def test_files_of_two_results_are_refused(result: Path) -> None:
    shutil.copytree(result, "copy")
    _edit("copy", lambda summary: summary.update(n_components=5))
    with pytest.raises(InputError, match=r"There are 4 clusters in copy, but summary\.json has 5"):
        _ = Run.open("copy").mixture


# -- the commands


def test_report(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(result), "--no-open", "--device", "cpu"]) == 0
    assert said(capsys).endswith(f"Next: siammm explore {result} or siammm sort {result} --to FOLDER")
    assert Path("photos-clusters-report.html").stat().st_size > 20_000
    run = opened(result)
    contents = gather(run, GatherSettings()).contents
    check_contents(contents, run)
    assert sorted(contents["images"]["thumbnail"]) == list(range(N))  # every image has its picture
    assert contents["run"]["epochs"] == 0
    assert contents["curves"] == {}
    assert ("", "family", "von-mises-fisher") in contents["run"]["settings"]


def test_the_merges_of_a_fit_have_no_epochs(result: Path) -> None:
    """They give the tree its finer levels, and there is no curve of them over a training that was not."""
    shutil.copytree(result, "copy")
    _edit("copy", lambda summary: summary.update(n_components_by_round=[8, 4]))
    for folder, was_merged in ((result, False), (Path("copy"), True)):
        contents = gather(opened(folder), GatherSettings()).contents
        assert contents["merge_rounds"] == []
        assert contents["tree"] is not None
        assert (contents["tree"]["n_leaves"] > 4) == was_merged


def test_the_page_says_how_the_clusters_came_about(result: Path, table: Path) -> None:
    assert main(["cluster", str(table), *CLUSTER]) == 0
    photos = ["--data", str(result.parent / "photos")]
    assert main(["report", str(result), "--no-open", "--output", "photos.html", "--device", "cpu"]) == 0
    assert main(["report", "t-clusters", *photos, "--no-open", "--output", "table.html", "--device", "cpu"]) == 0
    leads: list[str] = []
    with chromium() as browser:
        for name in ("photos.html", "table.html"):
            with closing(Watched(browser, Path(name).resolve().as_uri())) as watched:
                for section in ("clusters", "overview", "classes", "tree"):
                    watched.visit(f"#/{section}")
                    if section == "overview":
                        leads.append(watched.page.inner_text("#section-overview p.lead").replace("\u00a0", " "))
                watched.check()
    encoded = "encoded by tf_efficientnet_lite0 at 32 px, clustered without training and without labels."
    # Without the folders above, which say nothing of the images.
    assert leads == [f"photos, {encoded}", "t.pq, a table, clustered without labels."]


def test_explore(result: Path) -> None:
    run = opened(result)
    explorer = Explorer(run, gather(run, GatherSettings(live=True)))
    picture = result.parent / "photos" / "kind2" / "02.png"
    found = explorer.search(picture.read_bytes())
    assert found["neighbours"][0]["id"] == "kind2/02.png"
    assert found["clusters"][0][0] == run.cluster_N[run.ids.index("kind2/02.png")]


def test_audit_and_its_pictures(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(result), "--plant", "0.1", "--device", "cpu"]) == 0
    assert said(capsys).endswith(f"Next: siammm report {result} --audit photos-clusters-audit")
    suspects = pq.read_table("photos-clusters-audit/suspects.parquet")
    run = opened(result)
    clusters = dict(zip(run.ids, run.cluster_N.tolist(), strict=True))
    assert {row["id"]: row["cluster"] for row in suspects.to_pylist()} == clusters
    contents = gather(run, GatherSettings()).contents
    shown = contents["suspects"]
    assert shown
    assert all(contents["images"]["thumbnail"][suspect["image"]] >= 0 for suspect in shown)


def test_evaluate(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(result), "--device", "cpu"]) == 0
    assert said(capsys).endswith(f"Next: siammm report {result} or siammm compare photos-clusters-evaluation OTHER")
    stored = json.loads(Path("photos-clusters-evaluation/evaluation.json").read_text())
    assert (stored["test_images"]["seen"], stored["test_images"]["clustered"]) == (None, True)
    assert stored["test_images"]["why"] == (
        "Nothing is known of the images that lite was trained on. The test images were held out of those that the run "
        "clustered: it saw them, without labels."
    )
    assert stored["subject"]["clustered_with"] == "lite"
    results = {one["protocol"]: one["figures"] for one in stored["results"]}
    assert list(results) == ["knn", "linear", "clustering", "k"]
    assert results["clustering"]["mixture, train: AMI"]["mean"] > 0.5
    # The report finds its figures, until the images are clustered anew.
    assert gather(opened(result), GatherSettings()).contents["figures"]
    shutil.copytree(result, "photos-clusters")
    stored["subject"]["path"] = str(Path("photos-clusters").resolve())
    Path("photos-clusters-evaluation/evaluation.json").write_text(json.dumps(stored))
    _edit("photos-clusters", lambda summary: summary["input"].update(fingerprint="of others"))
    contents = gather(opened(Path("photos-clusters")), GatherSettings()).contents
    assert contents["figures"] == []
    assert any("is of an earlier run of this name" in note for note in contents["notes"])


def test_embed(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run.open(result)
    assert main(["embed", str(result), "--output", "e.npz", "--device", "cpu"]) == 0
    assert said(capsys).endswith("Next: siammm cluster e.npz")
    with np.load("e.npz", allow_pickle=False) as table:
        np.testing.assert_allclose(table["embeddings"], run.embeddings, atol=1e-3)
        np.testing.assert_array_equal(table["cluster"], run.cluster_N)
    # Other images, as the encoder leaves them.
    photos = str(result.parent / "photos" / "kind1")
    flags = ["--data", photos, "--what", "features", "--output", "f.npz", "--device", "cpu"]
    assert main(["embed", str(result), *flags]) == 0
    kept = [row for row in pq.read_table(result / "embeddings.parquet").to_pylist() if row["label"] == "kind1"]
    with np.load("f.npz", allow_pickle=False) as table:
        expected = np.stack([row["embedding"] for row in kept])
        np.testing.assert_allclose(table["features"], expected, rtol=1e-4, atol=1e-5)


def test_export_of_the_tables(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run.open(result)
    assert main(["export", str(result), "--device", "cpu"]) == 0
    assert said(capsys).endswith("Next: siammm cluster photos-clusters-export/embeddings.parquet")
    assert sorted(path.name for path in Path("photos-clusters-export").iterdir()) == [
        "clusters.parquet",
        "embeddings.parquet",
    ]
    rows = pq.read_table("photos-clusters-export/embeddings.parquet")
    assert rows.column("id").to_pylist() == run.ids
    assert rows.column("cluster").to_pylist() == run.cluster_N.tolist()
    assert all(Path(path).is_file() for path in rows.column("filepath").to_pylist())
    clusters = pq.read_table("photos-clusters-export/clusters.parquet")
    assert clusters.column("size").to_pylist() == np.bincount(run.cluster_N).tolist()
    # Images that were not clustered are encoded for it.
    photos = str(result.parent / "photos" / "kind1")
    assert main(["export", str(result), "--data", photos, "--output", "other", "--device", "cpu"]) == 0
    assert pq.read_table("other/embeddings.parquet").num_rows == N // 4


@pytest.mark.parametrize("flags", [["--formats", "encoder"], ["--formats", "tables", "onnx"], ["--hub", "me/birds"]])
def test_a_pretrained_encoder_is_not_exported(
    flags: list[str], result: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = refused(["export", str(result), *flags, "--device", "cpu"], capsys)
    assert (
        "was clustered with the pretrained encoder lite, and not trained, so it contains no encoder to export"
        in sentence
    )
    assert f"leave {'--hub' if '--hub' in flags else f'--formats {flags[-1]}'} out to write the tables" in sentence


def test_siammm_load_says_what_it_loads(result: Path) -> None:
    with pytest.raises(InputError, match="was clustered with the pretrained encoder lite, and not trained"):
        SiamMM.load(result, device="cpu")


def test_compare_two_results(result: Path) -> None:
    photos = str(result.parent / "photos")
    assert main(["cluster", photos, *QUICK, "--n-components", "3", "--output", "three"]) == 0
    run = opened(result)
    contents = gather(run, GatherSettings(compare=Path("three"))).contents
    assert contents["comparison"] is not None
    assert contents["comparison"]["n_shared"] == N


# -- where the images or the encoder are


def test_images_that_have_moved_or_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = clustered_run(tmp_path / "first")
    (tmp_path / "first" / "photos").rename(tmp_path / "moved")
    assert main(["report", str(result), "--no-open", "--device", "cpu"]) == 0
    assert "could not be opened, so none are shown; say where they are with --data" in said(capsys)
    moved = str(tmp_path / "moved")
    assert main(["report", str(result), "--no-open", "--data", moved, "--overwrite", "--device", "cpu"]) == 0
    assert "so none are shown" not in said(capsys)
    assert "photos does not exist" in refused(["embed", str(result), "--device", "cpu"], capsys)
    assert main(["export", str(result), "--device", "cpu"]) == 0  # of what was kept


def test_a_result_lends_its_encoder(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A result that was clustered with another's encoder names that encoder, and not the other."""
    photos = str(result.parent / "photos")
    assert main(["cluster", photos, "--encoder", str(result), *QUICK[2:], "--output", "out"]) == 0
    run = Run.open("out")
    assert run.encoder_record is not None
    assert run.encoder_record == Run.open(result).encoder_record
    np.testing.assert_allclose(run.embeddings, Run.open(result).embeddings, atol=1e-3)
    assert main(["embed", "out", "--output", "e.npy", "--device", "cpu"]) == 0


def test_a_run_of_ours_as_the_encoder(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = str(trained.parent / "images")
    assert main(["cluster", images, "--encoder", str(trained), *QUICK[2:], "--output", "out"]) == 0
    run = Run.open("out")
    np.testing.assert_allclose(run.embeddings, Run.open(trained).embeddings, atol=1e-3)
    assert main(["report", "out", "--no-open", "--device", "cpu"]) == 0
    assert main(["evaluate", "out", "--protocols", "knn", "--device", "cpu"]) == 0
    stored = json.loads(Path("out-evaluation/evaluation.json").read_text())["test_images"]
    assert (stored["seen"], stored["clustered"]) == (True, True)
    # The encoder is ours, and goes with the new clusters.
    assert main(["export", "out", "--device", "cpu"]) == 0
    assert "Its **4 clusters** are of" in Path("out-export/README.md").read_text()
    assert Path("out-export/siammm.onnx").is_file()
    for folder in ("out", "out-export"):
        model = SiamMM.load(folder, device="cpu")
        np.testing.assert_array_equal(model.predict(images), run.cluster_N)
    shutil.copytree("out", "alone")
    _edit("alone", lambda summary: summary["input"]["encoder"].update(path="/nowhere"))
    sentence = refused(["embed", "alone", "--device", "cpu"], capsys)
    assert "was clustered with the run" in sentence
    assert "which cannot be opened (/nowhere does not exist); put it back" in sentence
    assert main(["export", "alone", "--formats", "tables", "--device", "cpu"]) == 0


def test_gaussian_clusters(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = str(result.parent / "photos")
    assert main(["cluster", photos, *QUICK, "--family", "gaussian", "--output", "out"]) == 0
    assert said(capsys).endswith("Next: siammm sort out --to FOLDER")
    assert "of --family gaussian, and this needs von Mises-Fisher clusters" in refused(["report", "out"], capsys)
    assert main(["sort", "out", "--to", "sorted"]) == 0


# -- tables


def test_a_table_with_paths_has_a_report_with_pictures(
    result: Path, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", str(table), *CLUSTER]) == 0
    assert said(capsys).endswith(
        "Next: siammm report t-clusters --data FOLDER or siammm explore t-clusters --data FOLDER or "
        "siammm sort t-clusters --to FOLDER --data FOLDER"
    )
    run = opened(Path("t-clusters"), data=str(result.parent / "photos"))
    contents = gather(run, GatherSettings()).contents
    check_contents(contents, run)
    assert sorted(contents["images"]["thumbnail"]) == list(range(N))
    assert run.images.source is not None
    assert [run.images.source.identifier(i) for i in run.images.position_N.tolist()] == Run.open(result).ids
    np.testing.assert_allclose(run.embeddings, Run.open(result).embeddings, atol=1e-3)
    # Without the images it is made without pictures, and says how to show them.
    assert main(["report", "t-clusters", "--no-open", "--device", "cpu"]) == 0
    assert "show these with --data FOLDER" in said(capsys)
    sentence = refused(["report", "t-clusters", "--data", "digits", "--no-open", "--overwrite"], capsys)
    assert "None of the images in digits is named by the table that was clustered" in sentence


def test_paths_are_found_in_arrays_too_and_some_may_be_missing(result: Path) -> None:
    rows = pq.read_table(result / "embeddings.parquet")
    vectors, names = np.stack(rows.column("embedding").to_pylist()), rows.column("id").to_pylist()
    windows = [f"C:\\photos\\{name}".replace("/", "\\") for name in names]
    windows[3], windows[4] = "C:\\photos\\gone.png", "D:\\elsewhere\\photos\\kind1\\01.png"
    np.savez("t.npz", embeddings=vectors, id=np.arange(N), filepath=windows)
    assert main(["cluster", "t.npz", *CLUSTER]) == 0
    run = opened(Path("t-clusters"), data=str(result.parent / "photos"))
    assert np.flatnonzero(run.images.position_N < 0).tolist() == [3, 4]
    assert run.images.notes == [f"2 of the {N} rows name no image in {result.parent / 'photos'}."]
    assert run.ids[:2] == ["0", "1"]


def test_a_table_without_paths_has_a_report_without_pictures(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = pq.read_table(result / "embeddings.parquet")
    vectors = np.stack(rows.column("embedding").to_pylist())
    np.save("t.npy", vectors)
    np.savez("named.npz", embeddings=vectors, path=rows.column("id").to_pylist())
    for name, sentence in {"t.npy": "names no images: add a column", "named.npz": "show these with --data"}.items():
        assert main(["cluster", name, *CLUSTER]) == 0
        assert ("siammm sort" in said(capsys)) == (name == "named.npz")
        folder = f"{Path(name).stem}-clusters"
        assert main(["report", folder, "--no-open", "--device", "cpu"]) == 0
        assert sentence in said(capsys)
        assert sentence in refused(["sort", folder, "--to", "sorted"], capsys)


def test_a_table_has_no_encoder_and_says_so(result: Path, table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", str(table), *CLUSTER]) == 0
    path, no_encoder = table.resolve(), "was clustered from the table of embeddings"
    for command in ("evaluate", "embed"):
        sentence = refused([command, "t-clusters", "--device", "cpu"], capsys)
        assert f"{no_encoder} {path}, without an encoder; give that table" in sentence
    audit = refused(["audit", "t-clusters", "--device", "cpu"], capsys)
    assert f"siammm audit {path} --mixture t-clusters/mixture.safetensors" in audit
    assert no_encoder in refused(["export", "t-clusters", "--formats", "onnx", "--device", "cpu"], capsys)
    assert main(["export", "t-clusters", "--device", "cpu"]) == 0
    assert pq.read_table("t-clusters-export/embeddings.parquet").num_rows == N


def test_a_table_that_has_changed_or_gone(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", str(table), *CLUSTER]) == 0
    rows = pq.read_table(table)
    pq.write_table(rows.take(np.arange(N)[::-1]), table)
    sentence = refused(["report", "t-clusters", "--no-open", "--device", "cpu"], capsys)
    assert "has changed since t-clusters was clustered from it; put it back, or cluster the table again" in sentence
    table.unlink()
    sentence = refused(["report", "t-clusters", "--no-open", "--device", "cpu"], capsys)
    assert "The table that t-clusters was clustered from cannot be read" in sentence
