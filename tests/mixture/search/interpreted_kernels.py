"""Run the Triton kernels under Triton's interpreter and compare them with torch.

A program of its own, because the interpreter must be switched on before Triton is imported. Prints one line a check and
exits with 1 if any fails; ``tests/test_interpreted_kernels.py`` runs it.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch.nn.functional import normalize

from siammm import VonMisesFisherMixture
from siammm.mixture.search import kernels, neighbours

torch.set_num_threads(1)
failures: list[str] = []


def check(name: str, held: bool) -> None:
    sys.stdout.write(f"{'ok  ' if held else 'FAIL'} {name}\n")
    if not held:
        failures.append(name)


for n, k, d, h in ((70, 100, 24, 5), (33, 7, 16, 5), (100, 300, 40, 1), (50, 16, 32, 8), (31, 65, 17, 3)):
    generator = torch.Generator().manual_seed(n)
    x = normalize(torch.randn(n, d, generator=generator), dim=1)
    w = normalize(torch.randn(k, d, generator=generator), dim=1)
    h = min(h, k)
    for b in (None, 0.1 * torch.randn(k, generator=generator)):
        score, index = kernels.search_on_gpu(x, w, b, h)
        expected_score, expected_index = neighbours.search(x, w, b, h)
        label = f"n={n} k={k} d={d} h={h} bias={b is not None}"
        check(f"nearest, numbers, {label}", torch.equal(index, expected_index))
        check(f"nearest, scores, {label}", torch.allclose(score, expected_score, atol=1e-6))
    weight = torch.rand(n, h, generator=generator)
    count, total = kernels.sums_by_component(x, index, weight, k)
    flat = index.reshape(-1)
    expected = torch.zeros(k, d).index_add_(0, flat, (x[:, None] * weight[..., None]).reshape(-1, d))
    check(f"sums, n={n} k={k}", torch.allclose(total, expected, atol=1e-5))
    check(
        f"counts, n={n} k={k}", torch.allclose(count, torch.zeros(k).index_add_(0, flat, weight.reshape(-1)), atol=1e-5)
    )
    distances = torch.pdist(w.double()).sum()
    check(f"distances, k={k}", torch.allclose(kernels.sum_of_distances(w), distances, rtol=1e-5))

# More components than one launch takes: the parts' candidates are joined.
kernels._TILE_BITS = 2
generator = torch.Generator().manual_seed(5)
x = normalize(torch.randn(40, 16, generator=generator), dim=1)
w = normalize(torch.randn(200, 16, generator=generator), dim=1)
check("several launches", torch.equal(kernels.search_on_gpu(x, w, None, 4)[1], neighbours.search(x, w, None, 4)[1]))
kernels._TILE_BITS = 11

centres = normalize(torch.randn(5, 32, generator=generator), dim=1)
rows = normalize(centres.repeat(16, 1) + 0.08 * torch.randn(80, 32, generator=generator), dim=1)
fits = {
    backend: VonMisesFisherMixture(5, backend=backend, random_state=0).fit(rows.numpy())  # type: ignore[arg-type]
    for backend in ("torch", "triton")
}
check("fit: labels", bool((fits["torch"].labels_ == fits["triton"].labels_).all()))
check("fit: likelihood", abs(fits["torch"].lower_bound_ - fits["triton"].lower_bound_) < 1e-5)
sys.exit(1 if failures else 0)
