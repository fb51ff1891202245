"""How fast is the mixture on one GPU at ImageNet's size? Nearest components, one EM iteration, the pairs for merging.

    PYTHONPATH=src python benchmarks/mixture_gpu.py

flash-kmeans is measured beside it where it can be imported
(``pip install --no-deps --target carry/site flash-kmeans``).
Each figure is the median of ``--repeats`` runs after one that is not counted, by CUDA events.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

if __package__:
    from benchmarks import record
else:
    import record

from siammm import VonMisesFisherMixture
from siammm.mixture import centre_pairs, em, merge
from siammm.mixture.components import ConcentrationSettings, VonMisesFisherComponents
from siammm.mixture.em import Assignment
from siammm.mixture.merge_tree import MergeHistory
from siammm.mixture.samples import Samples
from siammm.mixture.search import kernels

sys.path.insert(0, str(Path(__file__).parents[1] / "carry" / "site"))


def embeddings(n: int, d: int, k: int, seed: int) -> tuple[Tensor, Tensor]:
    """Unit rows around 20,000 directions, and K starting centres near some of the rows."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    directions = normalize(noise(20_000, d), dim=1)
    x = normalize(
        directions[torch.randint(20_000, (n,), device="cuda", generator=generator)] + 0.06 * noise(n, d), dim=1
    )
    chosen = torch.randperm(n, device="cuda", generator=generator)[:k]
    return x, normalize(x[chosen] + 0.02 * noise(k, d), dim=1)


def seconds(work: Callable[[], Any], repeats: int, *, warm: bool = True) -> float:
    if warm:
        work()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return sorted(times)[repeats // 2]


def torch_topk(x: Tensor, w: Tensor, h: int, rows: int = 8192) -> None:
    for start in range(0, x.shape[0], rows):
        (x[start : start + rows] @ w.T).topk(h, dim=1)


def torch_max(x: Tensor, w: Tensor, rows: int = 8192) -> None:
    for start in range(0, x.shape[0], rows):
        (x[start : start + rows] @ w.T).max(dim=1)


def peers(x: Tensor, w: Tensor, note: Callable[..., float], repeats: int) -> tuple[float, float | None]:
    """What others take for the same: torch's 5 nearest, and the faster of flash-kmeans' two ways to the nearest."""
    work = 2.0 * x.shape[0] * w.shape[0] * x.shape[1]
    low_x, low_w = x.bfloat16(), w.bfloat16()
    topk = note("torch, bf16 product and `topk(5)` in chunks", seconds(lambda: torch_topk(low_x, low_w, 5), 3), work)
    note("torch, bf16 product and `max` in chunks", seconds(lambda: torch_max(low_x, low_w), 3), work)
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    note("a plain 8192^3 bf16 product", seconds(lambda: square @ square, 10), 2.0 * 8192**3, "the practical limit")
    try:
        flash: Any = import_module("flash_kmeans.assign_euclid_triton")
    except ImportError:
        print("flash-kmeans is not here", flush=True)
        return topk, None
    batch_x, batch_w = low_x[None], low_w[None]
    squares = (batch_x.float() ** 2).sum(dim=-1)
    euclid = seconds(lambda: flash.euclid_assign_triton(batch_x, batch_w, squares), repeats)
    cosine = seconds(lambda: flash.cosine_assign_triton(batch_x, batch_w), repeats)
    note("flash-kmeans, nearest, Euclidean, bf16", euclid, work)
    note("flash-kmeans, nearest, cosine, bf16", cosine, work)
    return topk, min(euclid, cosine)


def iteration_and_pairs(
    x: Tensor, w: Tensor, note: Callable[..., float], peak: Callable[[], str], repeats: int
) -> None:
    """One EM iteration with concentrations, and the statistics of all pairs of centres."""
    n, d, k = x.shape[0], x.shape[1], w.shape[0]
    samples = Samples(x, device=x.device, unit=True)
    start = VonMisesFisherComponents.started(w, ConcentrationSettings())
    hard = em.e_step(samples, start, Assignment(n_neighbours=1))
    components = start.estimated(hard.count_K, hard.mean_KF)
    assignment = Assignment()

    def iteration() -> None:
        statistics = em.e_step(samples, components, assignment)
        components.estimated(statistics.count_K, statistics.mean_KF)

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    note("**siammm, EM iteration with concentrations, H = 5**", seconds(iteration, repeats), 2.0 * n * k * d, peak())
    centre = components.centre_KD
    torch.cuda.reset_peak_memory_stats()
    note(
        "**siammm, all pairs: mean, deviation, nearest neighbours**",
        seconds(lambda: centre_pairs.pair_statistics(centre, unit=True), repeats),
        2.0 * k * k * d * 1.5,
        peak(),
    )

    for rule in ("paper", "auto"):
        settings = merge.MergeSettings(rule=rule)
        torch.cuda.reset_peak_memory_stats()
        note(
            f'siammm, one round of `merge="{rule}"`',
            seconds(
                partial(merge.merge_round, samples, components, assignment, settings, MergeHistory(k)),
                1,
                warm=False,
            ),
            None,
            peak(),
        )


def equal_rows(x: Tensor, w: Tensor, index: Tensor, n: int = 100_000) -> tuple[float, float]:
    """Over the first rows: the share whose H nearest are those of float32, as sets and in order."""
    h = index.shape[1]
    same_set = same_order = 0
    for start in range(0, n, 10_000):
        expected = (x[start : start + 10_000] @ w.T).topk(h, dim=1).indices
        found = index[start : start + 10_000]
        same_order += int((found == expected).all(dim=1).sum())
        same_set += int((found.sort(dim=1).values == expected.sort(dim=1).values).all(dim=1).sum())
    return same_set / n, same_order / n


def main() -> None:
    args = record.arguments(__doc__, n=1_281_167, d=256, k=100_000, repeats=5).parse_args()
    n, d, k = args.n, args.d, args.k
    torch.cuda.reset_peak_memory_stats()
    x, w = embeddings(n, d, k, seed=0)
    work = 2.0 * n * k * d
    rows: list[list[str]] = []

    def note(what: str, time: float, flops: float | None, remark: str = "") -> float:
        rate = f"{flops / time / 1e12:.0f}" if flops else ""
        rows.append([what, f"{time:.4f}", rate, remark])
        print(*rows[-1], flush=True)
        return time

    def peak() -> str:
        return f"peak memory {torch.cuda.max_memory_allocated() / 1e9:.2f} GB, embeddings and centres included"

    # Ours, whole calls: from float32 rows to float32 scores and numbers.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    five = note(
        "**siammm, 5 nearest**", seconds(lambda: kernels.search_on_gpu(x, w, None, 5), args.repeats), work, peak()
    )
    note("siammm, nearest", seconds(lambda: kernels.search_on_gpu(x, w, None, 1), args.repeats), work)
    same_set, same_order = equal_rows(x, w, kernels.search_on_gpu(x, w, None, 5)[1])

    iteration_and_pairs(x, w, note, peak, args.repeats)
    topk, flash = peers(x, w, note, args.repeats)

    # A whole fit through the public interface, tensors staying on the GPU.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = VonMisesFisherMixture(k, init=w, max_iter=5, tol=0.0)
    note("siammm, `fit` with 5 EM steps, all told", seconds(lambda: model.fit(x), 1), None, peak())

    body = record.table(["work", "seconds", "TFLOP/s", ""], rows)
    body += f"\n\nRows whose 5 nearest equal those of float32: {same_set:.4%} as sets, {same_order:.4%} in order "
    body += f"(first {100_000:,} rows). torch's `topk` takes {topk / five:.1f} x the time of our 5 nearest"
    body += f"; flash-kmeans' nearest 1 (the faster of its two) takes {flash / five:.2f} x.\n" if flash else ".\n"
    path = record.write(
        "mixture-gpu",
        f"The mixture on one GPU: {n:,} x {d} against {k:,} components",
        body,
        seeds="0",
        n=f"{n:,} x {d}, K = {k:,}; median of {args.repeats}",
        output=args.output,
    )
    print(path.read_text())


if __name__ == "__main__":
    main()
