"""``siammm cluster`` of images: encoded, clustered, and not encoded again after an interruption."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siammm.cli import main
from siammm.data.contents import holds_images
from siammm.runs.models import Model
from tests.clustered import QUICK, N, four_kinds, write_photos
from tests.commands import refused
from tests.export.runs import trained_run

pytestmark = pytest.mark.usefixtures("one_thread", "here")


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    return four_kinds()


@pytest.fixture
def photos(here: Path) -> str:
    write_photos(here)
    return "photos/"


@pytest.fixture
def shown_to_encoder(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images were encoded, one number a batch; batches are of 8 images."""
    monkeypatch.setattr("siammm.data.loader._MOST_CLEAN", 8)
    batches: list[int] = []
    encode = Model.features

    def counted(self: Model, x: Any) -> Any:
        batches.append(len(x))
        return encode(self, x)

    monkeypatch.setattr(Model, "features", counted)
    return batches


def test_a_folder_of_images(photos: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", photos, *QUICK]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "siammm encodes 40 images with lite on cpu" in printed
    assert "clusters in 40 images" in printed
    assert sorted(path.name for path in Path().iterdir()) == ["photos", "photos-clusters"]
    output = Path("photos-clusters")
    written = ["assignments.parquet", "embeddings.npy", "embeddings.parquet", "mixture.safetensors", "summary.json"]
    assert sorted(path.name for path in output.iterdir()) == written
    steps = [f"siammm {name} photos-clusters" for name in ("report", "explore", "sort")]
    assert printed.endswith(f"Next: {' or '.join(steps)} --to FOLDER")
    rows = pq.read_table(output / "assignments.parquet")
    expected = ["id", "cluster", "group", "probability", "group_probability", "outlier_score", "label", "filepath"]
    assert rows.column_names == expected
    assert all(Path(path).is_file() for path in rows.column("filepath").to_pylist())
    assert rows.column("id").to_pylist()[0] == "kind0/00.png"
    facts = json.loads((output / "summary.json").read_text())
    assert facts["input"]["n_samples"] == N
    assert facts["input"]["encoder"]["kind"] == "lite"
    assert facts["scores"]["ami"] > 0.5
    # The embeddings are those of ``embed``, and are clustered again without the images.
    assert main(["embed", "lite", "--data", photos, "--image-size", "32", "--device", "cpu", "--output", "e.npz"]) == 0
    embedded = np.stack(pq.read_table(output / "embeddings.parquet").column("embedding").to_pylist())
    np.testing.assert_allclose(embedded, np.load("e.npz")["features"], rtol=1e-4, atol=1e-5)
    assert (
        main(
            [
                "cluster",
                str(output / "embeddings.parquet"),
                "--n-components",
                "4",
                "--merge",
                "none",
                "--random-state",
                "1",
                "--output",
                "again",
            ]
        )
        == 0
    )
    again = pq.read_table("again/assignments.parquet")
    assert again.column("cluster").to_pylist() == rows.column("cluster").to_pylist()


@pytest.mark.parametrize("name", ["x.npz", "x.npy"])
def test_arrays_of_images(name: str, pixels: np.ndarray) -> None:
    if name == "x.npz":
        np.savez(name, x=pixels, y=np.arange(N) % 4)
    else:
        np.save(name, pixels)
    assert main(["cluster", name, *QUICK]) == 0
    rows = pq.read_table("x-clusters/assignments.parquet")
    assert rows.num_rows == N
    assert ("label" in rows.column_names) == (name == "x.npz")


def test_a_run_as_the_encoder(tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]) -> None:
    """What is clustered are the embeddings that the run clusters."""
    run = trained_run(tmp_path_factory.mktemp("run"))
    images = str(run.parent / "images")
    assert main(["cluster", images, "--encoder", str(run), *QUICK[2:], "--output", "out"]) == 0
    assert main(["embed", str(run), "--output", "e.npy", "--device", "cpu"]) == 0
    embedded = np.stack(pq.read_table("out/embeddings.parquet").column("embedding").to_pylist())
    np.testing.assert_array_equal(embedded, np.load("e.npy"))
    assert "leave --image-size out" in refused(["cluster", images, "--encoder", str(run), "--image-size", "9"], capsys)


def test_what_is_encoded_is_not_encoded_again(
    photos: str, shown_to_encoder: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", photos, *QUICK, "--output", "whole"]) == 0
    assert shown_to_encoder == [8] * 5
    encode = Model.features

    def interrupted(self: Model, x: Any) -> Any:
        if len(shown_to_encoder) == 3:
            raise KeyboardInterrupt
        return encode(self, x)

    shown_to_encoder.clear()
    with monkeypatch.context() as patched:
        patched.setattr(Model, "features", interrupted)
        assert main(["cluster", photos, *QUICK]) == 130
    assert "kept in photos-clusters-unfinished, and the same command continues" in capsys.readouterr().err
    with Path("photos-clusters-unfinished/rows.npy").open("ab") as file:
        file.write(b"half a row")
    shown_to_encoder.clear()
    with monkeypatch.context() as patched:
        patched.setattr("siammm.cluster.find_clusters._fit", _stopped)
        assert main(["cluster", photos, *QUICK]) == 130
    assert shown_to_encoder == [8, 8]
    assert main(["cluster", photos, *QUICK]) == 0
    assert shown_to_encoder == [8, 8]
    one, other = (pq.read_table(f"{name}/embeddings.parquet") for name in ("whole", "photos-clusters"))
    assert one.equals(other)
    assert not Path("photos-clusters-unfinished").exists()


def test_the_embeddings_of_an_earlier_result_are_used_again(
    photos: str, shown_to_encoder: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """With other settings, also in another folder; not of other images or another size."""
    assert main(["cluster", photos, *QUICK]) == 0
    before = pq.read_table("photos-clusters/embeddings.parquet")
    capsys.readouterr()
    fixed = ["--merge", "none", "--n-components", "3"]
    for more in (["--output", "three"], ["--overwrite"]):
        assert main(["cluster", photos, *QUICK, *fixed, *more]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "The images have not changed since photos-clusters was made, so its embeddings are reused." in said
    assert sum(shown_to_encoder) == N
    assert pq.read_table("photos-clusters/embeddings.parquet").equals(before)
    assert json.loads(Path("three/summary.json").read_text())["n_components"] == 3
    assert not list(Path().glob("*-unfinished"))
    assert main(["cluster", photos, *QUICK, "--image-size", "40", "--output", "larger"]) == 0
    assert sum(shown_to_encoder) == 2 * N
    os.utime("photos/kind0/00.png", (0, 0))
    assert main(["cluster", photos, *QUICK, "--overwrite"]) == 0
    assert sum(shown_to_encoder) == 3 * N


@pytest.mark.parametrize("damage", ["embeddings.parquet", "summary.json"])
def test_a_damaged_result_is_encoded_again(damage: str, photos: str, shown_to_encoder: list[int]) -> None:
    assert main(["cluster", photos, *QUICK]) == 0
    whole = pq.read_table("photos-clusters/embeddings.parquet")
    content = Path("photos-clusters", damage).read_bytes()
    Path("photos-clusters", damage).write_bytes(content[: len(content) // 2])
    assert main(["cluster", photos, *QUICK, "--output", "again"]) == 0
    assert sum(shown_to_encoder) == 2 * N
    assert pq.read_table("again/embeddings.parquet").equals(whole)


def _stopped(*_: Any) -> None:
    raise KeyboardInterrupt


def test_rows_of_something_else_are_made_anew(
    photos: str, shown_to_encoder: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another size, and then another image; files of others in the folder stay."""
    with monkeypatch.context() as patched:
        patched.setattr("siammm.cluster.find_clusters._fit", _stopped)
        assert main(["cluster", photos, *QUICK]) == 130
        assert main(["cluster", photos, *QUICK, "--image-size", "40"]) == 130
        assert sum(shown_to_encoder) == 2 * N
        Path("photos/kind1/01.png").unlink()
        Path("photos-clusters-unfinished/mine.txt").write_text("mine")
    assert main(["cluster", photos, *QUICK, "--image-size", "40"]) == 0
    assert sum(shown_to_encoder) == 3 * N - 1
    assert [path.name for path in Path("photos-clusters-unfinished").iterdir()] == ["mine.txt"]


def test_images_that_cannot_be_read_are_set_aside(photos: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("photos/kind0/00.png").write_bytes(b"no image")
    said = refused(["cluster", photos, *QUICK], capsys, silent=False)
    assert "cannot be read, and the limit is 1 %" in said
    assert [path.name for path in Path().iterdir()] == ["photos"]
    assert main(["cluster", photos, *QUICK, "--max-bad-images", "0.1"]) == 0
    assert "1 image could not be read and was left out" in capsys.readouterr().out
    facts = json.loads(Path("photos-clusters/summary.json").read_text())
    assert list(facts["input"]["set_aside"]) == ["kind0/00.png"]


def test_images_for_a_table_and_a_table_for_images(photos: str, capsys: pytest.CaptureFixture[str]) -> None:
    np.save("table.npy", np.eye(12, dtype=np.float32))
    for command, sentence in {
        f"{photos} --key x": "photos/ holds images, and --key is for a table of embeddings; leave --key out",
        f"{photos} --label-column x": "holds images, and --label-column is for a table of embeddings; use --label-key",
        "table.npy --encoder lite": "table.npy is a table of embeddings, and --encoder is for images",
        "table.npy --label-key x": "--label-key is for images; use --label-column",
        f"{photos} --encoder nowhere": "nowhere does not exist; give a run folder",
        f"{photos} --encoder timm:resnet1888": "timm has no model 'resnet1888'; did you mean",
        "photos/kind0/00.png": "is a single image",
        "nowhere/": "nowhere/ does not exist",
        "~nobody-of-this-name/x": "is not a path",
        f"{'x' * 300}.npy": "cannot be written (File name too long); choose another --output",
    }.items():
        assert sentence in refused(["cluster", *command.split(), "--device", "cpu"], capsys)
    assert sorted(path.name for path in Path().iterdir()) == ["photos", "table.npy"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "one/ holds 1 image, but clusters need 2 or more; give a folder with more images."),
        (["--n-components", "41"], "--n-components is 41, but photos/ holds 40 images; use at most as many"),
        (["--n-groups", "11"], "--n-groups is 11, but 40 samples can have 2 to 10 groups"),
        (["--merge", "none"], "With --merge none the number of clusters is needed; add --n-components."),
        (["--temperature", "0"], "--temperature is 0.0"),
        (["--init", "nowhere.safetensors"], "nowhere.safetensors"),
    ],
)
def test_what_is_refused_before_an_encoder_is_opened(
    flags: list[str], sentence: str, photos: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody waits for a download or for the encoder, to be told what was known before."""
    Path("one").mkdir()
    shutil.copy("photos/kind0/00.png", "one")

    def opened(*_: Any, **__: Any) -> None:
        raise AssertionError("an encoder was opened")

    monkeypatch.setattr("siammm.commands.cluster.open_model", opened)
    data = photos if flags else "one/"
    assert sentence in refused(["cluster", data, *flags, "--device", "cpu"], capsys)
    assert sorted(path.name for path in Path().iterdir()) == ["one", "photos"]


def test_clusters_that_are_the_groups_are_said_to_be(photos: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Unless nobody has looked for groups."""
    sentence = "No other groups were found: each cluster is a group."
    assert main(["cluster", photos, *QUICK]) == 0
    assert sentence not in capsys.readouterr().out
    assert main(["cluster", photos, *QUICK, "--merge", "auto", "--merge-floor", "2", "--overwrite"]) == 0
    assert sentence in capsys.readouterr().out


def test_groups_are_listed_first(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    """Whoever has photographs asks for their kinds; clusters are finer."""
    random = np.random.default_rng(0)
    kind_of = random.integers(5, size=600)
    X = (np.eye(5, 16)[kind_of] + 0.3 * random.normal(size=(600, 16))).astype(np.float32)
    np.savez("t.npz", embeddings=X, labels=kind_of)
    assert main(["cluster", "t.npz", "--merge-floor", "15"]) == 0
    printed = capsys.readouterr().out
    rows = pq.read_table("t-clusters/assignments.parquet")
    sizes = np.bincount(rows.column("group").to_numpy())
    n_clusters = rows.column("cluster").to_numpy().max() + 1
    assert "5 groups in 600 embeddings of 16 dimensions" in printed
    at = [
        printed.index(word) for word in ("5 groups in", " group ", f"There are also {n_clusters} clusters", " cluster ")
    ]
    assert at == sorted(at)
    table = [line.split("\u2502")[1:4] for line in printed[at[1] : at[2]].splitlines() if line.startswith("\u2502")]
    assert [(int(group), int(size)) for group, size, _ in table] == list(enumerate(sizes.tolist()))


def test_a_result_is_no_folder_of_images(photos: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("photos/mixture.safetensors").write_bytes(b"")
    assert "is a result of siammm cluster or train" in refused(["cluster", photos], capsys)


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"x": np.zeros((3, 8, 8, 3), np.uint8)}, True),
        ({"x": np.zeros((3, 8, 8), np.uint8)}, True),
        ({"x": np.zeros((3, 3, 8, 8), np.float32)}, True),
        ({"x": np.zeros((3, 8, 8, 3), np.uint8), "features": np.zeros((3, 4))}, False),
        ({"x": np.zeros((3, 8), np.uint8)}, False),
        ({"x": np.zeros((3, 8), np.float32)}, False),
        ({"x": np.zeros((3, 8, 8), np.float32)}, False),
    ],
)
def test_images_and_tables_are_told_apart(arrays: dict[str, np.ndarray], expected: bool) -> None:
    np.savez("x.npz", **arrays)  # pyright: ignore[reportArgumentType]
    assert holds_images("x.npz") == expected
    if len(arrays) == 1:
        np.save("x.npy", arrays["x"])
        assert holds_images("x.npy") == expected


def test_parquet_files_are_told_apart() -> None:
    pq.write_table(pa.table({"image": [b"1"], "label": [1]}), "images.parquet")
    pq.write_table(pa.table({"image": [b"1"], "vector": [[1.0, 2.0]]}), "both.parquet")
    pq.write_table(pa.table({"a": [1.0], "b": [2.0]}), "numbers.parquet")
    Path("broken.parquet").write_bytes(b"PAR1")
    found = {name: holds_images(f"{name}.parquet") for name in ("images", "both", "numbers", "broken", "gone")}
    assert found == {"images": True, "both": False, "numbers": False, "broken": False, "gone": False}
