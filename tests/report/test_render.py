"""The page as it is written: what is ours in it is markup, and all else is text."""

from __future__ import annotations

import base64
import hashlib
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from siammm.report.gather import Gathered, GatherSettings, gather
from siammm.report.render import as_json, page_file, policy, render
from tests.report.made_runs import HOSTILE, as_lists, hostile_folder, made_run, opened, trained_run


class Page(HTMLParser):
    """The elements of a page, and the text of its scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, dict[str, str | None], str]] = []
        self._open: tuple[str, dict[str, str | None]] | None = None
        self._text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style", "title"):
            self._open, self._text = (tag, dict(attrs)), []

    def handle_endtag(self, tag: str) -> None:
        if self._open is not None and tag == self._open[0]:
            self.texts.append((*self._open, "".join(self._text)))
            self._open = None

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self._text.append(data)

    def text_of(self, name: str) -> str:
        return next(text for _, attributes, text in self.texts if attributes.get("id") == name)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Gathered:
    folder = tmp_path_factory.mktemp("hostile")
    run = trained_run(folder, hostile_folder(folder), name="<script>alert(1)<")
    return gather(opened(run), GatherSettings())


@pytest.fixture(scope="module")
def harmless(tmp_path_factory: pytest.TempPathFactory) -> Gathered:
    return gather(opened(made_run(tmp_path_factory.mktemp("harmless"))), GatherSettings())


def test_contents_survive(hostile: Gathered) -> None:
    page = Page(render(hostile.contents, hostile.sheets))
    assert json.loads(page.text_of("contents")) == as_lists(hostile.contents)
    assert sorted(json.loads(page.text_of("contents"))["label_names"]) == sorted(HOSTILE)
    for i, sheet in enumerate(hostile.sheets):
        assert base64.b64decode(page.text_of(f"sheet-{i}"), validate=True) == sheet
    assert next(text for tag, _, text in page.texts if tag == "title").startswith("<script>alert(1)<: ")


def test_hostile_names_add_no_element(hostile: Gathered, harmless: Gathered) -> None:
    """The page of bad names has the elements and attributes of any other page."""
    bad, good = (Page(render(one.contents, one.sheets)) for one in (hostile, harmless))
    assert bad.elements == good.elements
    assert all(not name.startswith("on") and name != "style" for _, attributes in bad.elements for name in attributes)
    text = render(hostile.contents, hostile.sheets)
    for piece in ("<img src=x", "<svg onload", "<script>window", "<script>alert"):
        assert piece not in text


@pytest.mark.parametrize("live", [False, True])
def test_nothing_runs_but_our_script(live: bool, harmless: Gathered) -> None:
    contents: Any = harmless.contents | {"live": live}
    page = Page(render(contents, harmless.sheets, token="secret<"))
    stated = [a["content"] or "" for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert stated == [policy(live=live)]
    rules = dict(rule.split(" ", 1) for rule in stated[0].split("; "))
    scripts = [text for tag, attributes, text in page.texts if tag == "script" and "type" not in attributes]
    styles = [text for tag, _, text in page.texts if tag == "style"]
    assert (len(scripts), len(styles)) == (1, 1)
    for rule, text in (("script-src", scripts[0]), ("style-src", styles[0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == ("'self'" if live else "'none'")
    assert ("file:" in rules["img-src"]) == (not live)
    assert {a.get("type") for tag, a in page.elements if tag == "script"} == {None, "application/json", "text/plain"}
    assert [a["content"] for _, a in page.elements if a.get("name") == "token"] == (["secret<"] if live else [])


def test_nothing_is_fetched(harmless: Gathered) -> None:
    page = Page(render(harmless.contents, harmless.sheets))
    for _, attributes in page.elements:
        for name in ("src", "href", "action", "srcset", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), value


def test_json_holds_no_markup() -> None:
    text = as_json({"a": "</script><!--&\u2028\u2029\x00é\u202e", "b": [1.5, None, True]})
    assert text.isascii()
    assert not set("<>&") & set(text)
    assert json.loads(text) == {"a": "</script><!--&\u2028\u2029\x00é\u202e", "b": [1.5, None, True]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        as_json([float("nan")])


def test_the_files_of_the_page_are_in_the_package() -> None:
    """As ``importlib.resources`` finds them, so they are found in a wheel too."""
    from importlib import resources

    names = {entry.name for entry in (resources.files("siammm.report") / "page").iterdir()}
    assert {"report.html", "report.css", "report.js"} <= names
    assert "\r" not in page_file("report.js")


def test_a_page_of_the_demo_is_small(harmless: Gathered, tmp_path: Path) -> None:
    assert len(render(harmless.contents, harmless.sheets)) < 2e6
