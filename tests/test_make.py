"""What ``make`` would do, in a checkout where it was never run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def steps(target: str, folder: Path) -> str:
    if (make := shutil.which("make")) is None:
        pytest.skip("make is not installed")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    # As if the tests were not themselves started by make.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run([make, "-n", target], cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def test_the_demo_needs_no_development_tools(tmp_path: Path) -> None:
    said = steps("demo", tmp_path)
    assert "-m venv .venv" in said
    assert "--editable ." in said
    assert "[dev]" not in said
    assert said.strip().endswith("siammm demo")


def test_the_tests_do(tmp_path: Path) -> None:
    said = steps("test", tmp_path)
    assert said.count("pip install") == 1
    assert "--editable '.[dev]'" in said
