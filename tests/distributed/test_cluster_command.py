"""``siammm cluster`` on two ranks gives what it gives in one process, and ends as one. Real gloo, on this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file
from sklearn.datasets import load_digits

from siammm.cli import main
from siammm.core.errors import LostRankError
from tests.commands import refused
from tests.conftest import Known, needs_command_line
from tests.distributed.launch import LOOPBACK, environment, free_port, run_ranks
from tests.faults.runs import one_sentence
from tests.nursery import ROOT, Nursery

pytestmark = [needs_command_line, pytest.mark.usefixtures("one_thread_per_module")]

WORLD = 2
CASES: dict[str, list[str]] = {
    "npy": ["x.npy"],
    "parquet": ["part-*.parquet", "--n-components", "40"],
    "range": ["part-{0..3}.parquet", "--n-components", "6", "--merge", "none", "--family", "gaussian"],
    "npz": ["x.npz", "--id-column", "who", "--n-components", "40", "--merge", "paper", "--merge-floor", "6"],
    "one row": ["row.parquet"],  # the second rank has none
    "digits": ["digits.parquet", "--key", "pixels"],  # clusters across groups are replaced by finer ones
}
FAULTS: dict[str, dict[str, Any]] = {
    "a damaged file": {"arguments": ["cluster", "broken-*.parquet"]},
    "a bad row": {"arguments": ["cluster", "nan.npy"]},
    "a row of zeros": {"arguments": ["cluster", "zeros.npy"]},
    "no file on one rank": {"arguments": [["cluster", "x.npy"], ["cluster", "gone.npy"]]},
    "another column": {"arguments": ["cluster", "mixed-*.parquet"]},
    "a full output": {"arguments": ["cluster", "x.npy", "--output", "full"]},
    "a full disk": {"arguments": ["cluster", "x.npy", "--n-components", "6", "--merge", "none"], "room": 1024},
    "too many components": {"arguments": ["cluster", "x.npy", "--n-components", "901"]},
    "images": {"arguments": ["cluster", "digits"]},
}


def write_tables(folder: Path, X: np.ndarray, y: np.ndarray) -> None:
    """The same rows in several formats, and what is wrong with some of them beyond the first half."""
    names = np.array([f"kind {k}" for k in y], dtype=object)
    names[np.arange(len(X)) % 7 == 3] = None
    where = [f"{row:04}" for row in range(len(X))]
    rows = list(X.astype(np.float32))
    table = pa.table({"id": where, "embedding": rows, "label": list(names), "size": np.arange(len(X)) / 2})
    for number, (first, last) in enumerate([(0, 100), (100, 100), (100, 620), (620, 900)]):
        part = table.slice(first, last - first)
        pq.write_table(part, folder / f"part-{number}.parquet", row_group_size=130)
        pq.write_table(part, folder / f"broken-{number}.parquet", compression="none")
        pq.write_table(part.drop_columns(["size"]) if first == 620 else part, folder / f"mixed-{number}.parquet")
    broken = bytearray((folder / "broken-3.parquet").read_bytes())
    broken[4:2000] = bytes(1996)  # pages, of rows that only the second rank reads
    (folder / "broken-3.parquet").write_bytes(broken)
    labels = np.where(np.arange(len(X)) % 7 == 3, np.nan, y)
    np.savez(folder / "x.npz", embeddings=X.astype(np.float32), who=np.arange(len(X)) * 3, labels=labels)
    np.save(folder / "x.npy", X)
    for name, value in (("nan", np.nan), ("zeros", 0.0)):
        spoilt = X.copy()
        spoilt[700] = value
        np.save(folder / f"{name}.npy", spoilt)
    pixels, digits = load_digits(return_X_y=True)
    of_digits = {"pixels": list(pixels), "others": list(pixels[:, :3]), "label": digits.astype(np.int32)}
    pq.write_table(pa.table(of_digits), folder / "digits.parquet", row_group_size=400)
    pq.write_table(pa.table({"id": ["a"], "X": [[1.0, 2.0]], "label": ["b"]}), folder / "row.parquet")
    (folder / "full").mkdir()
    (folder / "full" / "mine.txt").write_text("mine")


@pytest.fixture(scope="module")
def folder(small: Known, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cluster")
    write_tables(path, small.X, small.y)
    return path


@pytest.fixture(scope="module")
def two(nursery: Nursery, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """How each of two ranks ended, by case; both run all of them in one go."""
    cases: list[dict[str, Any]] = [
        {"name": name, "arguments": ["cluster", *arguments, "--output", f"two {name}"]}
        for name, arguments in CASES.items()
    ]
    cases += [{"name": name, **fault} for name, fault in FAULTS.items()]
    (folder / "cases.json").write_text(json.dumps(cases))
    run_ranks(nursery, "cluster_worker.py", folder, WORLD, timeout=200)
    ended = [json.loads((folder / f"ended.{rank}.json").read_text()) for rank in range(WORLD)]
    return {case["name"]: [rank[case["name"]] for rank in ended] for case in cases}


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_find_what_one_process_finds(
    name: str, two: dict[str, list[dict[str, Any]]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [rank["code"] for rank in two[name]] == [0, 0], two[name]
    monkeypatch.chdir(folder)
    assert main(["cluster", *CASES[name], "--output", f"one {name}"]) == 0
    check_same(folder / f"one {name}", folder / f"two {name}")


def check_same(one_run: Path, other_run: Path) -> None:
    """Two results with the same clusters and groups, and with the same numbers up to rounding."""
    assert sorted(path.name for path in other_run.iterdir()) == sorted(path.name for path in one_run.iterdir())
    one, other = (pq.read_table(run / "assignments.parquet") for run in (one_run, other_run))
    assert other.schema.equals(one.schema)
    for column in one.column_names:
        ours, theirs = other.column(column), one.column(column)
        if column in ("probability", "group_probability"):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
        elif column == "outlier_score":  # a rank: two rows that are nearly as likely may change places
            np.testing.assert_allclose(ours, theirs, atol=2.5 / len(one))
        elif column == "label" and pa.types.is_floating(one.schema.field(column).type):
            np.testing.assert_array_equal(ours, theirs)
        else:
            assert ours.equals(theirs), column
    check_alike(*(json.loads((run / "summary.json").read_text()) for run in (one_run, other_run)))
    models = [load_file(run / "mixture.safetensors") for run in (one_run, other_run)]
    assert models[0].keys() == models[1].keys()
    for part, value in models[0].items():
        np.testing.assert_allclose(models[1][part], value, rtol=1e-3, atol=1e-5, err_msg=part)


def check_alike(one: dict[str, Any], two: dict[str, Any]) -> None:
    """Summaries that say the same, up to rounding."""
    assert one.keys() == two.keys()
    for name in one.keys() - {"seconds", "settings"}:
        if isinstance(one[name], dict):
            check_alike(one[name], two[name])
        elif isinstance(one[name], float | list):
            assert two[name] == pytest.approx(one[name], rel=1e-4), name
        else:
            assert two[name] == one[name], name


def test_the_cases_have_something_to_find(two: dict[str, list[dict[str, Any]]], folder: Path) -> None:
    """Merging, groups, finer clusters and scores."""
    found = {name: json.loads((folder / f"two {name}" / "summary.json").read_text()) for name in CASES}
    assert found["parquet"]["n_components"] == 6
    assert found["digits"]["ratio_of_groups"] < 0.65
    assert found["parquet"]["scores"]["ami"] > 0.9
    assert found["parquet"]["scores"]["n_unlabelled"] == found["npz"]["scores"]["n_unlabelled"] == 129


@pytest.mark.parametrize("name", CASES)
def test_one_rank_speaks(name: str, two: dict[str, list[dict[str, Any]]]) -> None:
    first, second = two[name]
    assert "Written to" in first["out"]
    assert second["out"] == second["err"] == first["err"] == ""


@pytest.mark.parametrize(
    ("name", "of_rank", "said"),
    [
        ("a damaged file", 1, "broken-3.parquet is not a complete Parquet file"),
        ("a bad row", 1, "NaN or infinity in 1 row, the first being row 700"),
        ("a row of zeros", 1, "the first being row 700: a zero vector has no direction"),
        ("no file on one rank", 1, "gone.npy does not exist"),
        ("another column", None, "mixed-3.parquet has no column 'size', but mixed-0.parquet has"),
        ("a full output", 0, "The output folder full is not empty"),
        ("a full disk", 0, "choose another --output or make room"),
        ("too many components", None, "--n-components 901 is more than the number of rows, 900"),
        ("images", None, "cluster encodes images in one process, but 2 were started"),
    ],
)
def test_all_ranks_end_with_a_sentence(
    name: str, of_rank: int | None, said: str, two: dict[str, list[dict[str, Any]]], folder: Path
) -> None:
    for rank, ended in enumerate(two[name]):
        assert ended["code"] == 2, ended
        assert ended["out"] == ""
        assert re.fullmatch(r"siammm: [^\n]+\n", ended["err"])
        if of_rank is None or rank == of_rank:
            assert said in ended["err"]
        else:
            assert f"Rank {of_rank} cannot" in ended["err"]
    assert not list(folder.glob("*-clusters"))
    assert not list(folder.glob(".*.partial"))
    assert [path.name for path in (folder / "full").iterdir()] == ["mine.txt"]


def test_a_rank_that_is_gone_is_not_waited_for(nursery: Nursery, folder: Path, tmp_path: Path) -> None:
    """It joins, and is killed where the others wait for it."""
    program = tmp_path / "gone.py"
    program.write_text(
        "import os, signal\n"
        "from siammm.core import processes, ranks\n"
        "processes.setup('cpu')\n"
        "with ranks.refused_together(ranks.transport()):\n    pass\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    port = free_port()
    gone = nursery.start_program(program, [], cwd=tmp_path, environment=environment(1, WORLD, port))
    arguments = ["cluster", str(folder / "x.npy"), "--device", "cpu"]
    command = nursery.start(arguments, cwd=folder, environment=environment(0, WORLD, port))
    assert command.wait(60) == LostRankError.exit_code
    assert "Another rank has ended" in one_sentence(command.err)
    assert gone.wait() < 0
    assert not (folder / "x-clusters").exists()


@pytest.mark.slow
def test_the_command_under_torchrun(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["cluster", "part-*.parquet", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "siammm",
         *command, "--output", "with torchrun"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "GLOO_SOCKET_IFNAME": LOOPBACK},
        cwd=folder, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Written to") == 1
    monkeypatch.chdir(folder)
    assert main([*command, "--output", "without torchrun"]) == 0
    check_same(folder / "without torchrun", folder / "with torchrun")


def test_a_pattern_without_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert "There is no file nowhere-*.parquet" in refused(["cluster", "nowhere-*.parquet"], capsys)
