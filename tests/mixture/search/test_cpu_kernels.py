"""The compiled part gives what torch gives; where it cannot be had, nobody notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from siammm.mixture import em
from siammm.mixture.components import ConcentrationSettings, VonMisesFisherComponents
from siammm.mixture.em import Assignment
from siammm.mixture.estimator import VonMisesFisherMixture
from siammm.mixture.samples import Samples
from siammm.mixture.search import cpu_kernels, eightbit, neighbours
from siammm.mixture.search.eightbit import Bytes
from tests.mixture.search.built_kernels import needs_compiler, rows


@needs_compiler
@pytest.mark.parametrize(
    ("n", "k", "d", "h"), [(101, 90, 5, 1), (200, 1000, 65, 5), (97, 2100, 130, 3), (1, 300, 64, 32)]
)
def test_nearest_equals_a_full_sort(build: Any, threads: int, n: int, k: int, d: int, h: int) -> None:
    """Sizes with a rest in every direction: of tiles, of panels, of blocks of rows, of fours of columns."""
    x, w = rows(n, d, 0), rows(k, d, 1)
    found = eightbit._compiled(x, eightbit._Rounded.of(w), h, Bytes.of(x))
    assert found is not None
    expected = (x.double() @ w.double().T).topk(h, dim=1)
    torch.testing.assert_close(found[0].double(), expected.values, rtol=0, atol=1e-6)
    assert (found[1] == expected.indices).float().mean() > 0.99


@needs_compiler
def test_scores_belong_to_their_components_and_equals_come_in_order(build: Any) -> None:
    x, w = rows(60, 64, 2), rows(150, 64, 3)
    w[100:150] = w[:50]
    found = eightbit._compiled(x, eightbit._Rounded.of(w), 4, Bytes.of(x))
    assert found is not None
    score, index = found
    torch.testing.assert_close(score, (x[:, None] * w[index]).sum(dim=2), rtol=0, atol=1e-6)
    tied = score[:, 1:] == score[:, :-1]
    assert tied.any()
    assert (index[:, 1:] > index[:, :-1])[tied].all()


@needs_compiler
def test_rows_with_too_many_rivals_are_marked(build: Any) -> None:
    """A row of zeros is as near to one component as to another; the others are not touched by it."""
    x, w = rows(90, 64, 4), rows(900, 64, 5)
    x[7] = 0
    low, components = Bytes.of(x), eightbit._Rounded.of(w)
    found = cpu_kernels.nearest_by_bytes(
        x,
        low.code_ND,
        w,
        components.bytes.code_ND,
        2,
        scale_N=low.step_N * components.step,
        reach_N=components.reach(x, low.step_N),
        slack_N=(2 * components.error(low.step_N) / (low.step_N * components.step)).clamp_max(2.0**29).int(),
    )
    assert found is not None
    assert found[2].nonzero()[:, 0].tolist() == [7]


# With a rest in every direction (of vectors, of strips, of panels, of blocks of rows, of parts of the columns), without
# one, and with just as many components as are asked for.
SIZES = [(101, 90, 5), (48, 1024, 64), (97, 1100, 300), (50, 513, 257), (7, 47, 1), (13, 129, 600), (1, 32, 16)]


def whole_numbers(n: int, k: int, d: int, *, bias: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Rows and components of small whole numbers: float32 has no rounding for these, and very many scores are equal."""
    generator = torch.Generator().manual_seed(20)
    x, w, b = (torch.randint(-2, 3, size, generator=generator).float() for size in ((n, d), (k, d), (k,)))
    return x, w, b if bias else None


@needs_compiler
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n", "k", "d"), SIZES)
def test_by_floats_equals_a_stable_sort(build: Any, threads: int, n: int, k: int, d: int, bias: bool) -> None:
    """To the last bit, and of equals the first comes first."""
    x, w, b = whole_numbers(n, k, d, bias=bias)
    expected = (x @ w.T + (0 if b is None else b)).sort(dim=1, descending=True, stable=True)
    for h in (1, 2, 5, 32):
        found = cpu_kernels.nearest_by_floats(x, w, b, h)
        assert found is not None
        assert torch.equal(found[0], expected.values[:, :h])
        assert torch.equal(found[1], expected.indices[:, :h])


@needs_compiler
@pytest.mark.parametrize(("n", "k", "d"), SIZES)
def test_by_floats_equals_a_full_sort(build: Any, n: int, k: int, d: int) -> None:
    x, w = rows(n, d, 21), rows(k, d, 22)
    bias = torch.randn(k, generator=torch.Generator().manual_seed(23))
    for b, h in ((None, 1), (None, 5), (bias, 1), (bias, 17)):
        found = cpu_kernels.nearest_by_floats(x, w, b, h)
        assert found is not None
        score_NK = x.double() @ w.double().T + (0 if b is None else b.double())
        torch.testing.assert_close(found[0].double(), score_NK.topk(h, dim=1).values, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found[0].double(), score_NK.gather(1, found[1]), rtol=1e-6, atol=1e-6)
        assert all(len(set(row)) == h for row in found[1].tolist())


@needs_compiler
def test_by_floats_a_row_does_not_depend_on_the_others(build: Any, threads: int) -> None:
    x, w = rows(200, 70, 24), rows(600, 70, 25)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(26))
    whole, mixed = cpu_kernels.nearest_by_floats(x, w, None, 3), cpu_kernels.nearest_by_floats(x[order], w, None, 3)
    alone = cpu_kernels.nearest_by_floats(x[5:6], w, None, 3)
    assert whole is not None
    assert mixed is not None
    assert alone is not None
    for of_all, of_mixed, of_one in zip(whole, mixed, alone, strict=True):
        assert torch.equal(of_all[order], of_mixed)
        assert torch.equal(of_all[5:6], of_one)


@needs_compiler
@pytest.mark.parametrize("h", [1, 32])
def test_by_floats_copies_and_rows_of_zeros_come_in_order(build: Any, h: int) -> None:
    x, w = rows(60, 64, 27), rows(1, 64, 28).repeat(1300, 1)
    x[3] = 0
    found = cpu_kernels.nearest_by_floats(x, w, None, h)
    assert found is not None
    assert torch.equal(found[1], torch.arange(h).expand(60, h))
    assert (found[0] == found[0][:, :1]).all()


@needs_compiler
@pytest.mark.parametrize("best", [0, 511, 512, 1029])
def test_by_floats_the_best_may_be_anywhere(build: Any, best: int) -> None:
    """Also where all scores are far below zero, as those of Gaussian components are."""
    x, w = rows(20, 33, 29), rows(1030, 33, 30)
    b = torch.full((1030,), -1e6)
    b[best] = -5e5
    found = cpu_kernels.nearest_by_floats(x, w, b, 2)
    assert found is not None
    assert (found[1][:, 0] == best).all()
    assert (found[1][:, 1] != best).all()


@needs_compiler
def test_by_floats_not_where_scores_are_no_numbers(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no H finite scores, too few components, or too many neighbours is left to torch."""
    monkeypatch.setattr(cpu_kernels, "multiplies_floats", lambda: True)
    x, w = rows(60, 64, 31), rows(70, 64, 32)
    huge = x.clone()
    huge[17] = 3e38
    b = torch.full((70,), -torch.inf)
    assert cpu_kernels.nearest_by_floats(huge, w.abs(), None, 1) is not None, "infinity is the highest of all"
    assert cpu_kernels.nearest_by_floats(huge, -w.abs(), None, 1) is None
    assert cpu_kernels.nearest_by_floats(x, torch.full_like(w, torch.nan), None, 1) is None
    assert cpu_kernels.nearest_by_floats(x, w, b, 2) is None
    assert cpu_kernels.nearest_by_floats(x, w, None, 33) is None
    assert cpu_kernels.nearest_by_floats(x, w[:4], None, 5) is None
    assert torch.equal(neighbours.search(x, w, None, 33)[1], (x @ w.T).topk(33, dim=1).indices)
    assert torch.isinf(neighbours.search(x, w, b, 2)[0]).all()


@needs_compiler
@pytest.mark.parametrize("backend", ["torch", "low-precision"])
@pytest.mark.parametrize("bias", [False, True])
def test_by_floats_is_what_a_search_goes_by(
    build: Any, monkeypatch: pytest.MonkeyPatch, backend: neighbours.Backend, bias: bool
) -> None:
    """Where there are no bytes, a bias that has no place in one, or too few components for them to pay."""
    calls: list[int] = []
    compiled = cpu_kernels.nearest_by_floats

    def counted(*given: Any) -> Any:
        calls.append(1)
        return compiled(*given)

    monkeypatch.setattr(cpu_kernels, "nearest_by_floats", counted)
    x, w, b = whole_numbers(300, 40, 64, bias=bias)
    score, _ = neighbours.search(x, w, b, 3, backend=backend)
    assert bool(calls) == bool(build.siammm_multiplies_floats()), "only where it is faster"
    assert torch.equal(score, (x @ w.T + (0 if b is None else b)).topk(3, dim=1).values)
    calls.clear()
    neighbours.search(x, w[:15], None if b is None else b[:15], 3, backend=backend)
    assert not calls, "so few components leave most of a vector empty"
    monkeypatch.setattr(cpu_kernels, "_LEAST_WORK", 300 * 40 * 64 + 1)
    neighbours.search(x, w, b, 3, backend=backend)
    assert not calls, "not worth it"


@needs_compiler
@pytest.mark.parametrize(("n", "k", "f", "h"), [(1000, 7, 33, 1), (500, 40, 100, 5), (3, 50, 16, 2)])
def test_sums_equal_a_matrix_product(build: Any, threads: int, n: int, k: int, f: int, h: int) -> None:
    generator = torch.Generator().manual_seed(6)
    t, weight = torch.randn(n, f, generator=generator), torch.rand(n, h, generator=generator)
    index = torch.randint(k, (n, h), generator=generator)
    found = cpu_kernels.sums_by_component(t, index, weight, k)
    again = cpu_kernels.sums_by_component(t, index, weight, k)
    assert found is not None
    assert again is not None
    share_NK = torch.zeros(n, k, dtype=torch.float64).scatter_add_(1, index, weight.double())
    torch.testing.assert_close(found[0], share_NK.sum(dim=0))
    torch.testing.assert_close(found[1].double(), share_NK.T @ t.double(), rtol=1e-5, atol=1e-4)
    assert torch.equal(found[1], again[1])


@needs_compiler
@pytest.mark.parametrize("wrong", [-1, 9])
def test_a_number_that_is_no_component_is_refused(build: Any, wrong: int) -> None:
    assert cpu_kernels.sums_by_component(torch.ones(5, 8), torch.full((5, 1), wrong), torch.ones(5, 1), 9) is None


@needs_compiler
def test_shares_equal_a_softmax(build: Any, threads: int) -> None:
    """Also where numbers are far apart, far from zero, or there is none."""
    generator = torch.Generator().manual_seed(7)
    logit = torch.randn(3000, 5, generator=generator) * torch.logspace(-3, 4, 3000)[:, None] + 50
    logit[5, 1:] = -torch.inf
    found = cpu_kernels.shares(logit)
    assert found is not None
    below = (logit - logit.amax(dim=1, keepdim=True)).double()  # what float32 makes of the difference is no matter here
    torch.testing.assert_close(found[0].double(), below.softmax(dim=1), rtol=1e-6, atol=2e-45)
    assert (found[0] == 0).any(), "far below it is nothing, and not next to nothing"
    torch.testing.assert_close(found[1].double(), logit.double().logsumexp(dim=1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[0].sum(dim=1), torch.ones(3000))


@needs_compiler
def test_shares_of_what_is_no_number(build: Any) -> None:
    inf, nan = torch.inf, torch.nan
    logit = torch.tensor([[0, -200, -90], [nan, 0, 0], [0, nan, 0], [0, -inf, -95], [-inf, -inf, -inf], [0, -103, 0]])
    found = cpu_kernels.shares(logit)
    assert found is not None
    torch.testing.assert_close(found[0], logit.softmax(dim=1), rtol=1e-5, atol=3e-45, equal_nan=True)
    assert torch.equal(found[0] == 0, logit.softmax(dim=1) == 0)


@needs_compiler
def test_what_was_dropped_is_not_forgotten(build: Any) -> None:
    """Equal maxima in a later panel lower the bound; what was dropped before may then be better than what is left."""
    k, d = 2048, 4
    w_code = torch.zeros(k, d, dtype=torch.int8)
    w_code[:, 1] = 1
    w_code[[0, 1, 2, 1025], 0] = torch.tensor([100, 80, 75, 100], dtype=torch.int8)
    w = w_code.float()
    w[2, 0] = 102.5
    x_code = torch.tensor([[1, 0, 0, 0]], dtype=torch.int8)
    numbers = {"scale_N": torch.ones(1), "reach_N": torch.full((1,), 28.0), "slack_N": torch.full((1,), 3)}
    found = cpu_kernels.nearest_by_bytes(x_code.float(), x_code, w, w_code, 2, **numbers)
    assert found is not None
    assert found[2].item() or found[1].tolist() == [[2, 0]]
    numbers["reach_N"] = torch.full((1,), -torch.inf)
    found = cpu_kernels.nearest_by_bytes(x_code.float(), x_code, torch.full_like(w, torch.nan), w_code, 2, **numbers)
    assert found is not None
    assert found[2].item(), "a row without scores is not settled"


@needs_compiler
def test_sizes_that_do_not_fit_are_refused(build: Any) -> None:
    x, w = rows(20, 64, 13), rows(200, 64, 14)
    with pytest.raises(ValueError, match="is expected"):
        eightbit._compiled(x, eightbit._Rounded.of(w), 3, Bytes.of(x[:10]))
    with pytest.raises(ValueError, match="is expected"):
        cpu_kernels.sums_by_component(x, torch.zeros(10, 1, dtype=torch.int64), torch.ones(10, 1), 3)
    for other_w, b in ((w[:, :63], None), (w, torch.ones(199))):
        with pytest.raises(ValueError, match="is expected"):
            cpu_kernels.nearest_by_floats(x, other_w, b, 3)
    with pytest.raises(ValueError, match="is expected"):
        cpu_kernels.nearest_by_floats(x.double(), w, None, 3)


@needs_compiler
@pytest.mark.parametrize("backend", ["low-precision", "torch"])
@pytest.mark.parametrize(
    ("n_neighbours", "by_density", "temperature"),
    [(1, False, 0.02), (5, False, 0.02), (5, True, 0.02), (5, False, 0.002)],
)
def test_an_e_step_is_the_same_with_and_without(
    build: Any,
    monkeypatch: pytest.MonkeyPatch,
    n_neighbours: int,
    by_density: bool,
    temperature: float,
    backend: neighbours.Backend,
) -> None:
    x = rows(1500, 64, 8)
    samples = Samples(x, device=torch.device("cpu"), unit=True)
    components = VonMisesFisherComponents.started(x[:300], ConcentrationSettings())
    assignment = Assignment(n_neighbours=n_neighbours, by_density=by_density, temperature=temperature, backend=backend)
    for units in ("multiplies_bytes", "multiplies_floats"):
        monkeypatch.setattr(cpu_kernels, units, lambda: True)  # also where it takes long
    compiled = em.e_step(samples, components, assignment)
    again = em.e_step(samples, components, assignment)
    assert torch.equal(compiled.total_KF, again.total_KF)
    monkeypatch.setenv("SIAMMM_COMPILED", "0")
    plain = em.e_step(samples, components, assignment)
    assert torch.equal(compiled.count_K > 0, plain.count_K > 0)
    torch.testing.assert_close(compiled.count_K, plain.count_K, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(compiled.total_KF, plain.total_KF, rtol=1e-5, atol=1e-4)
    assert compiled.log_likelihood == pytest.approx(plain.log_likelihood, rel=1e-6)


@needs_compiler
def test_memory_mapped_and_in_memory_agree(build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "multiplies_bytes", lambda: True)
    monkeypatch.setattr("siammm.mixture.samples._STREAM_BYTES", 64 * 4 * 500)
    monkeypatch.setattr(em, "_CPU_ROWS", 400)
    X = rows(1200, 64, 9).numpy()
    np.save(tmp_path / "x.npy", X)
    settings: dict[str, Any] = {"n_components": 280, "init": X[:280], "max_iter": 2, "backend": "low-precision"}
    whole = VonMisesFisherMixture(**settings).fit(X)
    mapped = VonMisesFisherMixture(**settings).fit(np.load(tmp_path / "x.npy", mmap_mode="r"))
    np.testing.assert_array_equal(whole.labels_, mapped.labels_)
    np.testing.assert_allclose(whole.mean_directions_, mapped.mean_directions_, atol=1e-6)
