"""Components that are numbered by size."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from siammm import GaussianMixture, VonMisesFisherMixture
from siammm.mixture.numbering import number_by_size


@pytest.mark.parametrize("kind", [VonMisesFisherMixture, GaussianMixture])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_largest_comes_first(kind: type, as_tensor: bool) -> None:
    random = np.random.default_rng(0)
    centre = np.eye(4) * 5
    rows = np.concatenate([random.normal(centre[k], 0.3, (n, 4)) for k, n in enumerate((20, 50, 10, 30))])
    X = torch.from_numpy(rows) if as_tensor else rows
    mixture = kind(n_components=4, random_state=0).fit(X)
    labels, likelihood = np.asarray(mixture.labels_), float(mixture.score(X))
    order = number_by_size(mixture, np.bincount(labels))
    assert np.bincount(np.asarray(mixture.labels_)).tolist() == [50, 30, 20, 10]
    assert np.array_equal(order[np.asarray(mixture.labels_)], labels)
    # It is the same mixture.
    assert np.array_equal(np.asarray(mixture.predict(X)), np.asarray(mixture.labels_))
    assert float(mixture.score(X)) == pytest.approx(likelihood)
    assert np.all(np.diff(np.asarray(mixture.weights_, dtype=float)) <= 0)
