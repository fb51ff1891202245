"""Studies: every cell is allowed and trains, evaluations measure, what is cut off goes on, and the paper is judged."""

from __future__ import annotations

import importlib
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from siammm.data.sources import open_source
from siammm.settings.fields import value_of

ROOT = Path(__file__).parents[2]
STUDIES = sorted((ROOT / "benchmarks" / "studies").glob("*.json"))

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.fixture
def study_cells() -> Any:
    return importlib.import_module("study_cells")


@pytest.fixture
def study() -> Any:
    return importlib.import_module("study")


@pytest.fixture
def study_table() -> Any:
    return importlib.import_module("study_table")


# -- the studies that are there


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_study_says_what_it_asks_and_all_its_cells_are_allowed(
    study_cells: Any, study_table: Any, path: Path
) -> None:
    found = study_cells.read_study(path)
    assert found["predictions"]
    assert found["text"]
    assert found["baseline"] in found["cells"]
    cells = study_cells.cells_of(found)
    for cell in cells:
        cell.check()
    assert len({cell.identity for cell in cells}) == len(cells), "no training is done twice"
    if "sets" in found:
        assert found["table"]
    for claim in found.get("claims", []):
        assert {claim["better"], claim["than"]} <= set(found["cells"])
        assert claim["says"]
        assert claim["figure"] in {
            *study_table.COLUMNS.values(), *study_table.FEW_LABELS.values(), *study_table.CLUSTERS.values()
        }  # fmt: skip


def test_every_table_of_the_paper_has_a_study() -> None:
    said = " ".join(json.loads(path.read_text("utf-8")).get("table", "") for path in STUDIES)
    assert all(f"T{number}" in said for number in range(1, 9))


def test_the_settings_of_a_cell_are_those_of_its_base_its_set_and_its_own(study_cells: Any) -> None:
    found = study_cells.read_study(ROOT / "benchmarks" / "studies" / "t5-fixed-or-merged.json")
    by_label = {cell.label: cell for cell in study_cells.cells_of(found)}
    merged = by_label["cifar100-merged-5x-1"].config()
    assert value_of(merged, "n_components") == 2000
    assert value_of(merged, "merge_floor") == 500
    assert value_of(merged, "merge") == "paper"
    assert value_of(merged, "epochs") == 100
    assert value_of(merged, "random_state") == 1
    fixed = by_label["cifar10-fixed-5x-0"]
    assert value_of(fixed.config(), "n_components") == 50
    words = fixed.words(Path("data"), Path("out"))
    assert words[3:9] == [str(Path("data/cifar10")), "--recipe", "siammm-paper", "--epochs", "100", "--preset"]
    assert "concentration_dims=150" in words


def test_the_same_training_under_two_names_is_done_once(study_cells: Any, study: Any, tmp_path: Path) -> None:
    first, second = (
        study_cells.cells_of(study_cells.read_study(ROOT / "benchmarks" / "studies" / f"{name}.json"), [0])
        for name in ("t6-start", "t8-negatives")
    )
    same = next(cell for cell in first if cell.label == "cifar10-soft-4000-0")
    other = next(cell for cell in second if cell.label == "cifar10-siammm-0")
    assert same.identity == other.identity
    (tmp_path / "t6").mkdir()
    (tmp_path / "t8").mkdir()
    record = {"recipe": "siammm-paper", "identity": same.identity, "evaluations": ["linear", "clusters"], "knn": 0.5}
    (tmp_path / "t6" / f"{same.label}.json").write_text(json.dumps(record))
    found = study_cells.read_study(ROOT / "benchmarks" / "studies" / "t8-negatives.json")
    assert other.label not in [cell.label for cell in study.left(found, tmp_path / "t8", None, seeds=[0])]
    assert json.loads((tmp_path / "t8" / f"{other.label}.json").read_text())["from_study"] == "t6"
    # What was measured by less is trained again.
    record["evaluations"] = ["linear"]
    (tmp_path / "t8" / f"{other.label}.json").unlink()
    (tmp_path / "t6" / f"{same.label}.json").write_text(json.dumps(record))
    assert other.label in [cell.label for cell in study.left(found, tmp_path / "t8", None, seeds=[0])]


# -- trainings on a few small images

CLASSES = 4
# Of every size that costs time, little; what a cell is about stays.
_SMALL: dict[str, Any] = {
    "backbone": "conv-small", "image_size": 16, "view_size": 16, "hidden_dim": 16, "embedding_dim": 8, "batch_size": 8,
    "predictor_hidden_dim": 8, "tensorboard": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sets of squares in the colours of their classes."""
    folder = tmp_path_factory.mktemp("sets")
    random = np.random.default_rng(0)
    for name in ("cifar10", "cifar100", "tiny"):
        (folder / name).mkdir()
        for part, n in (("train", 80), ("test", 40)):
            labels = np.arange(n) % CLASSES
            images = random.integers(0, 120, (n, 16, 16, 3), dtype=np.uint8)
            images[..., 0] += (labels * 30).astype(np.uint8)[:, None, None]
            np.savez(folder / name / f"{part}.npz", images=images, labels=labels)
    return folder


def small(cell: Any, study_cells: Any, *, epochs: int = 1) -> Any:
    """The cell with a small network and few images, and of numbers of clusters the order."""
    settings = dict(cell.settings) | _SMALL
    for name, most in (("n_components", 12), ("merge_floor", 4), ("concentration_dims", 4), ("em_steps", 2)):
        if settings.get(name):
            settings[name] = CLASSES if cell.is_oracle and name == "n_components" else min(settings[name], most)
    of = value_of(cell.config(), "more_components")
    settings |= {"more_components": [6] * len(of)} if of else {}
    settings |= {"queue_size": 16} if value_of(cell.config(), "queue_size") else {}
    settings |= {"n_prototypes": 6} if value_of(cell.config(), "cluster_loss") == "swapped" else {}
    settings |= {"n_components": 8} if "n_components" not in settings else {}
    how = {key: value for key, value in cell.how.items() if key not in ("images", "evaluations", "keep", "keep_at")}
    return replace(cell, how=how | {"epochs": epochs}, settings=settings)


def train(monkeypatch: pytest.MonkeyPatch, cell: Any, data: Path, output: Path, *more: str) -> dict[str, Any] | None:
    """Run the cell's training in this process."""
    train_cifar = importlib.import_module("train_cifar")
    words = cell.words(data if cell.image_set else data / "cifar10", output)
    # torch.cuda stays out of it, and timm, whose import takes seconds.
    monkeypatch.setattr(sys, "argv", [words[2], *words[3:], *more])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    train_cifar.main()
    found = next(output.glob("*.json"), None)
    return None if found is None else json.loads(found.read_text("utf-8"))


def every_kind() -> list[Any]:
    """One parameter for each different cell of all studies; few of them are in the default suite."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        cells = importlib.import_module("study_cells")
    finally:
        sys.path.pop(0)
    found: dict[str, Any] = {}
    for path in STUDIES:
        read = cells.read_study(path)
        for cell in cells.cells_of(read, [0]):
            if cell.image_set in (None, next(iter(read.get("sets") or [None]))):
                found.setdefault(cell.identity, (path.stem, cell))
    quick = {("t4-losses", "clusters"), ("q5-oracle", "oracle-full"), ("t7-concentration", "again-5")}
    return [
        pytest.param(cell, id=f"{stem}-{cell.name}", marks=() if (stem, cell.name) in quick else pytest.mark.slow)
        for stem, cell in found.values()
    ]


@pytest.mark.parametrize("cell", every_kind())
def test_every_kind_of_cell_trains(
    monkeypatch: pytest.MonkeyPatch, study_cells: Any, data: Path, tmp_path: Path, cell: Any
) -> None:
    found = train(monkeypatch, small(cell, study_cells), data, tmp_path)
    assert found is not None
    assert found["oracle"] == cell.is_oracle
    if "failed" not in found:  # so small a training may collapse, which is recorded
        assert 0 <= found["knn_online"] <= 1


def one_cell(study_cells: Any, **more: Any) -> Any:
    shared = {"preset": "laptop", "recipe": "siammm-paper", "epochs": 2, "set": {"n_components": 8, **_SMALL}, **more}
    study = {"name": "one", "shared": shared, "sets": {"cifar10": {}}, "seeds": [0], "cells": {"siammm": {}}}
    (cell,) = study_cells.cells_of(study)
    return cell


def test_a_training_that_is_asked_to_stop_goes_on_to_the_same_end(
    monkeypatch: pytest.MonkeyPatch, study_cells: Any, data: Path, tmp_path: Path
) -> None:
    cell = one_cell(study_cells, validation=0.2)
    at_once = train(monkeypatch, cell, data, tmp_path / "at-once")
    checkpoint = ["--checkpoint", str(tmp_path / "checkpoint.pt")]
    assert train(monkeypatch, cell, data, tmp_path / "in-two", *checkpoint, "--stop-at", "1") is None
    resume = ["--resume", str(tmp_path / "checkpoint.pt")]
    in_two = train(monkeypatch, cell, data, tmp_path / "in-two", *checkpoint, *resume)
    assert at_once is not None
    assert in_two is not None
    for name in ("knn_online", "n_clusters", "k_curve", "looked", "effective_rank"):
        assert at_once[name] == in_two[name], name
    assert len(in_two["looked"]) == 2


def test_evaluations_are_in_the_record(
    monkeypatch: pytest.MonkeyPatch, study_cells: Any, data: Path, tmp_path: Path
) -> None:
    evaluations = importlib.import_module("study_evaluations")
    plain = evaluations.semi
    # SwAV's thousand updates are for the GPU.
    monkeypatch.setattr(evaluations, "semi", lambda task, seed: plain(task, seed, epochs=1, batch_size=8))
    monkeypatch.setattr(evaluations, "MOSAICS", 60)
    monkeypatch.setattr(evaluations, "CLUSTERS_A_CLASS", (1, 2))
    cell = one_cell(study_cells, evaluations=list(evaluations.EVALUATIONS), epochs=1)
    found = train(monkeypatch, cell, data, tmp_path)
    assert found is not None
    names = ["linear_online", "semi_1_top1", "semi_10_top1", "transfer_cifar100", "transfer_tiny", "transfer_mean"]
    names += ["mosaics_map", "k1_train_ami", "k2_judged_named", "k2_train_hungarian_accuracy"]
    assert all(-1 <= found[name] <= 1 for name in names)
    assert found["evaluation_seconds"] > 0
    assert "transfer_cifar10" not in found


def test_a_mosaic_shows_the_classes_of_its_four_images() -> None:
    evaluations = importlib.import_module("study_evaluations")
    labels = np.arange(30)
    images = np.repeat(labels, 4 * 4 * 3).reshape(30, 4, 4, 3).astype(np.uint8)
    picture_N, target_NC = evaluations.mosaics_of(open_source(images), labels, 50, seed=1)
    assert picture_N.shape == (50, 8, 8, 3)
    for picture, target in zip(picture_N, target_NC, strict=True):
        assert set(np.unique(picture)) == set(np.flatnonzero(target)), "only the first twenty classes"


# -- several at once, within a limit

# Trains for so long: leaves a checkpoint if it is asked to stop, and a record at the end.
_TRAINER = """
import pathlib, signal, sys, time
folder, seconds = pathlib.Path(sys.argv[1]), float(sys.argv[2])
def stop(*_):
    (folder / "checkpoint.pt").write_text("half")
    sys.exit()
signal.signal(signal.SIGTERM, stop)
resumed = "--resume" in sys.argv
time.sleep(0.1 if resumed else seconds)
found = '{"recipe": "byol", "resumed": %s, "seconds": 1, "evaluations": []}' % str(resumed).lower()
(folder / "found.json").write_text(found)
"""


def test_what_the_limit_stops_goes_on_from_its_checkpoint(
    monkeypatch: pytest.MonkeyPatch, study: Any, study_cells: Any, tmp_path: Path
) -> None:
    lengths = {"quick": 0.1, "long": 60.0}
    given = {
        "name": "two", "shared": {"preset": "laptop", "recipe": "byol", "epochs": 1}, "seeds": [0],
        "cells": {name: {} for name in lengths},
    }  # fmt: skip
    monkeypatch.setattr(
        study_cells.Cell, "words",
        lambda cell, data, folder: [sys.executable, "-c", _TRAINER, str(folder), str(lengths[cell.name])],
    )  # fmt: skip
    monkeypatch.setattr(study_cells, "seconds_for", lambda cell, earlier, at_once: (1.0, "known"))
    monkeypatch.setattr(study, "_GRACE", 5.0)
    monkeypatch.setattr(study, "_share_gpu", lambda: None)
    output = tmp_path / "two"
    output.mkdir()
    first = study.left(given, output, None)
    assert [cell.name for cell in first] == ["quick", "long"]
    study.run(first, tmp_path, output, 2, time.monotonic() + 10)
    (second,) = study.left(given, output, None)
    assert second.name == "long"
    study.run([second], tmp_path, output, 2, time.monotonic() + 60)
    record = json.loads((output / "long-0.json").read_text())
    assert record["resumed"]
    assert record["at_once"] == 2
    assert not study.left(given, output, None)


def test_a_plan_says_what_fits(study: Any, study_cells: Any, tmp_path: Path) -> None:
    read = study_cells.read_study(ROOT / "benchmarks" / "studies" / "q2-weight.json")
    cells = study_cells.cells_of(read, [0])
    lines = study.planned(cells, tmp_path / "q2", 4, 300)
    assert [line.split("  ")[0].strip() for line in lines[:-1]] == ["fits"] * 4 + ["does not fit"]
    # An earlier record says how fast it goes: 2 s an epoch of 45,000 images with four at once.
    (tmp_path / "q1").mkdir()
    record = {"recipe": "siammm-cosine", "settings": {"epochs": 40}, "preset": "cifar-fast", "n": 45_000, "at_once": 4}
    record |= {"image_set": "cifar10", "seconds": 45 + 80, "evaluations": []}
    (tmp_path / "q1" / "a-0.json").write_text(json.dumps(record))
    lines = study.planned(cells, tmp_path / "q2", 4, 300)
    assert "127 s" in lines[1]
    assert "records of the recipe" in lines[1]


# -- the table


@pytest.mark.parametrize(
    ("pairs", "same", "expected"),
    [
        ([1.0, 1.2, 0.9], False, "agrees"),
        ([-1.0, -1.2, -0.9], False, "disagrees"),
        ([1.0, -1.2, 0.9], False, "not decided"),
        ([1.0, 1.2], False, "not decided"),  # two seeds decide nothing
        ([0.1, -0.1, 0.0], True, "agrees"),
        ([2.0, 2.1, 1.9], True, "disagrees"),
        ([0.5, 1.5, -0.5], True, "not decided"),
        ([], False, "not decided"),
        ([0.0, 0.0, 0.0], False, "not decided"),
    ],
)
def test_a_verdict_needs_two_standard_errors(study_table: Any, pairs: list[float], same: bool, expected: str) -> None:
    assert study_table.verdict(pairs, same=same) == expected


def test_a_table_stands_beside_the_papers(study_table: Any, tmp_path: Path) -> None:
    study = {
        "name": "small", "title": "A small table", "text": "What is asked.", "table": "T5",
        "paper": "Merged is better.", "baseline": "fixed", "predictions": ["Merged is better."], "seeds": [0, 1, 2],
        "sets": {"cifar10": {}},
        "shared": {"epochs": 1},
        "cells": {"fixed": {"set": {"merge": "none"}}, "merged": {}, "told": {"oracle": True}, "bad": {}},
        "claims": [
            {"says": "merged", "better": "merged", "than": "fixed", "figure": "linear_online", "paper": 1.4},
            {"says": "an oracle", "better": "told", "than": "fixed", "figure": "linear_online"},
        ],
    }  # fmt: skip
    output = tmp_path / "records"
    output.mkdir()
    circumstances = {"commit": "abc", "hardware": "a CPU", "software": "Python", "judged": "the test images"}
    for name, linear in (("fixed", 0.8), ("merged", 0.82), ("told", 0.95), ("bad", None)):
        for seed in range(3):
            record = {"evaluations": [], "n": 100, "n_judged": 50, "oracle": name == "told", **circumstances}
            if linear is None:
                record["failed"] = "The embeddings have collapsed. More."
            else:
                record |= {"knn_online": linear - 0.05, "linear_online": linear + 0.001 * seed * (name == "merged")}
                record |= {"semi_1_top1": 0.4}
            (output / f"cifar10-{name}-{seed}.json").write_text(json.dumps(record))
    path = study_table.written(tmp_path / "small.json", study, output, tmp_path)
    text = path.read_text("utf-8")
    claims = [line for line in text.splitlines() if line.startswith("| T5 |")]
    assert claims[0].endswith("| +1.4 | cifar10 | merged - fixed, linear_online | +2.10 ± 0.06 | 3 | agrees |")
    assert claims[1].endswith("| not measured | 0 | not decided |"), "an oracle is compared with nothing"
    assert "| told (oracle) | 3 |" in text
    assert "(3 of 3 failed: The embeddings have collapsed)" in text
    assert "| cell | 1 %: top-1 |\n" in text
    assert "| merged | 0.4000 ± 0.0000 |\n" in text
    assert "a diagnosis, not a result" in text
