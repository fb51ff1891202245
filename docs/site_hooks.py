"""What mkdocs needs to know about this repository when it builds the site.

The pages are written to be read in the repository, where a link may lead out of ``docs``: to a measurement, which
becomes a page of the site too, or to a source file, which becomes plain text. Formulas become MathML while the site is
built, so that readers load no script for them.
"""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_RESULTS = "benchmarks/results"
_README, _RESULTS_PAGE = "README.md", "results.md"
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
_FORMULA = re.compile(r'<(div|span) class="arithmatex">(.*?)</\1>', flags=re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the README's results and the measurements, and list them and the decisions in the navigation."""
    section = re.search(r"^## Results\n(.*?)(?=^## )", (ROOT / _README).read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert section is not None, "the README has a section Results"
    files.append(File.generated(config, _RESULTS_PAGE, content=f"# Results\n{section[1]}"))
    for path in sorted((ROOT / _RESULTS).glob("*.md")):
        files.append(File.generated(config, f"{_RESULTS}/{path.name}", content=path.read_text("utf-8")))
    decisions = sorted(file.src_uri for file in files if file.src_uri.startswith("decisions/"))
    measurements = sorted(file.src_uri for file in files if file.src_uri.startswith(_RESULTS))
    config.nav = [*config.nav, {"Why it is so": decisions}, {"Measurements": measurements}]
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Make the links that leave ``docs`` lead somewhere on the site."""
    here = page.file.src_uri
    in_repository = _README if here == _RESULTS_PAGE else here if here.startswith(_RESULTS) else f"docs/{here}"

    def followed(found: re.Match[str]) -> str:
        text, link = found.groups()
        if re.match(r"[a-z]+:|#", link):
            return found[0]
        path, _, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository), path))
        if target == _README:
            target = f"docs/{_RESULTS_PAGE}"
        on_site = target.removeprefix("docs/")
        if target.startswith("docs/") or files.get_file_from_path(on_site) is not None:
            relative = posixpath.relpath(on_site, posixpath.dirname(here) or ".")
            return f"[{text}]({relative}{'#' if anchor else ''}{anchor})"
        if (ROOT / target).exists():
            return text  # a file of the repository that is no page
        return found[0]  # broken: mkdocs says so

    return _LINK.sub(followed, markdown)


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    """Turn formulas into MathML."""

    def formula(found: re.Match[str]) -> str:
        display = found[1] == "div"
        latex = html.unescape(found[2]).strip().removeprefix(r"\(").removesuffix(r"\)")
        latex = latex.removeprefix(r"\[").removesuffix(r"\]").strip()
        return convert(latex, display="block" if display else "inline")

    return _FORMULA.sub(formula, content)
