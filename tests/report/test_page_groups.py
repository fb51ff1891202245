"""The page of a run with two levels: groups first, then their clusters, then images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.report.browser import PHONE, Watched, check_fits_a_phone, serious_faults_at, unfold, write_page
from tests.report.example_contents import HOSTILE, SECTIONS, Example, make

EXAMPLE = Example(n_groups=4, named=True)
WITH_GROUPS = ["groups", *SECTIONS]


@pytest.fixture(scope="module")
def url(folder: Path) -> str:
    return write_page(folder, EXAMPLE)


@pytest.fixture(scope="module")
def loaded(loaded: Watched) -> Watched:
    """The page with a function that reads the pixels of a canvas."""
    loaded.page.evaluate(PIXELS)
    return loaded


@pytest.fixture
def report(loaded: Watched) -> Iterator[Watched]:
    """The page, loaded once for all tests; each must leave it without a fault."""
    loaded.visit("#/groups")
    yield loaded
    loaded.check()


# The pixels of a canvas, or of its upper part. They are read from a copy: a canvas that is read often is a warning.
PIXELS = """() => void (window.pixelsOf = (selector, part = 1) => {
    const canvas = document.querySelector(selector);
    const [width, height] = [canvas.width, Math.round(canvas.height * part)];
    const copy = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
    copy.drawImage(canvas, 0, 0);
    return copy.getImageData(0, 0, width, height).data;
})"""


def clusters_shown(watched: Watched) -> list[int]:
    return watched.page.eval_on_selector_all(
        "#section-groups li a.card[data-cluster]", "all => all.map(one => Number(one.dataset.cluster))"
    )


def test_groups_are_what_opens_first(browser, url: str):
    watched = Watched(browser, url)
    page = watched.page
    assert page.locator("#nav a").first.inner_text() == "Groups"
    assert page.locator("#nav a[aria-current]").inner_text() == "Groups"
    assert page.inner_text("h1").replace("\xa0", " ") == "4 groups in 400 images"
    assert "12 clusters" in page.inner_text(".lead").replace("\xa0", " ")
    page.evaluate("location.hash = '#/nothing'")
    watched.settle()
    assert page.locator("#section-groups").is_visible()
    watched.check()
    watched.close()


def test_a_group_of_what_is_left_over_says_so(report: Watched):
    page = report.page
    marked = page.locator("#section-groups li a.card:visible", has=page.locator(".badge.mixed"))
    assert [marked.nth(i).get_attribute("data-group") for i in range(marked.count())] == ["1"]
    assert ", a catch-all" in (marked.get_attribute("aria-label") or "")
    report.visit("#/groups?group=1")
    words = page.inner_text("#section-groups .catch-all").replace("\xa0", " ").replace("\u202f", " ")
    assert "A catch-all. Its concentration is 31, unusually low" in words
    assert "60 % of the nearest neighbours of its images are in other groups" in words
    report.visit("#/groups?group=0")
    assert not page.locator("#section-groups .catch-all").count()


def test_the_images_of_a_group_that_are_least_certain_come_last(report: Watched):
    contents = make(EXAMPLE).contents
    images, central = contents["images"], contents["groups"][2]["central"]
    page = report.visit("#/groups?group=2")
    assert "least certain to belong here come last" in page.inner_text("#section-groups .strip")
    shown = page.eval_on_selector_all(
        "#section-groups .strip [data-image]", "all => all.map(one => Number(one.dataset.image))"
    )
    assert shown[: len(central)] == central
    sure = [images["group_probability"][row] for row in shown[len(central) :]]
    assert sure == sorted(sure, reverse=True)
    assert len(set(sure)) > 10


def test_a_card_for_each_group(report: Watched):
    groups = make(EXAMPLE).contents["groups"]
    page = report.page
    cards = page.locator("#section-groups li a.card:visible")
    order = sorted(range(4), key=lambda g: (-groups[g]["size"], g))
    assert page.eval_on_selector_all("a[data-group]", "all => all.map(one => Number(one.dataset.group))") == order
    for at, g in enumerate(order):
        text = cards.nth(at).inner_text().replace("\xa0", " ").replace("\u202f", " ")
        share = f"{100 * groups[g]['size'] / 400:.0f} %"
        assert f"{groups[g]['size']} images \u00b7 {share} \u00b7 3 clusters" in text
        assert f"Group {g}" in text
        assert (f"kind {g}" in text) == (g % 2 == 0)
        spoken = (cards.nth(at).get_attribute("aria-label") or "").replace("\xa0", " ")
        assert spoken.startswith(f"kind {g}, " if g % 2 == 0 else f"Group {g}, ")
        assert f"{groups[g]['size']} images, " in spoken
        assert spoken.endswith("3 clusters, a catch-all" if g == 1 else "3 clusters")


@pytest.mark.parametrize(("ratio", "side"), [(1, 24), (2, 96), (1, 48)])
def test_the_mosaic_is_sharp(browser, folder: Path, ratio: int, side: int):
    """A pixel of the canvas is one of the screen, also where it begins; a thumbnail is not enlarged, or by pixels."""
    example = Example(n_images=80, n_groups=4, thumbnail=side)
    watched = Watched(browser, write_page(folder, example, f"sharp-{side}.html"), device_scale_factor=ratio)
    page = watched.page
    assert page.evaluate("PIXELATED") == (side == 24)
    for width in (1366, 1301, 1111, 847):
        page.set_viewport_size({"width": width, "height": 850})
        watched.settle()
        found = page.eval_on_selector_all(
            "#section-groups canvas.mosaic",
            "all => all.map(one => [one.width, one.getBoundingClientRect().width, one.getBoundingClientRect().left])",
        )
        assert len(found) >= 3
        for pixels, wide, left in found:
            assert wide * ratio == pixels, width
            assert wide > 250
            assert left == round(left), width
            assert side == 24 or wide / page.evaluate(f"wallShape({wide})[0]") <= side
    watched.check()
    watched.close()


def test_the_mosaic_is_of_all_clusters(report: Watched):
    page = report.page
    page.wait_for_selector("#section-groups canvas.mosaic[data-painted]")
    contents = make(EXAMPLE).contents
    first = contents["groups"][3]["central"]
    assert {contents["images"]["cluster"][row] for row in first[:3]} == set(contents["groups"][3]["clusters"])
    # The first cell of the card is the first image as its sheet has it.
    same = page.evaluate(
        """async (rows) => {
            const canvas = document.querySelector("a[data-group='3'] canvas.mosaic");
            const [columns] = wallShape(canvas.clientWidth);
            const cell = Math.floor((canvas.width - 2 * (columns - 1)) / columns);
            const often = { willReadFrequently: true };
            const known = new OffscreenCanvas(cell, cell).getContext("2d", often);
            const shown = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", often);
            shown.drawImage(canvas, 0, 0);
            known.imageSmoothingEnabled = false;
            const sheets = await Promise.all(thumbs.sheets.map((_, number) => sheet(number)));
            return rows.map((row, i) => {
              const [number, x, y] = place(images.thumbnail[row]);
              known.drawImage(sheets[number], x, y, thumbs.width, thumbs.height, 0, 0, cell, cell);
              const left = (i % columns) * (cell + 2);
              const a = known.getImageData(0, 0, cell, cell).data;
              const b = shown.getImageData(left, Math.floor(i / columns) * (cell + 2), cell, cell).data;
              return a.every((value, at) => Math.abs(value - b[at]) < 3);
            });
        }""",
        first[:8],
    )
    assert same == [True] * 8


def test_a_group_without_a_name_or_labels_is_called_by_its_number(browser, folder: Path):
    watched = Watched(browser, write_page(folder, Example(n_groups=4, n_labels=0), "plain-groups.html"))
    assert sorted(watched.page.locator("#section-groups .card-label").all_inner_texts())[-4:] == [
        f"Group {g}" for g in range(4)
    ]
    assert watched.page.locator("#section-groups .card-number").count() == 0
    watched.check()
    watched.close()


def test_a_group_opens_to_its_clusters_and_these_to_images(report: Watched):
    groups = make(EXAMPLE).contents["groups"]
    page = report.page
    page.locator("a[data-group='1']").click()
    page.get_by_role("heading", name="Group 1").wait_for()
    assert "group=1" in page.evaluate("location.hash")
    assert page.evaluate("document.activeElement.tagName") == "H1"
    assert clusters_shown(report) == groups[1]["clusters"] == [3, 4, 5]
    page.locator("#section-groups a[data-cluster='4']").click()
    dialog = page.locator("dialog[open]")
    dialog.wait_for()
    assert "Cluster 4" in dialog.locator("h2").inner_text()
    assert dialog.locator(".thumb canvas").count() > 20
    assert dialog.locator(".place").inner_text() == "2 of 3"
    page.keyboard.press("ArrowRight")
    report.until("document.querySelector('dialog h2').textContent.includes('Cluster 5')")
    assert dialog.get_by_role("button", name="Next cluster").is_disabled(), "the last of the group"
    page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")
    assert page.get_by_role("heading", name="Group 1").is_visible()
    page.get_by_role("link", name="All groups").click()
    page.locator("a[data-group='1']").wait_for()
    assert page.evaluate("document.activeElement.dataset.group") == "1"


def test_a_group_has_its_own_images(report: Watched):
    """Those that its clusters share with other groups are where they belong, and nothing else is."""
    contents = make(EXAMPLE).contents
    page = report.visit("#/groups?group=1")
    shown = "[...document.querySelectorAll('#section-groups .strip .thumb')].map((one) => Number(one.dataset.image))"
    while page.get_by_role("button", name="Show more").count():
        page.get_by_role("button", name="Show more").click()
    rows = page.evaluate(shown)
    own = [row for row, group in enumerate(contents["images"]["group"]) if group == 1]
    assert sorted(rows) == own
    assert rows[: len(contents["groups"][1]["central"])] == contents["groups"][1]["central"]
    assert {contents["images"]["cluster"][row] for row in own} > set(contents["groups"][1]["clusters"])
    n_elsewhere = len(own) - contents["groups"][1]["n_in_clusters"]
    assert n_elsewhere > 1
    text = page.inner_text(".group-clusters").replace("\xa0", " ")
    assert f"{n_elsewhere} images of the group are in clusters of others." in text
    # A cluster says how many of its images are in the group that it stands with.
    cluster = next(k for k in range(12) if contents["clusters"][k]["n_in_group"] < contents["clusters"][k]["size"])
    page = report.visit(f"#/clusters?cluster={cluster}")
    facts = " ".join(page.inner_text("dialog.detail .facts").replace("\xa0", " ").split())
    assert f"{contents['clusters'][cluster]['n_in_group']} of its images" in facts
    page.keyboard.press("Escape")


def test_an_image_opens_its_group(report: Watched):
    contents = make(EXAMPLE).contents
    row = next(row for row, group in enumerate(contents["images"]["group"])
               if group != contents["clusters"][contents["images"]["cluster"][row]]["group"])  # fmt: skip
    group = contents["images"]["group"][row]
    page = report.visit(f"#/groups?group={group}")
    while page.get_by_role("button", name="Show more").count():
        page.get_by_role("button", name="Show more").click()
    page.locator(f"#section-groups .strip .thumb[data-image='{row}']").click()
    page.get_by_role("button", name="Open its cluster").click()
    assert page.locator("dialog.detail[open]").count() == 1
    page.locator(f"dialog.detail .thumb[data-image='{row}']").first.click()
    page.get_by_role("button", name="Open its group").click()
    report.until(f"location.hash === '#/groups?group={group}'")
    assert page.locator("dialog[open]").count() == 0


def test_a_group_opens_by_keys_and_closes_by_the_back_button(report: Watched):
    page = report.page
    page.focus("#section-groups li a.card >> nth=0")
    page.keyboard.press("ArrowRight")
    group = page.evaluate("document.activeElement.dataset.group")
    page.keyboard.press("Enter")
    report.until(f"location.hash === '#/groups?group={group}'")
    page.go_back()
    report.until(f"document.activeElement.dataset.group === '{group}'")
    assert page.evaluate("location.hash") == "#/groups"
    for address in ("#/groups?group=99", "#/groups?group=x", "#/groups?group=-1", "#/groups?group=1.5"):
        assert report.visit(address).get_by_role("heading", name="4 groups").is_visible(), address


def test_where_the_reader_was_is_kept(browser, folder: Path):
    example = Example(n_images=2000, n_clusters=120, n_groups=60, n_splits=1)
    watched = Watched(browser, write_page(folder, example, "many-groups.html"))
    page = watched.page
    page.evaluate("scrollTo(0, 1500)")
    watched.settle()
    before = page.evaluate("scrollY")
    card = page.locator("#section-groups a[data-group]:visible").nth(9)
    card.scroll_into_view_if_needed()
    watched.settle()
    before = page.evaluate("scrollY")
    assert before > 500
    card.click()
    watched.until("scrollY === 0 && location.hash.includes('group=')")
    page.go_back()
    watched.until("!location.hash.includes('group=')")
    watched.settle()
    assert abs(page.evaluate("scrollY") - before) < 200
    assert page.locator("#section-groups li").count() < 60, "only what is near is built"
    watched.check()
    watched.close()


def test_the_map_has_the_colours_of_groups_first(report: Watched):
    page = report.visit("#/overview")
    page.wait_for_selector(".points")
    assert page.inner_text("#section-overview h1").replace("\xa0", " ") == "4 groups and 12 clusters in 400 images"
    head = page.locator("#section-overview .panel-head").first
    assert head.locator("label").all_inner_texts() == ["Group", "Cluster", "Label"]
    assert head.get_by_label("Group").is_checked()
    chips = page.locator("#section-overview .chips").first
    assert chips.locator("button").all_inner_texts() == ["kind 0", "Group 1", "kind 2", "Group 3"]
    assert chips.get_attribute("aria-label") == "Show one group"
    pixels = """() => {
        const data = pixelsOf("canvas.points");
        const close = (at, [r, g, b]) => Math.hypot(data[at] - r, data[at + 1] - g, data[at + 2] - b) < 8;
        const count = (colour) => {
          let n = 0;
          for (let at = 0; at < data.length; at += 4) n += data[at + 3] > 180 && close(at, colour);
          return n;
        };
        return range(12).map((i) => count(rgbOf(i)));
    }"""
    report.settle()
    by_group = page.evaluate(pixels)
    assert min(by_group[:4]) > 50
    assert max(by_group[4:]) < 10
    head.get_by_label("Cluster").check(force=True)
    report.settle()
    assert min(page.evaluate(pixels)) > 50
    assert chips.locator("button").count() == 12
    assert chips.get_attribute("aria-label") == "Show one cluster"
    head.get_by_label("Label").check(force=True)
    assert chips.locator("button").first.inner_text() == "class a"
    head.get_by_label("Group").check(force=True)
    chips.locator("button", has_text="kind 2").click()
    report.settle()
    alone = page.evaluate(pixels)
    assert alone[2] > 50
    assert max(alone[0], alone[1], alone[3]) < 10
    chips.locator("button", has_text="kind 2").click()


def test_an_image_names_its_group(report: Watched):
    page = report.visit("#/clusters?sort=number&cluster=0")
    page.locator("dialog .thumb").nth(1).hover()
    assert "kind 0" in page.inner_text(".tip")
    assert "Probability of its group" in page.inner_text(".tip")
    assert "kind 0" in (page.locator("dialog .thumb").nth(1).get_attribute("aria-label") or "")
    page.locator("dialog .facts a", has_text="kind 0").click()
    page.locator("dialog.detail").wait_for(state="hidden")
    assert page.locator("#section-groups h1:visible").inner_text() == "kind 0"


def test_clusters_are_found_and_sorted_by_group(report: Watched):
    page = report.visit("#/clusters")
    groups = "[...document.querySelectorAll('#section-clusters li a')].map(one => clusters[one.dataset.cluster].group)"
    page.get_by_label("Sort by").select_option("group")
    report.settle()
    found = page.evaluate(groups)
    assert found == sorted(found)
    assert len(found) == 12
    page.get_by_label("Search").fill("KIND 2")
    report.until("document.querySelectorAll('#section-clusters li').length === 3")
    assert set(page.evaluate(groups)) == {2}
    assert "kind 2" in (page.locator("#section-clusters li a").first.get_attribute("aria-label") or "")
    page.get_by_label("Search").fill("")
    report.until("document.querySelectorAll('#section-clusters li').length === 12")


def test_the_tree_is_cut_at_the_groups(report: Watched):
    contents = make(EXAMPLE).contents
    tree = contents["tree"]
    assert tree is not None
    page = report.visit("#/tree")
    assert page.locator("#section-tree .cut .chip").all_inner_texts() == ["Groups: 4", "Clusters: 12"]
    at_groups, at_clusters = (page.get_by_role("button", name=name) for name in ("Groups: 4", "Clusters: 12"))
    assert page.get_by_label("K", exact=True).input_value() == "4", "where the slider is first"
    assert at_groups.get_attribute("aria-pressed") == "true"
    assert "These are the clusters of each group, joined" in page.inner_text("#section-tree")
    nodes = page.evaluate("new TreeShape(tree).cut(tree.n_groups)")
    assert sorted(tree["group"][node] for node in nodes) == [0, 1, 2, 3]
    assert sorted(page.locator("#section-tree .badge").all_inner_texts()) == ["Group 1", "Group 3", "kind 0", "kind 2"]
    at_clusters.click()
    report.until("document.querySelectorAll('#section-tree li').length === 12")
    assert at_groups.get_attribute("aria-pressed") == "false"
    assert at_clusters.get_attribute("aria-pressed") == "true"
    assert page.locator("#section-tree .badge", has_text="cluster 3").count() == 1
    page.get_by_label("K", exact=True).fill("2")
    report.until("document.querySelectorAll('#section-tree li').length === 2")
    assert "Groups, joined by Ward's method" in page.inner_text("#section-tree")
    page.get_by_label("K", exact=True).fill("6")
    report.until("document.querySelectorAll('#section-tree li').length === 6")
    assert "Clusters within their groups" in page.inner_text("#section-tree")
    at_groups.click()
    report.until("document.querySelectorAll('#section-tree li').length === 4")


def test_the_branches_of_a_group_have_its_colour(report: Watched):
    page = report.visit("#/tree?k=4")
    count = """() => {
        const data = pixelsOf("canvas.dendrogram", 0.6);
        return range(6).map((i) => {
          const [r, g, b] = rgbOf(i);
          let n = 0;
          for (let at = 0; at < data.length; at += 4) {
            n += data[at + 3] > 100 && Math.hypot(data[at] - r, data[at + 1] - g, data[at + 2] - b) < 25;
          }
          return n;
        });
    }"""
    report.until(f"Math.min(...({count})().slice(0, 4)) > 40")
    assert max(page.evaluate(count)[4:]) < 10


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(browser, url: str, scheme: str):
    addresses = ["#/groups", "#/groups?group=2", "#/groups?group=1&cluster=3", "#/overview", "#/clusters", "#/tree"]
    assert serious_faults_at(browser, url, addresses, scheme) == []


def test_a_phone_scrolls_one_way_only(browser, url: str):
    watched = Watched(browser, url, viewport=PHONE, has_touch=True)
    sections = [f"#/{section}" for section in WITH_GROUPS]
    check_fits_a_phone(watched, [*sections, "#/groups?group=2", "#/groups?group=2&cluster=7"])
    watched.visit("#/groups")
    watched.page.locator("a[data-group='1']").tap()
    watched.page.get_by_role("heading", name="Group 1").wait_for()
    watched.check()
    watched.close()


def test_nothing_hostile_runs_in_names(browser, folder: Path):
    example = Example(hostile=True, n_groups=len(HOSTILE) * 2, n_clusters=48, named=True)
    watched = Watched(browser, write_page(folder, example, "hostile-groups.html"))
    for address in [
        *(f"#/{section}" for section in WITH_GROUPS),
        *(f"#/groups?group={g}" for g in range(0, 20, 2)),
    ]:
        page = watched.visit(address)
        unfold(page)
        assert page.locator("#main img, #main script, #main iframe, a[href^='javascript']").count() == 0
        assert "\u202e" not in page.inner_text("body")
        assert page.evaluate("document.documentElement.scrollWidth") <= 1366, address
    watched.check()
    watched.close()


def test_a_name_of_a_cluster_where_there_is_one_level(browser, folder: Path):
    """There, every cluster is its own group, and the name is the cluster's."""
    watched = Watched(browser, write_page(folder, Example(named=True), "named-clusters.html"))
    page = watched.visit("#/clusters?sort=number")
    cards = page.locator("#section-clusters li a.card")
    assert "kind 2" in cards.nth(2).inner_text()
    assert (cards.nth(2).get_attribute("aria-label") or "").startswith("kind 2, ")
    assert "kind" not in cards.nth(3).inner_text()
    page.get_by_label("Search").fill("kind 4")
    watched.until("document.querySelectorAll('#section-clusters li').length === 1")
    page = watched.visit("#/overview?cluster=2")
    assert page.inner_text("dialog h2").startswith("kind 2")
    page.keyboard.press("Escape")
    assert page.locator(".chips button").nth(2).inner_text() == "kind 2"
    assert page.locator(".chips button").nth(3).inner_text() == "3"
    watched.check()
    watched.close()
