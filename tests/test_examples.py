"""The examples are short, and run as they stand, in an empty folder."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
PRINTED = {
    "cluster_a_folder.py": r"\d+ clusters; their most typical images are in shapes-sheets/",
    "cluster_embeddings.py": r"AMI with the labels, which it never saw: 0\.\d\d\n",
    "own_training_loop.py": r"epoch 4: loss -?\d\.\d+, \d+ clusters\n$",
}
ARGUMENTS = {"own_training_loop.py": ["4"]}


def test_every_example_is_known_and_short() -> None:
    assert {path.name for path in EXAMPLES} == set(PRINTED)
    assert all(len(path.read_text("utf-8").splitlines()) < 100 for path in EXAMPLES)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path), *ARGUMENTS.get(path.name, [])])
    runpy.run_path(str(path), run_name="__main__")
    assert re.search(PRINTED[path.name], capsys.readouterr().out)
