"""Every way to the H nearest components gives what a full sort gives."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

from siammm.core.errors import InputError
from siammm.mixture.search import neighbours
from siammm.mixture.search.neighbours import search


def problem(n: int, k: int, d: int, *, seed: int = 0, bias: bool = False) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x = normalize(torch.randn(n, d, generator=generator), dim=1)
    w = normalize(torch.randn(k, d, generator=generator), dim=1)
    return x, w, torch.randn(k, generator=generator) if bias else None  # type: ignore[return-value]


@pytest.mark.parametrize("n_neighbours", [1, 2, 5])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("backend", ["torch", "low-precision"])
def test_equals_a_full_sort(backend: neighbours.Backend, n_neighbours: int, bias: bool) -> None:
    x, w, b = problem(700, 300, 64, bias=bias)
    score, index = search(x, w, b, n_neighbours, backend=backend)
    full = x @ w.T if b is None else x @ w.T + b
    expected = full.sort(dim=1, descending=True)
    assert torch.equal(index, expected.indices[:, :n_neighbours])
    torch.testing.assert_close(score, expected.values[:, :n_neighbours], rtol=1e-5, atol=1e-6)


def test_low_precision_decides_near_ties_in_single_precision() -> None:
    """Components in pairs that differ by less than bfloat16 can see."""
    x, w, _ = problem(2000, 100, 64)
    w = normalize(torch.cat([w, w + 1e-4 * torch.randn(w.shape, generator=torch.Generator().manual_seed(1))]), dim=1)
    exact = search(x, w, None, 3)
    low = search(x, w, None, 3, backend="low-precision")
    # what is left to disagree on is the rounding of float32 itself
    torch.testing.assert_close(low[0], exact[0], rtol=0, atol=1e-6)
    assert (low[1] == exact[1]).float().mean() > 0.999


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, _ = problem(333, 50, 16)
    whole = search(x, w, None, 4)
    monkeypatch.setattr(neighbours, "_CPU_SCORE_BYTES", 16 * 50 * 4)
    pieces = search(x, w, None, 4)
    assert torch.equal(whole[1], pieces[1])
    torch.testing.assert_close(whole[0], pieces[0])


def test_double_precision_stays_double() -> None:
    x, w, _ = problem(20, 10, 8)
    score, _ = search(x.double(), w.double(), None, 2)
    assert score.dtype == torch.float64


def test_triton_is_refused_where_it_cannot_be_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(InputError, match="at most 8 neighbours"):
        neighbours.choose_backend("triton", cpu, torch.float32, d=64, k=100, n_neighbours=20)
    monkeypatch.setattr(neighbours.kernels, "available", lambda: False)
    with pytest.raises(InputError, match="CUDA device"):
        neighbours.choose_backend("triton", cpu, torch.float32, d=64, k=100, n_neighbours=5)
