"""``SiamMM``: the command's training behind scikit-learn's interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn import base
from sklearn.exceptions import NotFittedError

import siammm
from siammm import SiamMM
from siammm.core.errors import InputError
from siammm.data.sources import open_source
from siammm.estimator import preset_for
from tests.data.image_sets import example_images
from tests.learn.small_runs import SMALL, prepared, small_config, small_images

SETTINGS = {name: value for name, value in SMALL.items() if name != "device"}


def clone(model: SiamMM) -> SiamMM:
    """scikit-learn's clone, which is only partly typed."""
    copy: Any = base.clone(model)
    return copy


def small(**settings: Any) -> SiamMM:
    return SiamMM(preset="cifar", device="cpu", settings=SETTINGS | settings)


@pytest.fixture(scope="module")
def fitted() -> SiamMM:
    return small().fit(small_images())


def test_it_trains_what_the_loop_trains(fitted: SiamMM) -> None:
    trained = prepared(small_config(), small_images()).run()
    np.testing.assert_array_equal(fitted.labels_, trained.clusters)
    assert trained.mixture is not None
    assert fitted.n_clusters_ == trained.mixture.n_components_ == fitted.mixture_.n_components_
    assert len(fitted.groups_.label_K) == fitted.n_clusters_ >= fitted.groups_.n_groups


def test_the_groups_are_those_of_its_mixture() -> None:
    model = small(merge="auto", epochs=1).fit(small_images())
    found = model.mixture_.groups(model.embed(small_images()))
    np.testing.assert_array_equal(found.label_K, model.groups_.label_K)


def test_groups_of_new_images_also_of_a_saved_model(tmp_path: Path) -> None:
    """Clusters that are held at ten lie in fewer groups."""
    images = example_images(120, size=(8, 8), n_classes=4).images
    model = small(merge="auto", merge_floor=10, epochs=1).fit(images)
    assert model.groups_.is_found
    assert model.n_groups_ < model.n_clusters_
    np.testing.assert_array_equal(model.predict_group(images), model.group_labels_)
    share = model.predict_group_proba(images)
    assert share.shape == (120, model.n_groups_)
    np.testing.assert_allclose(share.sum(axis=1), 1)
    model.save(tmp_path / "model")
    loaded = SiamMM.load(tmp_path / "model", device="cpu")
    assert loaded.n_groups_ == model.n_groups_
    np.testing.assert_allclose(loaded.predict_group_proba(images[:9]), share[:9], rtol=1e-4)
    assert not hasattr(loaded, "group_labels_"), "it holds no table of images"


def test_without_groups_the_clusters_are_predicted(fitted: SiamMM) -> None:
    assert not fitted.groups_.is_found
    np.testing.assert_array_equal(fitted.predict_group(small_images()), fitted.labels_)
    assert fitted.predict_group_proba(small_images()).shape == (len(small_images()), fitted.n_clusters_)


def test_predicting_what_was_fitted_gives_the_labels(fitted: SiamMM) -> None:
    np.testing.assert_array_equal(fitted.predict(small_images()), fitted.labels_)
    shares = fitted.predict_proba(small_images())
    np.testing.assert_allclose(shares.sum(axis=1), 1, atol=1e-5)
    assert fitted.score_samples(small_images()).shape == (len(small_images()),)


def test_views_smaller_than_images_leave_the_images_as_they_are() -> None:
    model = small(view_size=6, epochs=1).fit(small_images())
    # Two of its components coincide, and one numbering must decide between them everywhere.
    np.testing.assert_array_equal(model.predict(small_images()), model.labels_)


def test_features_and_embeddings_are_directions(fitted: SiamMM) -> None:
    features, embeddings = fitted.transform(small_images()), fitted.embed(small_images())
    assert features.shape == (len(small_images()), fitted.network_.encoder.num_features)
    assert embeddings.shape == (len(small_images()), SMALL["embedding_dim"])
    for rows in (features, embeddings):
        np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)


def test_what_is_saved_is_what_is_loaded(fitted: SiamMM, tmp_path: Path) -> None:
    fitted.save(tmp_path / "model")
    loaded = SiamMM.load(tmp_path / "model", device="cpu")
    np.testing.assert_array_equal(loaded.transform(small_images()), fitted.transform(small_images()))
    np.testing.assert_array_equal(loaded.predict(small_images()), fitted.labels_)
    assert loaded.n_clusters_ == fitted.n_clusters_


def test_a_clone_of_what_was_loaded_trains_the_same(fitted: SiamMM, tmp_path: Path) -> None:
    fitted.save(tmp_path / "model")
    again = clone(SiamMM.load(tmp_path / "model", device="cpu")).fit(small_images())
    np.testing.assert_array_equal(again.labels_, fitted.labels_)


def test_parameters_are_scikit_learns() -> None:
    model = small(epochs=1)
    assert clone(model).get_params() == model.get_params()
    assert model.set_params(epochs=3).epochs == 3
    assert siammm.SiamMM is SiamMM


def test_what_cannot_be_used_is_refused_in_a_sentence(fitted: SiamMM, tmp_path: Path) -> None:
    for method in ("predict", "predict_group", "predict_group_proba"):
        with pytest.raises(NotFittedError):
            getattr(small(), method)(small_images())
    with pytest.raises(InputError, match="finds clusters"):
        small(cluster_loss="none").fit(small_images())
    with pytest.raises(InputError, match="'colour' is not a setting"):
        small(colour=1).fit(small_images())
    with pytest.raises(InputError, match="preset is 'large'"):
        SiamMM(preset="large").fit(small_images())  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="does not exist; give a run folder"):
        SiamMM.load(tmp_path / "nothing")


@pytest.mark.parametrize(("side", "preset"), [(8, "demo"), (32, "cifar"), (64, "tiny"), (200, "tiny")])
def test_a_preset_is_chosen_by_the_size_of_the_images(side: int, preset: str) -> None:
    assert preset_for(open_source(np.zeros((2, side, side, 3), np.uint8))) == preset
