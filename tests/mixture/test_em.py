"""What must hold of E and M steps, whatever the data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from siammm import GaussianMixture, VonMisesFisherMixture
from siammm.mixture import em, vmf
from siammm.mixture.components import ConcentrationSettings, VonMisesFisherComponents, concentrations
from siammm.mixture.em import Assignment
from siammm.mixture.samples import Samples
from tests.conftest import Known, known_mixture

CPU = torch.device("cpu")


def samples_of(known: Known) -> Samples:
    return Samples(known.X, device=CPU, unit=True)


def components_of(known: Known, **settings: Any) -> VonMisesFisherComponents:
    start = VonMisesFisherComponents.started(torch.from_numpy(known.mean_directions), ConcentrationSettings(**settings))
    statistics = em.e_step(samples_of(known), start, Assignment(n_neighbours=1))
    return start.estimated(statistics.count_K, statistics.mean_KF)


@pytest.mark.parametrize("rule", em.ASSIGNMENT_RULES)
def test_every_sample_is_shared_out_whole(small: Known, rule: em.AssignmentRule) -> None:
    statistics = em.e_step(samples_of(small), components_of(small), Assignment(rule=rule, n_neighbours=3))
    assert statistics.count_K.sum().item() == pytest.approx(len(small.X), rel=1e-6)
    np.testing.assert_allclose(statistics.total_KF.sum(dim=0).numpy(), small.X.sum(axis=0), rtol=1e-6, atol=1e-6)


def test_m_step_gives_unit_directions_and_weights_that_sum_to_one(small: Known) -> None:
    components = components_of(small)
    np.testing.assert_allclose(components.mu_KD.norm(dim=1).numpy(), 1, rtol=1e-12)
    assert components.weight_K.sum().item() == pytest.approx(1)
    assert (components.kappa_K > 0).all()


def test_mean_vector_is_equation_5(small: Known) -> None:
    """r_k is the weighted mean of the samples, with the weights of Eq. 10 written out."""
    components, assignment = components_of(small), Assignment(n_neighbours=2, temperature=0.1)
    statistics = em.e_step(samples_of(small), components, assignment)
    cosine = small.X @ components.mu_KD.numpy().T
    weight = np.exp(cosine / 0.1)
    weight[cosine < np.sort(cosine, axis=1)[:, [-2]]] = 0
    weight /= weight.sum(axis=1, keepdims=True)
    expected = weight.T @ small.X / weight.sum(axis=0)[:, None]
    np.testing.assert_allclose(statistics.mean_KF.numpy(), expected, rtol=1e-6, atol=1e-9)


def test_one_neighbour_is_hard_assignment(small: Known) -> None:
    """Eq. 8: all of a sample belongs to its nearest component."""
    index, weight, _ = em.weigh(components_of(small), Assignment(n_neighbours=1), torch.from_numpy(small.X))
    cosine = small.X @ components_of(small).mu_KD.numpy().T
    np.testing.assert_array_equal(index[:, 0].numpy(), cosine.argmax(axis=1))
    assert (weight == 1).all()


def test_temperature_goes_from_hard_to_even(small: Known) -> None:
    x, components = torch.from_numpy(small.X), components_of(small)
    cold = em.weigh(components, Assignment(temperature=1e-4), x)[1]
    hot = em.weigh(components, Assignment(temperature=1e4), x)[1]
    assert (cold[:, 0] > 0.99).float().mean() > 0.99
    torch.testing.assert_close(hot, torch.full_like(hot, 0.2), atol=1e-3, rtol=0)


def test_size_weighting_multiplies_by_the_components_weight(small: Known) -> None:
    """alpha of Eq. 10."""
    x, components = torch.from_numpy(small.X), components_of(small)
    index, plain, _ = em.weigh(components, Assignment(temperature=0.5), x)
    sized = em.weigh(components, Assignment(temperature=0.5, size_weighting=True), x)[1]
    expected = plain * components.weight_K[index]
    torch.testing.assert_close(sized, expected / expected.sum(dim=1, keepdim=True))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["vmf", "vmf-shared", "spherical", "diag"])
def test_textbook_likelihood_never_falls(small: Known, kind: str, seed: int) -> None:
    common: dict[str, Any] = {
        "assignment": "posterior",
        "tol": 0,
        "max_iter": 30,
        "random_state": seed,
        "init": "random",
    }
    if kind == "vmf":
        mixture: Any = VonMisesFisherMixture(9, **common)
    elif kind == "vmf-shared":
        mixture = VonMisesFisherMixture(9, concentration="shared", **common)
    else:
        mixture = GaussianMixture(9, covariance=kind, **common)  # type: ignore[arg-type]
    bounds = np.array(mixture.fit(small.X).lower_bounds_)
    assert (np.diff(bounds) >= -1e-9).all()
    assert mixture.score(small.X) >= bounds[-1] - 1e-9


def test_lower_bound_is_below_the_likelihood_and_equal_with_all_neighbours(small: Known) -> None:
    few = VonMisesFisherMixture(6, n_neighbours=1, random_state=0).fit(small.X)
    assert few.lower_bound_ <= few.score(small.X) + 1e-12
    every = VonMisesFisherMixture(6, n_neighbours=6, random_state=0).fit(small.X)
    assert every.lower_bound_ == pytest.approx(every.score(small.X), abs=1e-9)


def test_order_of_samples_does_not_matter(small: Known) -> None:
    shuffle = np.random.default_rng(0).permutation(len(small.X))
    one = VonMisesFisherMixture(init=small.mean_directions).fit(small.X)
    other = VonMisesFisherMixture(init=small.mean_directions).fit(small.X[shuffle])
    np.testing.assert_array_equal(one.labels_[shuffle], other.labels_)
    np.testing.assert_allclose(one.mean_directions_, other.mean_directions_, atol=1e-10)


@pytest.mark.parametrize("mapped", [False, True])
def test_chunks_and_files_do_not_show(
    small: Known, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, mapped: bool
) -> None:
    whole = VonMisesFisherMixture(6, random_state=0).fit(small.X)
    monkeypatch.setattr(em, "_CPU_ROWS", 64)
    monkeypatch.setattr("siammm.mixture.samples._STREAM_BYTES", 100 * 16 * 4)
    X = small.X
    if mapped:
        np.save(tmp_path / "x.npy", small.X)
        X = np.load(tmp_path / "x.npy", mmap_mode="r")
    pieces = VonMisesFisherMixture(6, random_state=0).fit(X)
    np.testing.assert_array_equal(whole.labels_, pieces.labels_)
    assert pieces.lower_bound_ == pytest.approx(whole.lower_bound_, abs=1e-9)
    np.testing.assert_array_equal(pieces.predict(X), pieces.labels_)


def test_a_memory_mapped_file_is_never_loaded_whole(tmp_path: Any) -> None:
    from siammm.mixture import samples

    np.save(tmp_path / "x.npy", np.ones((samples._STREAM_BYTES // 16 + 1, 8), np.float32))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert Samples(mapped, device=CPU, unit=True).resident is None
    assert Samples(np.asarray(mapped), device=CPU, unit=True).resident is None
    assert Samples(np.array(mapped), device=CPU, unit=True).resident is not None


def test_an_empty_component_becomes_half_of_a_large_one() -> None:
    statistics = em.Statistics(
        torch.tensor([0.0, 10.0, 4.0]).double(),
        torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 4.0]]).double(),
        0.0,
        torch.tensor([0.0, 14.0, 0.0]).double(),
    )
    count, mean = em.refilled(statistics, torch.Generator().manual_seed(0), 2)
    assert count.tolist() == [5.0, 5.0, 4.0]
    assert not torch.equal(mean[0], mean[1])
    torch.testing.assert_close(mean[0], mean[1], atol=0.05, rtol=0)
    # By first choices two are empty, and the one large component can help only one of them.
    count, mean = em.refilled(statistics, torch.Generator().manual_seed(0), 2, empty_K=statistics.nearest_K <= 0)
    assert count.tolist() == [5.0, 5.0, 4.0]


@pytest.mark.parametrize("rule", em.ASSIGNMENT_RULES)
def test_an_e_step_counts_first_choices(small: Known, rule: em.AssignmentRule) -> None:
    components, assignment = components_of(small), Assignment(rule=rule, n_neighbours=3)
    statistics = em.e_step(samples_of(small), components, assignment)
    first = em.assignments(samples_of(small), components, assignment)[0][:, 0]
    assert statistics.nearest_K.tolist() == torch.bincount(first, minlength=6).tolist()


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(2, 40),
    d=st.integers(2, 6),
    k=st.integers(1, 40),
    different=st.integers(1, 5),
    seed=st.integers(0, 99),
    rule=st.sampled_from(em.ASSIGNMENT_RULES),
    gaussian=st.booleans(),
)
def test_hostile_data_ends_in_finite_numbers(
    n: int, d: int, k: int, different: int, seed: int, rule: em.AssignmentRule, gaussian: bool
) -> None:
    """Duplicates, singletons, K near N, fewer different rows than components."""
    k = min(k, n)
    random = np.random.default_rng(seed)
    X = random.normal(size=(different, d))[random.integers(different, size=n)]
    kind: Any = GaussianMixture if gaussian else VonMisesFisherMixture
    mixture = kind(k, assignment=rule, random_state=0, max_iter=5).fit(X)
    centres = mixture.means_ if gaussian else mixture.mean_directions_
    spreads = mixture.variances_ if gaussian else mixture.concentrations_
    for found in (centres, spreads, mixture.weights_, mixture.score_samples(X)):
        assert np.isfinite(found).all()
    assert (spreads > 0).all() or not gaussian
    assert mixture.weights_.sum() == pytest.approx(1)


def test_principal_directions_hold_the_energy_they_claim(small: Known) -> None:
    """Appendix C."""
    basis, energy = em.principal_directions(samples_of(small), 5)
    np.testing.assert_allclose((basis.T @ basis).numpy(), np.eye(5), atol=1e-10)
    assert energy == pytest.approx(((small.X @ basis.numpy()) ** 2).sum(axis=1).mean())
    every, whole = em.principal_directions(samples_of(small), 16)
    assert whole == pytest.approx(1)
    assert every.shape == (16, 16)


def test_refilling_does_not_depend_on_units() -> None:
    random = np.random.default_rng(0)
    X = np.concatenate([random.normal(size=(100, 4)) + 8 * np.eye(4)[i] for i in range(4)])
    far = np.concatenate([X[:3], 1e3 + random.normal(size=(3, 4))])  # three centres that no sample is nearest to
    counts = []
    for scale in (1e-5, 1.0, 1e5):
        mixture = GaussianMixture(init=far * scale, random_state=0).fit(X * scale)
        counts.append(np.bincount(mixture.labels_, minlength=6))
    assert all((count == counts[0]).all() for count in counts)
    assert (counts[0] > 0).all()


def test_variances_about_centres_that_stay() -> None:
    """Weights and spreads alone: the spread includes how far the mean of the samples is from the centre."""
    from siammm.mixture.gaussian import GaussianComponents

    x = torch.randn(500, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 2
    for covariance in ("spherical", "diag"):
        components = GaussianComponents.started(torch.zeros(1, 3, dtype=torch.float64), covariance, 1.0)
        spread = components.respread(torch.tensor([500.0]), components.statistic(x).mean(dim=0, keepdim=True)).var_KV
        expected = (x**2).mean() if covariance == "spherical" else (x**2).mean(dim=0)
        torch.testing.assert_close(spread[0], expected.expand(spread.shape[1]))


def test_a_fit_in_bytes_is_the_fit_in_single_precision() -> None:
    known = known_mixture(k=300, d=64, n=6000, low=100, high=300, seed=2)
    rows = known.X.astype(np.float32)
    for h in (1, 5):
        fits = [
            VonMisesFisherMixture(300, n_neighbours=h, init=known.mean_directions, backend=backend, max_iter=5).fit(
                rows
            )
            for backend in ("torch", "low-precision")
        ]
        np.testing.assert_array_equal(fits[0].labels_, fits[1].labels_)
        assert fits[0].lower_bound_ == pytest.approx(fits[1].lower_bound_, abs=1e-5)


def test_few_samples_are_corrected_by_what_the_principal_directions_hold() -> None:
    """Appendix C with 13 samples a component: noise within some directions alone must not be taken for all of it."""
    d, kappa, n, repeats = 128, 80.0, 13, 300
    generator = torch.Generator().manual_seed(0)
    mu = torch.eye(d, dtype=torch.float64)[0]
    x = vmf.sample(mu, kappa, n * repeats, generator=generator)
    basis = torch.eye(d, dtype=torch.float64)[:, :32]
    energy = float((x @ basis).square().sum(dim=1).mean())
    mean = x.reshape(repeats, n, d).mean(dim=1)
    settings = ConcentrationSettings(shrinkage=0.0, basis_DP=basis, energy=energy)
    found = concentrations(mean.norm(dim=1), mean, torch.full((repeats,), float(n)), settings)
    many = concentrations(torch.ones(1), x.mean(dim=0, keepdim=True), torch.tensor([float(n * repeats)]), settings)
    assert found.mean().item() == pytest.approx(many.item(), rel=0.02)
