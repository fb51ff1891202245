"""The loss of a batch: what ``objective.py`` puts together is what ``losses.py`` says of each view."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from siammm.learn import losses
from siammm.learn.clustering import Clustering
from siammm.learn.networks import Predictions
from siammm.learn.objective import batch_loss
from siammm.presets import PRESETS

N, K, B, D = 40, 7, 12, 16


def clustered(clustering: Clustering) -> Clustering:
    """Tables as after an epoch: some images belong to fewer clusters than others, one to none."""
    torch.manual_seed(1)
    clustering.index_NH.random_(0, K)
    clustering.weight_NH.copy_(torch.rand(clustering.weight_NH.shape).softmax(dim=1))
    clustering.weight_NH[3, 2:] = 0
    clustering.weight_NH[5] = 0
    clustering.mu_KD.copy_(torch.nn.functional.normalize(torch.randn(K, D), dim=1))
    clustering.kappa_K.uniform_(1, 9)
    clustering.log_normaliser_K.uniform_(-3, 0)
    return clustering


@pytest.mark.parametrize("normaliser", [False, True])
def test_the_cluster_loss_is_the_sum_of_both_views(normaliser: bool) -> None:
    objective = dataclasses.replace(PRESETS["cifar"].objective, normaliser=normaliser, cluster_weight=0.7)
    settings = PRESETS["cifar"].clustering
    made = Clustering(K, N, D, torch.device("cpu"), objective=objective, settings=settings, seed=0)
    tables = clustered(made)
    torch.manual_seed(2)
    position = torch.randperm(N)[:B]
    position[:2] = torch.tensor([3, 5])
    views = [torch.randn(B, D, requires_grad=True) for _ in range(2)]
    targets = (torch.randn(B, D), torch.randn(B, D))
    loss = batch_loss(
        objective, Predictions(views[0], views[1], *targets, None), targets, position, [tables], clustered=True
    )
    index = tables.index_NH[position]
    of_views = [
        losses.soft_assignment_loss(
            view,
            tables.mu_KD[index],
            tables.kappa_K[index],
            tables.weight_NH[position],
            tables.log_normaliser_K[index] if normaliser else None,
        )
        for view in views
    ]
    assert loss.cluster.item() == pytest.approx((of_views[0] + of_views[1]).item(), rel=1e-6)
    assert loss.total.item() == pytest.approx((loss.instance + 0.7 * loss.cluster).item(), rel=1e-6)
    for view, expected in zip(views, of_views, strict=True):
        found, own = (torch.autograd.grad(of, view, retain_graph=True)[0] for of in (loss.cluster, expected))
        torch.testing.assert_close(found, own)
