"""The record: mean and deviation, what is written is read back, and figures are compared only where they may be."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from siammm.core.errors import StoredFileError
from siammm.evaluate.comparison import compare
from siammm.runs.evaluation import (
    FILE,
    Evaluation,
    Figure,
    Result,
    commit,
    default_output,
    environment,
    read_evaluation,
)


def evaluation(name: str = "a", top1: float = 0.5, **changes: Any) -> Evaluation:
    result = Result(
        protocol="knn",
        recipe="vote",
        settings={"rules": [[200, 0.1]]},
        figures={"top-1": Figure.of([top1]), "clusters": Figure.of([3])},
        neutral=["clusters"],
        detail={"curve": [{"epoch": 1, "n_clusters": 4}]},
        seconds=1.5,
    )
    whole = Evaluation(
        subject={"name": name, "kind": "run", "encoder": "online"},
        data={
            "train": {"name": "x", "fingerprint": "1"},
            "test": {"name": "y", "fingerprint": "2"},
            "split": {"kind": "given"},
        },
        test_images={"seen": False, "clustered": False, "in_train": 0, "why": ""},
        seeds=[0],
        results=[result],
        environment={"commit": "abc"},
    )
    return dataclasses.replace(whole, **changes)


def test_figures_over_seeds() -> None:
    values = [0.1, 0.4, 0.7, 0.2]
    figure = Figure.of(values)
    assert figure.mean == pytest.approx(np.mean(values))
    assert figure.deviation == pytest.approx(np.std(values, ddof=1))
    assert Figure.of([0.3]) == Figure(values=[0.3], mean=0.3, deviation=None)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    one = evaluation()
    one.write(tmp_path)
    assert read_evaluation(tmp_path) == read_evaluation(tmp_path / FILE) == one
    assert json.loads((tmp_path / FILE).read_text())["format"] == 1


def test_the_evaluation_of_a_run_is_found_by_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "one").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for place in (default_output("runs/one"), Path("runs/one-evaluation")):
        place.mkdir()
        evaluation().write(place)
        assert read_evaluation(Path("runs/one")) == evaluation()
        (place / FILE).unlink()


@pytest.mark.parametrize(
    ("subject", "folder"),
    [
        ("runs/one", "one-evaluation"),
        ("timm:resnet50", "resnet50-evaluation"),
        ("timm:resnet50:a/b.pth", "resnet50-b-evaluation"),
        ("x/table.npz", "table-evaluation"),
    ],
)
def test_where_an_evaluation_goes(subject: str, folder: str) -> None:
    assert default_output(subject) == Path(folder)


def test_files_that_are_no_evaluations(tmp_path: Path) -> None:
    with pytest.raises(StoredFileError, match="make one with: siammm evaluate"):
        read_evaluation(tmp_path)
    for text in ("", "[]", "{}", '{"format": 1}', '{"format": 1, "results": [{"figures": {}}]}'):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(StoredFileError, match="is not an evaluation"):
            read_evaluation(tmp_path)
    (tmp_path / FILE).write_text('{"format": 2}')
    with pytest.raises(StoredFileError, match="another version"):
        read_evaluation(tmp_path)


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    commit.cache_clear()
    monkeypatch.setenv("SIAMMM_COMMIT", "c0ffee")
    found = environment("siammm evaluate x")
    commit.cache_clear()
    assert (found["commit"], found["command"]) == ("c0ffee", "siammm evaluate x")
    assert {"siammm", "torch", "timm", "numpy", "scikit-learn"} <= found["versions"].keys()


# -- comparing


def test_the_best_is_marked_and_counts_are_not() -> None:
    found = compare([evaluation("a", 0.5), evaluation("b", 0.7), evaluation("c", 0.70001)])
    assert (found.names, found.warnings) == (["a", "b", "c"], [])
    first, second = found.rows
    assert (first.name, first.best) == ("top-1", [False, True, True])  # equal in all digits that are shown
    assert (second.name, second.neutral, second.best) == ("clusters", True, [False] * 3)


def test_what_was_measured_once_is_not_marked() -> None:
    other = dataclasses.replace(evaluation().results[0], protocol="linear")
    found = compare([evaluation("a"), evaluation("b", results=[other])])
    assert [(row.protocol, row.best) for row in found.rows if not row.neutral] == [
        ("knn", [False, False]),
        ("linear", [False, False]),
    ]
    assert [figure is None for figure in found.rows[0].figures] == [False, True]


@pytest.mark.parametrize("part", ["train", "test"])
def test_other_images_are_not_compared(part: str) -> None:
    data = evaluation().data | {part: {"name": "z", "fingerprint": "3"}}
    found = compare([evaluation("a", 0.5), evaluation("b", 0.7, data=data)])
    assert not any(any(row.best) for row in found.rows)
    assert any(
        f"The {'training' if part == 'train' else 'test'} images or their labels differ" in text
        for text in found.warnings
    )


def test_other_recipes_are_not_compared() -> None:
    changed = dataclasses.replace(evaluation().results[0], settings={"rules": [[20, 0.1]]})
    found = compare([evaluation("a", 0.5), evaluation("b", 0.7, results=[changed])])
    assert not any(any(row.best) for row in found.rows)
    assert found.warnings == ["The recipes of knn differ (rules): its figures cannot be compared, and none is marked."]


def test_seeds_and_seen_images_are_told() -> None:
    seen = {"seen": True, "clustered": True}
    found = compare([evaluation("a"), evaluation("b", seeds=[1], test_images=seen), evaluation("a")])
    assert found.names == ["a #1", "b", "a #2"]
    assert any("were seen in training differs (a #1: no; b: yes; a #2: no)" in text for text in found.warnings)
    assert any("The seeds differ" in text for text in found.warnings)


def test_other_labels_of_the_same_images_are_not_compared() -> None:
    plain = evaluation().data
    data = [plain | {"test": plain["test"] | {"labels": digest}} for digest in ("3", "4")]
    found = compare([evaluation("a", 0.5, data=data[0]), evaluation("b", 0.7, data=data[1])])
    assert not any(any(row.best) for row in found.rows)
    assert any("The test images or their labels differ" in text for text in found.warnings)
    # An evaluation that does not say which labels they were is taken to be of the same.
    assert any(any(row.best) for row in compare([evaluation("a", 0.5), evaluation("b", 0.7, data=data[1])]).rows)


def test_other_images_of_transfer_are_told() -> None:
    result = dataclasses.replace(evaluation().results[0], protocol="transfer")
    data = [evaluation().data | {"transfer": {"fingerprint": f}, "transfer_test": {"fingerprint": "5"}} for f in "67"]
    same = compare([evaluation("a", results=[result], data=data[0]), evaluation("b", results=[result], data=data[0])])
    assert (any(row.best[0] for row in same.rows), same.warnings) == (True, [])
    other = compare([evaluation("a", results=[result], data=data[0]), evaluation("b", results=[result], data=data[1])])
    assert not any(any(row.best) for row in other.rows)
    assert other.warnings == ["The images of transfer differ: its figures cannot be compared, and none is marked."]


def test_the_evaluation_of_a_table_is_found_by_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("table.npz").write_bytes(b"PK")
    (tmp_path / "table-evaluation").mkdir()
    evaluation("table.npz").write(tmp_path / "table-evaluation")
    assert read_evaluation(Path("table.npz")).subject["name"] == "table.npz"
