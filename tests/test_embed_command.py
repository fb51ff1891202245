"""``siammm embed``: what it takes, what it writes, and what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import timm
import torch

from siammm import SiamMM
from siammm.cli import main
from tests.commands import refused
from tests.export.runs import N_IMAGES, trained_run, write_images

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(tmp_path_factory.mktemp("embedded"))


def test_a_run_on_its_own_images(made: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embed", str(made), "--device", "cpu"]) == 0
    output = here / "first-embeddings.parquet"
    assert "Embeddings of 120 images, 16 numbers each" in " ".join(capsys.readouterr().out.split())
    table, assignments = (pq.read_table(path).to_pandas() for path in (output, made / "assignments.parquet"))
    assert table["id"].tolist() == assignments["id"].tolist()
    assert table["cluster"].tolist() == assignments["cluster"].tolist()
    np.testing.assert_allclose(table["outlier_score"], assignments["outlier_score"], atol=1e-5)
    model = SiamMM.load(made, device="cpu")
    np.testing.assert_allclose(np.stack(list(table["embedding"])), model.embed(made.parent / "images"), atol=1e-6)
    assert [path.name for path in here.iterdir()] == [output.name]


@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
def test_cluster_and_audit_read_it_as_it_is(made: Path, here: Path, suffix: str) -> None:
    assert main(["embed", str(made), "--output", f"table{suffix}", "--device", "cpu"]) == 0
    assert main(["cluster", f"table{suffix}", "--n-components", "8"]) == 0
    assigned: Any = duckdb.sql(
        "SELECT count(*), count(label), count(DISTINCT id) FROM 'table-clusters/assignments.parquet'"
    )
    assert assigned.fetchall() == [(N_IMAGES, N_IMAGES, N_IMAGES)]
    assert main(["audit", f"table{suffix}", "--n-neighbours", "10", "--device", "cpu"]) == 0
    assert pq.read_table("table-audit/suspects.parquet").num_rows == N_IMAGES


def test_other_images_and_an_exported_run(made: Path, here: Path) -> None:
    other = write_images(here, n=20, seed=5)
    SiamMM.load(made, device="cpu").save_pretrained("saved")
    for subject in (str(made), "saved"):
        output = f"{Path(subject).name}.npz"
        assert main(["embed", subject, "--data", str(other), "--output", output, "--device", "cpu"]) == 0
    with np.load("first.npz") as first, np.load("saved.npz") as saved:
        assert set(first) == {
            "embeddings",
            "ids",
            "cluster",
            "group",
            "probability",
            "group_probability",
            "outlier_score",
            "labels",
        }
        assert first["embeddings"].shape == (20, 16)
        for name in first:
            np.testing.assert_array_equal(first[name], saved[name])


def test_npy_is_the_numbers_alone(made: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embed", str(made), "--what", "features", "--output", "a/b.npy", "--device", "cpu"]) == 0
    assert "holds the numbers alone" in " ".join(capsys.readouterr().out.split())
    rows = np.load("a/b.npy")
    assert rows.shape == (N_IMAGES, 256)
    assert rows.dtype == np.float32
    assert [path.name for path in (here / "a").iterdir()] == ["b.npy"]


def test_features_of_a_run_have_clusters_too(made: Path, here: Path) -> None:
    assert main(["embed", str(made), "--what", "features", "--output", "f.parquet", "--device", "cpu"]) == 0
    frame = pd.read_parquet("f.parquet")
    assert len(frame["features"][0]) == 256
    assert frame["cluster"].tolist() == pq.read_table(made / "assignments.parquet").column("cluster").to_pylist()


def test_a_model_of_timm(made: Path, here: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = timm.create_model("test_convnext", num_classes=0).eval()
    torch.save(model.state_dict(), "weights.pth")
    command = ["embed", "timm:test_convnext:weights.pth", "--data", str(made.parent / "images"), "--device", "cpu"]
    assert main([*command, "--image-size", "64"]) == 0
    table = pq.read_table("timm-test_convnext-weights-embeddings.parquet")
    assert table.column_names == ["id", "features", "filepath", "label"]
    rows = np.stack(list(table.to_pandas()["features"]))
    assert rows.shape == (N_IMAGES, model.num_features)
    assert np.isfinite(rows).all()
    assert rows.std() > 0


def test_it_shows_how_far_it_is(made: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large images are few to a batch, so the bar moves; 512 at once stood still for minutes."""
    told: list[tuple[str, int, int]] = []
    monkeypatch.setattr("siammm.data.loader._CLEAN_PIXELS", {"cpu": 40 * 64**2})
    monkeypatch.setattr("siammm.core.progress.Bar.show", lambda self, *what: told.append(what))
    torch.save(timm.create_model("test_convnext", num_classes=0).state_dict(), "w.pth")
    command = ["embed", "timm:test_convnext:w.pth", "--data", str(made.parent / "images"), "--device", "cpu"]
    assert main([*command, "--image-size", "64", "--output", "e.npy"]) == 0
    assert [done for what, done, _ in (one for one in told if one[0] == "images")] == [0, 40, 80, 120]


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    {
        "--output x.csv": "ends in '.csv', but a table is written as .parquet, .npz, .npy",
        "--output .": "ends in ''",
        "--image-size 9": "is a run, which sees images at its own size",
        "--data nowhere": "nowhere does not exist",
    }.items(),
)
def test_what_is_refused(flags: str, message: str, made: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(["embed", str(made), "--device", "cpu", *flags.split()], capsys)
    assert not list(here.iterdir())


def test_a_file_is_never_lost(made: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = here / "mine.npy"
    kept.write_text("mine")
    command = ["embed", str(made), "--output", "mine.npy", "--device", "cpu"]
    assert "mine.npy exists; choose another --output, or add --overwrite" in refused(command, capsys)
    assert "does not exist" in refused([*command, "--overwrite", "--data", "nowhere"], capsys)
    assert kept.read_text() == "mine"
    assert main([*command, "--overwrite"]) == 0
    assert np.load(kept).shape == (N_IMAGES, 16)
    assert [path.name for path in here.iterdir()] == ["mine.npy"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda made, here: "nowhere", "nowhere does not exist; give a run folder"),
        (lambda made, here: table(here), "is a table of embeddings already"),
        (lambda made, here: unfinished(made, here), "has not finished; continue with: siammm train --resume"),
        (lambda made, here: empty(here), "is not a run folder"),
        (lambda made, here: "timm:resnet1888", "timm has no model 'resnet1888'; did you mean"),
    ],
)
def test_what_is_no_encoder(
    make: Any, message: str, made: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = str(made.parent / "images")
    assert message in refused(["embed", str(make(made, here)), "--data", images, "--device", "cpu"], capsys)


def test_models_have_no_embeddings_and_no_images(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(timm.create_model("test_convnext", num_classes=0).state_dict(), "w.pth")
    command = ["embed", "timm:test_convnext:w.pth", "--device", "cpu"]
    assert "only a run has embeddings; leave --what out" in refused([*command, "--what", "embeddings"], capsys)
    assert "comes without images; give some with --data" in refused(command, capsys)


def table(here: Path) -> Path:
    np.save(here / "table.npy", np.eye(4, dtype=np.float32))
    return here / "table.npy"


def unfinished(made: Path, here: Path) -> Path:
    shutil.copytree(made, here / "stopped")
    (here / "stopped" / "encoder.safetensors").unlink()
    return here / "stopped"


def empty(here: Path) -> Path:
    (here / "empty").mkdir()
    return here / "empty"


# -- hostile input -----------------------------------------------------------------------------------------------------


def test_names_of_every_kind(made: Path, here: Path) -> None:
    """Whatever files are called, each is a row with a name of its own, and our own commands read the table."""
    folder = here / "images" / '<b>"x"'
    folder.mkdir(parents=True)
    (here / "images" / "=1+1").mkdir()
    names = [
        b'"><img src=x onerror=alert(1)>',
        b"two\nlines",
        "\u202egnp".encode(),
        b"b\xff",
        b"javascript:x",
        b"'; --",
    ]
    pictures = sorted((made.parent / "images").rglob("*.png"))
    for number, name in enumerate(names * 3):
        target = (bytes(folder), bytes(here / "images" / "=1+1"))[number % 2]
        with open(target + b"/" + name.replace(b"/", b"") + b"%d.png" % number, "wb") as file:
            file.write(pictures[7 * number % len(pictures)].read_bytes())
    assert main(["embed", str(made), "--data", "images", "--output", "e.parquet", "--device", "cpu"]) == 0
    frame: Any = pd.read_parquet("e.parquet")
    assert frame["id"].nunique() == len(frame) == 18
    assert set(frame["label"]) == {'<b>"x"', "=1+1"}
    assert frame["filepath"].isna().sum() == 3
    assert frame["filepath"].dropna().map(lambda path: Path(path).is_file()).all()
    assert main(["cluster", "e.parquet", "--n-components", "3"]) == 0


def test_images_that_cannot_be_read_are_left_out(made: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = write_images(here, n=20)
    sorted(images.rglob("*.png"))[3].write_bytes(b"no image")
    command = ["embed", str(made), "--data", "images", "--output", "e.npz", "--device", "cpu"]
    assert "cannot be read, and the limit is 1 %" in refused(command, capsys)
    assert not (here / "e.npz").exists()
    assert main([*command, "--max-bad-images", "0.1"]) == 0
    assert "1 image could not be read and was left out" in capsys.readouterr().out
    with np.load("e.npz") as stored:
        assert len(stored["embeddings"]) == len(stored["ids"]) == 19


def test_an_interruption_leaves_nothing(made: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(path: Path, *arguments: Any, **settings: Any) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("siammm.commands.embed.write_npz", stopped)
    assert main(["embed", str(made), "--output", "e.npz", "--device", "cpu"]) == 130
    assert not list(here.iterdir())
