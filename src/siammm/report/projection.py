"""The map: a place in the plane for each image.

Legend:  N images, D dimensions, M images on the map.
"""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any, Literal

import numpy as np

from siammm.core.errors import InputError
from siammm.report.clusters import chunks

MapMethod = Literal["pca", "umap"]

# Fewer images have no neighbourhoods to keep.
_LEAST_FOR_UMAP = 10


def check_map(method: MapMethod) -> None:
    """Refuse now what would be refused after the work."""
    if method == "umap" and importlib.util.find_spec("umap") is None:
        raise InputError("--map umap needs umap-learn; pip install umap-learn, or leave --map out.")


def project(
    embedding_ND: np.ndarray, image_M: np.ndarray, method: MapMethod, *, seed: int
) -> tuple[np.ndarray, float | None, MapMethod]:
    """Places from 0 to 1, (M, 2), the share of the variance that they show (for PCA), and the method that made them."""
    if method == "umap" and len(image_M) >= _LEAST_FOR_UMAP:
        check_map(method)
        return _scaled(_umap(np.asarray(embedding_ND[image_M], dtype=np.float32), seed)), None, "umap"
    mean_D, axis_D2, share = principal_plane(embedding_ND)
    place_M2 = np.concatenate([(x_BD - mean_D) @ axis_D2 for _, x_BD in chunks(embedding_ND[image_M])])
    return _scaled(place_M2), share, "pca"


def principal_plane(embedding_ND: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """The mean, the two directions of largest variance (D, 2), and the share of the variance that lies in them.

    The sign of a direction means nothing; it is that with which its largest entry is positive.
    """
    n, d = embedding_ND.shape
    sum_D, square_DD = np.zeros(d), np.zeros((d, d))
    for _, x_BD in chunks(embedding_ND):
        sum_D += x_BD.sum(axis=0, dtype=np.float64)
        square_DD += (x_BD.T @ x_BD).astype(np.float64)
    mean_D = sum_D / n
    variance_D, axis_DD = np.linalg.eigh(square_DD / n - np.outer(mean_D, mean_D))
    variance_D = np.maximum(variance_D, 0.0)
    axis_D2 = np.zeros((d, 2))
    axis_D2[:, : min(2, d)] = axis_DD[:, ::-1][:, :2]
    sign_2 = np.sign(axis_D2[np.abs(axis_D2).argmax(axis=0), [0, 1]])
    total = float(variance_D.sum())
    share = min(1.0, float(variance_D[-2:].sum()) / total) if total > 0 else 1.0
    return mean_D, axis_D2 * np.where(sign_2 == 0, 1.0, sign_2), share


def _scaled(place_M2: np.ndarray) -> np.ndarray:
    """From 0 to 1, with one scale for both axes, in the middle of the shorter one."""
    place_M2 = np.nan_to_num(np.asarray(place_M2, dtype=np.float64))
    low_2, high_2 = place_M2.min(axis=0), place_M2.max(axis=0)
    extent = float((high_2 - low_2).max())
    if extent <= 0:
        return np.full_like(place_M2, 0.5)
    return np.clip(0.5 + (place_M2 - (low_2 + high_2) / 2) / extent, 0.0, 1.0)


def _umap(x_MD: np.ndarray, seed: int) -> np.ndarray:
    import umap  # pyright: ignore[reportMissingImports]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a seed means one thread, among others
        model: Any = umap.UMAP(metric="cosine", n_neighbors=min(15, len(x_MD) - 1), random_state=seed)
        return np.asarray(model.fit_transform(x_MD))
