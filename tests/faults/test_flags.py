"""Flags with values that nobody can mean: one sentence before the work starts, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.commands import TINY
from tests.data.image_sets import example_images, write_folder
from tests.nursery import Nursery

X = np.random.default_rng(0).normal(size=(60, 6)).astype(np.float32)

CLUSTER: dict[str, tuple[list[str], str]] = {
    "temperature": (["--temperature", "inf"], "--temperature is inf, but it must be at least 1e-6 and at most 1e6"),
    "tolerance": (["--tol", "inf"], "--tol is inf"),
    "threshold": (["--merge", "paper", "--merge-threshold=-inf"], "--merge-threshold is -inf"),
    "output": (["--output", 256 * "x"], "File name too long"),
    "output that leaves no room": (["--output", 250 * "x"], "File name too long"),
    "output in a folder": (["--output", f"{300 * 'x'}/out"], "File name too long"),
}


@pytest.mark.parametrize("case", CLUSTER)
def test_cluster(case: str, nursery: Nursery, tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", X)
    flags, words = CLUSTER[case]
    assert words in nursery.start(["cluster", "t.npy", *flags], cwd=tmp_path).refusal()
    assert {path.name for path in tmp_path.iterdir()} == {"t.npy", ".out", ".err"}


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_values_whose_squares_overflow(kind: str, nursery: Nursery, tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", X.astype(kind) * (1e20 if kind == "float32" else 1e160))
    sentence = nursery.start(["cluster", "t.npy", "--family", "gaussian"], cwd=tmp_path).refusal()
    assert "Row 0 of X holds a value of size" in sentence
    assert "divide all of X by a constant" in sentence


@pytest.mark.parametrize(
    ("flag", "value"), [("--learning-rate", "1e300"), ("--epochs", "1" + 400 * "0"), ("--output", 256 * "x")]
)
def test_train(flag: str, value: str, nursery: Nursery, tmp_path: Path) -> None:
    write_folder(tmp_path, example_images(24, size=(8, 8)))
    sentence = nursery.start(["train", "images", *TINY, flag, value], cwd=tmp_path).refusal()
    assert ("File name too long" if flag == "--output" else f"{flag} is") in sentence
    assert {path.name for path in tmp_path.iterdir()} == {"images", ".out", ".err"}
