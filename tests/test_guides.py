"""The code blocks of the README and the guides run as they stand, one after another, in an empty folder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from siammm.cli import main

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "guide",
    [
        "README.md",
        "docs/cluster-embeddings.md",
        "docs/evaluate.md",
        "docs/audit.md",
        "docs/large-data.md",
        "docs/train.md",
    ],
)
def test_guide(guide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"^```(python|bash)\n(.*?)^```", (ROOT / guide).read_text("utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    assert blocks
    names: dict[str, object] = {}
    for language, text in blocks:
        if language == "python":
            exec(compile(text, guide, "exec"), names)
        else:
            for line in text.splitlines():
                program, *arguments = shlex.split(line)
                assert program == "siammm"
                assert main(arguments) == 0, line
