"""The reports of real runs in a browser: of the demo, and of 10,000 images of CIFAR-10 in 300 clusters.

CIFAR-10 is read from ``../shared/data`` beside the repository; where it is absent, its tests are skipped.
"""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from siammm.cli import main
from tests.report.browser import PHONE, Watched, serious_faults

CIFAR = Path(__file__).parents[3] / "shared" / "data"
SECTIONS = ["overview", "clusters", "classes", "tree", "quality", "suspects"]
# What a reader should wait for at most. The limit for first paint is 2 s on a quiet machine; tests share theirs.
LARGEST_FILE, LONGEST_PAINT_MS = 25e6, 5_000


@pytest.fixture(scope="module")
def demo(browser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's recipe on a third of the digits, for two epochs without merges; wrong labels planted for the audit."""
    folder = tmp_path_factory.mktemp("demo")
    data, run, audit, page = (str(folder / name) for name in ("digits.npz", "run", "audit", "page.html"))
    pixels, labels = (np.asarray(array)[::3] for array in load_digits(return_X_y=True))
    np.savez(data, images=(pixels.reshape(-1, 8, 8) * 15.9).astype(np.uint8), labels=labels)
    small = ["--device", "cpu"]
    recipe = ["--preset", "demo", "--epochs", "2", "--merge", "none"]
    assert main(["train", data, *recipe, "--output", run, *small]) == 0
    assert main(["audit", run, "--plant", "0.06", "--output", audit, *small]) == 0
    assert main(["report", run, "--audit", audit, "--output", page, "--no-open", *small]) == 0
    return Path(page)


@pytest.fixture(scope="module")
def cifar(browser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (CIFAR / "cifar10_test.npz").is_file():
        pytest.skip("CIFAR-10 is not in ../shared/data.")
    folder = tmp_path_factory.mktemp("cifar")
    subprocess.run([sys.executable, CIFAR / "unpack.py", "cifar10", folder, "--per-class", "1000"], check=True)
    data, run, page = (str(folder / name) for name in ("test.npz", "run", "page.html"))
    settings = ["--preset", "demo", "--image-size", "8", "--epochs", "1", "--cluster-after", "0", "--device", "cpu"]
    assert main(["train", data, "--n-components", "300", "--merge", "none", "--output", run, *settings]) == 0
    assert main(["report", run, "--output", page, "--no-open", "--device", "cpu"]) == 0
    return Path(page)


def walk(watched: Watched, n_clusters: int | None) -> None:
    """What a reader does: sort, search, open a cluster, cut the tree, switch to dark."""
    page = watched.page
    page.wait_for_selector("#section-clusters canvas.mosaic[data-painted]")
    page = watched.visit("#/clusters")
    page.get_by_label("Sort by").select_option("concentration")
    watched.settle()
    first = page.locator("#section-clusters li a.card").first
    page.get_by_label("Search").fill("#3")
    watched.until("document.querySelector('#section-clusters li a')?.dataset.cluster === '3'")
    first.click()
    page.locator("dialog[open] h2", has_text="Cluster 3").wait_for()
    assert serious_faults(page) == []
    page.keyboard.press("Escape")
    page = watched.visit("#/tree")
    groups = page.get_by_role("spinbutton")
    if n_clusters is not None:
        assert groups.input_value() == str(n_clusters)
    for wanted in ("2", "5"):
        groups.fill(wanted)
        groups.press("Enter")
        page.get_by_text(f"{wanted} parts").first.wait_for()
    page.get_by_role("button", name="Dark").click()
    assert page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") is False
    watched.settle()
    for section in SECTIONS:
        assert serious_faults(watched.visit(f"#/{section}"), only_colour=True) == []
    page.get_by_role("button", name="Light").click()
    for section in SECTIONS:
        assert serious_faults(watched.visit(f"#/{section}")) == []
    watched.check()


def test_the_demo(browser, demo: Path) -> None:
    watched = Watched(browser, demo.as_uri())
    assert "clusters in 599 images" in watched.page.inner_text("h1").replace("\xa0", " ")
    walk(watched, None)
    page = watched.visit("#/suspects")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download").first.click()
    rows = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text("utf-8-sig"))))
    assert len(rows) > 20
    assert set("0123456789") >= {row["given_label"] for row in rows}
    watched.check()
    watched.close()


@pytest.mark.slow
def test_ten_thousand_images(browser, cifar: Path) -> None:
    assert cifar.stat().st_size < LARGEST_FILE
    watched = Watched(browser, cifar.as_uri())
    painted = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    watched.until(f"{painted} !== undefined")
    assert watched.page.evaluate(painted) < LONGEST_PAINT_MS
    assert "300 clusters in 10,000 images" in watched.page.inner_text("h1").replace("\xa0", " ")
    walk(watched, 300)
    watched.close()


@pytest.mark.parametrize("of", ["demo", pytest.param("cifar", marks=pytest.mark.slow)])
def test_on_a_phone(of: str, browser, request: pytest.FixtureRequest) -> None:
    watched = Watched(browser, request.getfixturevalue(of).as_uri(), viewport=PHONE)
    for section in SECTIONS:
        page = watched.visit(f"#/{section}")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    watched.check()
    watched.close()
