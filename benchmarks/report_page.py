"""How large is the report of 10,000 images in 300 clusters, and how soon does a browser show it?

    python benchmarks/report_page.py cifar10/test.npz

Trains for an epoch, which is all that the question needs, makes the report with the command, and opens the file from
disk in Chromium several times.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from playwright.sync_api import sync_playwright

import record
from siammm.cli import main as siammm

SIZES = {"laptop": (1366, 850), "phone": (390, 844)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", help="a .npz of images, such as CIFAR-10's test set")
    parser.add_argument("--clusters", type=int, default=300)
    parser.add_argument("--loads", type=int, default=7)
    parser.add_argument("--output", type=Path, help="where the result goes; by default benchmarks/results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run, page = Path(scratch) / "run", Path(scratch) / "report.html"
        settings = ["--preset", "demo", "--image-size", "8", "--epochs", "1", "--cluster-after", "0", "--merge", "none"]
        settings += ["--n-components", str(options.clusters), "--device", "cpu", "--output", str(run)]
        assert siammm(["train", options.images, *settings]) == 0
        started = time.perf_counter()
        assert siammm(["report", str(run), "--output", str(page), "--no-open", "--device", "cpu"]) == 0
        seconds = time.perf_counter() - started
        rows = [["made in", f"{seconds:.1f} s"], ["file", f"{page.stat().st_size / 1e6:.1f} MB"]]
        for name, times in paints(page, options.loads).items():
            rows.append([f"first paint, {name}", f"{statistics.median(times):.0f} ms (worst {max(times):.0f})"])
    with np.load(options.images) as stored:
        n = len(stored["images"])
    body = record.table(["what", "figure"], rows) + f"\n\nFirst paint: the median of {options.loads} loads from disk."
    path = record.write(
        "report-page",
        f"The report of {n:,} images in {options.clusters} clusters",
        body,
        seeds="0",
        n=f"{n:,} images, {options.clusters} clusters",
        output=options.output,
    )
    print(path)


def paints(page: Path, loads: int) -> dict[str, list[float]]:
    """Milliseconds from the beginning of loading to the first text or picture, for each size of screen."""
    found: dict[str, list[float]] = {name: [] for name in SIZES}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for _ in range(loads):
            for name, (width, height) in SIZES.items():
                tab = browser.new_page(viewport={"width": width, "height": height})
                tab.goto(page.as_uri())
                tab.wait_for_selector("canvas.thumbnail[data-painted]")
                entry = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
                found[name].append(float(tab.evaluate(entry)))
                tab.close()
        browser.close()
    return found


if __name__ == "__main__":
    main()
