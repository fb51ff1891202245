"""K through training, drawn from the records of a study."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def curve_of_k(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("curve_of_k")


def run_of(merge: str, start: int, curve: list[int | None], left: int) -> dict[str, Any]:
    return {
        "settings": {"merge": merge, "random_state": 0}, "n": 500, "n_classes": 10, "n_groups": 9,
        "n_clusters_at_start": start, "n_clusters": left, "k_curve": curve, "commit": "abc", "hardware": "a CPU",
        "software": "Python",
    }  # fmt: skip


def test_a_curve_begins_where_clusters_do_and_ends_with_what_is_left(curve_of_k: Any) -> None:
    run = run_of("auto", 100, [None, None, 80, 60], 12)
    assert curve_of_k.curve_of(run) == [(2, 100), (3, 80), (4, 60), (4, 12)]


def test_the_figure_and_the_record(curve_of_k: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = tmp_path / "cells"
    cells.mkdir()
    (cells / "auto-0.json").write_text(json.dumps(run_of("auto", 100, [None, 80, 60, 40, 20], 12)))
    (cells / "paper-0.json").write_text(json.dumps(run_of("paper", 50, [None, 40, 30, 20, 10], 10)))
    figure = tmp_path / "curve.svg"
    words = ["curve_of_k.py", f"Digits={cells}", f"More={cells}", "--figure", str(figure), "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    curve_of_k.main()
    drawn = ElementTree.fromstring(figure.read_text("utf-8"))
    lines = [part.get("class") for part in drawn.iter() if part.tag.endswith("polyline")]
    assert lines == ["auto", "paper"] * 2
    (record,) = tmp_path.glob("*-curve-of-k.md")
    assert "| Digits | auto-0 | 100 | 80 | 60 | 40 | 20 | 12 | 9 | 10 |" in record.read_text("utf-8")


def test_a_folder_without_records_is_refused(curve_of_k: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["curve_of_k.py", f"Digits={tmp_path}", "--figure", str(tmp_path / "f.svg")])
    with pytest.raises(SystemExit):
        curve_of_k.main()
