"""Whatever is wrong with what the command is given: one sentence, exit code 2, nothing written."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.commands import TINY
from tests.data.image_sets import encoded, example_images
from tests.faults.conftest import Commands
from tests.nursery import Nursery

X = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)


def changed(row: int, value: float) -> np.ndarray:
    array = X.copy()
    array[row] = value
    return array


def saved(array: np.ndarray) -> Callable[[Path], None]:
    return lambda path: np.save(path, array, allow_pickle=True)


def truncated(path: Path) -> None:
    np.save(path, X)
    path.write_bytes(path.read_bytes()[:-100])


CASES: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    "NaN": (saved(changed(7, np.nan)), [], "row 7"),
    "infinity": (saved(changed(3, np.inf)), [], "row 3"),
    "a zero row": (saved(changed(5, 0)), [], "row 5"),
    "NaN, gaussian": (saved(changed(7, np.nan)), ["--family", "gaussian"], "row 7"),
    "an object array": (saved(np.array([[1, None]], dtype=object)), [], "Python objects"),
    "1-D": (saved(X[0]), [], "2-D"),
    "no rows": (saved(X[:0]), [], "0 rows"),
    "no columns": (saved(X[:, :0]), [], "0 columns"),
    "one column": (saved(X[:, :1]), [], "at least 2"),
    "complex": (saved(X.astype(np.complex64)), [], "complex64"),
    "strings": (saved(X.astype(str)), [], "real numbers"),
    "an empty file": (lambda path: path.write_bytes(b""), [], "is empty"),
    "a text file": (lambda path: path.write_text("1 2 3\n4 5 6\n"), [], "not a NumPy array"),
    "a truncated file": (truncated, [], "shorter than its header"),
    "a folder": (lambda path: path.mkdir(), [], "holds no images"),
    "nothing": (lambda path: None, [], "does not exist"),
    "more components than samples": (saved(X), ["--n-components", "41"], "--n-components 41"),
    "no components": (saved(X), ["--n-components", "0"], "--n-components is 0"),
    "no merging and no number": (saved(X), ["--merge", "none"], "--n-components"),
    "a negative temperature": (saved(X), ["--temperature", "-1"], "temperature"),
    "an unknown device": (saved(X), ["--device", "abacus"], "device"),
    "a start that is not there": (saved(X), ["--init", "gone.safetensors"], "gone.safetensors"),
    "a key where there are none": (saved(X), ["--key", "a"], "without names"),
}


def contents(path: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(path)): p.read_bytes() if p.is_file() else None for p in sorted(path.rglob("*"))}


@pytest.mark.parametrize("case", CASES)
def test_bad_input(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Commands) -> None:
    write, flags, words = CASES[case]
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "t.npy")
    before = contents(tmp_path)
    assert words in command.refused("cluster", "t.npy", *flags)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "damaged"), [("cluster", "id"), ("cluster", "label"), ("audit", "label"), ("train", "label")]
)
def test_text_whose_bytes_are_none(name: str, damaged: str, tmp_path: Path, command: Commands) -> None:
    """Arrow writes and reads it as it is, and only fails where it is used."""
    sound = pa.array([f"é{at % 2}" for at in range(len(X))])
    offsets, data = sound.buffers()[1:]
    assert data is not None
    spoilt = pa.StringArray.from_buffers(len(sound), offsets, pa.py_buffer(b"\xff" + data.to_pybytes()[1:]))
    images = [{"bytes": encoded(image, "png"), "path": ""} for image in example_images(len(X)).images]
    columns = {"image": pa.array(images)} if name == "train" else {"embedding": pa.array(list(X))}
    columns |= {"id": pa.array(map(str, range(len(X)))), "label": sound} | {damaged: spoilt}
    table = tmp_path / "t.parquet"
    pq.write_table(pa.table(columns), table)
    output = tmp_path / "out"
    more = TINY if name == "train" else ()
    said = command.refused(name, table, *more, "--output", output)
    assert "is not a complete Parquet file" in said
    assert "UTF8" in said
    assert not output.exists()


@pytest.mark.parametrize("name", ["t.csv", "t", "t.pt", "t.npy.gz"])
def test_wrong_suffix(name: str, tmp_path: Path, command: Commands) -> None:
    (tmp_path / name).write_bytes(b"whatever")
    output = tmp_path / "out"
    assert "embeddings are read from" in command.refused("cluster", str(tmp_path / name), "--output", str(output))
    assert not output.exists()


def test_all_rows_equal_is_not_bad(tmp_path: Path, command: Commands) -> None:
    np.save(tmp_path / "t.npy", np.ones((30, 4), np.float32))
    command.done("cluster", str(tmp_path / "t.npy"), "--output", str(tmp_path / "out"))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    np.save(tmp_path / "t.npy", X)
    return tmp_path / "t.npy"


def test_output_exists(table: Path, tmp_path: Path, command: Commands) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    before = contents(tmp_path)
    arguments = ["cluster", str(table), "--output", str(tmp_path / "out")]
    assert "not empty" in command.refused(*arguments)
    assert "'notes.txt'" in command.refused(*arguments, "--overwrite")
    assert contents(tmp_path) == before


def test_output_would_replace_the_input(table: Path, tmp_path: Path, command: Commands) -> None:
    assert "'t.npy'" in command.refused("cluster", str(table), "--output", str(tmp_path), "--overwrite")
    assert table.exists()


def test_output_is_a_file(table: Path, tmp_path: Path, command: Commands) -> None:
    assert "is a file" in command.refused("cluster", str(table), "--output", str(table))
    assert "cannot be written" in command.refused("cluster", str(table), "--output", str(table / "out"))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_output(table: Path, tmp_path: Path, command: Commands) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o500)
    assert "cannot be written" in command.refused("cluster", str(table), "--output", str(locked / "out"))
    assert list(locked.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_output_where_nobody_can_write(table: Path, command: Commands) -> None:
    assert "cannot be written" in command.refused("cluster", str(table), "--output", "/proc/out")


@pytest.mark.parametrize("room", [400, 1000])
def test_full_disk(room: int, table: Path, tmp_path: Path, nursery: Nursery) -> None:
    """The mixture does not fit, or the assignments do not: neither is left, nor the folder that was made for them."""
    before = contents(tmp_path)
    arguments = ["cluster", "t.npy", "--output", "a/out"]
    sentence = nursery.start(arguments, cwd=tmp_path, largest_file=room).refusal()
    assert "cannot be written (" in sentence
    assert "choose another --output or make room." in sentence
    for name in (".out", ".err"):
        (tmp_path / name).unlink()
    assert contents(tmp_path) == before
    assert nursery.start(arguments, cwd=tmp_path).wait() == 0
