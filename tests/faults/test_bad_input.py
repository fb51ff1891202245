"""Whatever is wrong with what the command is given: one sentence, exit code 2, nothing written."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import siammm
from siammm.cli import main
from tests import commands

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
    "more components than samples": (saved(X), ["--n-components", "41"], "n_components=41"),
    "no components": (saved(X), ["--n-components", "0"], "n_components"),
    "no merging and no number": (saved(X), ["--merge", "none"], "--n-components"),
    "a negative temperature": (saved(X), ["--temperature", "-1"], "temperature"),
    "an unknown device": (saved(X), ["--device", "abacus"], "device"),
    "a start that is not there": (saved(X), ["--init", "gone.safetensors"], "gone.safetensors"),
    "a key where there are none": (saved(X), ["--key", "a"], "without names"),
}


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The sentence that the command ends with."""
    sentence = commands.refused(arguments, capsys)
    assert sentence.endswith(".\n")
    return sentence


def contents(path: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(path)): p.read_bytes() if p.is_file() else None for p in sorted(path.rglob("*"))}


@pytest.mark.parametrize("case", CASES)
def test_bad_input(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write, flags, words = CASES[case]
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "t.npy")
    before = contents(tmp_path)
    assert words in refused(["cluster", "t.npy", *flags], capsys)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["t.csv", "t", "t.pt", "t.npy.gz"])
def test_wrong_suffix(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_bytes(b"whatever")
    output = tmp_path / "out"
    assert "embeddings are read from" in refused(["cluster", str(tmp_path / name), "--output", str(output)], capsys)
    assert not output.exists()


def test_all_rows_equal_is_not_bad(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.ones((30, 4), np.float32))
    assert main(["cluster", str(tmp_path / "t.npy"), "--output", str(tmp_path / "out")]) == 0


@pytest.fixture
def table(tmp_path: Path) -> Path:
    np.save(tmp_path / "t.npy", X)
    return tmp_path / "t.npy"


def test_output_exists(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    before = contents(tmp_path)
    arguments = ["cluster", str(table), "--output", str(tmp_path / "out")]
    assert "not empty" in refused(arguments, capsys)
    assert "'notes.txt'" in refused([*arguments, "--overwrite"], capsys)
    assert contents(tmp_path) == before


def test_output_would_replace_the_input(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "'t.npy'" in refused(["cluster", str(table), "--output", str(tmp_path), "--overwrite"], capsys)
    assert table.exists()


def test_output_is_a_file(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is a file" in refused(["cluster", str(table), "--output", str(table)], capsys)
    assert "cannot be written" in refused(["cluster", str(table), "--output", str(table / "out")], capsys)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_output(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o500)
    assert "cannot be written" in refused(["cluster", str(table), "--output", str(locked / "out")], capsys)
    assert list(locked.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_output_where_nobody_can_write(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot be written" in refused(["cluster", str(table), "--output", "/proc/out"], capsys)


@pytest.mark.parametrize("where", ["fsync", "save"])
def test_full_disk(
    where: str, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if where == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    else:
        monkeypatch.setattr(siammm.VonMisesFisherMixture, "save", full)
    before = contents(tmp_path)
    assert "No space left" in refused(["cluster", str(table), "--output", str(tmp_path / "a" / "out")], capsys)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_out_of_memory(
    error: type[Exception],
    table: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def too_large(*_: object) -> None:
        raise error

    monkeypatch.setattr(siammm.VonMisesFisherMixture, "fit", too_large)
    assert "not have enough memory" in refused(["cluster", str(table), "--output", str(tmp_path / "out")], capsys)
    assert not (tmp_path / "out").exists()
