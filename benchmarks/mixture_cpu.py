"""How fast is one iteration on a CPU, beside scikit-learn's KMeans and faiss' spherical k-means?

    make bench        or, for sizes of your own,        python benchmarks/mixture_cpu.py --n 100000 --d 256 --k 1000

All start from the same centres and run the same number of iterations. The time of an iteration is that of a run with
many less that of a run with one, over the difference, so that what happens once does not count. The objective is the
mean cosine of a row with its nearest centre, higher is better; all must reach the same. Where a CPU has no units for
bytes, or the machine no C compiler, some rows are the same thing.

    python benchmarks/mixture_cpu.py --cpu avx2

compares all as on a CPU that has AVX2 but neither AVX-512 nor units for bytes: the libraries are told to use no more.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn.cluster import KMeans

if __package__:
    from benchmarks import record
else:
    import record

from siammm.mixture import em
from siammm.mixture.components import ConcentrationSettings, VonMisesFisherComponents
from siammm.mixture.em import Assignment
from siammm.mixture.samples import Samples
from siammm.mixture.search.neighbours import Backend

Array = np.ndarray

# How each library is held to AVX2; most read it once, when they are loaded.
AVX2 = {
    "OPENBLAS_CORETYPE": "Haswell",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "FAISS_OPT_LEVEL": "avx2",
}


def unit(x: Array) -> Array:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def embeddings(n: int, d: int, seed: int) -> Array:
    """Rows that look like a network's: 3,000 loose clusters within 48 strong directions, and noise in all others."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.standard_normal((d, min(48, d))))[0]
    centres = rng.standard_normal((3000, basis.shape[1])) @ basis.T
    x = centres[rng.integers(3000, size=n)] + 0.6 * rng.standard_normal((n, basis.shape[1])) @ basis.T
    return unit(x + 0.1 * rng.standard_normal((n, d))).astype(np.float32)


def objective(x: Array, centres: Array) -> float:
    w = torch.from_numpy(unit(centres.astype(np.float64)).astype(np.float32))
    rows = torch.from_numpy(x).split(4096)
    return float(torch.cat([(piece @ w.T).amax(dim=1) for piece in rows]).double().mean())


def runners(x: Array, start: Array, threads: int, cpu: str) -> dict[str, Callable[[int], Array]]:
    """What is compared: from a number of iterations to the centres after them."""
    k = len(start)

    def ours(h: int, backend: Backend = "auto", *, compiled: str = "1") -> Callable[[int], Array]:
        """``compiled`` is what SIAMMM_COMPILED is set to; without units for bytes, "auto" is "torch"."""
        samples = Samples(x, device=torch.device("cpu"), unit=True)
        first = VonMisesFisherComponents.started(torch.from_numpy(start), ConcentrationSettings())
        assignment = Assignment(n_neighbours=h, backend=backend)

        def run(iterations: int) -> Array:
            """E and M steps with concentrations, as in ``fit``."""
            os.environ["SIAMMM_COMPILED"] = compiled
            found, _, _ = em.maximise(
                samples, first, assignment, max_iter=iterations, tol=0.0, generator=torch.Generator().manual_seed(0)
            )
            return found.centre_KD.numpy()

        return run

    def sklearn(iterations: int) -> Array:
        settings: dict[str, Any] = {"init": start, "n_init": 1, "max_iter": iterations, "tol": 0, "algorithm": "lloyd"}
        return KMeans(k, **settings).fit(x).cluster_centers_

    found: dict[str, Callable[[int], Array]] = {}
    if cpu == "avx2":
        ways: dict[str, tuple[Backend, str]] = {"": ("torch", "x86-64-v3"), ", no C compiler": ("torch", "0")}
    else:
        ways = {
            "": ("auto", "1"),
            ", no C compiler": ("auto", "0"),
            ", no units for bytes but AVX-512": ("torch", "x86-64-v4"),
            ", no units for bytes but AVX2": ("torch", "x86-64-v3"),
            ", no units for bytes, no C compiler": ("torch", "0"),
        }
        if torch.backends.cpu.get_cpu_capability() != "AVX512":
            del ways[", no units for bytes but AVX-512"]
    for way, (backend, compiled) in ways.items():
        for h in (1, 5):
            found[f"siammm, H = {h}{way}"] = ours(h, backend, compiled=compiled)
    found["scikit-learn KMeans (lloyd)"] = sklearn
    try:
        import faiss  # type: ignore[import-not-found]

        faiss.omp_set_num_threads(threads)

        def faiss_kmeans(iterations: int) -> Array:
            model = faiss.Kmeans(x.shape[1], k, niter=iterations, spherical=True, max_points_per_centroid=10**9, seed=0)
            model.train(x, init_centroids=start)
            return np.asarray(model.centroids)

        found[f"faiss {faiss.__version__} Kmeans (spherical)"] = faiss_kmeans
    except ImportError:
        print("faiss is not here", flush=True)
    return found


def main() -> None:
    parser = record.arguments(__doc__, n=100_000, d=256, k=1_000, iterations=11, repeats=3, threads=2)
    parser.add_argument("--cpu", choices=["this", "avx2"], default="this", help="compare as on a CPU of this kind")
    parser.add_argument("--name", help="of the result's file (default: mixture-cpu, and the kind of CPU)")
    args = parser.parse_args()
    if args.cpu == "avx2" and any(os.environ.get(name) != value for name, value in AVX2.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **AVX2})
    warnings.filterwarnings("ignore", module="sklearn")  # that it has not converged is meant
    torch.set_num_threads(args.threads)
    x = embeddings(args.n, args.d, seed=0)
    start = x[np.random.default_rng(1).choice(args.n, args.k, replace=False)]
    compared = runners(x, start, args.threads, args.cpu)
    times: dict[str, list[float]] = {name: [] for name in compared}
    reached: dict[str, float] = {}
    for run in compared.values():
        run(2)  # what happens in a process only once
    for repeat in range(args.repeats):
        for name, run in compared.items():
            clock = time.perf_counter()
            run(1)
            once = time.perf_counter() - clock
            clock = time.perf_counter()
            centres = run(args.iterations)
            many = time.perf_counter() - clock
            times[name].append((many - once) / (args.iterations - 1))
            reached[name] = reached.get(name) or objective(x, centres)
            print(repeat, name, f"{times[name][-1]:.4f}", f"{reached[name]:.5f}", flush=True)
    median = {name: statistics.median(all_times) for name, all_times in times.items()}
    ours = median["siammm, H = 1"]
    rows = [
        [
            name,
            f"{median[name]:.3f}",
            f"{min(times[name]):.3f} to {max(times[name]):.3f}",
            f"{median[name] / ours:.2f}",
            f"{reached[name]:.5f}",
        ]
        for name in compared
    ]
    body = record.table(["", "seconds an iteration (median)", "range", "relative to ours", "objective"], rows)
    if args.cpu == "avx2":
        body += "\n\nA CPU with AVX2 alone was not at hand: this one, with " + ", ".join(
            f"`{name}={value}`" for name, value in {**AVX2, "SIAMMM_COMPILED": "x86-64-v3"}.items()
        )
        body += ". Its clock and its caches are not those of an older CPU."
    path = record.write(
        args.name or ("mixture-cpu" if args.cpu == "this" else f"mixture-cpu-{args.cpu}"),
        f"One iteration on a CPU: {args.n:,} x {args.d} into {args.k:,}",
        body,
        seeds="0 (data), 1 (start)",
        n=f"{args.n:,} x {args.d}, K = {args.k:,}, {args.iterations} iterations, {args.repeats} repeats, interleaved",
        output=args.output,
    )
    print(path.read_text())


if __name__ == "__main__":
    main()
