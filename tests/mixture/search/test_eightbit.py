"""Bytes propose, float32 decides: the answer must be float32's."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn.functional import normalize

from siammm.mixture.search import cpu_kernels, eightbit, neighbours
from siammm.mixture.search.eightbit import Bytes

pytestmark = pytest.mark.skipif(eightbit._int_mm is None, reason="this torch does not multiply bytes")


def rows(n: int, d: int, seed: int, *, rank: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if rank is None:
        return normalize(torch.randn(n, d, generator=generator), dim=1)
    return normalize(torch.randn(n, rank, generator=generator) @ torch.randn(rank, d, generator=generator), dim=1)


@pytest.fixture(params=["operations", "compiled"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to the answer, whatever the sizes."""
    monkeypatch.setattr(cpu_kernels, "_LEAST_WORK", 0)
    if request.param == "operations":
        monkeypatch.setattr(cpu_kernels, "multiplies_bytes", lambda: False)
    elif not cpu_kernels.multiplies_bytes():
        pytest.skip("no C compiler, or no CPU that multiplies bytes")
    return request.param


both_ways = pytest.mark.usefixtures("way")


@both_ways
@pytest.mark.parametrize(
    ("k", "d", "n_neighbours"),
    [*((k, d, h) for k, d in [(100, 64), (257, 96), (1000, 65)] for h in (1, 2, 5, 12)), (3001, 128, 5)],
)
def test_equals_a_full_sort(k: int, d: int, n_neighbours: int) -> None:
    x, w = rows(5000, d, 0, rank=12), rows(k, d, 1, rank=12)
    score, index = eightbit.search_by_bytes(x, w, n_neighbours)
    expected = (x @ w.T).topk(n_neighbours, dim=1)
    torch.testing.assert_close(score, expected.values, rtol=0, atol=1e-6)
    # Only what float32 itself cannot tell apart may differ.
    differs = (index != expected.indices).any(dim=1)
    assert differs.float().mean() < 1e-3


@both_ways
def test_rows_that_bytes_cannot_tell_apart_are_searched_in_full() -> None:
    """Components in tight bunches of twenty, more than the second round of candidates holds."""
    bunches = rows(30, 64, 2)
    noise = torch.randn(600, 64, generator=torch.Generator().manual_seed(3))
    w = normalize(bunches.repeat_interleave(20, dim=0) + 1e-4 * noise, dim=1)
    x = normalize(bunches.repeat(50, 1) + 0.05 * rows(1500, 64, 4), dim=1)
    score, _ = eightbit.search_by_bytes(x, w, 3)
    torch.testing.assert_close(score, (x @ w.T).topk(3, dim=1).values, rtol=0, atol=1e-6)


@both_ways
def test_double_precision_stays_double() -> None:
    x, w = rows(100, 64, 19).double(), rows(200, 64, 20).double()
    score, _ = eightbit.search_by_bytes(x, w, 2)
    torch.testing.assert_close(score, (x @ w.T).topk(2, dim=1).values, rtol=0, atol=1e-12)


@both_ways
def test_rounded_rows_may_be_kept() -> None:
    x, w = rows(900, 64, 5), rows(300, 64, 6)
    kept = Bytes.of(x)
    for h in (1, 4):
        assert torch.equal(eightbit.search_by_bytes(x, w, h)[1], eightbit.search_by_bytes(x, w, h, kept)[1])


def test_rounding_is_up_or_down_and_right_on_average() -> None:
    x = torch.full((4000, 64), 0.3) * torch.linspace(0.1, 1, 64)
    for common in (False, True):
        low = Bytes.of(x, common_step=common)
        off = (low.code_ND.float() * low.step_N[:, None] - x) / low.step_N[:, None]
        assert off.abs().max() <= 1.001
        assert off.mean(dim=0).abs().max() < 0.05


def test_the_largest_number_stays_a_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded up by the highest draw there is, it must not become 128, which as a byte is -128."""
    almost_one = torch.nextafter(torch.tensor(1.0), torch.tensor(0.0))
    monkeypatch.setattr(eightbit, "_dither", lambda d, *, seed: almost_one.expand(eightbit._ROWS, d))
    x = rows(500, 64, 18).abs()
    for common in (False, True):
        assert (Bytes.of(x, common_step=common).code_ND >= 0).all()


@both_ways
@pytest.mark.parametrize("kind", ["sparse", "one-hot", "one huge coordinate", "signs", "positive", "two values"])
@pytest.mark.parametrize("n_neighbours", [1, 5])
def test_hostile_rows_are_still_float32s(kind: str, n_neighbours: int) -> None:
    """Rows whose rounding is as unlike noise as can be."""
    generator = torch.Generator().manual_seed(12)

    def draw(n: int) -> torch.Tensor:
        x = torch.randn(n, 128, generator=generator)
        if kind == "sparse":
            x *= torch.rand(n, 128, generator=generator) < 0.03
            x[:, 0] += 0.01
        elif kind == "one-hot":
            x = torch.eye(128)[torch.randint(128, (n,), generator=generator)] + 1e-3 * x
        elif kind == "one huge coordinate":
            x[:, 5] += 60
        elif kind == "signs":
            x = x.sign()
        elif kind == "positive":
            x = x.abs() + 1
        else:
            x = torch.where(x > 0, 0.51, 1.49)
        return normalize(x, dim=1)

    x, w = draw(4000), draw(700)
    score, _ = eightbit.search_by_bytes(x, w, n_neighbours)
    exact = (x.double() @ w.double().T).topk(n_neighbours, dim=1).values
    torch.testing.assert_close(score.double(), exact, rtol=0, atol=3e-6)


@both_ways
def test_zero_rows_and_copies_are_harmless() -> None:
    x, w = rows(500, 64, 8), rows(300, 64, 9)
    x[3] = 0
    w[10:20] = w[10]
    score, index = eightbit.search_by_bytes(x, w, 5)
    assert torch.isfinite(score).all()
    assert (index >= 0).all()
    assert (index < 300).all()
    torch.testing.assert_close(score, (x @ w.T).topk(5, dim=1).values, rtol=0, atol=1e-6)


def test_chosen_on_cpus_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"d": 256, "k": 1000, "n_neighbours": 5}
    cpu = torch.device("cpu")
    monkeypatch.setattr(eightbit, "available", lambda: True)
    assert neighbours.choose_backend("auto", cpu, torch.float32, **sizes) == "low-precision"
    assert neighbours.choose_backend("auto", cpu, torch.float64, **sizes) == "torch"
    monkeypatch.setattr(eightbit, "available", lambda: False)
    assert neighbours.choose_backend("auto", cpu, torch.float32, **sizes) == "torch"


def test_scores_without_sparse_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has no MKL, scores are gathered."""
    x, w = rows(40, 64, 10), rows(30, 64, 11)
    index = torch.arange(40)[:, None] % 30 + torch.zeros(1, 3, dtype=torch.int64)
    direct = eightbit._scores(x, w, index)
    monkeypatch.setattr(eightbit, "_sampled_product_works", False)
    torch.testing.assert_close(eightbit._scores(x, w, index), direct)


@both_ways
def test_searching_in_threads_leaves_the_filters_of_warnings_alone() -> None:
    before = list(warnings.filters)
    x, w = rows(3000, 64, 13), rows(400, 64, 14)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: eightbit.search_by_bytes(x, w, 2), range(8)))
    assert list(warnings.filters) == before


@both_ways
@pytest.mark.parametrize("n_neighbours", [1, 5])
def test_components_in_a_narrow_cone(n_neighbours: int) -> None:
    """Their mean is taken off; without that every row would be searched in full."""
    axis = rows(1, 128, 15)
    x, w = (normalize(axis + 0.1 * rows(n, 128, seed), dim=1) for n, seed in ((3000, 16), (800, 17)))
    score, _ = eightbit.search_by_bytes(x, w, n_neighbours)
    exact = (x.double() @ w.double().T).topk(n_neighbours, dim=1).values
    torch.testing.assert_close(score.double(), exact, rtol=0, atol=1e-6)
