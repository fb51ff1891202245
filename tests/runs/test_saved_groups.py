"""The groups of a run are saved with it, so that new images and rows can be given theirs."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from siammm import GaussianMixture, SiamMM, VonMisesFisherMixture
from siammm.cli import main
from siammm.core.errors import StoredFileError
from siammm.runs import files
from siammm.runs.run import Run
from tests.commands import TINY
from tests.export.runs import trained_run, write_images
from tests.report.made_runs import made_run, without_groups

pytestmark = pytest.mark.usefixtures("one_thread")


def kinds(n: int = 600, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows of five kinds, which overlap so much that merging leaves fewer clusters."""
    random = np.random.default_rng(seed)
    y = random.integers(5, size=n)
    return (np.eye(5, 16)[y] + 0.3 * random.normal(size=(n, 16))).astype(np.float32), y


# -- of training


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten clusters in fewer groups."""
    return trained_run(tmp_path_factory.mktemp("grouped"), "--merge-floor", "10")


def test_the_rule_gives_what_the_table_has(trained: Path) -> None:
    run = Run.open(trained)
    assert run.has_groups
    assert run.groups is not None
    assert run.groups.n_groups == run.n_groups < run.n_clusters == 10
    np.testing.assert_array_equal(run.groups.label_K, run.group_K)
    # The embeddings that were kept are rounded.
    agreement = run.groups.predict(run.embeddings, run.cluster_N) == run.group_N
    assert agreement.mean() > 0.97


def test_a_model_of_the_run_knows_them(trained: Path) -> None:
    run, images = Run.open(trained), str(trained.parent / "images")
    model = SiamMM.load(trained, device="cpu")
    assert model.n_groups_ == run.n_groups
    np.testing.assert_array_equal(model.labels_, run.cluster_N)
    np.testing.assert_array_equal(model.group_labels_, run.group_N)
    np.testing.assert_array_equal(model.predict_group(images), run.group_N)


def test_new_images_get_their_group(trained: Path, tmp_path: Path) -> None:
    """``embed`` and the model say the same of images that the run has not seen."""
    other = str(write_images(tmp_path, n=40, seed=5))
    output = tmp_path / "table.parquet"
    assert main(["embed", str(trained), "--data", other, "--output", str(output), "--device", "cpu"]) == 0
    group = pq.read_table(output).column("group").to_numpy()
    np.testing.assert_array_equal(group, SiamMM.load(trained, device="cpu").predict_group(other))
    assert len(np.unique(group)) > 1


def test_a_run_without_clusters_has_none(tmp_path: Path) -> None:
    images = write_images(tmp_path, n=24)
    flags = [*TINY, "--cluster-loss", "none", "--output", str(tmp_path / "run")]
    assert main(["train", str(images), *flags]) == 0
    run = Run.open(tmp_path / "run")
    assert run.groups is None
    assert not run.has_groups


def test_a_table_with_groups_whose_rule_was_not_saved(tmp_path: Path) -> None:
    """As the first version that had groups left it."""
    folder = made_run(tmp_path, n=60, k=5, groups=[0, 1, 0, 2, 1])
    run = Run.open(folder)
    assert run.groups is None
    model = SiamMM.load(folder, device="cpu")
    np.testing.assert_array_equal(model.group_labels_, run.group_N)
    assert not hasattr(model, "n_groups_")
    assert not hasattr(SiamMM.load(without_groups(folder), device="cpu"), "group_labels_")


def test_a_damaged_rule_is_one_sentence(trained: Path, tmp_path: Path) -> None:
    folder = made_run(tmp_path, n=60, k=5)
    mixture = Run.open(folder).mixture
    mixture.groups_ = VonMisesFisherMixture.load(trained / files.MIXTURE).groups_  # of ten clusters
    mixture.save(folder / files.MIXTURE)
    run = Run.open(folder)
    with pytest.raises(StoredFileError, match=r"mixture\.safetensors is damaged: groups\.label is .* save it again\."):
        _ = run.groups


def test_a_model_does_not_need_the_table(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    table = tmp_path / "run" / files.ASSIGNMENTS
    table.write_bytes(table.read_bytes()[:-40])
    model, images = SiamMM.load(tmp_path / "run", device="cpu"), str(trained.parent / "images")
    assert not hasattr(model, "labels_")
    assert not hasattr(model, "group_labels_")
    np.testing.assert_array_equal(model.predict_group(images), Run.open(trained).group_N)


# -- of siammm cluster


@pytest.mark.parametrize("family", ["von-mises-fisher", "gaussian"])
def test_of_a_clustered_table(family: str, tmp_path: Path) -> None:
    X, y = kinds()
    np.savez(tmp_path / "t.npz", embeddings=X, labels=y)
    flags = ["--family", family, "--merge-floor", "15", "--output", str(tmp_path / "out")]
    assert main(["cluster", str(tmp_path / "t.npz"), *flags]) == 0
    run = Run.open(tmp_path / "out")
    assert run.groups is not None
    assert run.has_groups
    np.testing.assert_array_equal(run.groups.predict(X, run.cluster_N), run.group_N)
    # Somebody who has new rows needs the one file alone.
    kind = VonMisesFisherMixture if family == "von-mises-fisher" else GaussianMixture
    new, kind_of_new = kinds(seed=1)
    group = kind.load(tmp_path / "out" / files.MIXTURE).predict_group(new)
    commonest = np.array([np.bincount(kind_of_new[group == g], minlength=5).argmax() for g in range(run.n_groups)])
    assert (commonest[group] == kind_of_new).mean() > 0.9


def test_a_number_that_was_given_is_not_questioned(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", kinds()[0])
    flags = ["--merge", "none", "--n-components", "7", "--output", str(tmp_path / "out")]
    assert main(["cluster", str(tmp_path / "t.npy"), *flags]) == 0
    run = Run.open(tmp_path / "out")
    assert run.groups is not None
    assert (run.has_groups, run.groups.n_groups) == (False, 7)
    np.testing.assert_array_equal(run.mixture.predict_group(kinds(seed=1)[0]), run.mixture.predict(kinds(seed=1)[0]))
