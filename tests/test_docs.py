"""What the documentation names exists: functions, tests, files."""

from __future__ import annotations

import ast
import re
from functools import cache, reduce
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EQUATIONS = ROOT / "docs" / "equations.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])

FUNCTIONS = re.findall(r"`(siammm[\w.]*):([\w.]+)`", EQUATIONS.read_text("utf-8"))
TESTS = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", EQUATIONS.read_text("utf-8"))

# An equation is in the table when it is covered, and says so when it is not.
N_EQUATIONS = 16
WITH_TRAINING: set[int] = set()


def test_every_equation_has_a_row_with_a_function_and_a_test() -> None:
    rows: dict[int, list[str]] = {}
    for line in EQUATIONS.read_text("utf-8").splitlines():
        if found := re.match(r"\| (\d+) ", line):
            assert int(found[1]) not in rows, line
            rows[int(found[1])] = [cell.strip() for cell in line.strip("|").split("|")]
    assert sorted(rows) == list(range(1, N_EQUATIONS + 1))
    for number, cells in rows.items():
        assert len(cells) == 4, number
        _, meaning, function, test = cells
        assert meaning, number
        if number in WITH_TRAINING:
            assert function == "comes with training", number
        else:
            assert re.search(r"`siammm[\w.]*:[\w.]+`", function), number
            assert re.search(r"`tests/[\w/]+\.py::\w+`", test), number


@pytest.mark.parametrize(("module", "name"), FUNCTIONS)
def test_the_function_exists(module: str, name: str) -> None:
    reduce(getattr, name.split("."), import_module(module))


@pytest.mark.parametrize(("file", "name"), TESTS)
def test_the_test_exists(file: str, name: str) -> None:
    assert name in functions_in(ROOT / file)


@cache
def functions_in(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links and pictures: the file exists, and so does the heading that an anchor names."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    broken: list[str] = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in headings(target)):
            broken.append(link)
    assert not broken


def headings(page: Path) -> set[str]:
    """The anchors that a page's headings get."""
    titles = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_page_is_on_the_map() -> None:
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} - {"index.md"}
    assert not {page for page in pages if f"]({page})" not in index}
