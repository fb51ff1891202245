"""Accuracy against K, and time against initialisations, drawn from the records of studies."""

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
def study_figures(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("study_figures")


def drawn(study_figures: Any, monkeypatch: pytest.MonkeyPatch, what: str, folder: Path) -> list[str]:
    figure = folder / "figure.svg"
    words = ["study_figures.py", what, f"Digits={folder}/cifar10-*", "--figure", str(figure)]
    monkeypatch.setattr(sys, "argv", words)
    study_figures.main()
    parts = ElementTree.fromstring(figure.read_text("utf-8"))
    return [part.get("class", "") for part in parts.iter() if part.tag.endswith("polyline")]


def test_accuracy_is_drawn_against_k_with_both_correlations(
    study_figures: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    looked = [
        {"epoch": epoch, "knn": 0.5 + 0.01 * epoch, "n_clusters": k}
        for epoch, k in ((1, None), (2, 100), (3, 60), (4, 40), (5, 30))
    ]
    for name, merge in (("cifar10-auto-0", "auto"), ("cifar10-paper-0", "paper"), ("tiny-auto-0", "auto")):
        (tmp_path / f"{name}.json").write_text(json.dumps({"settings": {"merge": merge}, "looked": looked}))
    (tmp_path / "cifar10-bad-0.json").write_text(json.dumps({"settings": {}, "failed": "collapsed"}))
    assert drawn(study_figures, monkeypatch, "accuracy", tmp_path) == ["auto", "paper"]
    said = capsys.readouterr().out
    assert "Digits, cifar10-auto-0: log K and kNN -0.99" in said
    assert "epoch and kNN +1.000" in said
    assert "tiny" not in said


def test_times_are_multiples_of_the_shortest(
    study_figures: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for n, k, rate in ((0, 1000, 100), (0, 4000, 80), (1, 1000, 50), (5, 1000, 20)):
        settings = {"centroids": "reinitialised", "n_init": n} if n else {}
        record = {"settings": settings, "n_clusters_at_start": k, "images_per_second": rate}
        (tmp_path / f"cifar10-{n}-{k}-0.json").write_text(json.dumps(record))
    runs = study_figures.records(f"{tmp_path}/cifar10-*")
    assert study_figures.times(list(runs.values())) == {
        0: [(1000.0, 1.0), (4000.0, 1.25)], 1: [(1000.0, 2.0)], 5: [(1000.0, 5.0)],
    }  # fmt: skip
    assert drawn(study_figures, monkeypatch, "time", tmp_path) == ["auto", "paper", "paper"]
