"""Hooks for mkdocs.

Pages are written to be read in the repository, where a link may point outside ``docs``. A link to a benchmark record
becomes a link to a page of the site; a link to a source file becomes plain text. Formulas are converted to MathML at
build time, so that readers load no script for them.
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
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
_FORMULA = re.compile(r'<(div|span) class="arithmatex">(.*?)</\1>', flags=re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the benchmark records, and list them and the decisions in the navigation."""
    for path in sorted((ROOT / _RESULTS).glob("*.md")):
        files.append(File.generated(config, f"{_RESULTS}/{path.name}", content=path.read_text("utf-8")))
    decisions = sorted(file.src_uri for file in files if file.src_uri.startswith("decisions/"))
    measurements = sorted(file.src_uri for file in files if file.src_uri.startswith(_RESULTS))
    config.nav = [*config.nav, {"Why it is so": decisions}, {"Measurements": measurements}]
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite the links that point outside ``docs``."""
    here = page.file.src_uri
    in_repository = here if here.startswith(_RESULTS) else f"docs/{here}"

    def followed(found: re.Match[str]) -> str:
        text, link = found.groups()
        if re.match(r"[a-z]+:|#", link):
            return found[0]
        path, _, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository), path))
        on_site = target.removeprefix("docs/")
        if target.startswith("docs/") or files.get_file_from_path(on_site) is not None:
            relative = posixpath.relpath(on_site, posixpath.dirname(here) or ".")
            return f"[{text}]({relative}{'#' if anchor else ''}{anchor})"
        if (ROOT / target).exists():
            return text  # a file that is not a page of the site
        return found[0]  # broken: mkdocs reports it

    return _LINK.sub(followed, markdown)


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    """Turn formulas into MathML."""

    def formula(found: re.Match[str]) -> str:
        display = found[1] == "div"
        latex = html.unescape(found[2]).strip().removeprefix(r"\(").removesuffix(r"\)")
        latex = latex.removeprefix(r"\[").removesuffix(r"\]").strip()
        return convert(latex, display="block" if display else "inline")

    return _FORMULA.sub(formula, content)
