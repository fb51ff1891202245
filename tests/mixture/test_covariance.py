"""The shrunk covariance is scikit-learn's."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.covariance import ledoit_wolf

from siammm.mixture.covariance import shrunk_covariance


@pytest.mark.parametrize(("n", "p"), [(2, 3), (30, 64), (500, 16), (4000, 2), (50, 1)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_it_is_scikit_learns(n: int, p: int, scale: float) -> None:
    rng = np.random.default_rng(0)
    rows = scale * rng.standard_normal((n, p)) @ np.diag(np.linspace(0.1, 2, p))
    expected = ledoit_wolf(rows, assume_centered=True)[0]
    np.testing.assert_allclose(shrunk_covariance(rows), expected, rtol=1e-9, atol=1e-12 * scale**2)


@pytest.mark.parametrize("rows", [np.zeros((10, 4)), np.ones((10, 4))])
def test_rows_that_are_all_the_same(rows: np.ndarray) -> None:
    np.testing.assert_allclose(shrunk_covariance(rows), ledoit_wolf(rows, assume_centered=True)[0], atol=1e-12)
