"""Layers point one way: a package imports only those named beside it here, and no import hides in a function."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "siammm"

_BELOW_LEARN = {"core", "settings", "mixture", "data", "metrics"}
_BELOW_RUNS = _BELOW_LEARN | {"learn", "cluster"}
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
    "cluster": _BELOW_LEARN,
    "losses": {"learn"},
    "runs": _BELOW_RUNS,
    **dict.fromkeys(_USES, _BELOW_USES),
    "embedding": _BELOW_USES,
    "estimator": _BELOW_USES | {"export"},
    "commands": _BELOW_USES | _USES | {"estimator"},
    "cli": {"core", "settings", "commands", "runs"},
    "__main__": {"cli"},
}


def imports(code: str) -> Iterator[tuple[str, bool]]:
    """The package of ours that each import names, and whether it stands inside a function.

    Of ``import siammm`` that is ``siammm``, through which everything could be reached; also ``import siammm.core``
    without another name brings it.
    """
    tree = ast.parse(code)
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}; name the package"
            paths = [f"{node.module}.{name.name}" for name in node.names]
        elif isinstance(node, ast.Import):
            paths = [name.name if name.asname else name.name.split(".")[0] for name in node.names]
        else:
            continue
        for path in paths:
            words = path.split(".")
            if words[0] == "siammm":
                yield words[min(1, len(words) - 1)], id(node) in hidden


def package(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


FILES = sorted(file for file in SOURCE.rglob("*.py") if file != SOURCE / "__init__.py")


def test_every_package_has_a_place_in_the_order() -> None:
    assert {package(file) for file in FILES} == set(MAY_IMPORT)


def test_no_import_points_up() -> None:
    """What the package itself offers is for users: a module imports a name from where it is defined."""
    broken = {
        (str(file.relative_to(SOURCE)), target)
        for file in FILES
        for target, _ in imports(file.read_text("utf-8"))
        if target not in {package(file), *MAY_IMPORT[package(file)]}
    }
    assert not broken


@pytest.mark.parametrize(
    ("code", "target"),
    [
        ("import siammm", "siammm"),
        ("import siammm as package", "siammm"),
        ("import siammm.core.text", "siammm"),
        ("import siammm.core.text as text", "core"),
        ("from siammm import SiamMM", "SiamMM"),
        ("from siammm import __version__", "__version__"),
        ("from siammm import metrics", "metrics"),
        ("from siammm.mixture.em import steps", "mixture"),
    ],
)
def test_an_import_is_seen_however_it_is_written(code: str, target: str) -> None:
    assert list(imports(code)) == [(target, False)]
    assert list(imports(f"def f():\n    {code}")) == [(target, True)]


def test_the_package_itself_imports_only_its_version() -> None:
    """All else when it is first used, so that it is light (``tests/test_imports.py``)."""
    code = (SOURCE / "__init__.py").read_text("utf-8").replace("if TYPE_CHECKING:", "def used():")
    assert [target for target, hidden in imports(code) if not hidden] == ["core"]


def test_no_import_of_ours_hides_in_a_function() -> None:
    """``siammm --help`` answers before torch is there, so the command line imports a command when it runs."""
    hiding = {
        str(file.relative_to(SOURCE)) for file in FILES for _, hidden in imports(file.read_text("utf-8")) if hidden
    }
    assert hiding <= {"cli.py"}
