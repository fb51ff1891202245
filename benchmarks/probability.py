"""What the column `probability` means: does a crop of a photograph fall in the same cluster, and is its kind right?

    python benchmarks/probability.py PACKS [--choices mixed animals things] [--per-kind 60] [--record]

PACKS is the folder with the packed sets. For each choice of ten kinds (``photographs.py`` names them) the photographs
are clustered by ``siammm cluster``. Then a view of each that nobody has clustered, a random crop of half of it or more,
mirrored or not, is assigned by ``siammm embed``. If the share is calibrated on such views, of the photographs with a
share of .8 four fifths have a view in the same cluster. The same for groups, by ``predict_group_proba``.
(The record of 2026-11-19 that is called `probability` is of the time before these were calibrated.)
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

import record
from group_sets import unpacker
from photographs import CHOICES, photographs, run
from siammm import VonMisesFisherMixture

BORDERS = (0.0, 0.5, 0.7, 0.9, 0.99, 0.999)
LEAST_AREA, WIDEST = 0.5, 4 / 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packs", type=Path)
    parser.add_argument("--choices", nargs="+", choices=CHOICES, default=list(CHOICES))
    parser.add_argument("--per-kind", type=int, default=60)
    parser.add_argument("--record", action="store_true", help="write the figures to benchmarks/results")
    options = parser.parse_args()
    pack = unpacker(options.packs).read_pack(options.packs / "tinyimagenet_train_a.npz")
    found = {choice: measured(pack, choice, options.per_kind) for choice in options.choices}
    text = ""
    for of in ("cluster", "group"):
        rows = [row for choice, one in found.items() if of in one for row in table_rows(choice, *one[of])]
        header = ["choice", "share", "photographs", "mean share", f"view in the same {of}", "of its commonest kind"]
        text += f"\n\n**Of a {of}**\n\n" + record.table(header, rows)
    text += (
        "\n\nA view is a random crop of half of a photograph or more, mirrored or not, assigned by `siammm embed`. "
        "*All* has the mean distance of the share from the agreement of views, over the rows, weighted by photographs. "
        "No groups are listed where these are the clusters. Nothing was chosen on these figures."
    )
    print(text)
    if options.record:
        n = f"{10 * options.per_kind * len(found):,} photographs"
        print(
            record.write(
                "probability-calibrated", "What the shares of clusters and groups say", text.strip(), seeds="0", n=n
            )
        )


def measured(pack: dict[str, np.ndarray], choice: str, per_kind: int) -> dict[str, tuple[np.ndarray, ...]]:
    """The share of each photograph, whether its view is in the same part, and whether its kind is the commonest."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kind_of = photographs(pack, folder / "photos", CHOICES[choice], per_kind, 0)
        crop_all(folder / "photos", folder / "views")
        run(folder, "cluster", "photos", "--encoder", "lite")
        run(folder, "embed", "photos-clusters", "--data", "views", "--output", "views.parquet")
        one = pq.read_table(folder / "photos-clusters" / "assignments.parquet")
        other = pq.read_table(folder / "views.parquet")
        names = [Path(path).stem for path in one["id"].to_pylist()]
        assert names == [Path(path).stem for path in other["id"].to_pylist()]
        kinds = np.unique([kind_of[f"{stem}.jpg"] for stem in names], return_inverse=True)[1]
        shares = {"cluster": one["probability"].to_numpy()}
        mixture = VonMisesFisherMixture.load(folder / "photos-clusters" / "mixture.safetensors")
        if mixture.groups_ is not None and mixture.groups_.is_found:
            rows = pq.read_table(folder / "photos-clusters" / "embeddings.parquet")["embedding"].combine_chunks()
            values = rows.flatten().to_numpy().reshape(len(names), -1)
            shares["group"] = mixture.predict_group_proba(values).max(axis=1)
    found: dict[str, tuple[np.ndarray, ...]] = {}
    for of, share in shares.items():
        part = one[of].to_numpy()
        commonest = np.array([np.bincount(kinds[part == k]).argmax() for k in range(part.max() + 1)])
        found[of] = share, part == other[of].to_numpy(), commonest[part] == kinds
    return found


def crop_all(photos: Path, views: Path) -> None:
    """Write a crop of each photograph, without loss."""
    views.mkdir()
    random = np.random.default_rng(0)
    for file in sorted(photos.iterdir()):
        image = Image.open(file)
        side = (image.width * image.height * random.uniform(LEAST_AREA, 1)) ** 0.5
        aspect = WIDEST ** random.uniform(-0.5, 0.5)
        width, height = (round(min(side * a, b)) for a, b in ((aspect, image.width), (1 / aspect, image.height)))
        left, top = random.integers(0, image.width - width + 1), random.integers(0, image.height - height + 1)
        crop = image.crop((int(left), int(top), int(left) + width, int(top) + height))
        mirrored = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else crop
        mirrored.save(views / f"{file.stem}.png")


def table_rows(choice: str, share: np.ndarray, same: np.ndarray, right: np.ndarray) -> list[list[str]]:
    """A row for each range of shares, and one for all."""
    columns = (share, same, right)

    def row(words: str, inside: np.ndarray) -> list[str]:
        return [choice, words, f"{inside.sum()}", *(f"{column[inside].mean():.3f}" for column in columns)]

    rows, away = list[list[str]](), 0.0
    for low, high in zip(BORDERS, (*BORDERS[1:], np.inf), strict=True):
        inside = (share >= low) & (share < high)
        if inside.any():
            away += inside.mean() * abs(share[inside].mean() - same[inside].mean())
            rows.append(row(f"{low:g} to {min(high, 1.0):g}", inside))
    return [*rows, row(f"all ({away:.3f} away)", np.ones(len(share), dtype=bool))]


if __name__ == "__main__":
    main()
