"""Does ``merge="auto"`` find the number of components? Synthetic families of unit vectors, and scikit-learn's digits.

    python benchmarks/merge_families.py judge      families that no constant was fixed on, and digits
    python benchmarks/merge_families.py develop    families that the constants were fixed on, and data without structure
    python benchmarks/merge_families.py pace       K over the rounds of merge="paper"

A family is drawn anew for each seed. Each fit starts from 2, 5 and 20 times the true number of components.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.random import Generator, default_rng
from sklearn.datasets import load_digits
from sklearn.metrics import adjusted_rand_score

from siammm import VonMisesFisherMixture

if __package__:
    from benchmarks import record
else:
    import record

Array = np.ndarray
Labelled = tuple[Array, Array]


def unit(x: Array) -> Array:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def sizes(rng: Generator, n: int, k: int, balance: str, smallest: int = 60) -> Array:
    """Samples of each component: "even", "geom:R" (largest to smallest weight R), "dir:A" (Dirichlet of A)."""
    if balance == "even":
        weight = np.ones(k)
    elif balance.startswith("geom:"):
        weight = np.geomspace(1, float(balance[5:]), k)
    else:
        weight = rng.dirichlet(np.full(k, float(balance[4:])))
    return smallest + np.floor(weight / weight.sum() * (n - smallest * k)).astype(int)


def spread(rng: Generator, k: int, d: int, max_cosine: float) -> Array:
    """k directions no two of which have a larger cosine than this."""
    found: list[Array] = []
    for _ in range(200_000):
        candidate = unit(rng.standard_normal(d))
        if not found or (np.stack(found) @ candidate).max() <= max_cosine:
            found.append(candidate)
            if len(found) == k:
                return np.stack(found)
    raise RuntimeError(f"no room for {k} directions in {d} dimensions")


def two_level(
    rng: Generator, groups: int, each: int, d: int, max_cosine: float, radius: float, within_cosine: float
) -> Array:
    """Centres at a radius around the centres of groups: a hierarchy."""
    top = spread(rng, groups, d, max_cosine)
    return np.concatenate([unit(centre + radius * spread(rng, each, d, within_cosine)) for centre in top])


def mixture(centres: Array, counts: Array, draw: Callable[[int, Array, int], Array]) -> Labelled:
    rows = [draw(i, centres[i], int(n)) for i, n in enumerate(counts)]
    return np.concatenate(rows), np.repeat(np.arange(len(counts)), counts)


def von_mises_fisher(rng: Generator, centres: Array, counts: Array, low: float, high: float) -> Labelled:
    """Concentrations log-uniform between two values; Wood's sampler, written apart from the package's own."""
    kappas = np.exp(rng.uniform(np.log(low), np.log(high), len(centres)))

    def draw(i: int, mu: Array, n: int) -> Array:
        d, kappa = mu.size, kappas[i]
        b = (-2 * kappa + np.sqrt(4 * kappa**2 + (d - 1) ** 2)) / (d - 1)
        x0 = (1 - b) / (1 + b)
        c = kappa * x0 + (d - 1) * np.log(1 - x0**2)
        cosine = np.empty(0)
        while cosine.size < n:
            beta = rng.beta((d - 1) / 2, (d - 1) / 2, 2 * n)
            w = (1 - (1 + b) * beta) / (1 - (1 - b) * beta)
            accepted = kappa * w + (d - 1) * np.log(1 - x0 * w) - c >= np.log(rng.random(2 * n))
            cosine = np.concatenate([cosine, w[accepted]])
        cosine = cosine[:n, None]
        tangent = rng.standard_normal((n, d))
        return cosine * mu + np.sqrt(1 - cosine**2) * unit(tangent - (tangent @ mu)[:, None] * mu)

    return mixture(centres, counts, draw)


def stretched_gaussian(
    rng: Generator, centres: Array, counts: Array, low: float, high: float, ratio: float
) -> Labelled:
    """Gaussians with a random covariance whose deviations differ by a ratio, scaled to unit length."""
    d = centres.shape[1]

    def draw(i: int, mu: Array, n: int) -> Array:
        scale = np.exp(rng.uniform(np.log(low), np.log(high)))
        deviation = scale * np.exp(rng.uniform(-0.5, 0.5, d) * np.log(ratio))
        basis = np.linalg.qr(rng.standard_normal((d, d)))[0]
        return unit(mu + (rng.standard_normal((n, d)) * deviation) @ basis)

    return mixture(centres, counts, draw)


def student(rng: Generator, centres: Array, counts: Array, scale: float, freedom: float) -> Labelled:
    """Heavy tails: Student's t around the centres, scaled to unit length."""
    d = centres.shape[1]

    def draw(i: int, mu: Array, n: int) -> Array:
        return unit(mu + scale * rng.standard_normal((n, d)) / np.sqrt(rng.chisquare(freedom, (n, 1)) / freedom))

    return mixture(centres, counts, draw)


def caps(rng: Generator, centres: Array, counts: Array, low: float, high: float) -> Labelled:
    """Hard edges: uniform on a ball in the tangent plane, scaled to unit length."""
    d = centres.shape[1]

    def draw(i: int, mu: Array, n: int) -> Array:
        radius = rng.uniform(low, high)
        tangent = rng.standard_normal((n, d))
        tangent = unit(tangent - (tangent @ mu)[:, None] * mu)
        return unit(mu + tangent * rng.random((n, 1)) ** (1 / (d - 1)) * radius)

    return mixture(centres, counts, draw)


def arcs(rng: Generator, centres: Array, counts: Array, length: float, noise: float) -> Labelled:
    """Curved: uniform on an arc, plus noise, scaled to unit length."""
    d = centres.shape[1]

    def draw(i: int, mu: Array, n: int) -> Array:
        a, b = np.linalg.qr(rng.standard_normal((d, 2)))[0].T
        angle = rng.uniform(-0.7, 0.7, (n, 1))
        curve = length * (np.sin(angle) * a + (np.cos(angle) - 0.9) * b)
        return unit(mu + curve + noise * rng.standard_normal((n, d)))

    return mixture(centres, counts, draw)


def subspaces(rng: Generator, centres: Array, counts: Array, q: int, scale: float, noise: float) -> Labelled:
    """Flat: each component spread over its own q dimensions, with little noise in the others."""
    d = centres.shape[1]

    def draw(i: int, mu: Array, n: int) -> Array:
        basis = np.linalg.qr(rng.standard_normal((d, q)))[0]
        return unit(mu + scale * rng.standard_normal((n, q)) @ basis.T + noise * rng.standard_normal((n, d)))

    return mixture(centres, counts, draw)


def with_outliers(rng: Generator, labelled: Labelled, share: float) -> Labelled:
    """Uniform directions added, labelled -1."""
    x, y = labelled
    n = int(share * len(x))
    noise = unit(rng.standard_normal((n, x.shape[1])))
    return np.concatenate([x, noise]), np.concatenate([y, np.full(n, -1)])


def uniform(rng: Generator, n: int, d: int) -> Labelled:
    return unit(rng.standard_normal((n, d))), np.zeros(n, int)


Family = Callable[[Generator], Labelled]


def _vmf(k: int, d: int, gap: float, n: int, kind: str, low: float, high: float) -> Family:
    return lambda r: von_mises_fisher(r, spread(r, k, d, gap), sizes(r, n, k, kind), low, high)


DEVELOP: dict[str, Family] = {
    "vMF, d 16, K 10": _vmf(10, 16, 0.5, 5000, "even", 20, 80),
    "vMF, d 64, K 40, uneven": _vmf(40, 64, 0.35, 12000, "geom:8", 100, 500),
    "hierarchy 8 x 6, d 32": lambda r: von_mises_fisher(
        r, two_level(r, 8, 6, 32, 0.3, 0.6, 0.2), sizes(r, 10000, 48, "dir:3"), 90, 250
    ),
    "stretched Gaussians, d 24, K 12": lambda r: stretched_gaussian(
        r, spread(r, 12, 24, 0.4), sizes(r, 5000, 12, "dir:2"), 0.07, 0.16, 4
    ),
    "Student t5, d 48, K 25, 3 % outliers": lambda r: with_outliers(
        r, student(r, spread(r, 25, 48, 0.35), sizes(r, 7500, 25, "even"), 0.09, 5), 0.03
    ),
    "5-d subspaces, d 256, K 30": lambda r: subspaces(
        r, spread(r, 30, 256, 0.3), sizes(r, 8000, 30, "geom:4"), 5, 0.2, 0.02
    ),
    "noisy vMF, d 512, K 15": _vmf(15, 512, 0.3, 4500, "even", 90, 180),
    "overlapping vMF, d 16, K 20": _vmf(20, 16, 0.5, 6000, "dir:3", 14, 60),
    "close hierarchy 5 x 8, d 24": lambda r: von_mises_fisher(
        r, two_level(r, 5, 8, 24, 0.3, 0.55, 0.2), sizes(r, 8000, 40, "geom:4"), 60, 200
    ),
    "Student t3, d 20, K 18, 4 % outliers": lambda r: with_outliers(
        r, student(r, spread(r, 18, 20, 0.4), sizes(r, 5400, 18, "geom:4"), 0.09, 3), 0.04
    ),
    "small vMF, d 64, K 60, n 60 each": lambda r: von_mises_fisher(
        r, spread(r, 60, 64, 0.3), sizes(r, 3600, 60, "even", 40), 50, 200
    ),
    "20-fold concentrations, d 32, K 15": _vmf(15, 32, 0.5, 5000, "geom:10", 30, 600),
    "one vMF, d 8": lambda r: von_mises_fisher(r, spread(r, 1, 8, 0), np.array([2000]), 20, 20.1),
    "one vMF, d 128": lambda r: von_mises_fisher(r, spread(r, 1, 128, 0), np.array([2000]), 200, 200.1),
    "uniform, d 16": lambda r: uniform(r, 3000, 16),
    "uniform, d 128": lambda r: uniform(r, 3000, 128),
}
# Written before any rule was run on any of them.
JUDGE: dict[str, Family] = {
    "vMF, d 8, K 8, uneven": _vmf(8, 8, 0.45, 4000, "geom:5", 16, 70),
    "vMF, d 128, K 100, Dirichlet": _vmf(100, 128, 0.3, 16000, "dir:2", 90, 500),
    "hierarchy 20 x 5, d 48": lambda r: von_mises_fisher(
        r, two_level(r, 20, 5, 48, 0.35, 0.5, 0.2), sizes(r, 16000, 100, "geom:6"), 130, 500
    ),
    "stretched Gaussians, d 64, K 30": lambda r: stretched_gaussian(
        r, spread(r, 30, 64, 0.3), sizes(r, 8000, 30, "geom:10"), 0.07, 0.18, 6
    ),
    "Student t4, d 32, K 16, 5 % outliers": lambda r: with_outliers(
        r, student(r, spread(r, 16, 32, 0.35), sizes(r, 5000, 16, "dir:3"), 0.09, 4), 0.05
    ),
    "caps, d 12, K 20": lambda r: caps(r, spread(r, 20, 12, 0.5), sizes(r, 6000, 20, "dir:2"), 0.35, 0.6),
    "arcs, d 20, K 24": lambda r: arcs(r, spread(r, 24, 20, 0.4), sizes(r, 7000, 24, "even"), 0.5, 0.08),
    "8-d subspaces, d 384, K 60": lambda r: subspaces(
        r, spread(r, 60, 384, 0.25), sizes(r, 12000, 60, "dir:2"), 8, 0.22, 0.02
    ),
    "vMF, d 512, K 20, 2 % outliers": lambda r: with_outliers(
        r, von_mises_fisher(r, spread(r, 20, 512, 0.2), sizes(r, 6000, 20, "geom:4"), 100, 300), 0.02
    ),
    "vMF, d 256, K 200": _vmf(200, 256, 0.25, 20000, "even", 110, 330),
    "hierarchy of Gaussians 6 x 4, d 96": lambda r: stretched_gaussian(
        r, two_level(r, 6, 4, 96, 0.3, 0.7, 0.2), sizes(r, 7000, 24, "dir:3"), 0.06, 0.11, 4
    ),
}
FAMILIES = DEVELOP | JUDGE


def make(name: str, seed: int) -> tuple[Array, Array, int]:
    """Shuffled float32 rows, labels (-1: an outlier), and the true number of components."""
    rng = default_rng([seed, sum(map(ord, name)), len(name)])
    x, y = FAMILIES[name](rng)
    order = rng.permutation(len(x))
    return x[order].astype(np.float32), y[order], int(y.max()) + 1


def fitted(x: Array, y: Array, start: int, seed: int, **settings: object) -> tuple[int, float, float]:
    """K found, adjusted Rand index without the outliers, seconds."""
    began = time.perf_counter()
    model = VonMisesFisherMixture(start, merge="auto", random_state=seed, **settings).fit(x)  # type: ignore[arg-type]
    seconds = time.perf_counter() - began
    real = y >= 0
    return model.n_components_, adjusted_rand_score(y[real], model.labels_[real]), seconds


def families_table(families: dict[str, Family], seeds: int, *, digits: bool) -> str:
    rows, right, runs = [], 0, 0
    for name in families:
        for seed in range(seeds):
            x, y, k = make(name, seed)
            starts = [factor * k if k > 1 else 10 * factor for factor in (2, 5, 20)]
            results = [fitted(x, y, start, seed) for start in starts]
            good = sum(abs(found - k) <= 0.05 * k for found, _, _ in results)
            right, runs = right + good, runs + len(results)
            rows.append(
                [name, f"{len(x):,}", str(seed), str(k)]
                + [f"{found} ({ari:.3f})" for found, ari, _ in results]
                + [f"{sum(seconds for _, _, seconds in results):.0f}"]
            )
            print(rows[-1], flush=True)
    header = ["family", "n", "seed", "true K", "from 2x: K (ARI)", "from 5x", "from 20x", "seconds"]
    text = record.table(header, rows) + f"\n\nWithin 5 % of the true K: {right} of {runs} fits.\n"
    if digits:
        x, y = cast(Any, load_digits)(return_X_y=True)
        found = [
            [str(seed)] + ["{} ({:.3f})".format(*fitted(x, y, start, seed)[:2]) for start in (50, 100, 200)]
            for seed in range(max(20, seeds))
        ]
        text += "\nscikit-learn's digits (ten classes), K and ARI by start:\n\n"
        text += record.table(["seed", "from 50", "from 100", "from 200"], found)
    return text


def pace_table() -> str:
    """From 4,000 components to 400, on 40,000 samples of 100 and of 200: as where the reading of Eq. 11 was chosen."""
    marks = (0, 1, 2, 3, 5, 10, 15, 20, 30)
    rows = []
    for k in (200, 100):
        rng = default_rng(0)
        x, _ = von_mises_fisher(rng, spread(rng, k, 128, 0.3), sizes(rng, 40_000, k, "even"), 100, 100.1)
        model = VonMisesFisherMixture(
            4000, merge="paper", merge_share=1.0, merge_floor=400, init="random", random_state=0
        )
        merges = model.fit(x.astype(np.float32)).merges_
        assert merges is not None
        counts = merges.n_components
        share = 1 - (counts[10] / counts[0]) ** (1 / 10)
        shown = [str(counts[r]) if r < len(counts) else "" for r in marks]
        rows.append([str(k), *shown, f"{counts[-1]} after {len(counts) - 1}", f"{share:.1%}"])
        print(rows[-1], flush=True)
    header = ["true K", *(f"round {r}" for r in marks), "at the floor", "share merged a round, to round 10"]
    return record.table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["judge", "develop", "pace"])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--output", type=Path, help="folder for the result (default: benchmarks/results)")
    args = parser.parse_args()
    if args.what == "pace":
        body, seeds, n = pace_table(), "0", "40,000 x 128"
        title = 'How fast does merge="paper" merge?'
    else:
        judging = args.what == "judge"
        body = families_table(JUDGE if judging else DEVELOP, args.seeds, digits=judging)
        seeds, n = f"0 to {args.seeds - 1}, for the data and for the start", "in the table"
        title = f'Does merge="auto" find K? The families that {"judged" if judging else "fixed"} the constants'
    path = record.write(f"merge-{args.what}", title, body, seeds=seeds, n=n, output=args.output)
    print(path.read_text())


if __name__ == "__main__":
    main()
