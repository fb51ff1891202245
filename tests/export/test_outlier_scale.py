"""The scale of outliers goes through the scores of the images that it is of."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from siammm.export.onnx_file import _Scale
from siammm.export.outlier_scale import OutlierScale
from siammm.metrics.outliers import outlier_score


@pytest.mark.parametrize("n", [1, 2, 3, 64, 1000])
def test_on_its_own_images_it_is_the_outlier_score(n: int) -> None:
    density = np.random.default_rng(n).permutation(n) / 7 + 300
    np.testing.assert_allclose(OutlierScale.of(density)(density), outlier_score(density), atol=1e-6)


def test_where_densities_are_equal_but_for_rounding_it_is_off_by_a_place_at_most() -> None:
    density = np.random.default_rng(0).normal(0, 10, 2000)
    off = np.abs(OutlierScale.of(density)(density) - outlier_score(density))
    assert off.max() < 2.5 / 1999
    assert (off > 1e-6).mean() < 0.02


def test_equal_images_have_equal_scores() -> None:
    density = np.array([3.0, 1.0, 3.0, 2.0, 3.0])
    np.testing.assert_allclose(OutlierScale.of(density)(density), outlier_score(density), atol=1e-7)


def test_it_falls_with_the_density_and_stays_within_0_and_1() -> None:
    scale = OutlierScale.of(np.random.default_rng(0).normal(300, 20, 500))
    score = scale(np.linspace(0, 600, 4001))
    assert (np.diff(score) <= 0).all()
    assert (score[0], score[-1]) == (1.0, 0.0)


def test_rounding_does_not_decide_a_place() -> None:
    """Densities that float32 can hardly tell apart are one point of the scale."""
    density = np.sort(np.random.default_rng(1).normal(500, 1, 300))
    density[150] = density[149] + 1e-6
    scale = OutlierScale.of(density)
    moved = density + np.random.default_rng(2).normal(0, 1e-6, 300)
    np.testing.assert_allclose(scale(moved), scale(density), atol=1e-4)


def test_a_million_images_are_few_points() -> None:
    density = np.random.default_rng(3).normal(400, 10, 300_000)
    scale = OutlierScale.of(density)
    assert len(scale.density_P) < 2**16
    np.testing.assert_allclose(scale(density), outlier_score(density), atol=5e-5)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8, 100])
def test_bisection_finds_what_numpy_finds(n: int) -> None:
    scale = OutlierScale.of(np.random.default_rng(n).normal(0, 10, n))
    asked = np.concatenate([np.random.default_rng(0).normal(0, 20, 200), scale.density_P, [-1e6, 1e6]])
    with torch.no_grad():
        found = _Scale(scale)(torch.from_numpy(asked).float())
    np.testing.assert_allclose(found.numpy(), scale(asked.astype(np.float32)), atol=1e-5)
