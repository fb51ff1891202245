"""The code blocks of the README and the guides run as they stand, one after another, in an empty folder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from siammm.cli import main
from tests.digits import fewer_digits

ROOT = Path(__file__).parents[1]


# Blocks of python and bash are run; other languages (sh, sql, text) are for reading. The guide to many machines runs
# under torchrun, in tests/distributed.
_BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
GUIDES = [
    str(page.relative_to(ROOT))
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    if page.name != "many-machines.md" and _BLOCK.search(page.read_text("utf-8"))
]
# Which of the digits a guide runs with: each sixth, and each fifteenth where a pretrained network looks at them.
EVERY = {"docs/start.md": 15}


def run_blocks(guide: str) -> None:
    names: dict[str, object] = {}
    for language, text in _BLOCK.findall((ROOT / guide).read_text("utf-8")):
        if language == "python":
            exec(compile(text, guide, "exec"), names)
        else:
            for line in text.splitlines():
                program, *arguments = shlex.split(line)
                assert program == "siammm"
                assert main(arguments) == 0, line


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("guide", GUIDES)
def test_guide(guide: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With some of the digits, which takes a fraction of the time; every line is run."""
    fewer_digits(monkeypatch, EVERY.get(guide, 6))
    run_blocks(guide)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("guide", GUIDES)
def test_guide_with_all_digits(guide: str) -> None:
    run_blocks(guide)
