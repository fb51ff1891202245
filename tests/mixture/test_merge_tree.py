"""The tree of merges, which can be cut at every number."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.cluster import hierarchy

from siammm import VonMisesFisherMixture
from siammm.mixture import merge, merge_tree
from siammm.mixture.merge import MergeSettings
from siammm.mixture.merge_tree import MergeHistory
from siammm.mixture.samples import Samples
from tests.conftest import Known
from tests.mixture.merging import CPU, HARD, check_history, components_at, leaf_groups, same_groups


@pytest.mark.parametrize("rule", merge.MERGE_RULES)
def test_the_tree_can_be_cut_at_every_number(small: Known, rule: Any) -> None:
    mixture = VonMisesFisherMixture(30, merge=rule, random_state=0).fit(small.X)
    check_history(mixture, start=30)
    assert mixture.merges_ is not None
    leaves = len(mixture.merges_.linkage) + 1
    for k in range(1, leaves + 1):
        cut = hierarchy.fcluster(mixture.merges_.linkage, k, criterion="maxclust")
        assert same_groups(cut, leaf_groups(mixture.merges_, leaves - k))


def test_history_records_rounds_of_any_shape() -> None:
    """Random rounds, groups of any size and order: the tree's groups are the composition of the rounds."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        history, group = MergeHistory(40), np.arange(40)
        for _ in range(4):
            k = history.n_components[-1]
            _, number = np.unique(rng.integers(0, max(1, k - 5), size=k), return_inverse=True)
            history.record_round(torch.from_numpy(number), torch.from_numpy(rng.random(k)))
            group = number[group]
        k = history.n_components[-1]
        merges = history.finished(torch.from_numpy(rng.random((k, 3))))
        assert hierarchy.is_valid_linkage(merges.linkage)
        assert (np.diff(merges.linkage[:, 2]) > 0).all()
        assert merges.n_merges == 40 - k
        assert same_groups(hierarchy.fcluster(merges.linkage, k, criterion="maxclust"), group)


def test_an_empty_component_is_taken_in_at_its_distance() -> None:
    """Also where the one that takes it in has the higher number."""
    X = np.repeat(np.eye(3)[:2], 5, axis=0)
    samples = Samples(X, device=CPU, unit=True)
    centre_KD = torch.nn.functional.normalize(torch.tensor([[1.0, 0, 3], [0, 1, 0], [1, 0, 0]], dtype=torch.float64))
    components = components_at(samples, centre_KD, unit=True)
    history = MergeHistory(3)
    after, changed = merge.merge_round(samples, components, HARD, MergeSettings(rule="paper", floor=1), history)
    assert changed
    assert history.n_components == [3, 2]
    row = history.finished(after.centre_KD).linkage[0]
    assert row.tolist() == [0, 2, pytest.approx(math.sqrt(2 - 2 / math.sqrt(10))), 2]


def test_a_tree_of_many_centres_is_whole_without_the_table_of_all_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    centres = torch.randn(300, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    monkeypatch.setattr(merge_tree, "_LINKAGE_LIMIT", 40)
    tree = MergeHistory(300).finished(centres).linkage
    assert hierarchy.is_valid_linkage(tree)
    assert hierarchy.is_monotonic(tree)
    assert len(set(hierarchy.fcluster(tree, 7, criterion="maxclust"))) == 7
