"""What is imported, and when: in a process of its own, which starts with nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import siammm

_PROGRAM = """
import json, sys
sys.modules["triton"] = None  # it comes with torch on Linux alone
found = {}
import siammm
found["torch by the package"] = "torch" in sys.modules
found["metrics"] = callable(siammm.metrics.knn_accuracy)
import importlib, pkgutil, siammm.commands
for module in pkgutil.iter_modules(siammm.commands.__path__):
    importlib.import_module(f"siammm.commands.{module.name}")
found["training"] = callable(siammm.commands.train.train)
found["compiler by commands"] = "torch._dynamo" in sys.modules
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, bool]:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_package_alone_is_light(found: dict[str, bool]) -> None:
    """Its parts are imported when they are first used."""
    assert not found["torch by the package"]
    assert found["metrics"]


def test_training_needs_no_triton(found: dict[str, bool]) -> None:
    assert found["training"]


def test_no_command_imports_the_compiler_of_torch(found: dict[str, bool]) -> None:
    """It takes a second or more, and few commands use it."""
    assert not found["compiler by commands"]


def test_the_version_is_where_the_build_looks_for_it() -> None:
    root = Path(__file__).parents[1]
    settings = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["version"]
    code = (root / settings["path"]).read_text("utf-8")
    assert re.findall(r'^__version__ = "(.+)"$', code, flags=re.MULTILINE) == [siammm.__version__]
