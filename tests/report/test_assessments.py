"""Figures, suspects and another run beside this one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import adjusted_mutual_info_score, adjusted_rand_score, normalized_mutual_info_score

from siammm.cli import main
from siammm.core.errors import InputError, StoredFileError
from siammm.report import assessments
from siammm.report.gather import GatherSettings, gather
from siammm.runs.evaluation import Evaluation, Figure, Result
from siammm.runs.run import Run
from tests.report.made_runs import check_contents, made_run, opened, rewrite


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return opened(made_run(tmp_path))


# -- evaluations


def write_evaluation(folder: Path, path: Path | None, *, seen: bool = False, **subject: Any) -> Path:
    figures = {"top-1": Figure.of([0.5, 0.75]), "<b>": Figure.of([0.25])}
    found = Evaluation(
        subject={"name": "run", **({"path": str(path)} if path else {}), **subject},
        data={},
        test_images={"seen": seen, "why": "A tenth was held out."},
        seeds=[0, 1],
        results=[Result(protocol="knn", recipe="k = 20 & more", settings={}, figures=figures)],
        environment={},
    )
    folder.mkdir(parents=True)
    found.write(folder)
    return folder


def test_figures_of_an_evaluation(run: Run, here: Path) -> None:
    write_evaluation(here / "made-evaluation", run.path.resolve(), seen=True)
    contents = gather(run, GatherSettings()).contents
    check_contents(contents, run)
    first, second = contents["figures"]
    assert (first["protocol"], first["name"], first["value"], first["note"]) == ("knn", "top-1", 0.625, "k = 20 & more")
    assert first["deviation"] == pytest.approx(np.std([0.5, 0.75], ddof=1), rel=1e-5)
    assert (second["name"], second["deviation"]) == ("<b>", None)
    assert "About the figures: A tenth was held out." in contents["notes"]


def test_an_evaluation_of_another_run(run: Run, here: Path) -> None:
    folder = write_evaluation(here / "made-evaluation", Path("/other/made"))
    contents = gather(run, GatherSettings()).contents
    assert contents["figures"] == []
    assert any("is of another run (/other/made); its figures are not shown" in note for note in contents["notes"])
    contents = gather(run, GatherSettings(evaluation=folder)).contents
    assert len(contents["figures"]) == 2
    assert any("shown all the same" in note for note in contents["notes"])


@pytest.mark.parametrize(
    ("changed", "is_shown"),
    [
        ({}, True),
        ({"n_clusters": 6}, False),
        ({"epochs": 200}, False),
        ({"random_state": 1}, False),
        ({"trained_on": {"fingerprint": "of other images"}}, False),
        ({"trained_on": None}, True),
    ],
)
def test_an_evaluation_of_what_lay_there_before(changed: dict[str, Any], is_shown: bool, run: Run, here: Path) -> None:
    """A run that was trained anew has the path of the one before it, and not its figures."""
    config = run.config
    same = {
        "n_clusters": 5,
        "epochs": config.optimisation.epochs,
        "random_state": config.run.random_state,
        "trained_on": {"data": "made", "fingerprint": run.facts["fingerprint"]},
    }
    folder = write_evaluation(here / "made-evaluation", run.path.resolve(), **(same | changed))
    contents = gather(run, GatherSettings()).contents
    assert bool(contents["figures"]) is is_shown
    assert any("is of an earlier run of this name" in note for note in contents["notes"]) is not is_shown
    assert gather(run, GatherSettings(evaluation=folder)).contents["figures"], "who names it wants it"


def test_what_is_missing_is_asked_for(run: Run) -> None:
    notes = " ".join(gather(run, GatherSettings()).contents["notes"])
    assert f"siammm evaluate {run.path}" in notes
    assert f"siammm audit {run.path}" in notes
    with pytest.raises(StoredFileError, match="There is no evaluation of nowhere"):
        gather(run, GatherSettings(evaluation=Path("nowhere")))
    with pytest.raises(InputError, match=r"There is no audit in nowhere: it has no suspects.parquet"):
        gather(run, GatherSettings(audit=Path("nowhere")))


# -- audits


def write_audit(folder: Path, ids: list[str], **columns: Any) -> Path:
    n = len(ids)
    folder.mkdir()
    table = {
        "rank": np.arange(1, n + 1),
        "id": ids,
        "label": ["label 0"] * n,
        "suggested": ["</script>new"] * n,
        "probability": np.linspace(0.01, 0.9, n).astype(np.float32),
        "score": np.linspace(-9, 3, n),
        "component": np.full(n, 0.25, np.float32),
        "linear": [None, *np.full(n - 1, 0.5)],
        "cluster": np.zeros(n, np.int32),
        "planted": np.zeros(n, bool),
    }
    pq.write_table(pa.table(table | columns), folder / "suspects.parquet")
    (folder / "summary.json").write_text(json.dumps({"threshold": 0.3}))
    return folder


def test_suspects_are_those_below_the_threshold(run: Run, here: Path) -> None:
    write_audit(here / "made-audit", [str(i) for i in (7, 3, 150, 9, 11, 12)])
    contents = gather(run, GatherSettings()).contents
    check_contents(contents, run)
    suspects = contents["suspects"] or []
    names = contents["label_names"] or []
    assert [contents["images"]["id"][suspect["image"]] for suspect in suspects] == ["7", "3"]
    assert [suspect["rank"] for suspect in suspects] == [1, 2]
    assert names[suspects[0]["given"]] == "label 0"
    assert names[suspects[0]["proposed"]] == "</script>new"
    assert suspects[0]["score"] == pytest.approx(0.99)
    assert suspects[0]["evidence"] == [("component", 0.25)]
    assert suspects[1]["evidence"] == [("component", 0.25), ("linear", 0.5)]
    assert [suspect["group_label"] for suspect in suspects] == [-1, -1]  # an audit without groups


def test_a_suspect_says_the_label_of_its_group_where_that_is_another(run: Run, here: Path) -> None:
    labels, disagrees = ["label 0", "label 1", "label 1"], [False, True, True]
    ids = [str(i) for i in (7, 3, 5)]
    write_audit(here / "made-audit", ids, probability=[0.1] * 3, group_label=labels, group_disagrees=disagrees)
    contents = gather(run, GatherSettings()).contents
    names = contents["label_names"] or []
    found = [suspect["group_label"] for suspect in contents["suspects"] or []]
    assert [code if code < 0 else names[code] for code in found] == [-1, "label 1", "label 1"]


def test_suspects_of_images_that_the_run_has_not(run: Run, here: Path) -> None:
    folder = write_audit(here / "elsewhere", ["7", "none such", "8"], probability=[0.1, 0.1, 0.1])
    contents = gather(run, GatherSettings(audit=Path(folder.name))).contents
    assert len(contents["suspects"] or []) == 2
    assert any("1 of 3 suspects in elsewhere are not images of this run" in note for note in contents["notes"])


def test_the_worst_of_many(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assessments, "MOST_SUSPECTS", 3)
    write_audit(here / "made-audit", [str(i) for i in range(9)], probability=np.full(9, 0.1))
    contents = gather(run, GatherSettings()).contents
    assert [suspect["rank"] for suspect in contents["suspects"] or []] == [1, 2, 3]
    assert "Of 9 suspect labels the 3 worst are shown." in contents["notes"]


def test_labels_that_were_made_wrong_on_purpose(run: Run, here: Path) -> None:
    write_audit(here / "made-audit", ["7", "3", "9"], planted=[False, True, False], probability=[0.1, 0.1, 0.9])
    notes = gather(run, GatherSettings()).contents["notes"]
    assert any("made some labels wrong on purpose (--plant)" in note for note in notes)


def test_an_audit_of_a_run_without_labels(tmp_path: Path, here: Path) -> None:
    run = opened(made_run(tmp_path, n_labels=0))
    write_audit(here / "made-audit", ["7", "3", "9"])
    contents = gather(run, GatherSettings()).contents
    check_contents(contents, run)
    assert contents["label_names"] == ["label 0", "</script>new"]


def test_a_damaged_audit(run: Run, here: Path) -> None:
    (here / "made-audit").mkdir()
    (here / "made-audit" / "suspects.parquet").write_bytes(b"no table")
    with pytest.raises(StoredFileError, match=r"suspects.parquet is not an audit, or it is damaged"):
        gather(run, GatherSettings())


def test_a_real_audit(tmp_path: Path, here: Path) -> None:
    """What the command writes is what is read: all columns but those known by name are witnesses."""
    rng = np.random.default_rng(0)
    truth = np.arange(120) % 4
    rows = (np.eye(4, 8)[truth] + 0.1 * rng.normal(size=(120, 8))).astype(np.float32)
    labels = np.array(["ant", "bee", "cat", "dog"])[truth]
    labels[[3, 50]] = "bee"
    labels[50] = "ant"
    np.savez("t.npz", embeddings=rows, labels=labels)
    assert main(["audit", "t.npz", "--output", "audited", "--device", "cpu"]) == 0
    folder = made_run(tmp_path, n=120, name="other")
    rewrite(folder, label=labels.tolist())
    run = opened(folder)
    contents = gather(run, GatherSettings(audit=Path("audited"))).contents
    check_contents(contents, run)
    found = {contents["images"]["id"][suspect["image"]]: suspect for suspect in contents["suspects"] or []}
    assert {"3", "50"} <= set(found)
    assert [name for name, _ in found["3"]["evidence"]] == ["neighbours", "linear", "kernel"]
    names = contents["label_names"] or []
    assert (names[found["3"]["given"]], names[found["3"]["proposed"]]) == ("bee", "dog")


# -- another run


def test_a_comparison(tmp_path: Path, run: Run) -> None:
    other = made_run(tmp_path, name="other", k=3, seed=1, pixels=np.load(tmp_path / "made-images.npy"))
    contents = gather(run, GatherSettings(compare=other)).contents
    check_contents(contents, run)
    comparison = contents["comparison"]
    assert comparison is not None
    theirs = opened(other).cluster_N
    mine = run.cluster_N
    scores = dict(comparison["scores"])
    assert scores["AMI"] == pytest.approx(adjusted_mutual_info_score(theirs, mine), abs=1e-5)
    assert scores["NMI"] == pytest.approx(normalized_mutual_info_score(theirs, mine), abs=1e-5)
    assert scores["ARI"] == pytest.approx(adjusted_rand_score(theirs, mine), abs=1e-5)
    assert (comparison["name"], comparison["n_shared"]) == ("other", 200)
    assert comparison["other_sizes"] == np.bincount(theirs, minlength=3).tolist()
    assert [matching["cluster"] for matching in comparison["clusters"]] == list(range(5))
    for matching in comparison["clusters"]:
        counts = [count for _, count in matching["others"]]
        assert counts == sorted(counts, reverse=True)
        assert sum(counts) == contents["clusters"][matching["cluster"]]["size"], "three others are all shown"
        assert matching["n_shared"] == sum(counts)
        for k, count in matching["others"]:
            assert count == ((mine == matching["cluster"]) & (theirs == k)).sum()


def test_a_cluster_that_is_in_many_of_the_other(tmp_path: Path) -> None:
    """Shares are of all its images, not of those in the few clusters that are listed."""
    run = opened(made_run(tmp_path, n=200, k=1))
    other = made_run(tmp_path, name="other", k=12, seed=1, pixels=np.load(tmp_path / "made-images.npy"))
    comparison = gather(run, GatherSettings(compare=other)).contents["comparison"]
    assert comparison is not None
    (matching,) = comparison["clusters"]
    assert matching["n_shared"] == 200
    assert len(matching["others"]) == 6
    assert sum(count for _, count in matching["others"]) < 200


def test_numbers_are_no_names(tmp_path: Path, run: Run) -> None:
    """Rows of another array have the same numbers, and are other images."""
    other = made_run(tmp_path, name="other", seed=1)
    contents = gather(run, GatherSettings(compare=other)).contents
    check_contents(contents, run)
    comparison = contents["comparison"]
    assert comparison is not None
    assert (comparison["n_shared"], comparison["scores"], comparison["clusters"]) == (0, [], [])
    assert "The run other is of other images, so clusters cannot be matched." in contents["notes"]


def test_a_run_beside_itself(run: Run) -> None:
    comparison = gather(run, GatherSettings(compare=run.path)).contents["comparison"]
    assert comparison is not None
    assert dict(comparison["scores"]) == {"AMI": 1.0, "NMI": 1.0, "ARI": 1.0}


def test_images_are_matched_by_name(tmp_path: Path, run: Run) -> None:
    other = made_run(tmp_path, name="other")
    rewrite(other, id=[str(i) if i < 50 else f"x{i}" for i in range(200)])
    comparison = gather(run, GatherSettings(compare=other)).contents["comparison"]
    assert comparison is not None
    assert comparison["n_shared"] == 50
    rewrite(other, id=[f"x{i}" for i in range(200)])
    contents = gather(run, GatherSettings(compare=other)).contents
    check_contents(contents, run)
    comparison = contents["comparison"]
    assert comparison is not None
    assert (comparison["n_shared"], comparison["scores"], comparison["clusters"]) == (0, [], [])
    assert any("is of other images" in note for note in contents["notes"])
