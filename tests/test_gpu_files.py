"""Tests that need a GPU lie in files ``test_*_gpu.py``, which ``make test-gpu`` runs, also from a bare checkout."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GPU_FILES = sorted((ROOT / "tests").rglob("test_*_gpu.py"))
# What a machine with a GPU and torch may not have.
ABSENT = {"duckdb", "hypothesis", "mpmath", "onnx", "onnxruntime", "pandas", "playwright", "tyro", "umap", "yaml"}


def imported(path: Path, seen: set[Path]) -> Iterator[str]:
    """Packages that a file of tests imports when it is imported, also by way of other files of tests."""
    seen.add(path)
    for node in ast.parse(path.read_text("utf-8")).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}"] if node.module != "tests" else [f"tests.{alias.name}" for alias in node.names]
        for name in names:
            file = ROOT / f"{name.replace('.', '/')}.py"
            if name.startswith("tests.") and file.is_file() and file not in seen:
                yield from imported(file, seen)
            yield "tyro" if name == "siammm.cli" else name.split(".")[0]


def test_every_test_that_needs_a_gpu_is_in_such_a_file() -> None:
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark." + "gpu" in path.read_text("utf-8")]
    assert sorted(marked) == GPU_FILES


@pytest.mark.parametrize("path", GPU_FILES, ids=lambda path: path.stem)
def test_they_import_nothing_that_may_be_absent(path: Path) -> None:
    assert not ABSENT & set(imported(path, set()))
