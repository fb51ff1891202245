"""``siammm demo``: a first look, on data that comes with scikit-learn."""

from __future__ import annotations

import time

import numpy as np
import torch
from rich.columns import Columns
from rich.console import Console, Group
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text
from sklearn.datasets import load_digits

from siammm.commands.cluster_tables import score_table
from siammm.data.sources import open_source
from siammm.learn.loop import Training
from siammm.learn.progress import TrainingProgress
from siammm.metrics.clustering import clustering_scores
from siammm.settings.commands import DemoConfig
from siammm.settings.fields import with_settings
from siammm.settings.presets import PRESETS

_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH_OF_CURVE = 48


def demo(config: DemoConfig) -> None:
    """Train on the digits without labels, then compare with the labels."""
    console = Console(highlight=False)
    source = open_source("digits")
    source.labels = None  # not even to be measured with, until the end
    settings = with_settings(PRESETS["demo"], data="digits", random_state=config.random_state)
    console.print(
        f"\n[bold]siammm[/] looks at {len(source):,} images of handwritten digits, 8 x 8 pixels each.\n"
        "Nobody tells it that they are digits, or that there are ten of them. It learns an encoder from the images\n"
        "alone, and finds the groups in them. This takes a minute or two on a laptop.\n"
    )
    start = time.perf_counter()
    with TrainingProgress() as progress:
        training = Training(settings, source, torch.device("cpu"), listener=progress)
        trained = training.run()
    seconds = time.perf_counter() - start
    assert trained.mixture is not None
    assert trained.clusters is not None
    clusters = trained.clusters
    counts = [training.clustering.n_start, *(row["n_clusters"] for row in trained.metrics if "n_clusters" in row)]
    console.print(
        f"[bold green]It finds {trained.mixture.n_components_} clusters[/] in {seconds:.0f} s, "
        f"merging down from {counts[0]}:\n"
    )
    console.print(Padding(curve(counts, ascii_only=not _is_utf(console)), (0, 0, 1, 2)))
    console.print("Now compare with the labels. The mean image of each cluster, and the digit that it mostly holds:\n")
    images, digits = (np.asarray(array) for array in load_digits(return_X_y=True))
    console.print(Padding(Columns(_cards(images, digits, clusters, console), padding=(0, 2)), (0, 0, 1, 2)))
    console.print(score_table(clustering_scores(digits, clusters)))
    console.print(_next_steps())


def curve(counts: list[int], *, ascii_only: bool = False) -> Text:
    """The number of clusters over the epochs, as a row of bars on a logarithmic scale."""
    places = np.linspace(0, len(counts) - 1, min(len(counts), _WIDTH_OF_CURVE)).round().astype(int)
    heights = np.log2(np.asarray(counts, dtype=float)[places])
    top = max(float(heights.max()), 1e-9)
    bars = " .:-=+*#@" if ascii_only else _BARS
    line = "".join(bars[round(h / top * (len(bars) - 1))] for h in heights)
    return Text.assemble(f"{counts[0]} ", (line, "green"), f" {counts[-1]}", (f"   {len(counts) - 1} epochs", "dim"))


def picture(image: np.ndarray, *, colour: bool, ascii_only: bool = False) -> Text:
    """A small grey image in text, two rows of pixels to a line.

    With colour a half block shows one pixel in the foreground and one in the background; without, a pixel is on or off.
    """
    scaled = image / max(float(image.max()), 1e-12)
    text = Text()
    marks = {(0, 0): " ", (1, 0): "'" if ascii_only else "▀", (0, 1): "." if ascii_only else "▄"}
    for top, bottom in zip(scaled[::2], scaled[1::2], strict=True):
        for upper, lower in zip(top.tolist(), bottom.tolist(), strict=True):
            if colour:
                text.append("▀", style=f"{_grey(upper)} on {_grey(lower)}")
            else:
                text.append(marks.get((int(upper > 0.45), int(lower > 0.45)), "#" if ascii_only else "█"))
        text.append("\n")
    text.rstrip()
    return text


def _cards(images: np.ndarray, digits: np.ndarray, clusters: np.ndarray, console: Console) -> list[Group]:
    """One small picture with its caption for each cluster, in the order of the digits that they hold."""
    colour, ascii_only = console.color_system is not None and _is_utf(console), not _is_utf(console)
    cards: list[tuple[int, int, Group]] = []
    for k in range(int(clusters.max()) + 1):
        inside = clusters == k
        if not inside.any():
            continue
        held = np.bincount(digits[inside], minlength=10)
        digit, size = int(held.argmax()), int(inside.sum())
        image = picture(images[inside].mean(axis=0).reshape(8, 8), colour=colour, ascii_only=ascii_only)
        caption = Text.assemble((f"{digit}", "bold"), f"  {held.max() / size:.0%}\n", (f"{size} images", "dim"))
        cards.append((digit, -size, Group(image, caption)))
    return [card for _, _, card in sorted(cards, key=lambda card: card[:2])]


def _next_steps() -> Panel:
    lines = Text.assemble(
        "Group a folder of photographs with a pretrained encoder:\n",
        ("  siammm cluster photos/\n", "bold cyan"),
        "Train on a folder of images of your own:\n",
        ("  siammm train photos/\n", "bold cyan"),
        "See what it found, on one page:\n",
        ("  siammm report photos-run\n", "bold cyan"),
        "Measure what it learned, and find labels that look wrong, where there are labels:\n",
        ("  siammm evaluate photos-run\n  siammm audit photos-run\n", "bold cyan"),
        "Cluster embeddings that you already have (.npy, .npz, .parquet, .safetensors):\n",
        ("  siammm cluster embeddings.npy\n", "bold cyan"),
        "See every setting:\n",
        ("  siammm train --help-all\n", "bold cyan"),
        "From Python:\n",
        ("  siammm.SiamMM().fit('photos/')", "bold cyan"),
    )
    return Panel(lines, title="What next", title_align="left", expand=False, border_style="dim")


def _grey(value: float) -> str:
    level = round(255 * min(max(value, 0.0), 1.0))
    return f"rgb({level},{level},{level})"


def _is_utf(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")
