"""Concentrations as the loss has them: of a given mean, in the same order."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from siammm.learn import losses


@pytest.mark.parametrize("k", [1, 2, 5, 40, 1000])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 16.0])
@pytest.mark.parametrize("quantiles", [(0.1, 0.9), (0.0, 1.0), (0.25, 0.5)])
def test_relative_concentrations_have_the_mean_and_the_order(
    k: int, scale: float, quantiles: tuple[float, float]
) -> None:
    """Whatever the spread: concentrations from 0.01 to the mixture's cap."""
    kappa = 10 ** np.random.default_rng(k).uniform(-2, 6, k)
    given_K = torch.from_numpy(kappa)
    relative_K = losses.relative_concentrations(given_K, scale=scale, quantiles=quantiles)
    assert relative_K.mean().item() == pytest.approx(scale)
    assert (relative_K > 0).all()
    assert (relative_K[given_K.argsort()].diff() >= -1e-12 * scale).all()
    low, high = np.quantile(kappa, quantiles)
    np.testing.assert_allclose(
        (relative_K / relative_K.max()).numpy(), np.clip(kappa, low, high) / min(high, max(kappa))
    )
    # Only relative concentration counts.
    torch.testing.assert_close(
        losses.relative_concentrations(7 * given_K, scale=scale, quantiles=quantiles), relative_K, rtol=1e-9, atol=0
    )


def test_relative_concentrations_with_weights_have_the_samples_mean() -> None:
    kappa = torch.tensor([10.0, 20.0, 40.0, 1e9])
    weight = torch.tensor([0.5, 0.3, 0.2, 0.0])
    relative = losses.relative_concentrations(kappa, weight, scale=2.0, quantiles=(0.0, 1.0))
    assert (relative * weight).sum().item() == pytest.approx(2)
    # A component without samples counts neither for the mean nor for the quantiles: 1e9 became 40.
    np.testing.assert_allclose(relative.numpy(), np.array([10, 20, 40, 40]) * 2 / 19, rtol=1e-6)
    for empty in (math.inf, math.nan):
        kappa[3] = empty
        assert losses.relative_concentrations(kappa, weight).isfinite().all()


def test_equal_or_absent_concentrations_become_the_constant_of_the_ablation() -> None:
    for kappa in (0.0, 3.0, 1e6):
        relative = losses.relative_concentrations(torch.full((5,), kappa, dtype=torch.float64), scale=0.7)
        torch.testing.assert_close(relative, torch.full((5,), 0.7, dtype=torch.float64))


def test_relative_concentrations_keep_the_type_and_cut_the_gradient() -> None:
    relative = losses.relative_concentrations(torch.rand(9, requires_grad=True))
    assert relative.dtype == torch.float32
    assert not relative.requires_grad
