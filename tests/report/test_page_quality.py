"""What a reader does with single images: finds odd ones and copies, sees them large, selects some, looks for similar.

On the real run of a folder in which copies and odd images were planted.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from siammm.report.gather import Gathered, GatherSettings, gather
from siammm.report.render import render
from siammm.report.serve import Server
from siammm.runs.run import Run
from tests.report.browser import PHONE, Watched, serious_faults
from tests.report.made_runs import check_contents, made_run, opened
from tests.report.planted import COPIES, ODD, N, planted_run
from tests.report.served import serving
from tests.report.test_serve import Client

TOTAL = N + len(COPIES) + len(ODD)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return opened(planted_run(tmp_path_factory.mktemp("planted")))


@pytest.fixture(scope="module")
def gathered(run: Run) -> Gathered:
    return gather(run, GatherSettings())


@pytest.fixture(scope="module")
def url(gathered: Gathered, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(render(gathered.contents, gathered.within), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def report(loaded: Watched) -> Iterator[Watched]:
    yield loaded
    loaded.check()


@pytest.fixture(scope="module")
def server(run: Run) -> Iterator[Server]:
    with serving(run) as found:
        yield found


def saved(watched: Watched, name: str) -> tuple[str, list[dict[str, str]]]:
    """The name and the rows of the table that a button downloads."""
    with watched.page.expect_download() as download:
        watched.page.get_by_role("button", name=name, exact=True).click()
    text = Path(download.value.path()).read_bytes().decode("utf-8-sig")
    return download.value.suggested_filename, list(csv.DictReader(io.StringIO(text, newline="")))


# -- what is found


def test_what_was_planted_is_found(run: Run, gathered: Gathered) -> None:
    check_contents(gathered.contents, run)
    names, quality = gathered.contents["images"]["id"], gathered.contents["quality"]
    assert quality is not None
    assert quality["n_images"] == TOTAL == len(names)
    sets = {frozenset(names[row] for row in each["images"]) for each in quality["duplicates"]}
    assert sets == {frozenset(pair) for pair in COPIES.items()}
    found = {each["kind"]: [names[row] for row in each["images"]] for each in quality["odd"]}
    assert found == {"blurred": [], "dark": [], "bright": [], "plain": [], "shape": [], "size": []} | {
        kind: [name] for kind, name in ODD.items()
    }


def test_the_larger_of_two_copies_comes_first(gathered: Gathered) -> None:
    quality, names = gathered.contents["quality"], gathered.contents["images"]["id"]
    assert quality is not None
    by_name = {names[each["images"][1]]: each for each in quality["duplicates"]}
    assert by_name["copy-small.png"]["sizes"] == [(128, 96), (96, 72)]
    assert by_name["copy-small.png"]["similarities"][0] == pytest.approx(1, abs=1e-3)
    assert all(0.5 < each["similarities"][1] <= 1 for each in quality["duplicates"])


def test_without_images_nothing_is_looked_at(tmp_path: Path) -> None:
    folder = made_run(tmp_path, n=30, k=3)
    (tmp_path / "made-images.npy").unlink()
    lost = opened(folder)
    contents = gather(lost, GatherSettings()).contents
    check_contents(contents, lost)
    assert contents["quality"] is None


@pytest.mark.parametrize(("wide", "mixed"), [(True, True), (True, False), (False, True)])
def test_a_cluster_of_what_is_left_over_is_a_catch_all(wide: bool, mixed: bool, tmp_path: Path) -> None:
    """One that is spread widely, and whose images lie between those of the others; either alone is not enough."""
    folder = made_run(tmp_path, n=300, k=6)
    before = opened(folder)
    catch_all = int(np.argmax(np.bincount(before.cluster_N)))
    random, own = np.random.default_rng(0), before.cluster_N == catch_all
    if mixed:
        x_ND = np.load(folder / "embeddings.npy").astype(np.float32)
        x_ND[own] = before.mean_KD[random.integers(0, 6, own.sum())]
        x_ND[own] += 0.3 * random.normal(size=x_ND[own].shape)
        x_ND /= np.linalg.norm(x_ND, axis=1, keepdims=True)
        np.save(folder / "embeddings.npy", x_ND.astype(np.float16))
    if wide:
        before.mixture.concentrations_[catch_all] /= 20
        before.mixture.save(folder / "mixture.safetensors")
    run = opened(folder)
    contents = gather(run, GatherSettings()).contents
    check_contents(contents, run)
    found = [k for k, one in enumerate(contents["clusters"]) if one["is_catch_all"]]
    assert found == ([catch_all] if wide and mixed else [])


@pytest.mark.parametrize("mixed", [True, False])
def test_so_is_a_group(mixed: bool, tmp_path: Path) -> None:
    """By the same measure, of its own images, whatever clusters these are in."""
    folder = made_run(tmp_path, n=300, k=7, groups=[0, 1, 1, 2, 3, 4, 5], strays=9)
    before = opened(folder)
    if mixed:
        random, own = np.random.default_rng(0), before.group_N == 2
        x_ND = np.load(folder / "embeddings.npy").astype(np.float32)
        x_ND[own] = before.mean_KD[random.integers(0, 7, own.sum())]
        x_ND[own] += 0.3 * random.normal(size=x_ND[own].shape)
        x_ND /= np.linalg.norm(x_ND, axis=1, keepdims=True)
        np.save(folder / "embeddings.npy", x_ND.astype(np.float16))
    run = opened(folder)
    groups = gather(run, GatherSettings()).contents["groups"]
    assert [g for g, one in enumerate(groups) if one["is_catch_all"]] == ([2] if mixed else [])
    lengths = [np.linalg.norm(np.asarray(run.embeddings, float)[run.group_N == g].mean(axis=0)) for g in range(6)]
    order = np.argsort(lengths)
    assert np.argsort([one["concentration"] for one in groups]).tolist() == order.tolist()
    assert all(0 <= (one["foreign"] or 0) <= 1 for one in groups)


# -- the page


def test_the_findings_are_shown_and_saved(report: Watched, gathered: Gathered) -> None:
    page = report.visit("#/quality")
    titles = [text.replace("\n", " ") for text in page.locator(".finding h2").all_inner_texts()]
    assert titles == [
        "Near duplicates 4", "Blurred 1", "Dark 1", "Odd shape 1", "Odd size 1", "Outliers 3",
    ]  # fmt: skip
    lead = page.inner_text("#section-quality .lead")
    assert f"All {TOTAL} images were looked at." in lead
    assert "Nothing was found under: bright, without contrast." in lead
    assert page.locator(".duplicate-set").count() == 4
    assert "copy-mirrored.png" in page.inner_text(".duplicate-sets")
    report.until("[...document.querySelectorAll('.duplicate-set canvas')].every(one => 'painted' in one.dataset)")
    name, rows = saved(report, "Download CSV: Near duplicates")
    assert name == "near-duplicates.csv"
    pairs = [frozenset(row["image"] for row in rows if row["set"] == str(n)) for n in range(4)]
    assert set(pairs) == {frozenset(pair) for pair in COPIES.items()}
    assert {row["width"] for row in rows if row["image"] == "copy-small.png"} == {"96"}
    name, rows = saved(report, "Download CSV: Odd size")
    assert (name, [row["image"] for row in rows]) == ("odd-size.csv", ["odd-size.png"])
    assert (rows[0]["width"], rows[0]["height"], rows[0]["side"]) == ("1024", "768", "886.8")
    _, rows = saved(report, "Download CSV: Outliers")
    scores = [float(row["outlier_score"]) for row in rows]
    assert scores == sorted(gathered.contents["images"]["outlier_score"], reverse=True)[:3]


def test_an_image_is_shown_large(report: Watched) -> None:
    page = report.visit("#/quality")
    thumb = page.locator(".duplicate-set", has_text="copy-small.png").locator(".thumb").first
    thumb.click()
    dialog = page.locator("dialog.viewer[open]")
    dialog.wait_for()
    assert dialog.locator("h2").inner_text() == "0007.png"
    report.until("document.querySelector('.viewer canvas').dataset.painted !== undefined")
    assert dialog.locator("canvas").bounding_box()["width"] >= 3 * thumb.bounding_box()["width"]  # type: ignore[index]
    assert "siammm explore" in dialog.inner_text()
    assert dialog.get_by_role("button", name="Find similar").count() == 0, "only where somebody can answer"
    assert serious_faults(page) == []
    page.keyboard.press("ArrowRight")
    assert dialog.locator("h2").inner_text() == "copy-small.png"
    assert dialog.get_by_role("button", name="Next image").is_disabled()
    page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")
    assert page.evaluate("document.activeElement.matches('.duplicate-set .thumb')")
    thumb.click()
    dialog.get_by_role("button", name="Open its cluster").click()
    page.locator("dialog.detail[open]").wait_for()
    # From within a cluster, it closes before the cluster does.
    page.locator("dialog.detail .thumb").nth(1).click()
    dialog.wait_for()
    page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")
    assert page.locator("dialog.detail[open]").count() == 1
    page.keyboard.press("Escape")
    page.locator("dialog.detail").wait_for(state="hidden")


def draw_around(watched: Watched, left: float, top: float, right: float, bottom: float) -> None:
    """A line around a part of the map, in shares of its width and height."""
    page = watched.page
    canvas = page.locator(".map canvas.points")
    canvas.evaluate("one => one.scrollIntoView({ block: 'center', behavior: 'instant' })")
    box = canvas.bounding_box()
    assert box is not None
    corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
    places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in corners]
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in places[1:]:
        page.mouse.move(*place, steps=3)
    page.mouse.up()
    watched.settle()


def test_a_lasso_selects_what_it_encloses(report: Watched, gathered: Gathered) -> None:
    page = report.visit("#/overview")
    page.wait_for_selector(".map canvas.points")
    select = page.get_by_role("button", name="Select", exact=True)
    select.click()
    assert select.get_attribute("aria-pressed") == "true"
    draw_around(report, 0.01, 0.02, 0.5, 0.98)
    images = gathered.contents["images"]
    # The points of the left half of the map, which has the middle of the places in its middle.
    expected = {name for name, x in zip(images["id"], images["x"], strict=True) if x < 0.5}
    assert 0 < len(expected) < TOTAL
    assert page.inner_text(".selection h3").replace("\xa0", " ") == f"{len(expected)} images selected"
    page.locator(".selection").get_by_label("Name").fill("left: <half>")
    assert serious_faults(page) == []
    name, rows = saved(report, "Download CSV")
    assert name == "left-half.csv"
    assert {row["image"] for row in rows} == expected
    assert {row["selection"] for row in rows} == {"left: <half>"}
    clusters = dict(zip(images["id"], images["cluster"], strict=True))
    assert all(int(row["cluster"]) == clusters[row["image"]] for row in rows)
    assert page.locator(".selection .thumb").count() == min(60, len(expected))
    # One more, or one less, by a click; all others with Shift.
    page.keyboard.down("Shift")
    draw_around(report, 0.5, 0.02, 0.99, 0.98)
    page.keyboard.up("Shift")
    assert f"{TOTAL} images" in page.inner_text(".selection h3").replace("\xa0", " ")
    page.focus(".map canvas.points")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert f"{TOTAL - 1} images" in page.inner_text(".selection h3").replace("\xa0", " ")
    page.locator(".selection .thumb").first.click()
    page.locator("dialog.viewer[open]").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Clear").click()
    assert page.locator(".selection").is_hidden()
    select.click()
    draw_around(report, 0.3, 0.3, 0.6, 0.6)
    assert page.locator(".selection").is_hidden(), "the lasso is off"


def test_only_what_is_shown_is_selected(report: Watched, gathered: Gathered) -> None:
    page = report.visit("#/overview")
    chip = page.locator(".chips button", has_text="1").first
    page.get_by_role("button", name="Select", exact=True).click()
    chip.click()
    draw_around(report, 0.01, 0.02, 0.99, 0.98)
    _, rows = saved(report, "Download CSV")
    assert {row["cluster"] for row in rows} == {"1"}
    assert len(rows) == gathered.contents["clusters"][1]["size"]
    page.get_by_role("button", name="Select", exact=True).click()
    chip.click()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_themes_and_a_phone(browser, url: str, scheme: str) -> None:
    watched = Watched(browser, url, viewport=PHONE, has_touch=True, color_scheme=scheme)
    page = watched.visit("#/quality")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert serious_faults(page, only_colour=scheme == "dark") == []
    page.locator(".duplicate-set .thumb").first.tap()
    page.locator("dialog.viewer[open]").wait_for()
    assert page.evaluate("document.querySelector('.viewer').scrollWidth") <= PHONE["width"]
    assert serious_faults(page, only_colour=True) == []
    page.get_by_role("button", name="Close").tap()
    page = watched.visit("#/overview")
    page.wait_for_selector(".map canvas.points")
    page.get_by_role("button", name="Select", exact=True).tap()
    draw_around(watched, 0.01, 0.2, 0.99, 0.99)
    assert page.locator(".selection").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert serious_faults(page, only_colour=True) == []
    watched.check()
    watched.close()


# -- the page that is served


def test_the_server_looks_when_it_is_asked(live: Watched) -> None:
    page = live.visit("#/quality")
    page.locator(".finding").first.wait_for()
    assert page.locator(".duplicate-set").count() == 4
    assert serious_faults(page) == []
    live.check()


def test_an_image_comes_at_its_full_size(live: Watched) -> None:
    page = live.visit("#/quality")
    page.locator(".finding", has_text="Odd size").locator(".thumb").click()
    page.locator("dialog.viewer[open]").wait_for()
    live.until("document.querySelector('.viewer img').naturalWidth === 1024")
    assert "1,024 \u00d7 768 pixels" in page.inner_text(".viewer")
    assert serious_faults(page) == []
    page.keyboard.press("Escape")
    live.check()


def test_similar_images_are_found_from_any_image(live: Watched) -> None:
    page = live.visit("#/quality")
    page.locator(".duplicate-set", has_text="copy-small.png").locator(".thumb").first.click()
    page.get_by_role("button", name="Find similar").click()
    live.until("document.querySelector('.query-side bdi')?.textContent === '0007.png'")
    assert page.locator("dialog[open]").count() == 0
    alike = page.locator("[aria-label='Most similar images'] button")
    assert "copy-small.png" in (alike.first.get_attribute("aria-label") or "")
    labels = [alike.nth(i).get_attribute("aria-label") or "" for i in range(alike.count())]
    assert not any(label.startswith("0007.png") for label in labels), "not itself"
    # From there to the next, and back.
    alike.first.click()
    page.get_by_role("button", name="Find similar").click()
    live.until("document.querySelector('.query-side bdi')?.textContent === 'copy-small.png'")
    page.go_back()
    live.until("document.querySelector('.query-side bdi')?.textContent === '0007.png'")
    assert serious_faults(page) == []
    live.check()


def test_what_the_server_answers(server: Server, run: Run) -> None:
    client = Client(server)
    place = {name: i for i, name in enumerate(run.ids)}
    for name, kind in (("0000.png", "image/png"), ("odd-size.png", "image/jpeg")):
        status, body, headers = client.ask(f"/image/{place[name]}")
        assert (status, headers["Content-Type"]) == (200, kind)
        picture = np.asarray(Image.open(io.BytesIO(body)))
        original = np.asarray(Image.open(Path(str(run.data)) / name))
        assert picture.shape == original.shape
        assert np.abs(picture.astype(int) - original).mean() < (2 if kind == "image/jpeg" else 1e-9)
    similar: Any = client.json(f"/similar/{place['copy-mirrored.png']}")
    assert similar["id"] == "copy-mirrored.png"
    assert similar["neighbours"][0]["id"] == "0011.png"
    assert len(similar["neighbours"]) == min(48, TOTAL - 1)
    assert [one["similarity"] for one in similar["neighbours"]] == sorted(
        (one["similarity"] for one in similar["neighbours"]), reverse=True
    )
    for path in (f"/image/{TOTAL}", f"/similar/{TOTAL}"):
        status, body, _ = client.ask(path)
        assert (status, json.loads(body)["error"][:17]) == (404, "There is no image")
    for path in ("/image/x", "/similar/-1"):
        assert client.ask(path)[0] == 400
    assert client.json("/quality") == client.json("/quality")
