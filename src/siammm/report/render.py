"""Puts the contents into the page: one HTML file that needs nothing else.

Nothing that comes from a user's files is ever part of the markup. The contents are JSON in an element that no browser
runs, with every character escaped that could end it, and the page sets them as text. Should that fail, the page's
Content-Security-Policy runs only our own script, by its hash.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from collections.abc import Sequence
from importlib import resources

import jinja2
from markupsafe import Markup

from siammm.report.schema import Contents

_TEMPLATE, _STYLE = "report.html", "report.css"
# One script, written in parts; the last one starts the page.
_SCRIPTS = ["base", "csv", "thumbnails", "viewer", "charts", "points", "grid", "groups", "overview", "clusters"]
_SCRIPTS += ["classes", "tree", "quality", "suspects", "comparison", "search", "report"]
_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def render(contents: Contents, sheets: Sequence[bytes] = (), *, token: str = "") -> str:
    """The page. ``sheets`` are those that it holds itself; ``token`` is what a served page shows with a search."""
    return _template().render(
        title=contents["title"],
        csp=policy(live=contents["live"]),
        css=Markup(page_file(_STYLE)),
        js=Markup(_script()),
        contents_json=Markup(as_json(contents)),
        sheets=[Markup(base64.b64encode(data).decode("ascii")) for data in sheets],
        live=contents["live"],
        token=token,
    )


def as_json(contents: object) -> str:
    """JSON that can stand in an element of a page: ASCII, without any character that markup is made of."""
    return json.dumps(contents, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)


@functools.cache
def policy(*, live: bool) -> str:
    """The page's Content-Security-Policy: its own script and style, pictures, and questions to where it came from."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash(_script())}",
            f"style-src {_hash(page_file(_STYLE))}",
            # A page on the disk has the sheets beside it on the disk too.
            f"img-src 'self' data: blob:{'' if live else ' file:'}",
            "connect-src 'self'" if live else "connect-src 'none'",
            "font-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"


@functools.cache
def _script() -> str:
    return "\n".join(page_file(f"{name}.js") for name in _SCRIPTS)


@functools.cache
def page_file(name: str) -> str:
    """A file of the page, with the line ends that a browser reads."""
    text = (resources.files("siammm.report") / "page" / name).read_text(encoding="utf-8")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    # What a browser would take for the end of the element would also change what the hash is of.
    assert name == _TEMPLATE or not re.search(r"</(script|style)|<!--", text, re.IGNORECASE), name
    return text


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(page_file(_TEMPLATE))
