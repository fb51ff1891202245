"""A session on a machine with a GPU: sets travel in parts, steps are worked through, records come back."""

from __future__ import annotations

import importlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
N, PER, SIDE = 40, 8, 8


@pytest.fixture
def gpu_session(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu_session")


@pytest.fixture
def packs(tmp_path: Path) -> Path:
    """A set of two packs of training images and one of test images: sheets of eight tiles, each of one colour."""
    folder = tmp_path / "packs"
    folder.mkdir()
    for name, first, n in (("train_a", 0, 16), ("train_b", 16, N - 16), ("test", N, 10)):
        sheets: list[bytes] = []
        for start in range(0, n, PER):
            tiles = np.zeros((2 * SIDE, 4 * SIDE, 3), np.uint8)
            for at in range(min(PER, n - start)):
                row, column = divmod(at, 4)
                tiles[row * SIDE : (row + 1) * SIDE, column * SIDE : (column + 1) * SIDE] = 4 * (first + start + at)
            file = io.BytesIO()
            Image.fromarray(tiles).save(file, "JPEG", quality=100, subsampling=0)
            sheets.append(file.getvalue())
        offsets = np.cumsum([0, *map(len, sheets)])
        jpeg = np.frombuffer(b"".join(sheets), np.uint8)
        np.savez(
            folder / f"{name}.npz", jpeg=jpeg, offsets=offsets, labels=np.arange(first, first + n),
            names=np.array(["one"]), n=n, h=SIDE, w=SIDE, per=PER, cols=4,
        )  # fmt: skip
    return folder


def test_a_set_that_travels_in_parts_is_whole_in_the_end(
    monkeypatch: pytest.MonkeyPatch, gpu_session: Any, packs: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_session, "PACKS", {"tiny": {"train": ["train_a", "train_b"], "test": ["test"]}})
    monkeypatch.setattr(gpu_session, "SITE", ("threadpoolctl",))
    monkeypatch.setitem(importlib.import_module("study_cells").SETS, "tiny", (N, N))
    monkeypatch.setattr(gpu_session, "command_of", lambda step, *_: [sys.executable, "-c", f"print('did {step}')"])
    records, work, out = tmp_path / "records", tmp_path / "work", tmp_path / "out"
    (records / "t4").mkdir(parents=True)
    (records / "t4" / "a-0.json").write_text("{}")
    for number in (1, 2, 3):
        carry = tmp_path / f"carry-{number}"
        assert "MiB" in gpu_session.pack(carry, packs, [f"tiny:{number}/3"], records)
        assert (carry / "site" / "threadpoolctl.py").exists()
        gpu_session.run(carry, out, work, ["tests", "t4"], 300.0, None)
        assert (work / "data" / "tiny" / "train.npz").exists() == (number == 3)
    for split, first, n in (("train", 0, N), ("test", N, 10)):
        with np.load(work / "data" / "tiny" / f"{split}.npz") as found:
            assert list(found["labels"]) == list(range(first, first + n))
            assert np.abs(found["images"][:, 4, 4, 0] - 4.0 * found["labels"]).max() <= 2
            assert list(found["names"]) == ["one"]
    assert (work / "commit").read_text() == importlib.import_module("record").commit()
    # The tests are run once on a machine, a study in every call.
    assert (work / "logs" / "tests.log").read_text() == "did tests\n"
    assert (work / "logs" / "t4.log").read_text() == "did t4\n" * 3


def test_what_comes_back_is_cut_into_files_and_joins_the_records(
    monkeypatch: pytest.MonkeyPatch, gpu_session: Any, tmp_path: Path
) -> None:
    work, out, records = tmp_path / "work", tmp_path / "out", tmp_path / "records"
    (work / "records" / "t4").mkdir(parents=True)
    (work / "logs").mkdir()
    (work / "logs" / "t4.log").write_text("said")
    out.mkdir()
    random = np.random.default_rng(0)
    for seed in (0, 1):
        text = json.dumps({"seed": seed, "noise": random.random(500).tolist()})
        (work / "records" / "t4" / f"a-{seed}.json").write_text(text)
    monkeypatch.setattr(gpu_session, "COMES_BACK", 2000)
    gpu_session.bundle(work, out)
    files = sorted(out.iterdir())
    assert 2 < len(files) < 10
    (records / "t4").mkdir(parents=True)
    (records / "t4" / "a-0.json").write_text("earlier")
    assert gpu_session.collect(files, records) == f"1 new records in {records}"
    assert (records / "t4" / "a-0.json").read_text() == "earlier", "nothing is written over"
    assert json.loads((records / "t4" / "a-1.json").read_text())["seed"] == 1
    assert (records / "logs" / "t4.log").read_text() == "said"


def test_every_step_of_a_session_is_there(gpu_session: Any, tmp_path: Path) -> None:
    for step in gpu_session.PRIORITY:
        words = gpu_session.command_of(step, tmp_path, 100.0, None)
        scripts = [word for word in words if word.endswith((".py", ".json"))]
        assert all(Path(script).exists() for script in scripts), step
    studies = {path.stem for path in (ROOT / "benchmarks" / "studies").glob("*.json")}
    older = {"clusters", "cosine-or-contrast", "groups-in-training"}
    assert studies - older <= {step.split("@")[0] for step in gpu_session.PRIORITY}
    words = gpu_session.command_of("t4-losses@cifar10+tiny@0+2", tmp_path, 100.0, 3)
    assert words[words.index("--sets") + 1 :] == ["cifar10", "tiny", "--seeds", "0", "2", "--at-once", "3"]


def test_a_plan_of_what_is_left(gpu_session: Any, tmp_path: Path) -> None:
    lines = list(gpu_session.plan(tmp_path, ["tests", "q2-weight", "q3-instance-loss"]))
    assert "15 cells left" in lines[0]
    # The instance loss alone and the middle weight are those of the first study.
    assert "9 cells left" in lines[1]
    assert "in all" in lines[2]


def test_a_sheet_of_clusters_shows_each_in_its_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    cluster_sheet = importlib.import_module("cluster_sheet")
    labels = np.repeat(np.arange(4), 10)
    clusters = np.where(np.arange(40) % 10 < 7, labels, (labels + 1) % 4)
    images = np.repeat(np.arange(40, dtype=np.uint8), 4 * 4 * 3).reshape(40, 4, 4, 3)
    np.savez(tmp_path / "kept.npz", labels=labels, index_NH=clusters[:, None])
    np.savez(tmp_path / "train.npz", images=images, names=np.array(["a", "b", "c", "d"]))
    words = ["cluster_sheet.py", str(tmp_path / "kept.npz"), str(tmp_path), "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    cluster_sheet.main()
    drawn = np.asarray(Image.open(tmp_path / "clusters.png"))
    assert drawn.shape == (4 * 16 + 3 * 4, 12 * 4, 3)
    # The first cluster has seven images of its class in its first row, and three of another in the second.
    first, second = (drawn[row, ::4, 0] for row in (0, 4))
    assert (first[:7] < 10).all()
    assert (first[7:] == 255).all()
    assert {30 <= value < 40 for value in second[:3].tolist()} == {True}
