"""The loss of a batch: what ``objective.py`` puts together is what ``losses.py`` says of each view."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from siammm.learn import losses
from siammm.learn.clustering import Clustering
from siammm.learn.cuda import update
from siammm.learn.cuda.update import freshly_compiled
from siammm.learn.grouping import Grouping
from siammm.learn.networks import Predictions
from siammm.learn.objective import batch_loss
from siammm.learn.queue import Queued
from siammm.mixture.samples import Samples
from siammm.settings.methods import with_method
from siammm.settings.presets import PRESETS
from tests.learn.small_runs import prepared, small_config

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


def cluster_gradient(rows_ND: torch.Tensor, k: int, **changes: Any) -> torch.Tensor:
    """What the cluster loss does to these embeddings after an E and an M step."""
    preset, (n, d), cpu = PRESETS["cifar"], rows_ND.shape, torch.device("cpu")
    objective = dataclasses.replace(preset.objective, instance_loss="none", **changes)
    tables = Clustering(k, n, d, cpu, objective=objective, settings=preset.clustering, seed=0)
    tables.expectation_and_maximisation(Samples(rows_ND, device=cpu, unit=True))
    view = rows_ND.clone().requires_grad_()
    predictions = Predictions(view, view, rows_ND, rows_ND, None)
    loss = batch_loss(objective, predictions, (rows_ND, rows_ND), torch.arange(n), [tables], clustered=True)
    return torch.autograd.grad(loss.total, view)[0]


def test_negatives_change_the_gradient() -> None:
    """At concentrations around 1 every negative counts alike, and what is left is nearly the gradient of Eq. 9."""
    torch.manual_seed(3)
    families, clusters = torch.randn(8, 1, 64), torch.randn(8, 5, 64)  # five clusters are near each other, eight times
    centre_KD = (families + 0.7 * clusters).reshape(40, 64)
    rows_ND = torch.nn.functional.normalize(centre_KD.repeat(10, 1) + 1.5 * torch.randn(400, 64), dim=1)
    likelihood_ND = cluster_gradient(rows_ND, 40)

    def compared(**changes: Any) -> tuple[float, float]:
        """The angle to the gradient of Eq. 9, as a cosine, and how unevenly samples are pulled in comparison."""
        found_ND = cluster_gradient(rows_ND, 40, **changes)
        assert found_ND.norm() < 1.2 * likelihood_ND.norm()  # a weight of 1 pulls no harder than that of Eq. 9
        pull_N = found_ND.norm(dim=1) / likelihood_ND.norm(dim=1)
        cosine = torch.nn.functional.cosine_similarity(found_ND.flatten(), likelihood_ND.flatten(), dim=0)
        return float(cosine), float(pull_N.std() / pull_N.mean())

    assert compared(cluster_loss="nce-centroids", concentration_scale=1.0)[0] > 0.9
    assert compared(cluster_loss="nce-centroids")[0] < 0.6
    # Eq. 15 pulls a sample where Eq. 9 does, because its negatives stay fixed; what differs is whom it pulls.
    assert compared(cluster_loss="nce-samples", concentration_scale=1.0)[1] < 0.1
    assert compared(cluster_loss="nce-samples")[1] > 0.15


def test_peers_keep_their_own_scale() -> None:
    for method in ("deepcluster-v2", "pcl"):
        assert not with_method(PRESETS["cifar"], method).objective.sharpened


OBJECTIVES: dict[str, dict[str, Any]] = {
    "siammm": {},
    "the paper's": {"instance_loss": "cosine", "contrastive_temperature": 1.0},
    "with the normaliser": {"normaliser": True},
    "byol": {"instance_loss": "cosine", "cluster_loss": "none"},
    "moco-v3": {"cluster_loss": "none"},
    "a temperature that rises": {"contrastive_temperature_end": 1.0},
    "with a queue": {"cluster_loss": "none", "queue_size": 10},
    "nce-centroids": {"cluster_loss": "nce-centroids"},
    "nce-samples": {"cluster_loss": "nce-samples"},
    "propos": {"cluster_loss": "scattering"},
    "swav": {"instance_loss": "none", "cluster_loss": "swapped", "queue_size": 10},
    "groups": {"group_levels": "groups"},
    "groups and clusters": {"group_levels": "both"},
}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # what torch 2.11's compiler imports
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch hides it, unless warnings are errors
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_compiles_in_one_graph(name: str) -> None:
    """On a GPU it is compiled: a break in the graph would cost what compiling saves."""
    objective = dataclasses.replace(PRESETS["cifar"].objective, **OBJECTIVES[name])
    settings = PRESETS["cifar"].clustering
    made = Clustering(K, N, D, torch.device("cpu"), objective=objective, settings=settings, seed=0)
    tables = clustered(made)
    torch.manual_seed(2)
    position, targets = torch.randperm(N)[:B], (torch.randn(B, D), torch.randn(B, D))
    swapped = objective.cluster_loss == "swapped"
    queued = None
    if objective.queue_size:
        scores = (torch.rand(10, K), torch.rand(10, K)) if swapped else None
        queued = Queued(torch.randn(2, 10, D), scores, torch.ones(()) if swapped else None)
    temperature = None if objective.contrastive_temperature_end is None else torch.tensor(0.5)
    embedded = [torch.randn(B, D) for _ in range(4)]
    grouping = None
    if "groups" in name:
        grouping = Grouping(3, N, D, torch.device("cpu"))
        grouping.mu_GD.copy_(torch.nn.functional.normalize(torch.randn(3, D), dim=1))
        grouping.group_N.copy_(torch.arange(N) % 3)
        grouping.weight_N.copy_(torch.arange(N) % 2)
    prototypes = torch.nn.functional.normalize(torch.randn(K, D), dim=1)

    def found(compute: Any) -> tuple[torch.Tensor, ...]:
        leaves = [rows.clone().requires_grad_() for rows in embedded]
        v_1, v_2, z_1, z_2 = (2 * rows for rows in leaves)  # as from a network
        scored = (v_1 @ prototypes.T, v_2 @ prototypes.T) if swapped else None
        loss = compute(
            objective, Predictions(v_1, v_2, z_1, z_2, scored), targets, position, [tables],
            clustered=True, grouping=grouping, queued=queued, temperature=temperature,
        )  # fmt: skip
        gradients = torch.autograd.grad(loss.total, leaves, allow_unused=True)
        nothing = torch.zeros(B, D)
        return loss.total, loss.instance, loss.cluster, *(nothing if g is None else g for g in gradients)

    torch.compiler.reset()
    own = found(torch.compile(batch_loss, backend="aot_eager", fullgraph=True, dynamic=False))
    for value, expected in zip(own, found(batch_loss), strict=True):
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize(
    ("settings", "ranks", "expected"),
    [
        ({"compile": True}, 1, True),
        ({"compile": False}, 1, False),
        ({}, 1, False),  # a CPU
        ({"compile": True}, 2, False),
        ({"compile": True, "cluster_loss": "nce-centroids"}, 1, False),  # K changes by merging
        ({"compile": True, "cluster_loss": "nce-centroids", "merge": "none"}, 1, True),
    ],
)
def test_the_loss_is_compiled_where_its_sizes_stay(
    settings: dict[str, Any], ranks: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **more: lambda *args, **kwargs: function(*args, **kwargs))
    monkeypatch.setattr(nn.Module, "compile", lambda self, **more: None)
    monkeypatch.setattr(update, "world_size", lambda: ranks)
    training = prepared(small_config(epochs=1, **settings))
    assert (training.pieces.loss is not batch_loss) == expected


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_many_runs_in_one_process_are_all_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives up on code that was compiled eight times."""
    from torch._dynamo.utils import counters

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **more: compile_(function, backend="eager", **more))
    objective, settings = PRESETS["cifar"].objective, PRESETS["cifar"].clustering
    torch.compiler.reset()
    counters.clear()
    for k in range(7, 17):
        tables = Clustering(k, N, D, torch.device("cpu"), objective=objective, settings=settings, seed=0)
        v_1, v_2, *targets = (torch.randn(B, D) for _ in range(4))
        freshly_compiled(batch_loss)(
            objective, Predictions(v_1, v_2, v_1, v_2, None), tuple(targets), torch.arange(B), [tables], clustered=True
        )
    assert counters["frames"]["ok"] == counters["frames"]["total"] == 10
