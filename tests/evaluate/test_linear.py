"""The linear probe: as good as scikit-learn's logistic regression, and chosen without a look at the test labels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from siammm.errors import InputError
from siammm.evaluate.linear import linear_accuracy


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    images, labels = (np.asarray(array) for array in load_digits(return_X_y=True))
    order = np.random.default_rng(0).permutation(len(images))
    x, y = torch.from_numpy(images[order]).float(), torch.from_numpy(labels[order])
    return x[:1200], y[:1200], x[1200:], y[1200:]


def test_is_as_good_as_scikit_learns(digits: tuple[torch.Tensor, ...]) -> None:
    train, labels, test, test_labels = digits
    scaler = StandardScaler().fit(train.numpy())
    peer = LogisticRegression(C=0.1, max_iter=500).fit(scaler.transform(train.numpy()), labels.numpy())
    expected = peer.score(scaler.transform(test.numpy()), test_labels.numpy())
    assert linear_accuracy(train, labels, test, test_labels) == pytest.approx(expected, abs=0.015)


def test_the_scale_and_place_of_features_make_no_difference(digits: tuple[torch.Tensor, ...]) -> None:
    train, labels, test, test_labels = digits
    plain = linear_accuracy(train, labels, test, test_labels, penalties=(1e-3,))
    moved = linear_accuracy(100 * train + 7, labels, 100 * test + 7, test_labels, penalties=(1e-3,))
    assert moved == pytest.approx(plain, abs=0.005)


def test_what_cannot_be_probed_is_refused(digits: tuple[torch.Tensor, ...]) -> None:
    train, labels, test, test_labels = digits
    with pytest.raises(InputError, match="same number of columns"):
        linear_accuracy(train, labels, test[:, :5], test_labels)
    with pytest.raises(InputError, match="needs 20 or more"):
        linear_accuracy(train[:10], labels[:10], test, test_labels)
