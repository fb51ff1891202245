"""The mixture between epochs: tables of fixed shape, a K that only merging lowers, and a state that returns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from siammm.learn.clustering import Clustering
from siammm.mixture import em
from siammm.mixture.samples import Samples
from tests.learn.small_runs import check_same_bits, small_config

CPU = torch.device("cpu")
N, D, TRUE_K = 240, 8, 6


@pytest.fixture(scope="module")
def rows() -> Tensor:
    """Six tight groups."""
    generator = torch.Generator().manual_seed(0)
    centre = normalize(torch.randn(TRUE_K, D, generator=generator), dim=1)
    noise = 0.1 * torch.randn(N, D, generator=generator)
    return normalize(centre[torch.arange(N) % TRUE_K] + noise, dim=1)


def samples_of(rows: Tensor) -> Samples:
    return Samples(rows, device=CPU, unit=True)


def clustering_of(n_components: int = 20, *, n: int = N, seed: int = 0, **settings: Any) -> Clustering:
    config = small_config(**settings)
    return Clustering(
        n_components, n, D, CPU, objective=config.objective, settings=config.clustering, seed=seed
    )  # fmt: skip


TABLES = ("index_NH", "weight_NH", "mu_KD", "kappa_K", "log_normaliser_K")


def check_tables(clustering: Clustering) -> None:
    """Whatever the settings: weights that sum to 1 over clusters that exist, unit directions, zeros beyond K."""
    k = clustering.n_components
    torch.testing.assert_close(clustering.weight_NH.sum(dim=1), torch.ones(len(clustering.weight_NH)))
    assert int(clustering.index_NH.min()) >= 0
    assert int(clustering.index_NH.max()) < k
    lengths = clustering.mu_KD.norm(dim=1)
    torch.testing.assert_close(lengths[:k], torch.ones(k))
    assert bool((clustering.kappa_K[:k] > 0).all())
    for table in (clustering.mu_KD, clustering.kappa_K, clustering.log_normaliser_K):
        assert not table[k:].any()
    # The first neighbour is the nearest, which the contrastive losses rely on.
    assert bool((clustering.weight_NH[:, :1] >= clustering.weight_NH).all())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"n_neighbours": 1},
        {"n_neighbours": 30},
        {"concentration": "constant"},
        {"concentration": "closed-form", "concentration_dims": 4},
        {"concentration_scale": "literal", "normaliser": True},
        {"size_weighting": True},
        {"centroids": "reinitialised", "n_init": 2},
        {"merge": "auto", "merge_share": 0.3},
        {"merge": "none"},
        {"em_steps": 3},
    ],
    ids=str,
)
def test_the_tables_keep_their_place_and_shape_while_k_falls(settings: dict[str, Any], rows: Tensor) -> None:
    clustering = clustering_of(**settings)
    places = {name: (getattr(clustering, name).data_ptr(), getattr(clustering, name).shape) for name in TABLES}
    samples, counts = samples_of(rows), [clustering.n_components]
    for _ in range(6):
        clustering.expectation_and_maximisation(samples)
        check_tables(clustering)
        clustering.merge(samples)
        counts.append(clustering.n_components)
    assert {n: (getattr(clustering, n).data_ptr(), getattr(clustering, n).shape) for n in TABLES} == places
    assert counts == sorted(counts, reverse=True)
    assert (counts[-1] < 20) == (settings.get("merge") != "none")
    assert clustering.history.n_components[-1] == counts[-1]


def test_fewer_clusters_than_neighbours_leave_weights_of_0(rows: Tensor) -> None:
    clustering = clustering_of(4, n_neighbours=4, merge_floor=2, merge_share=1.0)
    samples = samples_of(rows)
    for _ in range(4):
        clustering.expectation_and_maximisation(samples)
        clustering.merge(samples)
    clustering.expectation_and_maximisation(samples)
    k = clustering.n_components
    assert k < 4
    assert clustering.weight_NH.shape[1] == 4
    assert not clustering.weight_NH[:, k:].any()
    check_tables(clustering)


def shadowed(rows: Tensor, clustering: Clustering) -> None:
    """Put clusters where they are many an image's second choice and nobody's first: halfway between two groups."""
    clustering.expectation_and_maximisation(samples_of(rows))
    assert clustering.components is not None
    mu_KD = clustering.components.mu_KD.clone()
    groups = normalize(torch.stack([rows[torch.arange(N) % TRUE_K == g].sum(dim=0) for g in range(TRUE_K)]), dim=1)
    mu_KD[:TRUE_K] = groups
    mu_KD[TRUE_K:] = normalize(groups + 0.9 * groups.roll(1, 0), dim=1)
    clustering.components = replace(clustering.components, mu_KD=mu_KD)


@pytest.mark.parametrize("rule", ["auto", "paper"])
def test_clusters_that_are_nobodys_nearest_do_not_vanish_beside_the_share(rule: str, rows: Tensor) -> None:
    """K falls by merging alone: with merge_share at most that share per epoch, empty clusters included."""
    clustering = clustering_of(2 * TRUE_K, merge=rule, merge_share=0.1, merge_threshold=-50.0, temperature=0.3)
    shadowed(rows, clustering)
    samples = samples_of(rows)
    assert clustering.components is not None
    statistics = em.e_step(samples, clustering.components, clustering.assignment)
    assert int((statistics.nearest_K <= 0).sum()) >= TRUE_K - 1
    assert bool((statistics.count_K > 0).all())
    clustering.merge(samples)
    assert clustering.n_components == (2 * TRUE_K - 1 if rule == "auto" else 2 * TRUE_K)


def test_a_cluster_that_is_nobodys_nearest_is_filled_again(rows: Tensor) -> None:
    clustering = clustering_of(2 * TRUE_K, merge="none", em_steps=3, temperature=0.3)
    shadowed(rows, clustering)
    clustering.expectation_and_maximisation(samples_of(rows))
    assert len(clustering.index_NH[:, 0].unique()) == 2 * TRUE_K


@pytest.mark.parametrize("n_neighbours", [1, 5])
def test_one_cluster(n_neighbours: int, rows: Tensor) -> None:
    clustering = clustering_of(1, n_neighbours=n_neighbours)
    samples = samples_of(rows)
    clustering.expectation_and_maximisation(samples)
    clustering.merge(samples)
    assert clustering.n_components == 1
    assert clustering.weight_NH.tolist() == [[1.0]] * N
    expected = normalize(rows.sum(dim=0), dim=0)
    torch.testing.assert_close(clustering.mu_KD[0], expected)
    mixture = clustering.finish(samples, rows)
    assert mixture.n_components_ == 1
    assert mixture.merges_ is not None
    assert mixture.merges_.linkage.shape == (0, 4)


def test_as_many_clusters_as_images(rows: Tensor) -> None:
    clustering = clustering_of(N)
    clustering.expectation_and_maximisation(samples_of(rows))
    check_tables(clustering)


def test_hard_assignment_is_the_nearest_direction(rows: Tensor) -> None:
    clustering = clustering_of(TRUE_K, n_neighbours=1)
    clustering.expectation_and_maximisation(samples_of(rows))
    nearest = (rows @ clustering.mu_KD.T).argmax(dim=1)
    assert torch.equal(clustering.index_NH[:, 0], nearest)


def test_concentrations_in_the_loss_have_the_mean_that_was_asked_for(rows: Tensor) -> None:
    cases: list[tuple[float, dict[str, Any]]] = [
        (1.0, {}),
        (7.0, {"concentration_scale": 7.0}),
        (10.0, {"cluster_loss": "nce-centroids"}),
        (1.0, {"cluster_loss": "nce-samples", "concentration_scale": 1.0}),
    ]
    for scale, changes in cases:
        clustering = clustering_of(**changes)
        clustering.expectation_and_maximisation(samples_of(rows))
        assert clustering.components is not None
        mean = (clustering.components.weight_K * clustering.kappa_K[:20]).sum()
        assert float(mean) == pytest.approx(scale, rel=1e-5)


def test_literal_concentrations_are_those_of_the_mixture(rows: Tensor) -> None:
    clustering = clustering_of(concentration_scale="literal")
    clustering.expectation_and_maximisation(samples_of(rows))
    assert clustering.components is not None
    torch.testing.assert_close(clustering.kappa_K, clustering.components.kappa_K.float())
    assert float(clustering.kappa_K.min()) > 10


def test_the_normaliser_is_filled_in_only_where_it_is_asked_for(rows: Tensor) -> None:
    for wanted in (False, True):
        clustering = clustering_of(normaliser=wanted)
        clustering.expectation_and_maximisation(samples_of(rows))
        assert bool(clustering.log_normaliser_K.any()) == wanted


def test_consistent_centroids_are_carried_over(rows: Tensor) -> None:
    """A second epoch on embeddings that stood still moves them little; starting anew moves them far."""
    moves = {}
    for centroids in ("consistent", "reinitialised"):
        clustering = clustering_of(12, centroids=centroids, em_steps=5, merge="none")
        clustering.expectation_and_maximisation(samples_of(rows))
        before = clustering.mu_KD.clone()
        clustering.expectation_and_maximisation(samples_of(rows))
        moves[centroids] = float((clustering.mu_KD - before).norm())
    assert moves["consistent"] < 0.2 * moves["reinitialised"]


def test_more_starts_never_find_a_worse_likelihood(rows: Tensor) -> None:
    found = []
    for n_init in (1, 5):
        clustering = clustering_of(TRUE_K, centroids="reinitialised", n_init=n_init, merge="none")
        clustering.expectation_and_maximisation(samples_of(rows))
        clustering.generator.manual_seed(3)  # so that the first of five starts is the only one of one
        found.append(clustering.expectation_and_maximisation(samples_of(rows)))
    assert found[1] >= found[0] - 1e-9


def test_every_start_makes_all_steps_and_the_best_end_is_kept(rows: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the first epoch: a start is judged by where it ends, as k-means with several initialisations is."""
    clustering = clustering_of(TRUE_K, centroids="reinitialised", n_init=3, em_steps=4, merge="none")
    plain, ends = clustering._stepped, list[float]()

    def stepped(*arguments: Any) -> Any:
        found = plain(*arguments)
        ends.append(found[1])
        return found

    monkeypatch.setattr(clustering, "_stepped", stepped)
    assert clustering.expectation_and_maximisation(samples_of(rows)) == max(ends)
    assert len(ends) == 3


def test_a_cluster_that_is_left_by_its_images_is_filled_again(rows: Tensor) -> None:
    """Only merging lowers K: embeddings that jump away between epochs do not."""
    clustering = clustering_of(20, merge="none")
    clustering.expectation_and_maximisation(samples_of(rows))
    gone = samples_of(normalize(rows[:1] + 0.05 * rows, dim=1))
    for _ in range(4):
        clustering.expectation_and_maximisation(gone)
    assert clustering.n_components == 20
    assert clustering.components is not None
    assert bool((clustering.components.weight_K > 0).all())


def test_merging_before_the_first_clustering_does_nothing(rows: Tensor) -> None:
    clustering = clustering_of()
    clustering.merge(samples_of(rows))
    assert clustering.components is None
    assert clustering.n_components == 20


def test_the_automatic_rule_finds_the_groups_at_the_end(rows: Tensor) -> None:
    clustering = clustering_of(24, merge="auto")
    samples = samples_of(rows)
    clustering.expectation_and_maximisation(samples)
    clustering.merge(samples)
    mixture = clustering.finish(samples, rows)
    assert mixture.n_components_ == TRUE_K
    labels = torch.as_tensor(mixture.labels_).reshape(-1, TRUE_K)
    assert bool((labels == labels[0]).all())


@pytest.mark.parametrize("merge", ["auto", "paper"])
def test_clusters_of_different_groups_stay_apart(merge: str, rows: Tensor) -> None:
    """Groups that cut through every kind: each kind keeps a cluster on either side."""
    clustering, samples = clustering_of(24, merge=merge, merge_threshold=0.0, merge_floor=2), samples_of(rows)
    axis_D = torch.zeros(rows.shape[1])
    axis_D[0] = 1.0
    sides_2D = torch.stack([axis_D, -axis_D])
    clustering.expectation_and_maximisation(samples)
    for _ in range(60):
        clustering.merge(samples, sides_2D)
    assert clustering.components is not None
    side_K = clustering.components.centre_KD[:, 0] > 0
    assert 2 <= clustering.n_components < 24
    assert 0 < int(side_K.sum()) < clustering.n_components


@pytest.mark.parametrize("merge", ["paper", "none"])
def test_otherwise_the_end_keeps_the_clusters(merge: str, rows: Tensor) -> None:
    clustering = clustering_of(merge=merge)
    samples = samples_of(rows)
    clustering.expectation_and_maximisation(samples)
    clustering.merge(samples)
    k = clustering.n_components
    assert clustering.finish(samples, rows).n_components_ == k


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"concentration_dims": 4},
        {"concentration": "closed-form"},
        {"centroids": "reinitialised", "n_init": 2},
        {"merge": "auto", "merge_share": 0.2},
        {"normaliser": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("epochs", [0, 1, 3])
def test_the_state_returns_to_the_bit(settings: dict[str, Any], epochs: int, rows: Tensor) -> None:
    samples = samples_of(rows)
    one, other = clustering_of(**settings), clustering_of(seed=99, **settings)

    def epoch(clustering: Clustering) -> None:
        clustering.expectation_and_maximisation(samples)
        clustering.merge(samples)

    for _ in range(epochs):
        epoch(one)
    other.restore({name: value.clone() for name, value in one.as_tensors().items()})
    check_same_bits(one.as_tensors(), other.as_tensors())
    for _ in range(2):
        epoch(one)
        epoch(other)
    check_same_bits(one.as_tensors(), other.as_tensors())


def test_the_same_seed_finds_the_same_clusters(rows: Tensor) -> None:
    found = []
    for seed in (0, 0, 1):
        clustering = clustering_of(seed=seed)
        clustering.expectation_and_maximisation(samples_of(rows))
        found.append(clustering.mu_KD)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
