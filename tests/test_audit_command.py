"""``siammm audit``: what it takes, what it writes and prints, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siammm import SiamMM
from siammm.cli import main, parse
from siammm.report.gather import GatherSettings, gather
from siammm.runs.run import Run
from siammm.settings.commands import AuditConfig
from tests.commands import refused
from tests.data.image_sets import example_images, write_folder
from tests.export.runs import trained_run, write_images
from tests.report.made_runs import opened

N, K, D = 120, 4, 8
NAMES = np.array(["ant", "bee", "cat", "dog"])
WRONG = [3, 50, 81, 110]


COLUMNS = [
    "rank", "id", "label", "suggested", "probability", "score", "neighbours", "linear", "kernel",
]  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def blobs() -> tuple[np.ndarray, np.ndarray]:
    """Four well separated directions, and labels of which four are wrong."""
    rng = np.random.default_rng(0)
    labels = np.arange(N) % K
    embeddings = (np.eye(K, D)[labels] + 0.1 * rng.normal(size=(N, D))).astype(np.float32)
    labels[WRONG] = (labels[WRONG] + 1) % K
    return embeddings, labels


@pytest.fixture
def table(blobs: tuple[np.ndarray, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    np.savez("table.npz", embeddings=blobs[0], labels=NAMES[blobs[1]], ids=[f"{i}.png" for i in range(N)])
    return Path("table.npz")


def rows_of(folder: str | Path) -> pa.Table:
    return pq.read_table(Path(folder) / "suspects.parquet")


def summary_of(folder: str | Path) -> dict[str, Any]:
    return json.loads((Path(folder) / "summary.json").read_text())


# -- flags


def test_values_are_parsed() -> None:
    config = parse(["audit", "runs/photos", "--data", "photos", "--plant", "0.05", "--show", "5"])
    assert config == AuditConfig(subject=Path("runs/photos"), data="photos", plant=0.05, show=5)


# -- a table


def test_a_table_of_embeddings(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(table), "--show", "6"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert sorted(path.name for path in Path().iterdir()) == ["table-audit", "table.npz"]
    assert sorted(path.name for path in Path("table-audit").iterdir()) == ["summary.json", "suspects.parquet"]

    rows = rows_of("table-audit")
    assert rows.column_names == COLUMNS
    assert rows.column("rank").to_pylist() == list(range(1, N + 1))
    assert set(rows.column("id").to_pylist()[: len(WRONG)]) == {f"{i}.png" for i in WRONG}
    first = rows.slice(0, len(WRONG)).to_pylist()
    for row in first:
        right = NAMES[int(row["id"].removesuffix(".png")) % K]
        assert (row["suggested"], row["probability"] < 0.5) == (right, True)
        assert row["label"] != right
    for row in rows.slice(len(WRONG)).to_pylist():
        assert row["suggested"] == row["label"]

    summary = summary_of("table-audit")
    assert summary["n_suspects"] == len(WRONG)
    assert summary["threshold"] == 0.5
    assert summary["error_rate"] == pytest.approx(len(WRONG) / N, abs=0.01)
    assert [entry["label"] for entry in summary["classes"]] == NAMES.tolist()
    assert sum(entry["suspects"] for entry in summary["classes"]) == len(WRONG)
    assert summary["input"]["n_labelled"] == N
    assert summary["seconds"].keys() == {"read", "audit"}
    assert summary["weights"].keys() == {"neighbours", "linear", "kernel"}
    assert summary["n_clusters"] is None
    assert summary["planted"] is None
    for text in ("4 suspects", "probability below 0.5", "3.png", "ant", "estimated wrong", "Written to table-audit"):
        assert text in printed.out, text


def test_the_clusters_of_an_earlier_result(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", str(table), "--output", "c", "--merge", "none", "--n-components", "4"]) == 0
    assert main(["audit", str(table), "--mixture", "c/mixture.safetensors", "--output", "a"]) == 0
    clusters = pq.read_table("c/assignments.parquet").to_pylist()
    known = {row["id"]: row["cluster"] for row in clusters}
    assert all(row["cluster"] == known[row["id"]] for row in rows_of("a").to_pylist())
    assert summary_of("a")["n_clusters"] == 4
    assert rows_of("a").column_names == [*COLUMNS, "cluster"]
    # One label in thirty of each cluster is wrong.
    assert re.search(r"3\.png .* 3\.3%", capsys.readouterr().out)


@pytest.fixture
def grouped(blobs: tuple[np.ndarray, np.ndarray], table: Path) -> Path:
    """The table with a mixture of ten clusters whose groups are the four directions."""
    assert main(["cluster", str(table), "--output", "c", "--merge-floor", "10"]) == 0
    assert Run.open("c").has_groups
    assert main(["audit", str(table), "--mixture", "c/mixture.safetensors", "--output", "a"]) == 0
    return table


GROUPED = [*COLUMNS, "cluster", "group", "group_label", "group_disagrees"]


def test_labels_beside_their_groups(grouped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    flags = ["--mixture", "c/mixture.safetensors", "--output", "a", "--overwrite"]
    assert main(["audit", str(grouped), *flags]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    rows = rows_of("a")
    assert rows.column_names == GROUPED
    known = {row["id"]: row["group"] for row in pq.read_table("c/assignments.parquet").to_pylist()}
    frame: Any = rows.to_pandas()
    assert frame["group"].tolist() == [known[name] for name in frame["id"]]
    for _, inside in frame.groupby("group"):
        commonest = inside["label"].value_counts()
        assert set(inside["group_label"]) == {commonest.index[0]}
        assert inside["group_disagrees"].sum() == len(inside) - commonest.iloc[0]
    assert (frame["group_disagrees"] == (frame["label"] != frame["group_label"])).all()
    # What is wrong here is what disagrees.
    assert set(frame["id"][frame["group_disagrees"]]) == {f"{i}.png" for i in WRONG}
    assert frame["suggested"][:4].tolist() == frame["group_label"][:4].tolist()
    assert "The images are in 4 groups. 4 of 120 labels differ from the commonest label of their group" in printed
    assert "4 of these are suspects" in printed
    # Its label is that of one image in thirty, as in the group's own count.
    worst = next(row for row in rows.to_pylist() if row["id"] == "3.png")
    assert re.search(rf"3\.png .* {worst['group']} │ {worst['group_label']} │ 3\.3%", printed)
    summary = summary_of("a")
    assert (summary["n_clusters"], summary["n_groups"]) == (10, 4)
    assert (summary["groups"]["disagree"], summary["groups"]["suspects_disagree"]) == (4, 4)
    listed = summary["groups"]["labels"]
    assert [entry["group"] for entry in listed] == [0, 1, 2, 3]
    assert sum(entry["n"] for entry in listed) == N
    assert {entry["label"] for entry in listed} == set(NAMES)
    assert sum(entry["n"] * (1 - entry["purity"]) for entry in listed) == pytest.approx(4)


def test_groups_do_not_change_the_ranking(grouped: Path) -> None:
    assert main(["audit", str(grouped), "--output", "without"]) == 0
    assert rows_of("a").select(COLUMNS).equals(rows_of("without"))
    assert summary_of("without")["groups"] is None
    assert summary_of("without")["weights"] == summary_of("a")["weights"]


def test_groups_beside_planted_labels(grouped: Path) -> None:
    """What is compared are the labels that are audited."""
    flags = ["--mixture", "c/mixture.safetensors", "--plant", "0.1", "--output", "p"]
    assert main(["audit", str(grouped), *flags]) == 0
    rows = rows_of("p").to_pylist()
    assert [row["group_disagrees"] for row in rows] == [row["label"] != row["group_label"] for row in rows]
    assert sum(row["group_disagrees"] for row in rows) > 8


def test_groups_of_images_without_a_label(blobs: Any, grouped: Path) -> None:
    """They are left out, and a group may hold nobody else."""
    kinds = np.arange(N) % K
    np.savez("some.npz", embeddings=blobs[0], labels=np.where(kinds == 2, -1, blobs[1]))
    assert main(["audit", "some.npz", "--mixture", "c/mixture.safetensors", "--output", "s"]) == 0
    rows = rows_of("s").to_pylist()
    assert len(rows) == N - N // K
    by_count = sorted(summary_of("s")["groups"]["labels"], key=lambda entry: entry["n"])
    assert (by_count[0]["n"], by_count[0]["label"], by_count[0]["purity"]) == (0, None, 0)
    assert [row["group_disagrees"] for row in rows] == [row["label"] != row["group_label"] for row in rows]


def test_planted_errors_are_reported(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(table), "--plant", "0.05"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"Of 6 labels that were made wrong, \d+ \(\d+\.\d%\) are among the first 6 suspects", printed)
    planted = summary_of("table-audit")["planted"]
    assert planted["count"] == 6
    assert planted["precision"] == planted["found"] / 6 >= 0.5  # four labels were wrong before
    rows = rows_of("table-audit").to_pylist()
    assert sum(row["planted"] for row in rows) == 6
    assert all(row["planted"] == (row["label"] != row["label_before"]) for row in rows)
    assert sum(row["planted"] for row in rows[:6]) == planted["found"]


@pytest.mark.parametrize("missing", [None, -1])
def test_images_without_a_label(blobs: Any, tmp_path: Path, missing: object, capsys: Any) -> None:
    labels = [missing if i < 7 else int(label) for i, label in enumerate(blobs[1])]
    columns = {"id": np.arange(N), "vector": pa.array(blobs[0].tolist(), pa.list_(pa.float32())), "label": labels}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    assert main(["audit", str(tmp_path / "t.parquet"), "--output", str(tmp_path / "out")]) == 0
    assert "7 images without a label were left out" in capsys.readouterr().out
    summary = summary_of(tmp_path / "out")
    assert (summary["input"]["n_unlabelled"], summary["input"]["n_labelled"]) == (7, N - 7)
    rows = rows_of(tmp_path / "out")
    assert len(rows) == N - 7
    assert min(rows.column("id").to_pylist()) == 7
    assert [entry["label"] for entry in summary["classes"]] == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["csv", "parquet", "npy"])
def test_labels_from_a_file_of_their_own(kind: str, blobs: Any, table: Path) -> None:
    np.savez("bare.npz", embeddings=blobs[0], ids=[f"{i}.png" for i in range(N)])
    names = NAMES[blobs[1]]
    order = np.random.default_rng(0).permutation(N)[5:]  # by id: in any order, and not for all
    by_id = pa.table({"path": [f"{i}.png" for i in order], "target": names[order]})
    if kind == "npy":
        np.save("labels.npy", names)
    elif kind == "csv":
        Path("labels.csv").write_text("path,target\n" + "".join(f"{i}.png,{names[i]}\n" for i in order))
    else:
        pq.write_table(by_id, "labels.parquet")
    assert main(["audit", "bare.npz", "--labels", f"labels.{kind}", "--output", "out"]) == 0
    given = {row["id"]: row["label"] for row in rows_of("out").to_pylist()}
    expected = range(N) if kind == "npy" else order
    assert given == {f"{i}.png": names[i] for i in expected}


def test_overwrite_and_the_same_seed(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(table)]) == 0
    before = Path("table-audit/suspects.parquet").read_bytes()
    assert main(["audit", str(table), "--show", "0"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert summary_of("table-audit")["settings"]["show"] == 20
    assert main(["audit", str(table), "--show", "0", "--overwrite"]) == 0
    assert summary_of("table-audit")["settings"]["show"] == 0
    assert Path("table-audit/suspects.parquet").read_bytes() == before


def test_labels_that_would_move_the_cursor(blobs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "t.npz", X=blobs[0], y=np.array(["\x1b[2Jgone", "b", "c", "d"])[blobs[1]])
    assert main(["audit", str(tmp_path / "t.npz"), "--output", str(tmp_path / "out"), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "\x1b[2J" not in out
    assert "gone" in out


def test_labels_that_look_like_markup(blobs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "t.npz", X=blobs[0], y=np.array(["[/red]", "[bold]", "a[0]", "ü"])[blobs[1]])
    assert main(["audit", str(tmp_path / "t.npz"), "--output", str(tmp_path / "out[1]")]) == 0
    assert "[/red]" in capsys.readouterr().out


# -- a run

TRAIN = [
    "--backbone", "conv-small", "--hidden-dim", "32", "--embedding-dim", "16", "--epochs", "2", "--batch-size", "12",
    "--optimiser", "sgd", "--learning-rate", "0.1", "--warmup-epochs", "1", "--n-components", "10",
    "--device", "cpu", "--no-tensorboard",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images in four classes and a run on them."""
    here = tmp_path_factory.mktemp("trained")
    images = write_folder(here, example_images(48, size=(8, 8), n_classes=4))
    assert main(["train", str(images), "--output", str(here / "run"), *TRAIN]) == 0
    return here


def test_a_run_on_its_own_images(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["audit", str(trained / "run"), "--output", str(tmp_path / "out"), "--device", "cpu"]) == 0
    assert "48 labels of 4 classes" in " ".join(capsys.readouterr().out.split())
    rows = rows_of(tmp_path / "out")
    assert rows.column_names == [*COLUMNS, "cluster"]
    assigned = pq.read_table(trained / "run" / "assignments.parquet").to_pylist()
    known = {row["id"]: row for row in assigned}
    found = {row["id"]: row for row in rows.to_pylist()}
    assert {name: row["label"] for name, row in found.items()} == {name: row["label"] for name, row in known.items()}
    # An image on the border of two clusters may fall to the other side by the last bit of a convolution.
    assert sum(row["cluster"] != known[name]["cluster"] for name, row in found.items()) <= 2


def test_a_run_with_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained_run(tmp_path, "--merge-floor", "10")
    run = Run.open(folder)
    assert run.has_groups
    other = str(write_images(tmp_path / "other", n=60, seed=5))
    for data, expected in ((None, run.group_N), (other, SiamMM.load(folder, device="cpu").predict_group(other))):
        output = str(tmp_path / f"audit-{data is None}")
        flags = [] if data is None else ["--data", data]
        assert main(["audit", str(folder), *flags, "--output", output, "--device", "cpu"]) == 0
        rows = sorted(rows_of(output).to_pylist(), key=lambda row: row["id"])
        assert [row["group"] for row in rows] == expected.tolist()
        assert f"The images are in {run.n_groups} groups" in " ".join(capsys.readouterr().out.split())
    # The page takes none of the columns for a witness, even if labels are numbers with a point.
    labels = run.label_N.astype(float)
    labels[::20] = (labels[::20] + 1) % 4
    np.save(tmp_path / "labels.npy", labels)
    flags = ["--labels", str(tmp_path / "labels.npy"), "--output", str(tmp_path / "numbers"), "--device", "cpu"]
    assert main(["audit", str(folder), *flags]) == 0
    assert rows_of(tmp_path / "numbers").schema.field("group_label").type == pa.float64()
    suspects = gather(opened(folder), GatherSettings(audit=tmp_path / "numbers")).contents["suspects"]
    assert suspects
    assert {name for suspect in suspects for name, _ in suspect["evidence"]} == {"neighbours", "linear", "kernel"}


def test_a_run_on_other_images(trained: Path, tmp_path: Path) -> None:
    images = write_folder(tmp_path, example_images(40, size=(8, 8), n_classes=4, seed=1))
    arguments = ["audit", str(trained / "run"), "--data", str(images), "--device", "cpu"]
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 0
    assert len(rows_of(tmp_path / "out")) == 40
    assert summary_of(tmp_path / "out")["input"]["data"] == str(images)


# -- refusals


def test_tables_that_are_refused(blobs: Any, table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    X, y = blobs
    assert "missing.npz does not exist" in refused(["audit", "missing.npz"], capsys)
    np.savez("bare.npz", embeddings=X)
    assert "has no labels" in refused(["audit", "bare.npz"], capsys)
    np.save("bare.npy", X)
    assert "has no labels" in refused(["audit", "bare.npy"], capsys)
    np.savez("one.npz", embeddings=X, labels=np.full(N, "cat"))
    assert "All 120 labels are 'cat'" in refused(["audit", "one.npz"], capsys)
    np.savez("many.npz", embeddings=X, labels=np.arange(N))
    assert "120 labelled images of 120 classes" in refused(["audit", "many.npz"], capsys)
    zero = X.copy()
    zero[3] = 0
    np.savez("zero.npz", embeddings=zero, labels=y)
    assert "GaussianMixture" not in refused(["audit", "zero.npz"], capsys)
    assert "leave --data out" in refused(["audit", str(table), "--data", "photos"], capsys)
    assert not [path.name for path in Path().iterdir() if path.is_dir()]


SETTINGS_REFUSED = {
    "--plant 0.7": "--plant is 0.7",
    "--threshold 0": "--threshold is 0.0",
    "--rounds 0": "--rounds is 0",
    "--n-neighbours 0": "--n-neighbours is 0",
    "--labels gone.csv": "gone.csv does not exist",
    "--labels table.npz": "ends in '.npz'",
    "--label-column colour": "no array 'colour'",
    "--mixture gone.safetensors": "gone.safetensors",
}


@pytest.mark.parametrize("flags", SETTINGS_REFUSED)
def test_settings_that_are_refused(flags: str, table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert SETTINGS_REFUSED[flags] in refused(["audit", str(table), *flags.split()], capsys)


def test_files_of_labels_that_are_refused(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save("few.npy", np.arange(3))
    assert "holds 3 labels for 120 images" in refused(["audit", str(table), "--labels", "few.npy"], capsys)
    Path("other.csv").write_text("id,label\nx,1\n")
    assert "None of the 1 ids" in refused(["audit", str(table), "--labels", "other.csv"], capsys)
    Path("twice.csv").write_text("id,label\n1.png,1\n1.png,2\n")
    assert "two rows for one id" in refused(["audit", str(table), "--labels", "twice.csv"], capsys)
    Path("nothing.csv").write_text("a,b\n1,2\n")
    assert "--id-column" in refused(["audit", str(table), "--labels", "nothing.csv"], capsys)


def test_runs_that_are_refused(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(trained / "run")
    assert "is not a run folder" in refused(["audit", str(tmp_path)], capsys)
    assert "leave --key out" in refused(["audit", run, "--key", "x"], capsys)
    assert "does not exist" in refused(["audit", run, "--data", str(tmp_path / "gone")], capsys)
    np.save(tmp_path / "images.npy", np.zeros((30, 8, 8, 3), np.uint8))
    assert "has no labels" in refused(["audit", run, "--data", str(tmp_path / "images.npy")], capsys)


def test_ids_that_begin_with_zeros(blobs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """000012 in a file of labels is a name, and not the number 12."""
    monkeypatch.chdir(tmp_path)
    X, y = blobs
    ids = [f"{i:06d}" for i in range(len(y))]
    pq.write_table(pa.table({"id": ids, "embedding": list(X)}), "t.parquet")
    Path("labels.csv").write_text("id,label\n" + "".join(f"{i},{c}\n" for i, c in zip(ids, y, strict=True)))
    assert main(["audit", "t.parquet", "--labels", "labels.csv", "--device", "cpu"]) == 0
    assert summary_of("t-audit")["input"]["n_labelled"] == len(y)
    assert sorted(rows_of("t-audit")["id"].to_pylist()) == ids


def test_a_run_whose_name_holds_a_dot(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained / "run", tmp_path / "photos-v1.5")
    assert main(["audit", "photos-v1.5", "--device", "cpu"]) == 0
    assert rows_of("photos-v1.5-audit").num_rows > 0


def test_a_run_that_read_no_labels_is_audited_with_them(tmp_path: Path) -> None:
    images = write_folder(tmp_path, example_images(48, size=(8, 8), n_classes=4))
    assert main(["train", str(images), "--output", str(tmp_path / "run"), "--label-key", "", *TRAIN]) == 0
    assert main(["audit", str(tmp_path / "run"), "--output", str(tmp_path / "out"), "--device", "cpu"]) == 0
    assert len(rows_of(tmp_path / "out")) == 48


def test_a_row_of_zeros_is_refused_in_a_whole_sentence(blobs: Any, tmp_path: Path, capsys: Any) -> None:
    X = blobs[0].copy()
    X[5] = 0
    np.savez(tmp_path / "zero.npz", embeddings=X, labels=blobs[1])
    said = refused(["audit", str(tmp_path / "zero.npz"), "--output", str(tmp_path / "out")], capsys)
    assert said.endswith("a zero vector has no direction; remove these rows.\n")
