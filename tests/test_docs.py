"""What the documentation names exists: functions, tests, files."""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache, reduce
from importlib import import_module
from pathlib import Path

import pytest

from siammm.cli import parse
from siammm.settings.checks import check_settings
from siammm.settings.fields import setting_homes
from siammm.settings.presets import PRESETS
from siammm.settings.training import TrainConfig
from tests.test_layers import MAY_IMPORT

ROOT = Path(__file__).parents[1]
EQUATIONS, MATHS, ARCHITECTURE = (ROOT / "docs" / f"{name}.md" for name in ("equations", "maths", "architecture"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])

FUNCTIONS = sorted(
    {
        found
        for page in (EQUATIONS, MATHS, ARCHITECTURE)
        for found in re.findall(r"`(siammm[\w.]*):([\w.]+)`", page.read_text("utf-8"))
    }
)
RELIABILITY = ROOT / "docs" / "reliability.md"
TESTS = [
    found
    for page in (EQUATIONS, RELIABILITY)
    for found in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text("utf-8"))
]

N_EQUATIONS = 16


def test_every_listed_fault_is_counted() -> None:
    page = RELIABILITY.read_text("utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and "`tests/" in line]
    assert f"**This page lists {len(rows)} faults" in page


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


def test_the_table_of_the_architecture_says_what_each_package_may_import() -> None:
    section = ARCHITECTURE.read_text("utf-8").split("\n## ")[1]
    above: dict[str, set[str]] = {}  # what the rows so far say
    for row in re.findall(r"^\| (`.+) \|$", section, flags=re.MULTILINE):
        packages, _, imports = row.split(" | ")
        named = set(re.findall(r"`(\w+)`", imports))
        if imports == "all of the above":
            named = set(above)
        elif found := re.match(r"`(\w+)` and all above it", imports):
            named |= set(list(above)[: list(above).index(found[1])])
        above |= dict.fromkeys(re.findall(r"`(\w+)`", packages), named)
    assert above == {package: targets for package, targets in MAY_IMPORT.items() if package != "__main__"}


def test_every_record_is_on_the_page_of_results_with_a_command_that_exists() -> None:
    page = (ROOT / "docs" / "results.md").read_text("utf-8")
    records = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
    assert records
    assert not [record.name for record in records if f"benchmarks/results/{record.name})" not in page]
    for row in re.findall(r"^\|(.+)\|$", page, flags=re.MULTILINE):
        assert len(row.split(" | ")) == 3 or set(row) <= {"-", "|"}, row
    for script in re.findall(r"`python ([\w/.]+)", page):
        assert (ROOT / script).is_file(), script


def test_the_readme_is_short_and_has_five_results() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert len(readme.split()) < 900
    _, _, *results = re.findall(r"^\|.+\|$", readme, flags=re.MULTILINE)
    assert len(results) == 5
    assert all("](benchmarks/results/" in row for row in results)


# -- training

TRAIN = (ROOT / "docs" / "train.md").read_text("utf-8")


def rows_under(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its head."""
    section = TRAIN.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = re.findall(r"^\|(.+)\|$", section, flags=re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in table[2:]]


def test_every_flag_in_the_guide_to_training_exists() -> None:
    flags = {f"--{name.replace('_', '-')}" for name in setting_homes()}
    flags |= {"--help", "--help-all", *(f"--no-{flag[2:]}" for flag in flags)}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", TRAIN)) <= flags


def test_the_table_of_presets_is_true() -> None:
    _, *rows = rows_under("Presets")  # the first says what they are for
    assert rows
    for name, *cells in rows:
        setting = name.strip("`").removeprefix("--").replace("-", "_")
        home = setting_homes()[setting]
        for cell, preset in zip(cells, PRESETS.values(), strict=True):
            value = getattr(preset if home is None else getattr(preset, home), setting)
            if value is None:
                assert not re.fullmatch(r"[\d.e-]+", cell), (name, preset.preset)
            else:
                assert cell == (f"{value:g}" if isinstance(value, float) else str(value)), (name, preset.preset)


@pytest.mark.parametrize("row", rows_under("The paper's variants"), ids=lambda row: row[0])
def test_every_variant_of_the_paper_is_a_setting(row: list[str]) -> None:
    flags = [] if row[1] == "none" else shlex.split(row[1].strip("`"))
    config = parse(["train", "images", *flags])
    assert isinstance(config, TrainConfig)
    check_settings(config)
