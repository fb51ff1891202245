"""Draw the README's pictures: what `siammm train digits --preset demo` finds in scikit-learn's digits, and its report.

    python docs/pictures.py        trains for a minute or two, and writes docs/images/digits.svg and report.png

The SVG is written by hand, so that it needs nothing but the package itself; the report is photographed in Chromium.
"""

from __future__ import annotations

import json
import tempfile
from html import escape
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from playwright.sync_api import sync_playwright
from sklearn.datasets import load_digits

from siammm.cli import main as siammm

IMAGES = Path(__file__).parent / "images"

WIDTH, HEIGHT = 820, 372
SHADES = 8
# One panel with a background of its own, so that it reads on any page; browsers in dark mode get the darker one.
STYLE = """
  text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 13px; fill: #57606a }
  .panel { fill: #ffffff; stroke: #d0d7de }
  .strong { fill: #1f2328; font-weight: 600 }
  .title { fill: #1f2328; font-size: 16px; font-weight: 600 }
  .paper { fill: #f3f5f7 }
  .ink { fill: #1f2328 }
  .rule { stroke: #d8dee4 }
  .line { stroke: #1a7f5a; fill: none; stroke-width: 2 }
  .dot { fill: #1a7f5a }
  @media (prefers-color-scheme: dark) {
    text { fill: #9ea7b3 }
    .panel { fill: #0d1117; stroke: #30363d }
    .strong, .title { fill: #e6edf3 }
    .paper { fill: #1b222b }
    .ink { fill: #e6edf3 }
    .rule { stroke: #262d36 }
    .line { stroke: #4ac99b }
    .dot { fill: #4ac99b }
  }
"""


def main() -> None:
    """Train, draw, write."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        run, page = Path(scratch) / "digits-run", Path(scratch) / "report.html"
        assert siammm(["train", "digits", "--preset", "demo", "--device", "cpu", "--output", str(run)]) == 0
        assert siammm(["report", str(run), "--output", str(page), "--device", "cpu", "--no-open"]) == 0
        images, digits = (np.asarray(array) for array in load_digits(return_X_y=True))
        clusters = pq.read_table(run / "assignments.parquet").column("cluster").to_numpy()
        merges = json.loads((run / "merges.json").read_text("utf-8"))
        counts = [merges["n_components"][0], *(k for _, k in merges["n_clusters_by_epoch"])]
        (IMAGES / "digits.svg").write_text(drawn(images, digits, clusters, counts), encoding="utf-8")
        photograph(page, IMAGES / "report.png")


def photograph(page: Path, picture: Path) -> None:
    """The top of the report, as a laptop shows it."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1366, "height": 850})
        tab.goto(page.as_uri())
        tab.wait_for_timeout(1500)  # the map is drawn after the first paint
        tab.screenshot(path=picture)
        browser.close()


def drawn(images: np.ndarray, digits: np.ndarray, clusters: np.ndarray, counts: list[int]) -> str:
    """The whole picture as SVG: K over the epochs on the left, the mean image of each cluster on the right."""
    title = f"{len(images):,} handwritten digits, no labels: {counts[0]} clusters become {counts[-1]}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{escape(title)}">',
        f"<style>{STYLE}</style>",
        f'<rect class="panel" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
        text(24, 36, title, "title"),
        curve(counts, left=62, top=84, width=206, height=222),
        mean_images(images, digits, clusters, left=316, top=66, across=5),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def curve(counts: list[int], *, left: float, top: float, width: float, height: float) -> str:
    """The number of clusters after each epoch, on a logarithmic scale."""
    low, high = np.log(min(counts) * 0.8), np.log(max(counts) * 1.05)

    def across(step: int) -> float:
        return left + width * step / max(1, len(counts) - 1)

    def down(count: float) -> float:
        return float(top + height * (high - np.log(count)) / (high - low))

    parts = [text(left - 38, top - 12, "number of clusters")]
    for count in (10, 20, 50, 100, 200):
        parts.append(f'<path class="rule" d="M{left} {down(count):.1f}h{width}"/>')
        parts.append(text(left - 8, down(count) + 4, str(count), anchor="end"))
    steps = range(0, len(counts), 10)
    parts += [text(across(step), top + height + 18, str(step), anchor="middle") for step in steps]
    parts.append(text(left + width / 2, top + height + 40, "epoch since clustering began", anchor="middle"))
    points = " ".join(f"{across(step):.1f},{down(count):.1f}" for step, count in enumerate(counts))
    parts.append(f'<polyline class="line" points="{points}"/>')
    end_x, end_y = across(len(counts) - 1), down(counts[-1])
    parts.append(f'<circle class="dot" cx="{end_x:.1f}" cy="{end_y:.1f}" r="4"/>')
    parts.append(text(end_x - 34, end_y - 7, f"stops at {counts[-1]}", "strong", anchor="end"))
    return "\n".join(parts)


def mean_images(
    images: np.ndarray, digits: np.ndarray, clusters: np.ndarray, *, left: float, top: float, across: int
) -> str:
    """The mean image of each cluster, in the order of the digit that it mostly holds, with its size and purity."""
    found: list[tuple[int, int, float, np.ndarray]] = []
    for k in np.unique(clusters):
        inside = clusters == k
        held = np.bincount(digits[inside], minlength=10)
        digit, size = int(held.argmax()), int(inside.sum())
        found.append((digit, -size, held.max() / size, images[inside].mean(axis=0).reshape(8, 8)))
    parts: list[str] = []
    for place, (digit, minus_size, purity, image) in enumerate(sorted(found, key=lambda card: card[:2])):
        x, y = left + 98 * (place % across), top + 148 * (place // across)
        parts.append(pixels(image, x, y, 10))
        parts.append(text(x + 40, y + 98, f"{-minus_size} images", "strong", anchor="middle"))
        parts.append(text(x + 40, y + 116, f"{purity:.0%} are {digit}s", anchor="middle"))
    return "\n".join(parts)


def pixels(image: np.ndarray, x: float, y: float, side: int) -> str:
    """A small grey image: one path for each shade."""
    shade = np.round(image / max(float(image.max()), 1e-12) * SHADES).astype(int)
    parts = [f'<rect class="paper" x="{x}" y="{y}" width="{8 * side}" height="{8 * side}"/>']
    for level in range(1, SHADES + 1):
        squares = "".join(
            f"M{x + side * column:g} {y + side * row:g}h{side}v{side}h-{side}z"
            for row, column in np.argwhere(shade == level).tolist()
        )
        if squares:
            parts.append(f'<path class="ink" opacity="{level / SHADES:g}" shape-rendering="crispEdges" d="{squares}"/>')
    return "\n".join(parts)


def text(x: float, y: float, words: str, kind: str = "", *, anchor: str = "start") -> str:
    """One line of text."""
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:g}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


if __name__ == "__main__":
    main()
