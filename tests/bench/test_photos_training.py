"""The comparison of a frozen encoder with training from it runs to its end, and judges by images that nobody saw."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from siammm.cli import main
from tests.commands import TINY
from tests.data.image_sets import example_images, write_npz

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "photos_training.py"


def test_a_fifth_of_each_kind_is_held_out_another_for_each_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    photos_training: Any = importlib.import_module("photos_training")
    labels = np.repeat([3, 5, 8], 10)
    splits = [photos_training.split(labels, seed) for seed in (0, 0, 1)]
    for learnt, held_out in splits:
        assert sorted([*learnt, *held_out]) == list(range(30))
        np.testing.assert_array_equal(labels[held_out], np.repeat([3, 5, 8], 2))
    np.testing.assert_array_equal(splits[0][1], splits[1][1])
    assert not np.array_equal(splits[0][1], splits[2][1])


@pytest.mark.slow
def test_it_runs_from_a_bare_checkout_and_goes_on_where_it_was(tmp_path: Path) -> None:
    data = write_npz(tmp_path, example_images(60, size=(8, 8), n_classes=3))
    assert main(["train", str(data), *TINY, "--epochs", "1", "--output", str(tmp_path / "run")]) == 0
    small = ["hidden_dim=32", "embedding_dim=16", "epochs=2", "batch_size=12", "n_components=6", "cluster_after=0.0"]
    command = [sys.executable, str(SCRIPT), "run", str(data), "--output", str(tmp_path / "out"), "--device", "cpu"]
    command += ["--weights", str(tmp_path / "run"), "--seeds", "0", "1", "--set", *small]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "SIAMMM_COMMIT": "a1b2c3d"}
    subprocess.run([*command, "--ways", "frozen"], check=True, env=environment, cwd=tmp_path)
    done = (tmp_path / "out" / "frozen-8-0.json").stat().st_mtime_ns
    subprocess.run(command, check=True, env=environment, cwd=tmp_path)
    assert (tmp_path / "out" / "frozen-8-0.json").stat().st_mtime_ns == done
    assert len(list((tmp_path / "out").iterdir())) == 6
    found = json.loads((tmp_path / "out" / "trained-8-1.json").read_text())
    assert (found["n"], found["n_judged"], found["kinds"], found["commit"]) == (48, 12, 3, "a1b2c3d")
    table = [
        sys.executable,
        str(SCRIPT),
        "table",
        "--output",
        str(tmp_path / "out"),
        "--records",
        str(tmp_path / "rec"),
    ]
    subprocess.run(table, check=True, env=environment, cwd=tmp_path)
    (record,) = (tmp_path / "rec").iterdir()
    assert "| from nothing | 8 | 2 |" in record.read_text()
