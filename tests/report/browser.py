"""A real Chromium to look at pages with, that remembers whatever goes wrong in them.

Tests that need it are skipped where there is none, unless SIAMMM_BROWSER=required says that there must be one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from siammm.report.render import render
from tests.report.example_contents import Example, make

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page, ViewportSize

LAPTOP: ViewportSize = {"width": 1366, "height": 850}
PHONE: ViewportSize = {"width": 390, "height": 844}
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def _missing(why: str) -> None:
    if os.environ.get("SIAMMM_BROWSER") == "required":
        pytest.fail(f"SIAMMM_BROWSER=required, but {why}.")
    pytest.skip(f"{why}; the page is tested where there is one.")


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """The browser of this machine, else Playwright's own."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        _missing("playwright is not installed")
        raise AssertionError from None
    path = next((found for name in _NAMES if (found := shutil.which(name))), None)
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        except Error as error:
            _missing(f"no Chromium starts here ({str(error).splitlines()[0]})")
            raise AssertionError from error
        with contextlib.closing(browser):
            yield browser


class Watched:
    """A page and everything in it that should not have happened."""

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        self.faults: list[str] = []
        self.requests: list[str] = []
        self._origin = url.split("#")[0].rsplit("/", 1)[0]
        options.setdefault("viewport", LAPTOP)
        self._context = browser.new_context(reduced_motion="reduce", accept_downloads=True, **options)
        page = self.page = self._context.new_page()
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.faults.append(f"{error}\n{error.stack}"))
        page.on("dialog", self._asked)
        page.on("popup", lambda popup: self.faults.append(f"popup {popup.url}"))
        page.on("request", lambda request: self._heard(request.url))
        page.set_default_timeout(10_000)
        page.goto(url)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(message.text)

    def _asked(self, dialog: Dialog) -> None:
        self.faults.append(f"dialog {dialog.message}")
        dialog.dismiss()

    def _heard(self, url: str) -> None:
        self.requests.append(url)
        if not url.startswith((self._origin, "blob:", "data:")):
            self.faults.append(f"asked for {url}")

    def visit(self, address: str) -> Page:
        """Go to a section as a bookmark would, without loading the page again."""
        self.page.evaluate("hash => { location.hash = hash; }", address)
        section = address.removeprefix("#/").split("?")[0]
        self.page.wait_for_selector(f"#section-{section}:not([hidden])")
        self.settle()
        return self.page

    def settle(self) -> None:
        """Wait until what was asked for is on the screen."""
        self.page.evaluate("() => new Promise(done => requestAnimationFrame(() => setTimeout(done, 60)))")

    def until(self, expression: str, patience: float = 10.0) -> None:
        """Wait until something is true. Playwright's own way is a script that the page's policy forbids."""
        end = time.monotonic() + patience
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, f"never true: {expression}"
            self.page.wait_for_timeout(20)

    def wait_for_fault(self, text: str, patience: float = 10.0) -> None:
        """Wait until a fault that is expected has been told, and forget it."""
        end = time.monotonic() + patience
        while not any(text in fault for fault in self.faults):
            assert time.monotonic() < end, f"no {text} among the faults {self.faults}"
            self.page.wait_for_timeout(20)
        self.faults[:] = [fault for fault in self.faults if text not in fault]

    def check(self) -> None:
        """Fail with what went wrong since the last time."""
        faults, self.faults[:] = self.faults[:], []
        assert faults == [], "\n".join(faults)
        assert self.page.evaluate("window.pwned") is None

    def close(self) -> None:
        """Let the page go."""
        self._context.close()


def write_page(folder: Path, example: Example, name: str = "report.html") -> str:
    """The address of a page of an example, on the disk."""
    made = make(example)
    path = folder / name
    path.write_text(render(made.contents, made.sheets), encoding="utf-8", errors="surrogatepass")
    return path.as_uri()


def serious_faults(page: Page, *, only_colour: bool = False) -> list[str]:
    """What axe finds to be a serious or critical fault for people who use the page in another way."""
    from axe_playwright_python.sync_playwright import Axe

    options: dict[str, Any] = {"resultTypes": ["violations"]}
    if only_colour:
        options["runOnly"] = {"type": "rule", "values": ["color-contrast"]}
    found = Axe().run(page, options=options).response
    assert found["passes"], "axe looked at nothing"
    return [
        f"{violation['id']}: {violation['help']}: {[node['html'][:160] for node in violation['nodes'][:3]]}"
        for violation in found["violations"]
        if violation["impact"] in ("serious", "critical")
    ]


def serious_faults_at(browser: Browser, url: str, addresses: list[str], scheme: str) -> list[str]:
    """What axe finds at these addresses of a page, with everything unfolded, in a light or dark scheme."""
    watched = Watched(browser, url, color_scheme=scheme)
    found: list[str] = []
    for address in addresses:
        page = watched.visit(address)
        unfold(page)
        watched.settle()
        # The themes differ in nothing but colour.
        found += [f"{address}: {fault}" for fault in serious_faults(page, only_colour=scheme == "dark")]
    watched.check()
    watched.close()
    return found


def unfold(page: Page) -> None:
    """Open everything that can be opened."""
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")


def check_fits_a_phone(watched: Watched, addresses: list[str]) -> None:
    """Nothing at these addresses is wider than the screen."""
    for address in addresses:
        page = watched.visit(address)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], address
        wide = page.evaluate("(document.querySelector('dialog[open] .detail-body') ?? document.body).scrollWidth")
        assert wide <= PHONE["width"], address
