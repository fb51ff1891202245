"""How certain may the scores of groups be? Rules for the factor that makes them probabilities, on views nobody grouped.

    python benchmarks/certainty.py PACKS [--folder FOLDER] [--seeds 3] [--record]

PACKS is the folder with the packed sets. All sets are for development: kinds of Tiny-ImageNet with an even number that
``photographs.py`` does not name. Each photograph has a view, a crop as in ``probability.py``. Groups are found among
the photographs; each rule says how probable the group of a photograph is; and the view is in the same group or not.
With ``--folder`` photographs, views and their embeddings stay there.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from PIL import Image
from scipy.special import softmax

import record
from group_sets import unpacker
from photographs import CHOICES, run
from probability import BORDERS, crop_all
from siammm.mixture import borders, groups

KINDS, PER_KIND = 60, 60
# Kinds of a set, and photographs of each.
SETS = ((2, 60), (4, 15), (5, 60), (10, 12), (10, 20), (10, 60), (20, 40), (40, 60))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packs", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--record", action="store_true", help="write the figures to benchmarks/results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        x, views, kind, number = embedded(options.packs, (options.folder or Path(name)).absolute())
    found: dict[str, list[tuple[float, float, float]]] = {}
    for seed in range(options.seeds):
        for n_kinds, per_kind in SETS:
            drawn = np.random.default_rng([seed, n_kinds, per_kind]).permutation(np.unique(kind))[:n_kinds]
            own = np.isin(kind, drawn) & (number < per_kind)
            for asked in (None, n_kinds):
                for rule, figures in measured(x[own], views[own], asked, seed).items():
                    found.setdefault(rule, []).append(figures)
            print(seed, n_kinds, per_kind, flush=True)
    header = ["factor by", "away", "Brier score", "mean too high by"]
    rows = [[rule, *(f"{figure:.4f}" for figure in np.mean(each, axis=0))] for rule, each in found.items()]
    n_sets = len(next(iter(found.values())))
    text = record.table(header, rows) + (
        f"\n\nMeans of {n_sets} sets with groups: {', '.join(f'{k} kinds of {n}' for k, n in SETS)} photographs, the "
        "number of groups found and given, with other kinds for each seed. *Away* is the mean distance of the "
        "probability of a photograph's group from how often its view is in the same, over the ranges of the record "
        "`probability`; the Brier score is of the same answer. The last row is what no rule can know."
    )
    print(text)
    if options.record:
        seeds = ", ".join(map(str, range(options.seeds)))
        print(record.write("certainty", "How certain groups may be", text, seeds=seeds, n=f"{n_sets} sets"))


def embedded(packs: Path, folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The embeddings of photographs and of their views, and the kind and the number of each."""
    if not (folder / "photos").exists():
        pack = unpacker(packs).read_pack(packs / "tinyimagenet_train_a.npz")
        judged = {kind for choice in CHOICES.values() for kind in choice}
        names = [str(name).split(",")[0] for name in pack["names"]]
        even = [kind for kind in range(0, len(names), 2) if names[kind] not in judged]
        (folder / "photos").mkdir(parents=True)
        for kind in sorted(np.random.default_rng(1).permutation(even)[:KINDS].tolist()):
            for number, row in enumerate(np.flatnonzero(pack["labels"] == kind)[:PER_KIND]):
                file = folder / "photos" / f"{kind:03d}-{number:03d}.jpg"
                Image.fromarray(pack["images"][row]).save(file, quality=95)
    if not (folder / "views").exists():
        crop_all(folder / "photos", folder / "views")
    rows, names = list[np.ndarray](), list[list[str]]()
    for part in ("photos", "views"):
        if not (folder / f"{part}.parquet").exists():
            run(folder, "embed", "lite", "--data", part, "--output", f"{part}.parquet")
        table = pq.read_table(folder / f"{part}.parquet")
        rows.append(table["features"].combine_chunks().flatten().to_numpy().reshape(len(table), -1))
        names.append([Path(name).stem for name in table["id"].to_pylist()])
    assert names[0] == names[1]
    kind, number = (np.array([int(name.split("-")[part]) for name in names[0]]) for part in (0, 1))
    return rows[0], rows[1], kind, number


def measured(
    x_ND: np.ndarray, view_ND: np.ndarray, so_many: int | None, seed: int
) -> dict[str, tuple[float, float, float]]:
    """For each rule how far its probabilities are from the agreement of views, their Brier score, and their excess."""
    asked: list[Any] = []
    with_factor = borders.calibrated
    borders.calibrated = lambda *given: asked.append(given) or with_factor(*given)
    try:
        nearest_N2 = np.zeros((len(x_ND), 2), dtype=np.int64)
        found = groups.found(x_ND, nearest_N2, 1, unit=True, separate=False, seed=seed, so_many=so_many)
    finally:
        borders.calibrated = with_factor
    if not found.is_found:
        return {}
    z_NP, label_N, community_N, _ = asked[-1]
    weight_GP, offset_G = borders.discriminant(z_NP, label_N)
    score_NG = z_NP @ weight_GP.T + offset_G
    rule_N = score_NG.argmax(axis=1)
    table_CG = np.zeros((community_N.max() + 1, len(offset_G)), dtype=np.int64)
    np.add.at(table_CG, (community_N, label_N), 1)
    witness_N = table_CG.argmax(axis=1)[community_N]
    of_view_N, of_photo_N = found.predict(view_ND, None), found.predict(x_ND, None)
    in_ours = {int(group): int(rule) for group, rule in zip(of_photo_N, rule_N, strict=True)}  # numbered by size there
    view_N = np.array([in_ours.get(int(group), 0) for group in of_view_N])
    others = borders.scores_by_others(z_NP, label_N, seed)
    factors = {
        "nothing: the discriminant's own scores": 1.0,
        "the rule's own answers": borders.best_factor(score_NG, rule_N),
        "the rule's own answers, by other rows": borders.best_factor(others, rule_N),
        "the group of the nearest photograph": borders.best_factor(score_NG, rule_N[nearest(x_ND)]),
        "the group of the nearest in the principal directions": borders.best_factor(score_NG, rule_N[nearest(z_NP)]),
        "the communities": borders.best_factor(score_NG, witness_N),
        "**the communities, by other rows**": borders.best_factor(others, witness_N),
        "the views": borders.best_factor(score_NG, view_N),
    }
    same_N = of_view_N == of_photo_N
    return {rule: figures(softmax(factor * score_NG, axis=1).max(axis=1), same_N) for rule, factor in factors.items()}


def nearest(x_ND: np.ndarray) -> np.ndarray:
    """The row nearest to each by its direction."""
    unit_ND = (x_ND / np.linalg.norm(x_ND, axis=1, keepdims=True)).astype(np.float32)
    cosine_NN = unit_ND @ unit_ND.T
    np.fill_diagonal(cosine_NN, -np.inf)
    return cosine_NN.argmax(axis=1)


def figures(share_N: np.ndarray, same_N: np.ndarray) -> tuple[float, float, float]:
    """How far probabilities are from what they say, by ranges; their Brier score; by how much they are too high."""
    away = 0.0
    for low, high in zip(BORDERS, (*BORDERS[1:], np.inf), strict=True):
        inside = (share_N >= low) & (share_N < high)
        if inside.any():
            away += inside.mean() * abs(share_N[inside].mean() - same_N[inside].mean())
    return away, float(((share_N - same_N) ** 2).mean()), float(share_N.mean() - same_N.mean())


if __name__ == "__main__":
    main()
