"""``siammm export``: what it takes, what it writes, and what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import onnxruntime
import pyarrow.parquet as pq
import pytest
import timm
import torch
from huggingface_hub import HfApi

from siammm import SiamMM
from siammm.cli import main
from siammm.export import onnx_file
from siammm.runs import files
from tests.borders import is_clear
from tests.commands import refused
from tests.export.runs import N_IMAGES, trained_run, write_images

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(tmp_path_factory.mktemp("exported"))


def test_everything(made: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(made), "--device", "cpu"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for what in ("tables", "onnx", "encoder", "Written to first-export"):
        assert what in said
    assert said.endswith("Next: siammm embed first-export --data FOLDER")
    folder = here / "first-export"
    assert {path.name for path in folder.iterdir()} == files.EXPORT_NAMES
    model = SiamMM.from_pretrained(folder, device="cpu")
    images = made.parent / "images"
    clusters = model.predict(images)
    table: Any = duckdb.sql(f"SELECT cluster FROM '{folder}/embeddings.parquet'")
    np.testing.assert_array_equal(table.fetchnumpy()["cluster"], clusters)
    sizes: Any = duckdb.sql(f"SELECT sum(size) FROM '{folder}/clusters.parquet'")
    assert sizes.fetchall() == [(N_IMAGES,)]
    session: Any = onnxruntime.InferenceSession(folder / files.ONNX, providers=["CPUExecutionProvider"])
    from siammm.data.sources import open_source

    source = open_source(str(images))
    pixels = np.stack([source.image(i) for i in range(100)])
    embedding, cluster, outlier = session.run(["embedding", "cluster", "outlier_score"], {"image": pixels})
    clear = is_clear(model.predict_proba(images)[:100])
    np.testing.assert_array_equal(cluster[clear], clusters[:100][clear])
    np.testing.assert_allclose(embedding, model.embed(images)[:100], atol=1e-4)
    assigned = pq.read_table(made / "assignments.parquet").column("outlier_score").to_numpy()[:100]
    np.testing.assert_allclose(outlier, assigned, atol=2.1 / (N_IMAGES - 1))
    encoder = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert encoder(torch.zeros(1, 3, 32, 32)).shape == (1, 256)


def test_one_format_needs_no_images(made: Path, here: Path) -> None:
    shutil.copytree(made, "run")
    config = (here / "run" / "config.json").read_text("utf-8")
    (here / "run" / "config.json").write_text(config.replace(str(made.parent / "images"), "/gone"), "utf-8")
    assert main(["export", "run", "--formats", "encoder", "--encoder", "momentum", "--device", "cpu"]) == 0
    assert {path.name for path in (here / "run-export").iterdir()} == set(files.PRETRAINED_NAMES)
    assert "momentum encoder" in (here / "run-export" / files.CARD).read_text("utf-8")


def test_other_images(made: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables are of the images that were given; outliers of the ONNX file stay measured against the run's."""
    other = write_images(here, n=20, seed=5)
    command = ["export", str(made), "--data", str(other), "--output", "out", "--device", "cpu"]
    assert main([*command, "--formats", "tables", "onnx"]) == 0
    assert pq.read_table("out/embeddings.parquet").num_rows == 20
    session = onnxruntime.InferenceSession("out/siammm.onnx", providers=["CPUExecutionProvider"])
    assert session.get_modelmeta().custom_metadata_map["n_reference_images"] == str(N_IMAGES)
    assert "gone" not in capsys.readouterr().out


def test_a_run_without_clusters(made: Path, here: Path) -> None:
    shutil.copytree(made, "run")
    (here / "run" / "mixture.safetensors").unlink()
    assert main(["export", "run", "--device", "cpu"]) == 0
    assert {path.name for path in (here / "run-export").iterdir()} == files.EXPORT_NAMES - {
        files.MIXTURE,
        files.CLUSTERS_TABLE,
    }
    assert pq.read_table("run-export/embeddings.parquet").column_names == ["id", "embedding", "filepath", "label"]


def test_images_that_changed_are_told_of(made: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(made, "run")
    shutil.copytree(made.parent / "images", "images")
    next((here / "images").rglob("*.png")).unlink()
    config = (here / "run" / "config.json").read_text("utf-8")
    moved = config.replace(str(made.parent / "images"), str(here / "images"))
    (here / "run" / "config.json").write_text(moved, "utf-8")
    assert main(["export", "run", "--formats", "tables", "--device", "cpu"]) == 0
    assert "have changed since the run was trained" in " ".join(capsys.readouterr().out.split())


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_nothing_of_a_user_is_lost(made: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["export", str(made), "--output", "out", "--formats", "encoder", "--device", "cpu"]
    assert main(command) == 0
    assert "is not empty; choose another --output, or add --overwrite" in refused(command, capsys)
    card = here / "out" / files.CARD
    # As an editor of another system leaves it; and kept also where no encoder is exported.
    edited = card.read_bytes() + "Licence: mine, née yours.\r\n".encode("latin-1")
    card.write_bytes(edited)
    for formats in ("encoder", "tables"):
        assert main([*command, "--overwrite", "--formats", formats]) == 0
        assert "was edited, so it was not replaced" in capsys.readouterr().out
        assert card.read_bytes() == edited
    (here / "out" / "notes.txt").write_text("mine")
    assert "holds 'notes.txt', which is not part of an earlier result" in refused([*command, "--overwrite"], capsys)
    assert (here / "out" / "notes.txt").read_text() == "mine"


def test_a_failure_leaves_the_earlier_export(
    made: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["export", str(made), "--output", "out", "--formats", "tables", "--device", "cpu"]
    assert main(command) == 0
    before = (here / "out" / files.IMAGES_TABLE).read_bytes()

    def full(*arguments: Any, **settings: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("siammm.commands.export.write_parquet", full)
    assert "cannot be written (No space left on device)" in refused([*command, "--overwrite"], capsys)
    assert (here / "out" / files.IMAGES_TABLE).read_bytes() == before
    assert [path.name for path in here.iterdir()] == ["out"]


def test_without_the_packages_of_onnx(
    made: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_file, "PACKAGES", ("no_such_package",))
    message = "no_such_package, not installed here; pip install no_such_package"
    assert message in refused(["export", str(made), "--formats", "onnx"], capsys)
    assert not list(here.iterdir())
    assert main(["export", str(made), "--device", "cpu"]) == 0
    assert "No ONNX file: no_such_package not installed; pip install no_such_package." in capsys.readouterr().out
    assert {path.name for path in (here / "first-export").iterdir()} == files.EXPORT_NAMES - {files.ONNX}


def test_what_is_refused(made: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["export", str(made), "--device", "cpu"]
    assert "--hub is 'a b', which is not the name of a repository" in refused([*command, "--hub", "a b"], capsys)
    no_encoder = refused([*command, "--hub", "me/birds", "--formats", "tables"], capsys)
    assert "--hub pushes the encoder, but --formats leaves it out" in no_encoder
    assert "nowhere does not exist" in refused([*command, "--data", "nowhere"], capsys)
    assert not list(here.iterdir())


def test_runs_that_are_none(made: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere does not exist" in refused(["export", "nowhere"], capsys)
    shutil.copytree(made, "stopped")
    (here / "stopped" / "encoder.safetensors").unlink()
    assert "has not finished; continue with: siammm train --resume stopped" in refused(["export", "stopped"], capsys)
    shutil.copytree(made, "gone")
    config = (here / "gone" / "config.json").read_text("utf-8")
    (here / "gone" / "config.json").write_text(config.replace(str(made.parent / "images"), "/gone"), "utf-8")
    message = refused(["export", "gone", "--device", "cpu"], capsys)
    assert "cannot be read (/gone does not exist; check the path); give images with --data, or --formats" in message
    # What the run kept of its embeddings stands for the images where it can.
    assert main(["export", "gone", "--formats", "onnx", "--device", "cpu"]) == 0
    assert "against the embeddings that the run kept" in " ".join(capsys.readouterr().out.split())
    shutil.rmtree("gone-export")
    (here / "gone" / "embeddings.npy").unlink()
    assert "--formats encoder" in refused(["export", "gone", "--formats", "onnx", "--device", "cpu"], capsys)
    assert not (here / "gone-export").exists()


def test_the_hub(made: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that reach the network are answered here; a hub that says no does not cost the export."""
    pushed: dict[str, Any] = {}

    class Address:
        repo_id = "me/birds"

    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, **kwargs: Address())
    monkeypatch.setattr(HfApi, "upload_folder", lambda self, **kwargs: pushed.update(kwargs))
    command = ["export", str(made), "--formats", "encoder", "--hub", "me/birds", "--device", "cpu"]
    assert main([*command, "--output", "one"]) == 0
    assert "Pushed to https://huggingface.co/me/birds" in " ".join(capsys.readouterr().out.split())
    assert (pushed["repo_id"], pushed["folder_path"]) == ("me/birds", Path("one"))
    assert set(pushed["allow_patterns"]) == set(files.PRETRAINED_NAMES)

    def refuse(self: HfApi, repo_id: str, **kwargs: Any) -> Any:
        raise ConnectionError("no way\nthere")

    monkeypatch.setattr(HfApi, "create_repo", refuse)
    message = refused([*command, "--output", "two"], capsys, silent=False)
    assert "The export is complete in two, but me/birds cannot be pushed to (no way there)" in message
    assert SiamMM.from_pretrained("two", device="cpu").n_clusters_ > 0
