"""Halves of components, by which a merge is undone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from siammm import VonMisesFisherMixture
from siammm.mixture import acceptance, merge
from siammm.mixture.merge import MergeSettings
from siammm.mixture.samples import Samples
from tests.conftest import Known
from tests.mixture.merging import CPU, HARD, check_history, components_at


@pytest.mark.parametrize("unit", [True, False])
def test_halves_separate_a_dumbbell(unit: bool) -> None:
    rng = np.random.default_rng(0)
    side = rng.random(600) < 0.4
    X = 0.1 * rng.normal(size=(600, 12)) + np.eye(12)[0] + np.where(side[:, None], 0.5, -0.5) * np.eye(12)[1]
    samples = Samples(X, device=CPU, unit=unit)
    components = components_at(samples, samples.rows().mean(dim=0, keepdim=True), unit=unit)
    centre_2KD, pair_P2 = acceptance.halves(samples, components, HARD, unit=unit)
    assert pair_P2.tolist() == [[0, 1]]
    rows = samples.rows().numpy()
    expected = np.stack([rows[side].mean(axis=0), rows[~side].mean(axis=0)])
    expected = expected / np.linalg.norm(expected, axis=1, keepdims=True) if unit else expected
    found = centre_2KD.numpy()[np.argsort(-centre_2KD[:, 1].numpy())]
    np.testing.assert_allclose(found, expected, atol=1e-2)


def test_halves_leave_out_an_empty_side() -> None:
    """One sample alone has no axis, and copies have none either."""
    X = np.repeat(np.eye(4)[:2], [1, 5], axis=0)
    samples = Samples(X, device=CPU, unit=True)
    components = components_at(samples, torch.eye(4, dtype=torch.float64)[:2], unit=True)
    centre_SD, pair_P2 = acceptance.halves(samples, components, HARD, unit=True)
    np.testing.assert_allclose(centre_SD.numpy(), np.eye(4)[:2], atol=1e-12)
    assert pair_P2.shape == (0, 2)


def test_halves_of_one_beside_an_empty_side() -> None:
    """Which two belong together is said of the centres that are left."""
    X = np.array([[1, 0, 0, 0], [0, 1, 0.1, 0], [0, 1, -0.1, 0], [0, 1, 0.1, 0], [0, 1, -0.1, 0]])
    samples = Samples(X, device=CPU, unit=True)
    components = components_at(samples, torch.eye(4, dtype=torch.float64)[:2], unit=True)
    centre_SD, pair_P2 = acceptance.halves(samples, components, HARD, unit=True)
    assert centre_SD.shape[0] == 3
    assert pair_P2.tolist() == [[1, 2]]
    assert float(centre_SD[1, 2] * centre_SD[2, 2]) < 0


def test_a_split_compares_halves_with_each_other_alone(small: Known) -> None:
    """Two of six in one: that one is split again, the other four stay whole, whatever their halves are near to."""
    samples = Samples(small.X, device=CPU, unit=True)
    centre_KD = torch.from_numpy(small.mean_directions)
    joined_KD = torch.cat([centre_KD[:2].mean(dim=0, keepdim=True), centre_KD[2:]])
    components = components_at(samples, joined_KD, unit=True)
    split = merge._split(samples, components, HARD, MergeSettings(rule="auto"))
    assert split is not None
    assert split.weight_K.shape[0] == 6
    whole = components_at(samples, centre_KD, unit=True)
    assert merge._split(samples, whole, HARD, MergeSettings(rule="auto")) is None


def test_a_split_frees_what_was_merged_too_early(small: Known) -> None:
    """From one component, merging has nothing to do; splits alone find all six."""
    mixture = VonMisesFisherMixture(1, merge="auto", random_state=0).fit(small.X)
    assert mixture.n_components_ == 6
    assert mixture.merges_ is not None
    assert max(mixture.merges_.n_components) > mixture.merges_.n_components[0] == 1
    check_history(mixture, start=1)
