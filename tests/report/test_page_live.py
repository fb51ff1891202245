"""The served page in a browser, asking the real server of ``siammm explore``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from siammm.cli import main
from siammm.report.serve import Server
from tests.report.browser import PHONE, Watched, serious_faults
from tests.report.made_runs import made_run, opened
from tests.report.served import serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(opened(made_run(tmp_path_factory.mktemp("run"), n=300, k=4))) as found:
        yield found


@pytest.fixture(scope="module")
def report(live: Watched) -> Watched:
    return live


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
    report.settle()  # what the browser notes of it may come later than what the page says
    assert "Looking" not in page.inner_text("#section-search [role=status] >> nth=0")
    # The browser itself notes an answer that is an error, sooner or later; that is no fault of the page.
    report.wait_for_fault("422")
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
            if (!String(path).includes("order=central")) return ask(path, options);
            const answer = await ask(path, options);
            await new Promise((done) => { window.letGo = done; });
            setTimeout(() => { window.wentOn = true; }, 100);
            return answer;
          };
        }"""
    )
    page.get_by_role("button", name="Show all images").click()
    report.until("window.letGo !== undefined")
    page.get_by_label("Most outlying first").check()
    report.until("document.querySelectorAll('[aria-label=\"All images of the cluster\"] button').length > 0")
    page.evaluate("window.letGo()")
    report.until("window.wentOn === true")
    first = page.evaluate("fetch('cluster/1?limit=60&order=outlying').then((answer) => answer.json())")
    shown = page.locator("[aria-label='All images of the cluster'] button")
    assert shown.count() == len(first["images"])
    assert first["images"][0]["id"] in (shown.first.get_attribute("aria-label") or "")
    page.keyboard.press("Escape")
    page.reload()
    report.check()


# -- names


def test_a_group_is_named_and_the_report_shows_it(browser, tmp_path: Path):
    folder = made_run(tmp_path, n=120, k=5, groups=[0, 1, 0, 1, 1])
    with serving(opened(folder)) as server:
        watched = Watched(browser, server.url)
        page = watched.visit("#/groups?group=1")
        box = page.get_by_label("Name")
        assert box.input_value() == ""
        box.fill("  small <b>birds</b> ")
        box.press("Enter")
        page.get_by_text("Kept in the run folder.").wait_for()
        assert box.input_value() == "small <b>birds</b>"
        assert page.locator("#section-groups h1:visible").inner_text() == "small <b>birds</b>"
        assert serious_faults(page) == []
        page.set_viewport_size(PHONE)
        watched.settle()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        # What was shown before has the name too.
        page.get_by_role("link", name="All groups").click()
        page.locator("a[data-group='1']", has_text="small <b>birds</b>").wait_for()
        page.reload()
        page.locator("a[data-group='1']", has_text="small <b>birds</b>").wait_for()
        page = watched.visit("#/groups?group=1")
        page.get_by_label("Name").fill("x" * 100)
        page.evaluate("document.querySelector('.naming input').value = 'y'.repeat(101)")
        page.get_by_role("button", name="Save").click()
        page.get_by_text("at most 100 are kept; shorten it.").wait_for()
        watched.faults[:] = [fault for fault in watched.faults if "422" not in fault]
        assert page.locator("#section-groups h1:visible").inner_text() == "small <b>birds</b>"
        page = watched.visit("#/groups?group=0")
        page.get_by_label("Name").fill("fish")
        page.get_by_role("button", name="Save").click()
        page.get_by_text("Kept in the run folder.").wait_for()
        page.get_by_label("Name").fill("")
        page.get_by_role("button", name="Save").click()
        page.get_by_text("It has no name now.").wait_for()
        assert page.locator("#section-groups h1:visible").inner_text() == "Group 0"
        watched.check()
        watched.close()
    output = tmp_path / "page.html"
    assert main(["report", str(folder), "--output", str(output), "--no-open", "--device", "cpu"]) == 0
    watched = Watched(browser, output.as_uri())
    watched.page.locator("a[data-group='1']", has_text="small <b>birds</b>").wait_for()
    assert "fish" not in watched.page.inner_text("#section-groups")
    assert watched.visit("#/groups?group=1").locator(".naming").count() == 0, "only where it can be kept"
    watched.check()
    watched.close()


def test_a_selection_is_kept(browser, tmp_path: Path):
    folder = made_run(tmp_path, n=120, k=4)
    with serving(opened(folder)) as server:
        watched = Watched(browser, server.url)
        page = watched.visit("#/overview")
        page.wait_for_selector(".map canvas.points")
        page.get_by_role("button", name="Select", exact=True).click()
        page.focus(".map canvas.points")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        page.locator(".selection").get_by_label("Name").fill(" the <b>one</b> ")
        page.get_by_role("button", name="Keep").click()
        page.get_by_text("Kept in the run folder").wait_for()
        assert serious_faults(page) == []
        kept = opened(folder).selections.read()
        assert [len(images) for images in kept.values()] == [1]
        assert list(kept) == ["the <b>one</b>"]
        page.reload()
        chip = page.locator(".kept button", has_text="the <b>one</b> 1")
        chip.click()
        assert page.inner_text(".selection h3").replace("\xa0", " ") == "1 image selected"
        assert page.locator(".selection").get_by_label("Name").input_value() == "the <b>one</b>"
        page.get_by_role("button", name="Forget").click()
        page.get_by_text("It is not kept any more.").wait_for()
        assert chip.count() == 0
        assert opened(folder).selections.read() == {}
        watched.check()
        watched.close()


def test_a_cluster_is_named_where_there_is_one_level(report: Watched, server: Server):
    page = report.visit("#/clusters?sort=number&cluster=2")
    page.get_by_label("Name").fill("boats")
    page.keyboard.press("ArrowLeft")  # within the box, not to the cluster before
    page.keyboard.press("Enter")
    page.get_by_text("Kept in the run folder.").wait_for()
    assert page.inner_text("dialog h2").startswith("boats")
    page.keyboard.press("Escape")
    report.settle()
    assert "boats" in page.locator("#section-clusters a[data-cluster='2']").inner_text()
    assert server.explorer is not None
    assert server.explorer.run.group_names.read()[0] == ["", "", "boats", ""]
    page.reload()
    report.visit("#/clusters?cluster=2")
    page.get_by_label("Name").fill("")
    page.get_by_role("button", name="Save").click()
    page.get_by_text("It has no name now.").wait_for()
    page.keyboard.press("Escape")
    report.check()


def test_a_search_names_the_group(browser, tmp_path: Path, picture: Path):
    folder = made_run(tmp_path, n=120, k=5, groups=[0, 1, 0, 1, 1])
    names = opened(folder).group_names
    for g, name in enumerate(["fish", "birds"]):
        names.give(g, name)
    with serving(opened(folder)) as server:
        watched = Watched(browser, server.url)
        page = watched.visit("#/search")
        page.set_input_files("#picture", picture)
        page.wait_for_selector(".likely")
        index = page.evaluate("Number(document.querySelector('.likely').dataset.cluster)")
        assert ["fish", "birds"][[0, 1, 0, 1, 1][index]] in page.inner_text(".query-side .facts")
        watched.check()
        watched.close()


def test_a_phone_fits_the_search(report: Watched):
    page = report.visit("#/search")
    page.set_viewport_size(PHONE)
    report.settle()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    report.check()
