"""What most images of each group are labelled, and which labels disagree."""

from __future__ import annotations

import numpy as np

from siammm.audit.group_labels import GroupLabels


def test_by_hand() -> None:
    """Three groups: one with a wrong label, one of two equally common labels, one that is empty."""
    group, label = np.array([0, 0, 0, 1, 1, 0]), np.array([2, 2, 0, 1, 0, 2])
    found = GroupLabels.of(group, label, 3, 3)
    assert found.count_G.tolist() == [4, 2, 0]
    assert found.commonest_G[:2].tolist() == [2, 0]  # the first of equals
    np.testing.assert_allclose(found.purity_G, [0.75, 0.5, 0])
    assert found.commonest_N.tolist() == [2, 2, 2, 0, 0, 2]
    assert found.disagrees_N.tolist() == [False, False, True, True, False, False]
    np.testing.assert_allclose(found.share_N, [0.75, 0.75, 0.25, 0.5, 0.5, 0.75])


def test_what_holds_of_any_labels() -> None:
    random = np.random.default_rng(0)
    group, label = random.integers(6, size=500), random.integers(4, size=500)
    found = GroupLabels.of(group, label, 6, 4)
    assert found.count_G.sum() == 500
    # A label that is the commonest is at least as common as any other of the group.
    for g in range(6):
        inside = label[group == g]
        assert found.purity_G[g] == np.bincount(inside).max() / len(inside)
        assert (found.share_N[group == g] <= found.purity_G[g]).all()
    assert (~found.disagrees_N).sum() == (found.purity_G * found.count_G).round().sum()
    order = random.permutation(500)
    again = GroupLabels.of(group[order], label[order], 6, 4)
    np.testing.assert_array_equal(again.disagrees_N, found.disagrees_N[order])
