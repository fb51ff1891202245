"""The table of runs says what was trained on, what judged, and how to run each again."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "benchmarks" / "results" / "runs"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = importlib.import_module("train_cifar_table")

    def made(*names: str) -> str:
        words = ["train_cifar_table.py", *(str(RUNS / f"{name}.json") for name in names)]
        words += ["--question", "which", "--title", "Which?", "--note", "A note.", "--output", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", words)
        script.main()
        (found,) = tmp_path.glob("*which.md")
        return found.read_text("utf-8")

    return made


@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("siammm-screened-645-0", "50,000 training images, 10,000 test images"),
        ("validation-screen-1-110-0", "40,000 training images, 10,000 held out"),
        ("validation-long-base-110-0", "45,000 training images, 5,000 held out"),  # from before a run noted it
    ],
)
def test_how_many_images_were_trained_on_and_judged(table: Any, name: str, n: str) -> None:
    assert f"| n | {n} |" in table(name)


def test_every_run_has_its_row_its_command_and_its_commit(table: Any) -> None:
    text = table("siammm-muon-580-0", "siammm-screened-645-0")
    assert "| commit | 973de8a; 0ea0332 |" in text
    assert "--epochs 580 --set" in text
    assert "| 580 | 0.9066 | 0.9183 | 0.9079 | 0.9235 |" in text
    assert "| 645 | 0.9213 | 0.9327 | 0.9230 | 0.9364 |" in text
    assert text.rstrip().endswith("A note.")
