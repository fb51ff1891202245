"""Damaged inputs from seeds: none ends in a traceback, and none takes much memory. ``fuzz.py`` makes them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.faults import fuzz
from tests.nursery import ROOT


@pytest.mark.filterwarnings("ignore")
def test_damaged_inputs_are_refused_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """A first hundred and fifty, and the seeds that once ended in a traceback."""
    failed = fuzz.run([*range(150), *FOUND])
    capsys.readouterr()
    assert not failed, "\n".join(failed.values())


FOUND = (295,)
"""Seeds that once ended in a traceback."""


@pytest.mark.slow
def test_thousands_of_damaged_inputs() -> None:
    command = [sys.executable, "-m", "tests.faults.fuzz", "6000", "--seed", "1000"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1500)
    last = ended.stdout.splitlines()[-1]
    assert last.startswith("6000 inputs, 0 with a traceback"), ended.stdout[-4000:] + ended.stderr[-2000:]
    assert float(last.split("at most ")[1].split()[0]) < 4
