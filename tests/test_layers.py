"""Layers point one way: a package imports only those named beside it here, and no import hides in a function."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "siammm"

_BELOW_LEARN = {"core", "settings", "mixture", "data", "metrics"}
_BELOW_RUNS = _BELOW_LEARN | {"learn"}
_BELOW_USES = _BELOW_RUNS | {"runs"}
_USES = {"evaluate", "audit", "report", "export", "bench"}
# What each package may import besides itself. None of the uses of a run knows another.
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "settings": {"core"},
    "mixture": {"core"},
    "data": {"core"},
    "metrics": {"core", "mixture"},
    "learn": _BELOW_LEARN,
    "losses": {"learn"},
    "runs": _BELOW_RUNS,
    **dict.fromkeys(_USES, _BELOW_USES),
    "embedding": _BELOW_USES,
    "estimator": _BELOW_USES | {"export"},
    "commands": _BELOW_USES | _USES | {"estimator"},
    "cli": {"core", "settings", "commands", "runs"},
    "__main__": {"cli"},
}
# Imports that break the rule today; each is a debt to be paid, and the test fails when one is paid and still listed.
DEBTS: set[tuple[str, str]] = set()


def imports(file: Path) -> Iterator[tuple[str, bool]]:
    """The package of ours that each import names, and whether it stands inside a function."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import; name the package"
            paths = [f"{node.module}.{name.name}" for name in node.names]
        elif isinstance(node, ast.Import):
            paths = [name.name for name in node.names]
        else:
            continue
        for path in paths:
            words = path.split(".")
            if words[0] == "siammm" and len(words) > 1:
                yield words[1], id(node) in hidden


def package(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


FILES = sorted(file for file in SOURCE.rglob("*.py") if file != SOURCE / "__init__.py")


def test_every_package_has_a_place_in_the_order() -> None:
    assert {package(file) for file in FILES} == set(MAY_IMPORT)


def test_no_import_points_up() -> None:
    broken = {
        (str(file.relative_to(SOURCE)), target)
        for file in FILES
        for target, _ in imports(file)
        if target in MAY_IMPORT and target != package(file) and target not in MAY_IMPORT[package(file)]
    }
    assert broken == DEBTS


def test_no_import_of_ours_hides_in_a_function() -> None:
    """``siammm --help`` answers before torch is there, so the command line imports a command when it runs."""
    hiding = {str(file.relative_to(SOURCE)) for file in FILES for _, hidden in imports(file) if hidden}
    assert hiding <= {"cli.py"}
