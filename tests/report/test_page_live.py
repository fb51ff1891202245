"""The served page in a browser, asking the real server of ``siammm explore``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from siammm.report.explorer import Explorer
from siammm.report.gather import GatherSettings, gather
from siammm.report.serve import Server
from tests.report.browser import PHONE, Watched, chromium, serious_faults
from tests.report.made_runs import made_run, opened


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    run = opened(made_run(tmp_path_factory.mktemp("run"), n=300, k=4))
    with Server(0) as found:
        found.show(Explorer(run, gather(run, GatherSettings(live=True))))
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def report(server: Server) -> Iterator[Watched]:
    with chromium() as browser:
        watched = Watched(browser, server.url)
        yield watched
        watched.check()
        watched.close()


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures") / "query <b>.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (12, 12, 3), dtype=np.uint8)).save(path)
    return path


def test_sheets_come_from_the_server(report: Watched):
    report.visit("#/overview")
    report.page.wait_for_selector("canvas.thumbnail[data-painted]")
    assert any("/sheets/" in url for url in report.requests)
    report.check()


def test_a_picture_finds_its_cluster_and_neighbours(report: Watched, picture: Path):
    page = report.visit("#/search")
    page.set_input_files("#picture", picture)
    page.wait_for_selector(".likely")
    assert 1 <= page.locator(".likely").count() <= 4
    assert "%" in page.inner_text(".likely >> nth=0")
    assert page.locator(".query-main .thumb img").count() > 10
    report.until("[...document.querySelectorAll('.query-main .thumb img')].slice(0, 6).every(one => one.naturalWidth)")
    assert "Outlier score" in page.inner_text(".query-side")
    assert "query <b>.png" in page.inner_text(".query-side")
    assert serious_faults(page) == []
    report.check()


def test_a_picture_can_be_dropped_anywhere(report: Watched, picture: Path):
    page = report.visit("#/clusters")
    page.reload()  # the search was not shown yet
    drop = """bytes => {
        const data = new DataTransfer();
        data.items.add(new File([new Uint8Array(bytes)], "dropped.png", { type: "image/png" }));
        for (const kind of ["dragover", "drop"]) {
          document.body.dispatchEvent(new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true }));
        }
    }"""
    page.evaluate(drop, list(picture.read_bytes()))
    report.until("document.querySelector('.query-side bdi')?.textContent === 'dropped.png'")
    assert page.evaluate("location.hash") == "#/search"
    report.check()


def test_what_is_no_picture_is_said_to_be_none(report: Watched, tmp_path: Path):
    path = tmp_path / "not.png"
    path.write_bytes(b"no picture at all")
    page = report.visit("#/search")
    page.set_input_files("#picture", path)
    report.until("document.querySelector('#section-search [role=status]').textContent.length > 10")
    assert "Looking" not in page.inner_text("#section-search [role=status] >> nth=0")
    # The browser itself notes an answer that is an error; that is no fault of the page.
    report.faults[:] = [fault for fault in report.faults if "422" not in fault]
    report.check()


def test_names_are_found(report: Watched):
    page = report.visit("#/search")
    name = page.evaluate("images.id[3]")
    page.get_by_label("File name").fill(name)
    report.until("document.querySelectorAll('#section-search [aria-label=\"Images found\"] button').length > 0")
    assert name in (page.locator("[aria-label='Images found'] button").first.get_attribute("aria-label") or "")
    report.check()


def test_all_images_of_a_cluster_are_paged(report: Watched):
    page = report.visit("#/clusters?cluster=1")
    size = page.evaluate("clusters[1].size")
    shown = page.locator("[aria-label='All images of the cluster'] button")
    page.get_by_role("button", name="Show all images").click()
    loaded = "document.querySelectorAll('[aria-label=\"All images of the cluster\"] button').length"
    report.until(f"{loaded} > 0")
    assert shown.count() == min(60, size)
    while page.get_by_role("button", name="More images").is_visible():
        before = shown.count()
        page.get_by_role("button", name="More images").click()
        report.until(
            f"document.querySelectorAll('[aria-label=\"All images of the cluster\"] button').length > {before}"
        )
    assert shown.count() == size
    page.keyboard.press("Escape")
    report.check()


def test_an_answer_in_another_order_is_dropped(report: Watched):
    """Whoever changes the order while images are on their way sees those of the new order, and no others."""
    page = report.visit("#/clusters?cluster=1")
    page.evaluate(
        """() => {
          const ask = window.fetch;
          window.fetch = async (path, options) => {
            if (String(path).includes("order=central")) await new Promise((done) => setTimeout(done, 400));
            return ask(path, options);
          };
        }"""
    )
    page.get_by_role("button", name="Show all images").click()
    page.get_by_label("Most outlying first").check()
    page.wait_for_timeout(700)
    first = page.evaluate("fetch('cluster/1?limit=60&order=outlying').then((answer) => answer.json())")
    shown = page.locator("[aria-label='All images of the cluster'] button")
    assert shown.count() == len(first["images"])
    assert first["images"][0]["id"] in (shown.first.get_attribute("aria-label") or "")
    page.keyboard.press("Escape")
    page.reload()
    report.check()


def test_a_phone_fits_the_search(report: Watched):
    page = report.visit("#/search")
    page.set_viewport_size(PHONE)
    report.settle()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    report.check()
