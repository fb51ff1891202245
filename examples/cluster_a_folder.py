"""Cluster the images of a folder and write one contact sheet per cluster.

    python examples/cluster_a_folder.py photos/ sheets/ [epochs]

The encoder is trained on these images only, and the number of clusters is found. Without arguments it draws a folder of
simple shapes, trains for a moment, and clusters those.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from siammm import SiamMM

SIDE, COLUMNS, SHOWN = 64, 8, 32


def draw_shapes(folder: Path, n: int = 120) -> None:
    """Circles, squares and bars with random colours and positions, 32 x 32 pixels."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(n):
        dark, light = (tuple(int(c) for c in rng.integers(low, low + 90, 3)) for low in (10, 160))
        image = Image.new("RGB", (32, 32), dark)
        x, y = (int(c) for c in rng.integers(2, 12, 2))
        shape = ImageDraw.Draw(image)
        if number % 3 == 0:
            shape.ellipse((x, y, x + 16, y + 16), fill=light)
        elif number % 3 == 1:
            shape.rectangle((x, y, x + 15, y + 15), outline=light, width=3)
        else:
            shape.line((x, y, x + 16, y + 18), fill=light, width=4)
        image.save(folder / f"{number:03}.png")


def contact_sheet(paths: list[Path]) -> Image.Image:
    """The images in rows, each within a square."""
    rows = -(-len(paths) // COLUMNS)
    sheet = Image.new("RGB", (SIDE * min(COLUMNS, len(paths)), SIDE * rows), "white")
    for number, path in enumerate(paths):
        with Image.open(path) as image:
            small = image.convert("RGB").resize((SIDE, SIDE))
        sheet.paste(small, (SIDE * (number % COLUMNS), SIDE * (number // COLUMNS)))
    return sheet


def main(arguments: list[str]) -> None:
    if arguments:
        photos, sheets = Path(arguments[0]), Path(arguments[1])
        epochs = int(arguments[2]) if len(arguments) > 2 else None
    else:
        photos, sheets, epochs = Path("shapes"), Path("shapes-sheets"), 2
        draw_shapes(photos)
    model = SiamMM(preset="cifar" if arguments else "demo", image_size=32, epochs=epochs, progress=True)
    clusters = model.fit_predict(str(photos))
    paths = sorted(path for path in photos.rglob("*") if path.is_file())
    assert len(paths) == len(clusters), "some files could not be read as images"
    density = model.score_samples(str(photos))
    sheets.mkdir(parents=True, exist_ok=True)
    for cluster in range(model.n_clusters_):
        members = np.flatnonzero(clusters == cluster)
        typical = members[np.argsort(-density[members])][:SHOWN]
        if len(typical):
            contact_sheet([paths[i] for i in typical]).save(sheets / f"cluster-{cluster:03}-{len(members)}.png")
    model.save(sheets / "model")
    sys.stdout.write(f"{model.n_clusters_} clusters; their most typical images are in {sheets}/\n")


if __name__ == "__main__":
    main(sys.argv[1:])
