"""The protocols on embeddings whose answers are known, the splits they are measured on, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from torch.nn.functional import normalize

from siammm.core.errors import InputError
from siammm.data.array_source import ArraySource
from siammm.evaluate.datasets import open_task
from siammm.evaluate.measure import choose, measure
from siammm.evaluate.protocols import PROTOCOLS
from siammm.evaluate.split import aligned_labels, held_out, n_shared
from siammm.evaluate.subject import open_subject
from siammm.evaluate.task import Task
from siammm.metrics.clustering import clustering_scores, mapped_accuracy
from siammm.metrics.kmeans import clusters_of, k_means
from siammm.metrics.knn import RULES
from siammm.settings.commands import EvaluateConfig, ProtocolName
from siammm.settings.training import DataConfig
from tests.conftest import Known
from tests.data.image_sets import example_images

CPU = torch.device("cpu")


def settings(**given: Any) -> EvaluateConfig:
    return EvaluateConfig(subject="t.npz", **given)


def table(folder: Path, X: np.ndarray, y: Any, *, test: tuple[np.ndarray, Any] | None = None) -> Task:
    np.savez(folder / "t.npz", embeddings=X.astype(np.float32), labels=y)
    if test is not None:
        np.savez(folder / "test.npz", embeddings=test[0].astype(np.float32), labels=test[1])
    given = None if test is None else str(folder / "test.npz")
    subject = open_subject(str(folder / "t.npz"))
    return open_task(subject, data=None, test=given, device=CPU, reading=DataConfig())


# -- registry


def test_every_name_on_the_command_line_is_a_protocol_with_a_recipe() -> None:
    assert set(PROTOCOLS) == set(ProtocolName.__args__)  # pyright: ignore[reportAttributeAccessIssue]
    assert all(protocol.recipe.endswith(".") for protocol in PROTOCOLS.values())


def test_what_applies_to_a_table(small: Known, tmp_path: Path) -> None:
    task = table(tmp_path, small.X, small.y)
    assert [one.name for one in choose(None, task)] == ["knn", "linear", "clustering"]
    for name in ("linear-paper", "semi", "transfer", "k"):
        with pytest.raises(InputError, match=f"The protocol {name} needs an encoder, but .* is a table; leave it out"):
            choose([name], task)
    with pytest.raises(InputError, match="There is nothing to measure"):
        choose([], task)
    with pytest.raises(InputError, match="'knm' is not a protocol"):
        choose(["knm"], task)


# -- figures


def test_knn_is_scikit_learns(small: Known, tmp_path: Path) -> None:
    noisy = small.X + 0.25 * np.random.default_rng(0).normal(size=small.X.shape)
    task = table(tmp_path, noisy[:700], small.y[:700], test=(noisy[700:], small.y[700:]))
    found = measure(PROTOCOLS["knn"], task, settings(seeds=(0, 1, 2)))
    train, test = (part.row_ND.numpy() for part in (task.features(task.train), task.features(task.test)))
    for k, temperature in RULES:

        def weights(distance: np.ndarray, temperature: float = temperature) -> np.ndarray:
            return np.exp((1 - distance) / temperature)

        reference = KNeighborsClassifier(k, metric="cosine", weights=cast(Any, weights)).fit(train, small.y[:700])
        figure = found.figures[f"top-1, k = {k}, T = {temperature:g}"]
        assert figure.values == [reference.score(test, small.y[700:])]  # once, for there is no chance in it
        assert figure.deviation is None


def test_linear_and_clustering_find_what_is_there(small: Known, tmp_path: Path) -> None:
    task = table(tmp_path, small.X, np.array([f"class {code}" for code in small.y]))
    linear = measure(PROTOCOLS["linear"], task, settings(seeds=(0, 1)))
    assert linear.figures["top-1"].mean > 0.99
    assert len(linear.figures["top-1"].values) == 2
    found = measure(PROTOCOLS["clustering"], task, settings(k_means=(6, 30), seeds=(0, 1, 2)))
    assert found.settings["k_means"] == [6, 30]
    for part in ("train", "test"):
        for score in ("AMI", "NMI", "ARI", "Hungarian", "majority", "class purity", "cluster purity"):
            figure = found.figures[f"k-means 6, {part}: {score}"]
            assert len(figure.values) == 3
            assert figure.mean > 0.97
        # More clusters than classes: pure, but no longer one to one.
        assert found.figures[f"k-means 30, {part}: majority"].mean > 0.97
        assert found.figures[f"k-means 30, {part}: Hungarian"].mean < 0.6
    assert found.figures["k-means 6, test: named by train"].mean > 0.97
    detail = found.detail["k-means 6, train"]
    assert sorted(detail["purities"]["classes"]) == sorted({f"class {code}" for code in small.y})
    assert detail["scores"]["n_classes"] == 6
    assert "k-means 6, train: clusters" in found.neutral


def test_the_default_number_of_clusters_is_that_of_the_classes(small: Known, tmp_path: Path) -> None:
    found = measure(PROTOCOLS["clustering"], table(tmp_path, small.X, small.y), settings())
    assert found.settings["k_means"] == [6]


# -- k-means


def test_k_means_is_at_a_fixed_point_of_lloyds_steps(small: Known) -> None:
    x = torch.from_numpy(small.X)
    fitted = k_means(x, 9, seed=0)
    unit, mu = normalize(x, dim=1), torch.as_tensor(fitted.mean_directions_)
    nearest = (unit @ mu.T).argmax(dim=1)
    assert torch.equal(nearest, torch.as_tensor(fitted.labels_))
    means = normalize(torch.zeros_like(mu).index_add_(0, nearest, unit), dim=1)
    moved = ((unit * means[nearest]).sum(dim=1).mean() - (unit * mu[nearest]).sum(dim=1).mean()).abs()
    assert float(moved) < 1e-5
    assert torch.equal(torch.as_tensor(k_means(x, 9, seed=0).labels_), nearest)


def test_k_means_refuses_more_clusters_than_samples() -> None:
    with pytest.raises(InputError, match=r"k-means was asked for 25,000 clusters of 20 samples; ask for 1 to 20"):
        k_means(torch.randn(20, 4), 25_000)


def test_features_of_zeros_are_clustered_without_a_word() -> None:
    x = torch.cat([torch.zeros(3, 4), torch.randn(40, 4, generator=torch.Generator().manual_seed(0))])
    assert clusters_of(k_means(x, 5), x).shape == (43,)


@pytest.mark.slow
def test_k_means_with_25000_clusters() -> None:
    x = torch.randn(30_000, 16, generator=torch.Generator().manual_seed(0))
    fitted = k_means(x, 25_000)
    assert fitted.n_components_ == 25_000
    assert len(np.unique(np.asarray(fitted.labels_))) > 20_000


# -- splits


def test_a_tenth_is_held_out_of_every_class() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat([0, 1, 2], [100, 300, 50]))
    teach, test = held_out(labels)
    assert sorted([*teach, *test]) == list(range(450))
    for code, size in enumerate([100, 300, 50]):
        assert abs((labels[test] == code).sum() - size / 10) <= 1
    assert np.array_equal(held_out(labels)[1], test)
    assert not np.array_equal(held_out(labels, seed=1)[1], test)


def test_a_class_of_one_image_teaches() -> None:
    labels = np.concatenate([np.arange(38), np.zeros(20, dtype=np.int64)])
    teach, _ = held_out(labels)
    assert set(labels[teach]) == set(labels)
    with pytest.raises(
        InputError, match="19 images, but 20 or more are needed to hold a tenth out; give a set with --test"
    ):
        held_out(np.zeros(19))


def test_names_decide_where_both_sets_have_them() -> None:
    train, test, names = aligned_labels(np.array([0, 1, 1]), ["ant", "bee"], np.array([0, 1]), ["bee", "ant"])
    assert (train.tolist(), test.tolist(), names) == ([0, 1, 1], [1, 0], ["ant", "bee"])
    train, test, names = aligned_labels(np.array([3, 7]), None, np.array([7, 3]), ["x"] * 8)
    assert (train.tolist(), test.tolist(), names) == ([0, 1], [1, 0], ["3", "7"])
    with pytest.raises(InputError, match="has the class 'cat', which the training set lacks"):
        aligned_labels(np.array([0, 1]), ["ant", "bee"], np.array([0]), ["cat"])


def test_images_that_two_sets_share() -> None:
    images = example_images(12).images
    first, second = (ArraySource(part, name="x") for part in (images[:8], images[5:]))
    assert n_shared(first, second) == 3


def test_clusters_named_by_other_images() -> None:
    known, clusters = np.array([0, 0, 1, 1, 1]), np.array([0, 0, 1, 1, 0])
    assert mapped_accuracy(known, clusters, np.array([0, 1, 1, 1]), np.array([0, 1, 0, 2])) == 0.5


# -- what is refused


def test_tables_that_cannot_be_measured(small: Known, tmp_path: Path) -> None:
    np.save(tmp_path / "bare.npy", small.X)
    with pytest.raises(InputError, match="has no labels, but an evaluation needs them"):
        open_task(open_subject(str(tmp_path / "bare.npy")), data=None, test=None, device=CPU, reading=DataConfig())
    with pytest.raises(InputError, match="has one class, '0', but at least two are needed"):
        table(tmp_path, small.X, np.zeros(len(small.y), int))
    with pytest.raises(InputError, match="30 images of 30 classes, too few to hold some out; give --test"):
        table(tmp_path, small.X[:30], np.arange(30))
    with pytest.raises(InputError, match=r"has 3 columns and .* 16; embed both with the same encoder"):
        table(tmp_path, small.X, small.y, test=(small.X[:, :3], small.y))
    with pytest.raises(InputError, match="contains its own data; leave --data digits out"):
        open_task(open_subject(str(tmp_path / "t.npz")), data="digits", test=None, device=CPU, reading=DataConfig())
    small_table = table(tmp_path, np.where(np.arange(900)[:, None] == 5, np.nan, small.X), small.y)
    with pytest.raises(InputError, match=r"1 of the 8.. rows of the training embeddings hold NaN"):
        measure(PROTOCOLS["knn"], small_table, settings())


def test_rows_without_a_label_are_left_out(small: Known, tmp_path: Path) -> None:
    labels = small.y.astype(float)
    labels[:100] = np.nan
    task = table(tmp_path, small.X, labels)
    assert len(task.train.labels) + len(task.test.labels) == len(small.y) - 100
    assert task.class_names == [str(code) for code in range(6)]


def test_scores_are_those_of_the_labels_given(small: Known, tmp_path: Path) -> None:
    """The protocol's own figures against the functions by hand."""
    task = table(tmp_path, small.X, small.y)
    found = measure(PROTOCOLS["clustering"], task, settings(k_means=(4,), seeds=(3,)))
    train = task.features(task.train)
    fitted = k_means(train.row_ND, 4, seed=3)
    scores = clustering_scores(train.labels, np.asarray(fitted.labels_))
    assert found.figures["k-means 4, train: AMI"].mean == pytest.approx(scores.ami)


def test_a_number_below_zero_is_no_label(small: Known, tmp_path: Path) -> None:
    labels = small.y.copy()
    labels[:7] = -1
    task = table(tmp_path, small.X, labels)
    assert task.n_classes == len(np.unique(small.y))
    assert len(task.train.labels) + len(task.test.labels) == len(labels) - 7
    assert task.train.n_unlabelled == 7


@pytest.mark.parametrize("kind", [float, str])
def test_labels_of_two_types_are_the_same_classes(small: Known, tmp_path: Path, kind: Any) -> None:
    task = table(tmp_path, small.X, small.y, test=(small.X, small.y.astype(kind)))
    assert (task.train.labels == task.test.labels).all()
    assert sorted(task.class_names) == sorted({str(value) for value in small.y.tolist()})


def test_what_the_record_says_of_tables(small: Known, tmp_path: Path) -> None:
    for name in ("a.npz", "b.npz"):
        np.savez(tmp_path / name, embeddings=small.X.astype(np.float32), labels=small.y)
    subject = open_subject(str(tmp_path / "a.npz"))
    task = open_task(subject, data=None, test=str(tmp_path / "b.npz"), device=CPU, reading=DataConfig())
    assert [task.data[part]["name"] for part in ("train", "test")] == [str(tmp_path / f) for f in ("a.npz", "b.npz")]
