"""A browser, and a page that is loaded once for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from siammm.report.serve import Server
from tests.report.browser import Watched, chromium, write_page
from tests.report.example_contents import Example


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def url(folder: Path) -> str:
    """The page of the usual example; a module with another page has a fixture of the same name."""
    return write_page(folder, Example())


@pytest.fixture(scope="module")
def loaded(browser, url: str) -> Iterator[Watched]:
    watched = Watched(browser, url)
    yield watched
    watched.close()


@pytest.fixture(scope="module")
def live(browser, server: Server) -> Iterator[Watched]:
    """The page of a module's ``server``."""
    watched = Watched(browser, server.url)
    yield watched
    watched.check()
    watched.close()
