"""All Triton kernels under Triton's interpreter compute what torch computes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nursery import ROOT

FOLDER = Path(__file__).parent
# How many checks each of the programs makes at least.
PROGRAMS = {
    "mixture/search/interpreted_kernels.py": 30,
    "learn/cuda/interpreted_norms.py": 100,
    "learn/cuda/interpreted_ranks.py": 40,
    "learn/cuda/interpreted_updates.py": 30,
}


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """What each program printed, and with what it ended."""
    pytest.importorskip("triton")
    environment = {
        **os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }  # fmt: skip
    command = [sys.executable, "-P", str(FOLDER / "interpreted.py"), *(str(FOLDER / name) for name in PROGRAMS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(zip(PROGRAMS, done.stdout.split("program ")[1:], strict=True))


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_agree_with_torch(name: str, printed: dict[str, str]) -> None:
    assert "FAIL" not in printed[name], printed[name]
    assert printed[name].endswith("ended 0\n"), printed[name]
    assert printed[name].count("ok  ") > PROGRAMS[name]
