"""The report in a browser: what a reader does with it, by mouse, by keyboard, on a phone."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.report.browser import Watched, write_page
from tests.report.example_contents import SECTIONS, Example, make

EXAMPLE = Example()


@pytest.fixture
def report(loaded: Watched) -> Iterator[Watched]:
    """The page, loaded once for all tests; each must leave it without a fault."""
    loaded.visit("#/overview")
    yield loaded
    loaded.check()


def numbers(watched: Watched) -> list[int]:
    found = watched.page.eval_on_selector_all(
        "#section-clusters li a.card", "all => all.map(one => Number(one.dataset.cluster))"
    )
    return found


def test_clusters_are_what_opens_first_without_groups(browser, url: str):
    watched = Watched(browser, url)
    page = watched.page
    assert page.locator("#nav a").first.inner_text() == page.locator("#nav a[aria-current]").inner_text() == "Clusters"
    assert page.inner_text("h1").replace("\xa0", " ") == "12 clusters in 400 images"
    assert page.inner_text(".lead").startswith("There is one level: no groups.")
    assert page.locator("#section-clusters li a.card").count() == 12
    page.get_by_label("Search").fill("#5")
    watched.until("document.querySelector('#section-clusters .result').textContent === '1 of 12'")
    watched.check()
    watched.close()


def test_opens_from_disk_and_says_what_was_found(report: Watched):
    page = report.page
    assert page.inner_text("#section-overview h1").replace("\xa0", " ") == "12 clusters in 400 images"
    assert "resnet18" in page.inner_text("#section-overview .lead")
    page.wait_for_selector(".points")
    page.wait_for_selector("canvas.thumbnail[data-painted]")
    assert page.locator("#nav a").count() == len(SECTIONS)
    painted = "c => { const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; return d.some(v => v); }"
    assert page.eval_on_selector("canvas.points", painted)
    assert page.eval_on_selector(".ribbon canvas", painted)


def test_how_it_was_found_is_closed(report: Watched):
    """Curves are for those who ask."""
    page = report.page
    closed = page.locator("details.how-found")
    closed.wait_for()
    assert closed.get_attribute("open") is None
    assert not page.get_by_text("The number of clusters was found.").is_visible()
    assert page.locator("#section-overview .chart:visible").count() == 0
    for name in ("Loss", "learning rate", "kNN", "Size and concentration"):
        assert closed.locator(".chart-title", has_text=name).count() >= 1
    page.get_by_text("How it was found").click()
    assert page.get_by_text("The number of clusters was found.").is_visible()
    report.until("document.querySelectorAll('.how-found .chart svg').length >= 4")
    assert page.locator("#section-overview .chart:visible").count() == closed.locator(".chart").count() >= 4
    page.get_by_text("How it was found").click()


def test_one_level_is_said_to_be_one(report: Watched):
    page = report.page
    assert page.locator("#section-overview .hero").get_by_text("There is one level: no groups.").is_visible()
    assert page.locator("#nav a[data-section='groups']").count() == 0
    page.wait_for_selector(".points")
    assert page.locator(".map").locator("xpath=..").locator("fieldset label").all_inner_texts() == ["Cluster", "Label"]
    assert page.locator(".chips").first.get_attribute("aria-label") == "Show one cluster"
    options = report.visit("#/clusters").locator("#section-clusters option").all_inner_texts()
    assert "Group" not in options
    report.visit("#/clusters?cluster=1")
    assert "Group" not in page.inner_text("dialog .facts")
    assert page.locator("#section-tree .chip, .naming").count() == 0
    assert report.visit("#/tree").locator("#section-tree .cut .chip").all_inner_texts() == ["Found: 12"]


def test_figures_are_tables_by_protocol(report: Watched):
    figures = {(one["protocol"], one["name"]): one["value"] for one in make(EXAMPLE).contents["figures"]}
    page = report.page
    page.wait_for_selector(".figures")
    assert page.locator(".figures").count() == 3
    rows = page.locator(".figures.wide tbody tr").all_inner_texts()
    ami = [figures["clustering", f"mixture, {part}: AMI"] for part in ("train", "test")]
    assert rows[0].split() == ["AMI", f"{ami[0]:.3f}", f"{ami[1]:.3f}"]
    assert rows[1].split() == ["NMI", "\u2013", f"{figures['clustering', 'mixture, test: NMI']:.3f}"]
    assert "\u00b1 0.004" in page.locator(".figures tbody").nth(1).inner_text()


def test_clusters_are_sorted_and_searched(report: Watched):
    contents = make(EXAMPLE).contents
    page = report.visit("#/clusters")
    sizes = [contents["clusters"][i]["size"] for i in numbers(report)]
    assert sizes == sorted(sizes, reverse=True)
    page.get_by_label("Sort by").select_option("concentration")
    report.settle()
    found = [contents["clusters"][i]["concentration"] for i in numbers(report)]
    assert found == sorted(found, reverse=True)
    page.get_by_label("Search").fill("class b")
    report.until("document.querySelectorAll('#section-clusters li').length === 2")
    assert set(numbers(report)) == {1, 7}
    page.get_by_label("Search").fill("image-00003")
    report.until("document.querySelectorAll('#section-clusters li').length === 1")
    assert numbers(report) == [3]
    page.get_by_label("Search").fill("#5")
    report.until("document.querySelector('#section-clusters li a').dataset.cluster === '5'")
    page.get_by_label("Search").fill("nothing of the kind")
    page.get_by_text("No cluster matches.").wait_for()
    page.get_by_label("Search").fill("")
    report.until("document.querySelectorAll('#section-clusters li').length === 12")


@pytest.mark.parametrize("address", ["clusters?sort=constructor", "clusters?sort=__proto__", "tree?k=x"])
def test_an_address_may_hold_anything(report: Watched, address: str):
    page = report.visit(f"#/{address}")
    assert page.locator("#main h1:visible").count() == 1
    report.check()


def test_a_cluster_opens_steps_and_closes_by_keys(report: Watched):
    page = report.visit("#/clusters?sort=number")
    page.focus("#section-clusters a.card[data-cluster='0']")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.cluster") == "1"
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.dataset.cluster") == "11"
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    dialog = page.locator("dialog[open]")
    dialog.wait_for()
    assert "Cluster 0" in dialog.locator("h2").inner_text()
    assert "cluster=0" in page.evaluate("location.hash")
    for heading in ("Central", "Boundary", "Sample", "Labels", "Nearest clusters", "Merges"):
        assert dialog.get_by_role("heading", name=heading).count() == 1
    page.keyboard.press("ArrowRight")
    report.until("document.querySelector('dialog h2').textContent.includes('Cluster 1')")
    for _ in range(40):  # the focus never leaves the dialog for the page below it
        page.keyboard.press("Tab")
        inside = "document.activeElement === document.body || !!document.activeElement.closest('dialog')"
        assert page.evaluate(inside)
    page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")
    assert "cluster=" not in page.evaluate("location.hash")
    assert page.evaluate("document.activeElement.dataset.cluster") == "0"


def test_the_back_button_and_links_work(report: Watched):
    page = report.visit("#/clusters?sort=number")
    page.locator("#section-clusters a.card[data-cluster='2']").click()
    page.locator("dialog[open] .near").first.click()
    report.settle()
    page.go_back()
    page.locator("dialog").wait_for(state="hidden")
    assert page.evaluate("location.hash").startswith("#/clusters")
    page.locator("#nav a[data-section='tree']").click()
    page.wait_for_selector("#section-tree:not([hidden])")
    page.go_back()
    page.wait_for_selector("#section-clusters:not([hidden])")
    report.visit("#/overview?cluster=4")
    assert "Cluster 4" in page.inner_text("dialog h2")
    page.get_by_role("button", name="Close").click()
    page.locator("dialog").wait_for(state="hidden")
    assert page.evaluate("location.hash") == "#/overview"
    page.evaluate("location.hash = '#/nothing?cluster=x'")
    page.wait_for_selector("#section-clusters:not([hidden])")


def test_an_image_shows_its_facts(report: Watched):
    page = report.visit("#/clusters?cluster=3")
    page.locator("dialog .thumb").first.hover()
    tip = page.locator(".tip")
    tip.wait_for()
    assert "image-00003" in tip.inner_text()
    assert "Share of its cluster" in tip.inner_text()
    page.keyboard.press("Escape")
    tip.wait_for(state="hidden")


def test_the_map_is_walked_by_keys_and_opens_a_cluster(report: Watched):
    page = report.visit("#/overview")
    page.focus("canvas.points >> nth=0")
    page.keyboard.press("ArrowRight")
    first = page.inner_text("#announcer")
    assert "cluster" in first
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#announcer") != first
    page.keyboard.press("+")
    page.keyboard.press("0")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    page.locator("dialog[open]").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Enlarge the map").click()
    page.locator("#section-overview label", has_text="Label").first.click()
    page.locator(".chip", has_text="class b").click()
    report.settle()
    page.get_by_role("button", name="Show the whole map").click()


def test_the_map_is_drawn_at_once(browser, folder: Path):
    watched = Watched(browser, write_page(folder, Example(n_images=20_000, n_clusters=50, thumbnail=4), "map.html"))
    watched.visit("#/overview").wait_for_selector(".points")
    took = watched.page.evaluate(
        """() => {
            const plot = new PointPlot({ xs: images.x, ys: images.y, colour: () => [1, 2, 3], radius: 1.5,
              padding: [0, 0, 0, 0], label: "", onHover() {}, onOpen() {}, describe: () => "" });
            document.querySelector(".map").append(plot.canvas);
            plot.render();
            const times = [];
            for (let i = 0; i < 15; i++) {
              const start = performance.now();
              plot.render();
              times.push(performance.now() - start);
            }
            return Math.min(...times);
        }"""
    )
    watched.check()
    watched.close()
    assert took < 150  # a few milliseconds on a quiet core; the best of 15, for cores that are not


def test_the_tree_is_cut_anywhere(report: Watched):
    page = report.visit("#/tree")
    cards = "#section-tree li"
    assert page.locator(cards).count() == 12
    assert "These are the clusters that were found." in page.inner_text("#section-tree")
    page.get_by_label("Number of parts, K").focus()
    page.keyboard.press("ArrowLeft")
    report.until("document.querySelectorAll('#section-tree li').length === 11")
    page.get_by_label("K", exact=True).fill("14")
    report.until("location.hash.includes('k=14')")
    assert "made for this report" in page.inner_text("#section-tree")
    page.get_by_label("K", exact=True).fill("1")
    report.until("document.querySelectorAll('#section-tree li').length === 1")
    page.get_by_role("button", name="Found: 12").click()
    report.until("document.querySelectorAll('#section-tree li').length === 12")
    page.get_by_label("Number of parts, K").focus()
    page.keyboard.press("Home")
    report.until("location.hash.includes('k=1')")
    page.locator("#section-tree li a").click()
    page.focus("canvas.dendrogram")
    page.keyboard.press("ArrowDown")
    assert "images" in page.inner_text("#announcer")
    page.keyboard.press("Enter")
    report.until("location.hash.includes('node=')")
    page.locator(".crumbs a", has_text="All images").click()
    report.until("!location.hash.includes('node=')")


def test_cuts_agree_with_the_tree(report: Watched):
    tree = make(EXAMPLE).contents["tree"]
    assert tree is not None
    page = report.visit("#/tree")
    for k in (1, 2, 5, 12, 17, 24):
        groups = page.evaluate("k => new TreeShape(tree).cut(k)", k)
        assert len(groups) == k
        assert sum(tree["size"][node] for node in groups) == EXAMPLE.n_images
    assert sorted(tree["cluster"][node] for node in page.evaluate("new TreeShape(tree).cut(12)")) == list(range(12))


def test_classes_have_both_views(report: Watched):
    contents = make(EXAMPLE).contents
    page = report.visit("#/classes?view=label&of=1")
    assert "class b" in page.inner_text("#section-classes .lead")
    of_label = sum(dict(c["label_counts"]).get(1, 0) > 0 for c in contents["clusters"])
    assert page.locator(".class-row").count() == min(of_label, 12)
    page.locator("label", has_text="One cluster, by label").click()
    page.locator("#section-classes select:visible").select_option("4")
    report.settle()
    assert "Cluster 4" in page.inner_text("#section-classes .lead")
    assert page.locator(".class-row").count() == len(contents["clusters"][4]["label_counts"])
    page.get_by_role("button", name="Next cluster").click()
    report.settle()
    assert "Cluster 4 has" not in page.inner_text("#section-classes .lead")


def test_the_selected_suspects_are_downloaded(report: Watched):
    contents = make(EXAMPLE).contents
    suspects, names = contents["suspects"], contents["label_names"]
    assert suspects is not None
    assert names is not None
    page = report.visit("#/suspects")
    boxes = page.locator("#section-suspects li input")
    boxes.nth(0).check()
    boxes.nth(2).check()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download 2 selected").click()
    text = Path(download.value.path()).read_bytes().decode("ascii")
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert [row["rank"] for row in rows] == ["1", "3"]
    assert rows[0]["image"] == contents["images"]["id"][suspects[0]["image"]]
    assert rows[0]["given_label"] == names[suspects[0]["given"]]
    assert rows[0]["proposed_label"] == names[suspects[0]["proposed"]]
    assert float(rows[0]["score"]) == suspects[0]["score"]
    assert rows[0]["label_of_group"] == names[suspects[0]["group_label"]]
    assert f"Its group is mostly {rows[0]['label_of_group']}." in page.inner_text("#section-suspects li >> nth=0")
    assert float(rows[0]["mixture"]) == 0.25
    page.get_by_label("Given label").select_option("2")
    page.get_by_label("Select all shown").check()
    given = [s["rank"] for s in suspects if s["given"] == 2]
    chosen = {1, 3, *given}
    with page.expect_download() as download:
        page.get_by_role("button", name=f"Download {len(chosen)} selected").click()
    text = Path(download.value.path()).read_bytes().decode("ascii")
    assert [int(row["rank"]) for row in csv.DictReader(io.StringIO(text, newline=""))] == sorted(chosen)
    page.get_by_label("Given label").select_option("")
    page.get_by_label("Select all shown").check()
    page.get_by_label("Select all shown").uncheck()
    assert "Download all 40" in page.inner_text("#section-suspects .primary")


def test_no_cell_is_a_formula(report: Watched):
    page = report.visit("#/suspects")
    for start in "=+-@\t\r\n\uff1d\uff0b\uff0d\uff20":
        cell = page.evaluate("text => csvField(text)", f"{start}1")
        assert cell.lstrip('"').startswith("'"), ascii(start)
    assert page.evaluate("csvField(-1)") == "-1", "a number is a number"


def test_the_comparison_is_shown(report: Watched):
    page = report.visit("#/comparison")
    text = page.inner_text("#section-comparison")
    assert "0.710" in text
    assert "400 shared images" in text.replace("\xa0", " ")
    page.get_by_role("heading", name="Where each cluster went").scroll_into_view_if_needed()
    report.settle()
    page.locator(".match").first.click()
    page.locator("dialog[open]").wait_for()
    page.keyboard.press("Escape")


def test_the_theme_is_switched_and_remembered(report: Watched):
    page = report.page
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Switch to the dark theme").click()
    assert page.evaluate(ground) != light
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.get_by_role("button", name="Switch to the light theme").click()
    assert page.evaluate(ground) == light


def test_the_skip_link_and_tabs_reach_everything(report: Watched):
    page = report.page
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    page.reload()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("Tab")
    assert page.evaluate("!!document.activeElement.closest('main')")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"
