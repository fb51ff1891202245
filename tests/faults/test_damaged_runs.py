"""Every file of a run, damaged in every way by seed: each command ends in a result or in one sentence.

``python -m tests.faults.test_damaged_runs 0 500`` tries more seeds, and prints those that end otherwise.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from siammm.cli import main
from siammm.runs.run import Run
from tests.faults import runs
from tests.nursery import Nursery

pytestmark = pytest.mark.usefixtures("one_thread")

_RESUME = ["train", "images", "--resume", "run", "--device", "cpu"]
_REPORT = ["report", "run", "--max-thumbnails", "0", "--no-open", "--output", "page.html"]
_COMPARE = ["compare", "run-evaluation", "other"]
_EXPORT = ["export", "run", "--formats", "tables", "--output", "exported", "--data", "images"]
_AUDIT = ["audit", "run", "--output", "audited"]
_EVALUATE = ["evaluate", "run", "--protocols", "knn", "--output", "evaluated", "--data", "images"]
# Which commands read which file.
READERS: dict[str, list[list[str]]] = {
    "run/config.json": [_RESUME, _REPORT, _EXPORT, _AUDIT, _EVALUATE],
    "run/metrics.jsonl": [_RESUME, _REPORT],
    "run/inventory.parquet": [_RESUME],
    "run/checkpoints/last.safetensors": [_RESUME],
    "run/.lock": [_RESUME],
    "run/mixture.safetensors": [_REPORT, _EXPORT, _AUDIT],
    "run/encoder.safetensors": [_REPORT, _EXPORT, _EVALUATE],
    "run/assignments.parquet": [_REPORT, _AUDIT],
    "run/embeddings.npy": [_REPORT, _AUDIT],
    "run/merges.json": [_REPORT],
    "run/names.json": [_REPORT],
    "run/set_aside.json": [_REPORT],
    "run-evaluation/evaluation.json": [_REPORT, _COMPARE],
    "run-audit/suspects.parquet": [_REPORT],
    "run-audit/summary.json": [_REPORT],
}
WRONG: list[Any] = [None, True, -1, 0, 10**30, 1e308, float("nan"), float("inf"), "x", "", [], [1, "a"], {}, {"a": 1}]


# -- ways to do harm


def bytes_of(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    way = draw.choice(["cut", "cut", "flip", "flip", "flip", "empty", "noise", "longer"])
    if way == "cut":
        del data[draw.randrange(len(data) + 1) :]
    elif way == "flip":
        for _ in range(draw.choice([1, 1, 4, 64])):
            if data:
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif way == "empty":
        data.clear()
    elif way == "noise":
        data = bytearray(draw.randbytes(draw.randrange(1, 400)))
    else:
        data += draw.randbytes(draw.randrange(1, 400))
    path.write_bytes(data)


def harmed_json(plain: Any, draw: random.Random) -> Any:
    """One value in it, at any depth, replaced, removed or added to."""
    if isinstance(plain, (dict, list)) and plain and draw.random() < 0.85:
        key = draw.choice(list(plain)) if isinstance(plain, dict) else draw.randrange(len(plain))
        if draw.random() < 0.15:
            del plain[key]
        else:
            plain[key] = harmed_json(plain[key], draw)
        return plain
    if isinstance(plain, dict) and draw.random() < 0.3:
        return plain | {"unheard of": 1}
    return draw.choice(WRONG)


def json_of(path: Path, draw: random.Random) -> None:
    path.write_text(json.dumps(harmed_json(json.loads(path.read_text()), draw)))


def lines_of(path: Path, draw: random.Random) -> None:
    lines = path.read_text().splitlines()
    at = draw.randrange(len(lines))
    lines[at] = json.dumps(harmed_json(json.loads(lines[at]), draw))
    path.write_text("\n".join(lines) + "\n")


def table_of(path: Path, draw: random.Random) -> None:
    table = pq.read_table(path)
    name = draw.choice(table.column_names)
    at = table.column_names.index(name)
    way = draw.choice(["drop", "text", "null", "some null", "short", "none", "numbers", "lists", "twice"])
    if way == "drop":
        table = table.drop_columns([name])
    elif way in ("short", "none"):
        table = table.slice(0, draw.randrange(len(table)) if way == "short" else 0)
    elif way == "twice":
        table = pa.concat_tables([table, table])
    else:
        n = len(table)
        some = table.column(name).to_pylist()
        values: dict[str, Callable[[], Any]] = {
            "text": lambda: pa.array([str(value) for value in some]),
            "null": lambda: pa.nulls(n),
            "some null": lambda: pa.array(
                [None if draw.random() < 0.5 else value for value in some], table.field(at).type
            ),
            "numbers": lambda: pa.array(np.array([draw.choice([-1.0, 1e30, np.nan, 5.0]) for _ in range(n)])),
            "lists": lambda: pa.array([[1]] * n),
        }
        table = table.set_column(at, name, values[way]())
    pq.write_table(table, path)


def tensors_of(path: Path, draw: random.Random) -> None:
    with safe_open(path, "numpy") as stored:
        header = dict(stored.metadata() or {})
    tensors = load_file(path)
    name = draw.choice(list(tensors))
    way = draw.choice(["drop", "flat", "type", "nan", "short", "header", "header", "header", "header"])
    if way == "drop":
        del tensors[name]
    elif way == "flat":
        tensors[name] = tensors[name].reshape(-1)
    elif way == "type":
        tensors[name] = tensors[name].astype(draw.choice([np.int32, np.float64, np.uint8]))
    elif way == "nan":
        tensors[name] = np.full_like(tensors[name], np.nan if tensors[name].dtype.kind == "f" else 255)
    elif way == "short":
        tensors[name] = tensors[name][: len(tensors[name]) // 2] if tensors[name].ndim else tensors[name]
    else:
        key = draw.choice(list(header))
        with contextlib.suppress(ValueError):
            header[key] = json.dumps(harmed_json(json.loads(header[key]), draw))
    save_file(tensors, path, metadata=header)


def array_of(path: Path, draw: random.Random) -> None:
    array = np.load(path)
    way = draw.choice(["type", "shape", "nan", "short", "objects"])
    if way == "objects":
        np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    elif way == "type":
        np.save(path, array.astype(draw.choice([np.int8, np.float64, np.complex64, "U3"])))
    elif way == "shape":
        np.save(path, array.reshape(-1))
    else:
        np.save(path, array[: len(array) // 2] if way == "short" else np.full_like(array, np.nan))


_BY_SUFFIX: dict[str, Callable[[Path, random.Random], None]] = {
    ".json": json_of, ".jsonl": lines_of, ".parquet": table_of, ".safetensors": tensors_of, ".npy": array_of,
}  # fmt: skip


def harm(path: Path, draw: random.Random) -> None:
    way = _BY_SUFFIX.get(path.suffix, bytes_of)
    (way if draw.random() < 0.6 else bytes_of)(path, draw)


# -- the test


@pytest.fixture(scope="module")
def whole(finished_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with its images, an evaluation and an audit, and an evaluation to compare with."""
    return prepare(finished_once, tmp_path_factory.mktemp("whole"))


def prepare(finished: Path, folder: Path) -> Path:
    shutil.copytree(finished, folder, dirs_exist_ok=True)
    with contextlib.chdir(folder):
        assert main(["evaluate", "run", "--protocols", "knn", "clustering", "--data", "images"]) == 0
        assert main(["audit", "run"]) == 0
    shutil.copytree(folder / "run-evaluation", folder / "other")
    Run.open(folder / "run").group_names.give(0, "birds")
    (folder / "run" / "set_aside.json").write_text('{"total": 301, "set_aside": [{"image": "x", "reason": "y"}]}')
    (folder / "run" / ".lock").write_text('{"host": "h", "pid": 1, "started": 1, "place": "p", "token": "t"}')
    return folder


def ended_well(seed: int, whole: Path, folder: Path) -> str | None:
    """What went wrong with this seed; None if nothing did."""
    draw = random.Random(seed)
    name = list(READERS)[seed % len(READERS)]
    arguments = draw.choice(READERS[name])
    shutil.copytree(whole, folder, dirs_exist_ok=True, copy_function=shutil.copy2)
    (folder / "run" / ".lock").unlink() if name != "run/.lock" else None
    harm(folder / name, draw)
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                code = main(arguments)
        except Exception:
            return f"seed {seed}: {name}, siammm {' '.join(arguments)}\n{traceback.format_exc(limit=-4)}"
    text = printed.getvalue()
    is_told = code == 0 or (code == 2 and text.splitlines()[-1].startswith("siammm: "))
    return None if is_told and "Traceback" not in text else f"seed {seed}: {name}, {arguments}: {code}, {text[-500:]}"


@pytest.mark.parametrize("seed", range(len(READERS)))
def test_a_damaged_file_ends_in_a_result_or_a_sentence(seed: int, whole: Path, tmp_path: Path) -> None:
    assert ended_well(seed, whole, tmp_path) is None


@pytest.mark.slow
def test_many_damaged_files(whole: Path, tmp_path: Path) -> None:
    problems: list[str] = []
    for seed in range(1000, 1600):
        problem = ended_well(seed, whole, tmp_path / "copy")
        problems += [] if problem is None else [problem]
        shutil.rmtree(tmp_path / "copy")
    assert not problems, "\n".join(problems)


def _try_seeds(first: int, last: int) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        with Nursery() as nursery:
            path = runs.stopped_run(nursery, Path(root))
        assert main(["train", f"{root}/images", "--resume", str(path), *runs.little_more(path)]) == 0
        whole = prepare(Path(root), Path(root) / "whole")
        for seed in range(first, last):
            with tempfile.TemporaryDirectory() as folder:
                problem = ended_well(seed, whole, Path(folder))
            if problem is not None:
                sys.stderr.write(problem + "\n")


if __name__ == "__main__":
    _try_seeds(*map(int, sys.argv[1:3]))
