"""The mixture's Triton kernels on a GPU: they agree with torch and repeat themselves, and a fit is that of the CPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

from siammm import VonMisesFisherMixture
from siammm.mixture import centre_pairs, em
from siammm.mixture.search import kernels, neighbours
from tests.conftest import Known

pytestmark = pytest.mark.gpu


def problem(n: int, k: int, d: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(0)
    w = normalize(torch.randn(k, d, device="cuda", generator=generator), dim=1)
    x = w[torch.randint(k, (n,), device="cuda", generator=generator)]
    return normalize(x + 0.05 * torch.randn(n, d, device="cuda", generator=generator), dim=1), w


# Each case compiles kernels of its own.
@pytest.mark.parametrize(
    ("d", "h", "bias"),
    [
        (16, 5, False), (40, 5, True), (384, 5, False), (1024, 5, False),
        (256, 1, False), (256, 5, False), (256, 5, True), (256, 8, False),
    ],
)  # fmt: skip
def test_nearest_agrees_with_torch_on_the_gpu(d: int, h: int, bias: bool) -> None:
    x, w = problem(5000, 3001, d)
    b = 0.01 * torch.randn(3001, device="cuda") if bias else None
    score, index = kernels.search_on_gpu(x, w, b, h)
    expected_score, expected_index = neighbours.search(x.double(), w.double(), None if b is None else b.double(), h)
    assert (index == expected_index).all(dim=1).float().mean() >= 0.999
    torch.testing.assert_close(score[:, 0], expected_score[:, 0].float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("d", [96, 256, 512, 1024])
def test_sums_and_distances_agree_with_torch_on_the_gpu(d: int) -> None:
    x, w = problem(20_000, 500, d)
    score, index = kernels.search_on_gpu(x, w, None, 5)
    weight = (score / 0.02).softmax(dim=1)
    count, total = kernels.sums_by_component(x, index, weight, 500)
    cpu_count, cpu_total = em.sums_by_component(x.cpu(), index.cpu(), weight.cpu(), 500)
    torch.testing.assert_close(total.cpu(), cpu_total, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(count.cpu().double(), cpu_count, rtol=1e-4, atol=1e-4)
    on_gpu, on_cpu = centre_pairs.pair_statistics(w, unit=True), centre_pairs.pair_statistics(w.cpu(), unit=True)
    assert on_gpu.mean == pytest.approx(on_cpu.mean, rel=1e-6)
    assert on_gpu.deviation == pytest.approx(on_cpu.deviation, rel=1e-3)
    assert torch.equal(on_gpu.nearest_K.cpu(), on_cpu.nearest_K)


def test_sums_are_the_same_bits_every_time() -> None:
    x, w = problem(50_000, 100, 64)
    _, index = kernels.search_on_gpu(x, w, None, 3)
    weight = torch.rand(index.shape, device="cuda")
    first = kernels.sums_by_component(x, index, weight, 100)[1]
    assert all(torch.equal(first, kernels.sums_by_component(x, index, weight, 100)[1]) for _ in range(5))


@pytest.mark.parametrize("settings", [{}, {"n_neighbours": 1}, {"assignment": "posterior"}])
def test_a_fit_on_the_gpu_equals_one_on_the_cpu(twenty: Known, settings: dict) -> None:
    rows = twenty.X.astype("float32")
    cpu = VonMisesFisherMixture(20, random_state=0, device="cpu", **settings).fit(rows)
    gpu = VonMisesFisherMixture(20, random_state=0, device="cuda", **settings).fit(rows)
    tensors = VonMisesFisherMixture(20, random_state=0, **settings).fit(torch.from_numpy(rows).cuda())
    assert gpu.lower_bound_ == pytest.approx(cpu.lower_bound_, abs=1e-3)
    assert (gpu.labels_ == cpu.labels_).mean() > 0.9999
    assert tensors.labels_.is_cuda
    assert tensors.mean_directions_.is_cuda
    assert (tensors.labels_.cpu().numpy() == cpu.labels_).mean() > 0.9999
