"""The map."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.decomposition import PCA

from siammm.report.projection import principal_plane, project


def test_the_plane_is_that_of_pca() -> None:
    random = np.random.default_rng(0)
    x_ND = (random.normal(size=(300, 8)) * [5, 3, 1, 1, 1, 1, 0.5, 0.1]).astype(np.float32)
    mean_D, axis_D2, share = principal_plane(x_ND)
    reference: Any = PCA(2).fit(x_ND)
    np.testing.assert_allclose(mean_D, reference.mean_, atol=1e-4)
    np.testing.assert_allclose(np.abs(axis_D2.T), np.abs(reference.components_), atol=1e-3)
    assert share == pytest.approx(reference.explained_variance_ratio_.sum(), rel=1e-3)
    assert (axis_D2[np.abs(axis_D2).argmax(axis=0), [0, 1]] > 0).all()


def test_places_are_from_0_to_1_in_one_scale() -> None:
    random = np.random.default_rng(0)
    x_ND = (random.normal(size=(200, 4)) * [8, 2, 0.1, 0.1]).astype(np.float16)
    place_M2, share, method = project(x_ND, np.arange(0, 200, 2), "pca", seed=0)
    assert place_M2.shape == (100, 2)
    assert method == "pca"
    assert share is not None
    assert share > 0.99
    assert np.ptp(place_M2[:, 0]) == pytest.approx(1)
    assert 0.1 < np.ptp(place_M2[:, 1]) < 0.6
    assert place_M2[:, 1].min() + place_M2[:, 1].max() == pytest.approx(1)


@pytest.mark.parametrize("shape", [(1, 4), (5, 1), (2, 2)])
def test_small_tables(shape: tuple[int, int]) -> None:
    place_M2, _, method = project(np.ones(shape, np.float16), np.arange(shape[0]), "umap", seed=0)
    assert method == "pca", "too few to have neighbourhoods"
    assert np.isfinite(place_M2).all()
    assert (place_M2 == 0.5).all()


def test_umap() -> None:
    pytest.importorskip("umap")
    x_ND = np.random.default_rng(0).normal(size=(60, 8)).astype(np.float16)
    first, second = (project(x_ND, np.arange(60), "umap", seed=0)[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert first.min() >= 0
    assert first.max() <= 1
