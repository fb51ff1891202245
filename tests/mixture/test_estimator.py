"""The mixtures as scikit-learn estimators."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from scipy.optimize import linear_sum_assignment
from sklearn.base import clone
from sklearn.datasets import make_blobs
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import adjusted_rand_score
from sklearn.utils.estimator_checks import parametrize_with_checks

from siammm import GaussianMixture, VonMisesFisherMixture
from siammm.core.errors import InputError, StoredFileError, ZeroRowWarning
from siammm.mixture import vmf
from siammm.mixture.forms import checked_form
from tests.conftest import Known, known_mixture

KINDS = (VonMisesFisherMixture, GaussianMixture)


@pytest.mark.filterwarnings("ignore::siammm.core.errors.ZeroRowWarning")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks(
    [
        VonMisesFisherMixture(),
        VonMisesFisherMixture(3, merge="auto"),
        VonMisesFisherMixture(3, assignment="posterior", n_init=2, max_iter=20),
        GaussianMixture(3),
        GaussianMixture(3, covariance="diag", assignment="posterior"),
    ]
)
def test_scikit_learn_conventions(estimator: Any, check: Any) -> None:
    check(estimator)


def matched(mixture: VonMisesFisherMixture, known: Known) -> np.ndarray:
    """The fitted component that stands for each true one."""
    found, true = linear_sum_assignment(-(mixture.mean_directions_ @ known.mean_directions.T))
    return found[np.argsort(true)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("settings", [{}, {"n_neighbours": 1}, {"assignment": "posterior"}])
def test_recovers_twenty_components(twenty: Known, settings: dict[str, Any], seed: int) -> None:
    mixture = VonMisesFisherMixture(20, random_state=seed, **settings).fit(twenty.X)
    order = matched(mixture, twenty)
    assert adjusted_rand_score(twenty.y, mixture.labels_) >= 0.99
    np.testing.assert_allclose(mixture.concentrations_[order], twenty.concentrations, rtol=0.05)
    np.testing.assert_allclose(mixture.weights_[order], twenty.weights, rtol=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_fit_predict_equals_predict(small: Known, kind: Any) -> None:
    mixture = kind(6, random_state=0)
    labels = mixture.fit_predict(small.X)
    np.testing.assert_array_equal(labels, mixture.predict(small.X))
    np.testing.assert_array_equal(labels, mixture.predict_proba(small.X).toarray().argmax(axis=1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["nearest", "posterior"])
def test_assign_says_what_three_methods_say(small: Known, kind: Any, rule: Any) -> None:
    mixture = kind(6, n_neighbours=3, assignment=rule, random_state=0).fit(small.X)
    component, share, log_density = mixture.assign(small.X)
    np.testing.assert_array_equal(component, mixture.predict(small.X))
    np.testing.assert_allclose(share, mixture.predict_proba(small.X).max(axis=1).toarray().ravel(), rtol=1e-6)
    np.testing.assert_allclose(log_density, mixture.score_samples(small.X), rtol=1e-6)
    assert all(isinstance(found, torch.Tensor) for found in mixture.assign(torch.from_numpy(small.X)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["nearest", "posterior"])
def test_probabilities_are_sparse_rows_that_sum_to_one(small: Known, kind: Any, rule: Any) -> None:
    mixture = kind(6, n_neighbours=3, assignment=rule, random_state=0).fit(small.X)
    table = mixture.predict_proba(small.X)
    assert scipy.sparse.issparse(table)
    assert table.shape == (len(small.X), 6)
    assert (np.diff(table.indptr) == 3).all()
    np.testing.assert_allclose(np.asarray(table.sum(axis=1))[:, 0], 1, atol=1e-6 if rule == "nearest" else 0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_in_tensors_out(small: Known, kind: Any) -> None:
    arrays = kind(6, random_state=0).fit(small.X)
    tensor = torch.from_numpy(small.X)
    tensors = kind(6, random_state=0).fit(tensor)
    assert isinstance(tensors.labels_, torch.Tensor)
    assert isinstance(tensors.weights_, torch.Tensor)
    np.testing.assert_array_equal(tensors.predict(tensor).numpy(), arrays.labels_)
    np.testing.assert_allclose(tensors.score_samples(tensor).numpy(), arrays.score_samples(small.X))
    assert tensors.predict_proba(tensor).is_sparse
    np.testing.assert_allclose(
        tensors.predict_proba(tensor).to_dense().numpy(), arrays.predict_proba(small.X).toarray()
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_precisions_agree(small: Known, dtype: Any) -> None:
    mixture = VonMisesFisherMixture(6, random_state=0).fit(small.X.astype(dtype))
    assert adjusted_rand_score(small.y, mixture.labels_) > 0.99


def test_data_frames_carry_their_names(small: Known) -> None:
    frame = pd.DataFrame(small.X, columns=[f"f{i}" for i in range(16)])
    mixture = VonMisesFisherMixture(6, random_state=0).fit(frame)
    assert list(mixture.feature_names_in_) == list(frame.columns)  # type: ignore[attr-defined]


def test_length_does_not_matter_to_directions(small: Known) -> None:
    stretched = small.X * np.random.default_rng(0).uniform(0.1, 10, size=(len(small.X), 1))
    one, other = (VonMisesFisherMixture(6, random_state=0).fit(X) for X in (small.X, stretched))
    np.testing.assert_array_equal(one.labels_, other.labels_)


def test_shift_does_not_matter_to_gaussians(small: Known) -> None:
    moved = small.X + 1e4
    one, other = (GaussianMixture(6, random_state=0).fit(X) for X in (small.X, moved))
    np.testing.assert_array_equal(one.labels_, other.labels_)
    np.testing.assert_allclose(one.means_ + 1e4, other.means_, atol=1e-6)
    np.testing.assert_array_equal(other.predict(moved), other.labels_)


def test_gaussian_density_is_scikit_learns(small: Known) -> None:
    from sklearn.mixture import GaussianMixture as Theirs

    for covariance in ("spherical", "diag"):
        ours = GaussianMixture(6, covariance=covariance, assignment="posterior", random_state=0).fit(small.X)
        theirs = Theirs(6, covariance_type=covariance)
        theirs.weights_, theirs.means_, theirs.covariances_ = ours.weights_, ours.means_, ours.variances_
        theirs.precisions_cholesky_ = 1 / np.sqrt(ours.variances_)
        np.testing.assert_allclose(ours.score_samples(small.X), theirs.score_samples(small.X), rtol=1e-9)
        assert ours.bic(small.X) == pytest.approx(theirs.bic(small.X))
        assert ours.aic(small.X) == pytest.approx(theirs.aic(small.X))


def test_information_criteria_prefer_the_true_number() -> None:
    known = known_mixture(k=5, d=8, n=1500, low=40, high=80, seed=1)
    bic = {
        k: VonMisesFisherMixture(k, assignment="posterior", random_state=0).fit(known.X).bic(known.X) for k in (3, 5, 8)
    }
    assert min(bic, key=bic.__getitem__) == 5


def test_density_of_one_component_is_the_distributions(small: Known) -> None:
    mixture = VonMisesFisherMixture(1, assignment="posterior").fit(small.X)
    cosine = torch.from_numpy(small.X @ mixture.mean_directions_[0])
    kappa = torch.tensor(float(mixture.concentrations_[0]), dtype=torch.float64)
    expected = vmf.log_density(cosine, kappa, 16)
    np.testing.assert_allclose(mixture.score_samples(small.X), expected.numpy(), rtol=1e-10)


def test_samples_of_the_mixture_are_fitted_again(small: Known) -> None:
    mixture = VonMisesFisherMixture(6, random_state=0).fit(small.X)
    X, y = mixture.sample(2000)
    again = VonMisesFisherMixture(6, random_state=0).fit(X)
    assert adjusted_rand_score(y, again.labels_) > 0.98
    np.testing.assert_allclose(np.linalg.norm(X, axis=1), 1)
    X, y = GaussianMixture(6, random_state=0).fit(small.X * 3 + 5).sample(500)
    assert X.shape == (500, 16)
    assert X.mean() == pytest.approx((small.X * 3 + 5).mean(), abs=0.1)


# -- concentrations -------------------------------------------------------------------------------------------------


def test_concentration_rules(small: Known) -> None:
    fits = {
        rule: VonMisesFisherMixture(6, concentration=rule, random_state=0).fit(small.X).concentrations_
        for rule in ("per-component", "closed-form", "shared", 77.0)
    }
    assert fits["per-component"].std() > 10
    np.testing.assert_allclose(fits["closed-form"], fits["per-component"], rtol=0.05)
    assert np.ptp(fits["shared"]) == 0
    assert (fits[77.0] == 77).all()


def test_concentration_in_principal_directions(small: Known) -> None:
    """Appendix C with all directions is the plain estimate; with fewer it uses the shorter r and the smaller d."""
    plain = VonMisesFisherMixture(6, random_state=0).fit(small.X)
    every = VonMisesFisherMixture(6, concentration_dims=16, random_state=0).fit(small.X)
    np.testing.assert_allclose(every.concentrations_, plain.concentrations_, rtol=1e-9)
    some = VonMisesFisherMixture(
        6, concentration_dims=8, concentration="closed-form", small_sample_correction=False,
        concentration_shrinkage=0.0, n_neighbours=1, random_state=0,
    ).fit(small.X)  # fmt: skip
    _, vectors = np.linalg.eigh(small.X.T @ small.X)
    for k in range(6):
        rho = np.linalg.norm(small.X[some.labels_ == k].mean(axis=0) @ vectors[:, -8:])
        assert some.concentrations_[k] == pytest.approx((rho * 8 - rho**3) / (1 - rho**2), rel=1e-6)


# -- where a fit starts -----------------------------------------------------------------------------------------------


def test_warm_start_goes_on_from_the_last_fit(small: Known) -> None:
    mixture = VonMisesFisherMixture(6, random_state=0, warm_start=True).fit(small.X)
    before = mixture.mean_directions_
    mixture.fit(small.X)
    assert mixture.n_iter_ <= 2
    np.testing.assert_allclose(mixture.mean_directions_, before, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_init_takes_a_fitted_mixture_or_an_array(small: Known, kind: Any) -> None:
    previous = kind(6, random_state=0).fit(small.X)
    centres = previous.mean_directions_ if kind is VonMisesFisherMixture else previous.means_
    for start in (previous, centres, torch.from_numpy(centres)):
        carried = kind(99).fit(small.X, init=start)
        assert carried.n_components_ == 6
        np.testing.assert_array_equal(carried.labels_, previous.labels_)


def test_gaussians_carry_over_to_data_with_another_mean() -> None:
    """Means are in the coordinates of the data, whatever mean the engine works about."""
    X, y, *_ = make_blobs(900, 5, centers=6, random_state=1)
    X = np.asarray(X) + 100
    part = (y != 0) | (np.arange(900) % 4 == 0)
    previous = GaussianMixture(6, random_state=0, warm_start=True).fit(X)
    for start in (previous, previous.means_):
        carried = GaussianMixture(6, max_iter=1).fit(X[part], init=start)
        np.testing.assert_array_equal(carried.labels_, previous.labels_[part])
    expected = previous.labels_[part]
    np.testing.assert_array_equal(previous.set_params(max_iter=1).fit(X[part]).labels_, expected)


def test_a_carried_mixture_takes_the_settings_of_the_new_one(small: Known) -> None:
    previous = VonMisesFisherMixture(6, random_state=0).fit(small.X)
    fewer = VonMisesFisherMixture(6, concentration_dims=8, random_state=0).fit(small.X)
    carried = VonMisesFisherMixture(concentration_dims=8).fit(small.X, init=previous)
    np.testing.assert_allclose(sorted(carried.concentrations_), sorted(fewer.concentrations_), rtol=1e-3)
    assert (VonMisesFisherMixture(concentration=50.0).fit(small.X, init=previous).concentrations_ == 50).all()
    round_ones = GaussianMixture(6, random_state=0).fit(small.X)
    diagonal = GaussianMixture(covariance="diag").fit(small.X, init=round_ones)
    assert diagonal.variances_.shape == (6, 16)
    assert GaussianMixture().fit(small.X, init=diagonal).variances_.shape == (6,)
    with pytest.raises(InputError, match="init was fitted to 16 features, but X has 8"):
        VonMisesFisherMixture().fit(small.X[:, :8], init=previous)


def test_correction_and_shrinkage_reach_the_estimate(small: Known) -> None:
    """Components of few samples: uncorrected they look too tight, shrunken they look alike."""
    few = small.X[:60]
    plain = {"small_sample_correction": False, "concentration_shrinkage": 0.0}
    naive = VonMisesFisherMixture(12, random_state=0, **plain).fit(few).concentrations_
    corrected = VonMisesFisherMixture(12, random_state=0, **{**plain, "small_sample_correction": True}).fit(few)
    shrunken = VonMisesFisherMixture(12, random_state=0, **{**plain, "concentration_shrinkage": 20.0}).fit(few)
    assert np.median(corrected.concentrations_) < np.median(naive)
    assert np.std(np.log(shrunken.concentrations_)) < 0.5 * np.std(np.log(naive))


def test_a_narrow_component_within_a_wide_one_is_measured() -> None:
    """The paper's rule looks at angles alone; the density that is left must not."""
    generator = torch.Generator().manual_seed(0)
    mu = torch.zeros(16, dtype=torch.float64)
    mu[0] = 1
    other = torch.nn.functional.normalize(mu + 0.4 * torch.eye(16, dtype=torch.float64)[1], dim=0)
    wide, narrow = vmf.sample(mu, 15.0, 5000, generator=generator), vmf.sample(other, 200.0, 1000, generator=generator)
    X = torch.cat([wide, narrow]).numpy()
    mixture = VonMisesFisherMixture(init=torch.stack([mu, other]).numpy()).fit(X)
    assert mixture.concentrations_.max() > 130
    assert mixture.weights_.min() == pytest.approx(1 / 6, abs=0.02)


@pytest.mark.parametrize("scale", [1e-25, 1e-10, 1e10, 1e20])
def test_rows_of_any_size_have_a_direction(small: Known, scale: float) -> None:
    mixture = VonMisesFisherMixture(6, random_state=0).fit((small.X * scale).astype(np.float32))
    assert adjusted_rand_score(small.y, mixture.labels_) > 0.99


def test_half_precision_files_are_not_loaded_whole(small: Known, tmp_path: Path) -> None:
    np.save(tmp_path / "half.npy", small.X.astype(np.float16))
    mixture = VonMisesFisherMixture(6, random_state=0)
    checked = checked_form(mixture, np.load(tmp_path / "half.npy", mmap_mode="r"), unit=True, reset=True)
    assert checked.dtype == np.float16
    assert adjusted_rand_score(small.y, mixture.fit(checked).labels_) > 0.99


def test_numbers_of_numpy_are_saved(small: Known, tmp_path: Path) -> None:
    mixture = VonMisesFisherMixture(np.int64(6), n_neighbours=np.int64(2), temperature=np.float32(0.2))  # type: ignore[arg-type]
    mixture.fit(small.X).save(tmp_path / "m.safetensors")
    loaded = VonMisesFisherMixture.load(tmp_path / "m.safetensors")
    assert (loaded.n_components, loaded.n_neighbours) == (6, 2)
    assert loaded.temperature == pytest.approx(0.2)


def test_criteria_take_lists(small: Known) -> None:
    mixture = VonMisesFisherMixture(6, random_state=0).fit(small.X)
    assert mixture.bic(small.X.tolist()) == pytest.approx(mixture.bic(small.X))


def test_same_seed_same_fit_and_clone(small: Known) -> None:
    one = VonMisesFisherMixture(6, random_state=5).fit(small.X)
    other = cast(VonMisesFisherMixture, clone(one)).fit(small.X)
    np.testing.assert_array_equal(one.mean_directions_, other.mean_directions_)


def test_restarts_keep_the_best(small: Known) -> None:
    one, many = (
        VonMisesFisherMixture(6, init="random", n_init=n, random_state=1).fit(small.X).lower_bound_ for n in (1, 8)
    )
    assert many >= one - 1e-9


# -- saving -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("merge", [None, "auto"])
def test_what_is_saved_comes_back(small: Known, tmp_path: Path, kind: Any, merge: Any) -> None:
    mixture = kind(12, random_state=0, merge=merge, init="random").fit(small.X)
    path = tmp_path / "deep" / "mixture.safetensors"
    mixture.save(path)
    assert [file.name for file in path.parent.iterdir()] == ["mixture.safetensors"]
    loaded = kind.load(path)
    assert loaded.get_params() == mixture.get_params()
    np.testing.assert_array_equal(loaded.predict(small.X), mixture.labels_)
    np.testing.assert_array_equal(loaded.score_samples(small.X), mixture.score_samples(small.X))
    if merge:
        np.testing.assert_array_equal(loaded.merges_.linkage, mixture.merges_.linkage)
        assert loaded.merges_.n_components == mixture.merges_.n_components


def test_a_damaged_or_foreign_file_is_refused(small: Known, tmp_path: Path) -> None:
    path = tmp_path / "mixture.safetensors"
    mixture = VonMisesFisherMixture(6, random_state=0).fit(small.X)
    with pytest.raises(StoredFileError, match="no file"):
        VonMisesFisherMixture.load(path)
    mixture.save(path)
    with pytest.raises(StoredFileError, match="holds a VonMisesFisherMixture"):
        GaussianMixture.load(path)
    whole = path.read_bytes()
    for damaged in (whole[:100], b"", b"hello", whole[:-8]):
        path.write_bytes(damaged)
        with pytest.raises(StoredFileError, match="damaged"):
            VonMisesFisherMixture.load(path)
    from safetensors.numpy import save_file

    header = {"format": 1, "kind": "VonMisesFisherMixture", "parameters": {}, "fitted": {}, "merges": None}
    save_file({"weights_": np.ones(2)}, path, metadata={"siammm": json.dumps(header)})
    with pytest.raises(StoredFileError, match="mean_directions_ is missing"):
        VonMisesFisherMixture.load(path)


@pytest.mark.parametrize("stored", [{"temperature": "warm"}, {"n_neighbours": "many"}, {"assignment": "by chance"}])
def test_stored_parameters_that_mean_nothing_are_refused(stored: dict[str, Any], small: Known, tmp_path: Path) -> None:
    path = tmp_path / "mixture.safetensors"
    mixture = VonMisesFisherMixture(6, random_state=0).fit(small.X)
    mixture.set_params(**stored).save(path)
    with pytest.raises(StoredFileError, match="header cannot be read"):
        VonMisesFisherMixture.load(path)


def test_a_failed_save_leaves_the_old_file(small: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mixture.safetensors"
    mixture = VonMisesFisherMixture(6, random_state=0).fit(small.X)
    mixture.save(path)
    before = path.read_bytes()

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("siammm.mixture.storage.save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        mixture.save(path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


# -- bad input --------------------------------------------------------------------------------------------------------

GOOD = np.random.default_rng(0).normal(size=(30, 4))


def spoilt(row: int, value: float) -> np.ndarray:
    X = GOOD.copy()
    X[row, 2] = value
    return X


@pytest.mark.parametrize(
    ("X", "says"),
    [
        (spoilt(7, np.nan), "NaN or infinity in 1 row, the first being row 7"),
        (spoilt(9, np.inf), "NaN or infinity in 1 row, the first being row 9"),
        (GOOD[:0], "0 sample"),
        (GOOD[:, :1], "1 feature"),
        (GOOD[0], "1D array"),
        (GOOD[:5], "n_components=8 is more than n_samples=5"),
        (torch.ones(3), r"shape \(3,\)"),
        (torch.ones(9, 4, dtype=torch.complex64), "complex64"),
        (scipy.sparse.eye(9, format="csr"), "[Ss]parse"),
    ],
)
def test_bad_samples(X: Any, says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        VonMisesFisherMixture().fit(X)


def test_rows_without_direction_are_warned_of_once() -> None:
    X = GOOD.copy()
    X[3] = 0
    with pytest.warns(ZeroRowWarning, match="length of 0 in 1 row, the first being row 3") as caught:
        mixture = VonMisesFisherMixture(3, random_state=0).fit(X)
    assert len(caught) == 1
    assert np.isfinite(mixture.concentrations_).all()


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"n_components": 0}, "n_components is 0"),
        ({"n_components": 2.5}, "n_components is 2.5"),
        ({"n_neighbours": 0}, "n_neighbours is 0"),
        ({"temperature": 0}, "temperature is 0"),
        ({"temperature": 1e-45}, "at least 1e-6"),
        ({"random_state": -1}, "random_state is -1"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"assignment": "soft"}, "assignment is 'soft', but it must be one of nearest, posterior"),
        ({"merge": "always"}, "merge is 'always'"),
        ({"merge_share": 0}, "merge_share is 0"),
        ({"concentration": "big"}, "concentration is 'big'"),
        ({"concentration": -1.0}, "concentration is -1.0"),
        ({"concentration": 1e9}, "above the limit"),
        ({"concentration_dims": 9}, "concentration_dims=9 is more than the 4 features"),
        ({"init": "best"}, "init is 'best'"),
        ({"init": np.ones((3, 9))}, r"init has shape \(3, 9\)"),
        ({"init": object()}, "init is a object"),
        ({"n_init": 0}, "n_init is 0"),
        ({"max_iter": 0}, "max_iter is 0"),
        ({"tol": -1}, "tol is -1"),
        ({"device": "abacus"}, "device='abacus'"),
        ({"device": "meta"}, "device='meta'"),
        ({"backend": "gpu"}, "backend is 'gpu'"),
    ],
)
def test_bad_parameters(parameters: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        VonMisesFisherMixture(**{"n_components": 3, **parameters}).fit(GOOD)


def test_wrong_dimension_at_predict() -> None:
    mixture = VonMisesFisherMixture(3, random_state=0).fit(GOOD)
    for X in (GOOD[:, :3], torch.from_numpy(GOOD[:, :3])):
        with pytest.raises(ValueError, match="X has 3 features, but VonMisesFisherMixture is expecting 4"):
            mixture.predict(X)


def test_progress_is_shown_when_asked(small: Known, capsys: pytest.CaptureFixture[str]) -> None:
    VonMisesFisherMixture(6, random_state=0, progress=True).fit(small.X)
    VonMisesFisherMixture(12, merge="auto", random_state=0, progress=True).fit(small.X)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_that_runs_out_of_steps_warns(small: Known, kind: Any) -> None:
    with pytest.warns(ConvergenceWarning, match="EM did not converge in 1 steps; raise max_iter or tol"):
        mixture = kind(6, max_iter=1, random_state=0).fit(small.X)
    assert not mixture.converged_
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kind(6, tol=1e9, random_state=0).fit(small.X).converged_
