"""The von Mises-Fisher density and its concentration, against mpmath and against what must always hold."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from siammm.core.errors import InputError
from siammm.mixture import vmf

DIMENSIONS = (2, 3, 16, 128, 256, 768, 4096)
CONCENTRATIONS = (0.0, 1e-3, 1e-2, 0.1, 1.0, 10.0, 1e2, 1e3, 1e4, 1e5, 1e6)


def tensor(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def exact(kappa: float, d: int) -> tuple[Any, Any]:
    """log c_d(kappa) and A_d(kappa) to forty digits, from the definition (Eq. 4)."""
    with mpmath.workdps(40):
        half, x = mpmath.mpf(d) / 2, mpmath.mpf(kappa)
        if kappa == 0:
            return mpmath.log(mpmath.gamma(half) / (2 * mpmath.pi**half)), mpmath.mpf(0)
        bessel = mpmath.besseli(half - 1, x, maxterms=10**8)
        log_c = (half - 1) * mpmath.log(x) - half * mpmath.log(2 * mpmath.pi) - mpmath.log(bessel)
        return log_c, mpmath.besseli(half, x, maxterms=10**8) / bessel


@pytest.mark.parametrize("d", DIMENSIONS)
@pytest.mark.parametrize("kappa", CONCENTRATIONS)
def test_log_normaliser_and_length_agree_with_mpmath(d: int, kappa: float) -> None:
    log_c, length = exact(kappa, d)
    assert float(abs((vmf.log_normaliser(tensor(kappa), d).item() - log_c) / log_c)) < 1e-9
    assert float(abs(vmf.expected_length(tensor(kappa), d).item() - length)) < 1e-13


@pytest.mark.parametrize("d", DIMENSIONS)
@pytest.mark.parametrize("kappa", CONCENTRATIONS[1:])
def test_mle_is_the_root(d: int, kappa: float) -> None:
    _, length = exact(kappa, d)
    found = vmf.concentration_mle(tensor(float(length)), d).item()
    assert found == pytest.approx(kappa, rel=1e-6)


@pytest.mark.parametrize("d", [2, 8, 31, 32, 64, 256])
def test_mle_finds_the_root_of_our_own_length(d: int) -> None:
    kappa = torch.logspace(-3, 5.9, 200, dtype=torch.float64)
    torch.testing.assert_close(vmf.concentration_mle(vmf.expected_length(kappa, d), d), kappa, rtol=1e-8, atol=0)


def test_what_is_kept_from_a_call_without_gradients_serves_one_with() -> None:
    vmf._debye_coefficients.cache_clear()
    with torch.inference_mode():
        vmf.log_normaliser(tensor(3.0), 200)
    kappa = tensor(3.0).requires_grad_()
    vmf.log_normaliser(kappa, 200).backward()
    assert kappa.grad is not None
    assert float(-kappa.grad) == pytest.approx(float(vmf.expected_length(tensor(3.0), 200)), rel=1e-9)


def test_density_integrates_to_one_on_the_circle_and_the_sphere() -> None:
    angle = torch.linspace(-math.pi, math.pi, 200_001, dtype=torch.float64)
    for kappa in (0.0, 1.0, 50.0):
        circle = vmf.log_density(angle.cos(), tensor(kappa), 2).exp()
        assert torch.trapezoid(circle, angle).item() == pytest.approx(1, rel=1e-9)
        height = torch.linspace(-1, 1, 200_001, dtype=torch.float64)
        sphere = 2 * math.pi * vmf.log_density(height, tensor(kappa), 3).exp()
        assert torch.trapezoid(sphere, height).item() == pytest.approx(1, rel=1e-6)


def test_closed_form_is_equation_7() -> None:
    rho, d = tensor(0.6), 256
    assert vmf.concentration_closed_form(rho, d).item() == pytest.approx((0.6 * 256 - 0.6**3) / (1 - 0.6**2))


def test_closed_form_is_within_the_published_error_at_256_dimensions() -> None:
    rho = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    exact_kappa, closed = vmf.concentration_mle(rho, 256), vmf.concentration_closed_form(rho, 256)
    assert ((closed - exact_kappa) / exact_kappa).abs().max().item() < 1e-3


@given(rho=st.floats(0, 1), d=st.integers(2, 5000))
def test_estimates_are_finite_and_within_the_cap(rho: float, d: int) -> None:
    for estimate in (vmf.concentration_mle, vmf.concentration_closed_form):
        kappa = estimate(tensor(rho), d).item()
        assert 0 <= kappa <= vmf.MAX_CONCENTRATION


@given(d=st.integers(2, 2000), a=st.floats(0, 1e5), b=st.floats(0, 1e5))
def test_length_increases_with_concentration(d: int, a: float, b: float) -> None:
    low, high = sorted((a, b))
    lengths = vmf.expected_length(torch.tensor([low, high], dtype=torch.float64), d)
    assert 0 <= lengths[0] <= lengths[1] + 1e-15 <= 1 + 1e-15


def test_small_sample_correction_removes_the_bias() -> None:
    """13 samples a component, as in the paper's 100 k of 1.28 M: uncorrected, kappa is 13 % too large."""
    d, kappa, n, repeats = 256, 150.0, 13, 400
    generator = torch.Generator().manual_seed(0)
    mu = torch.nn.functional.normalize(torch.randn(d, generator=generator, dtype=torch.float64), dim=0)
    x = vmf.sample(mu, kappa, n * repeats, generator=generator).reshape(repeats, n, d)
    rho = x.mean(dim=1).norm(dim=1)
    naive = vmf.concentration_mle(rho, d).mean().item()
    corrected = vmf.concentration_mle(vmf.corrected_length(rho, torch.full((repeats,), n)), d).mean().item()
    assert naive > 1.1 * kappa
    assert corrected == pytest.approx(kappa, rel=0.01)


def test_correction_leaves_singletons_and_shrinkage_pulls_small_components() -> None:
    assert vmf.corrected_length(tensor(1.0), tensor(1.0)).item() == 1.0
    rho, count = torch.tensor([0.9, 0.5]), torch.tensor([1.0, 1e6])
    shrunk = vmf.shrunken_length(rho, count, strength=1.0)
    assert shrunk[0] < 0.75
    assert shrunk[1].item() == pytest.approx(0.5, abs=1e-5)
    assert torch.equal(vmf.shrunken_length(rho, count, strength=0.0), rho.double())


@pytest.mark.parametrize(("d", "kappa"), [(2, 3.0), (3, 0.0), (3, 20.0), (64, 100.0), (512, 1e5)])
def test_samples_have_unit_length_and_the_right_mean(d: int, kappa: float) -> None:
    generator = torch.Generator().manual_seed(1)
    mu = torch.nn.functional.normalize(torch.randn(d, generator=generator, dtype=torch.float64), dim=0)
    n = 20_000
    x = vmf.sample(mu, kappa, n, generator=generator)
    np.testing.assert_allclose(x.norm(dim=1).numpy(), 1, rtol=1e-12)
    cosine = x @ mu
    expected = vmf.expected_length(tensor(kappa), d).item()
    assert cosine.mean().item() == pytest.approx(expected, abs=5 * cosine.std().item() / n**0.5 + 1e-12)
    # and nothing is left over around the mean direction
    assert (x.mean(dim=0) - cosine.mean() * mu).norm().item() < 5 * ((1 - expected**2) / n) ** 0.5 + 1e-9


def test_one_dimension_has_no_directions() -> None:
    with pytest.raises(InputError, match="at least 2"):
        vmf.log_normaliser(tensor(1.0), 1)
