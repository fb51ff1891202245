"""``--n-groups``: as many groups as the user knows there are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from siammm import VonMisesFisherMixture
from siammm.cli import main
from siammm.metrics import clustering_scores
from siammm.report.history import how_found
from siammm.runs.run import Run
from tests.commands import refused
from tests.data.image_sets import example_images, write_npz

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, np.ndarray]:
    """Six kinds, each of two parts, of which every other pair of kinds is close."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    kind_of = random.integers(6, size=600)
    centre = np.repeat(np.eye(3, 24), 2, axis=0) + 0.5 * np.eye(6, 24, k=6)
    part = 0.35 * np.eye(12, 24, k=12)[2 * kind_of + random.integers(2, size=600)]
    X = (centre[kind_of] + part + 0.12 * random.normal(size=(600, 24))).astype(np.float32)
    np.savez("t.npz", embeddings=X, labels=kind_of)
    return X, kind_of


@pytest.mark.parametrize("n_groups", [2, 6, 8])
def test_so_many_groups(
    n_groups: int, table: tuple[np.ndarray, np.ndarray], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", "t.npz", "--n-groups", f"{n_groups}", "--device", "cpu"]) == 0
    assert f"{n_groups} groups in 600 embeddings" in capsys.readouterr().out
    rows = pq.read_table("t-clusters/assignments.parquet")
    group, cluster = (rows.column(name).to_numpy() for name in ("group", "cluster"))
    assert sorted(set(group)) == list(range(n_groups))
    summary = json.loads(Path("t-clusters/summary.json").read_text())
    assert summary["n_groups"] == summary["settings"]["n_groups"] == n_groups
    assert set(summary["groups"]) == set(range(n_groups)), "every group has a cluster"
    mixture = VonMisesFisherMixture.load("t-clusters/mixture.safetensors")
    np.testing.assert_array_equal(mixture.predict_group(table[0]), group)
    np.testing.assert_array_equal(mixture.predict(table[0]), cluster)
    if n_groups == 6:
        assert clustering_scores(table[1], group).ami > 0.9
    assert f"{n_groups} groups, as --n-groups asked." in how_found(Run.open(Path("t-clusters")))["levels"]


def test_of_clusters_whose_number_is_given_too(table: tuple[np.ndarray, np.ndarray]) -> None:
    flags = ["--merge", "none", "--n-components", "12", "--device", "cpu"]
    assert main(["cluster", "t.npz", "--n-groups", "3", *flags]) == 0
    summary = json.loads(Path("t-clusters/summary.json").read_text())
    assert (summary["n_components"], summary["n_groups"]) == (12, 3)
    assert main(["cluster", "t.npz", *flags, "--output", "found"]) == 0
    assert json.loads(Path("found/summary.json").read_text())["n_groups"] == 12, "groups were not asked for"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--n-groups 1", "--n-groups is 1, but 600 samples can have 2 to 150 groups; ask for a number in between"),
        ("--n-groups 151", "--n-groups is 151, but 600 samples can have 2 to 150 groups"),
        ("--n-groups 9 --merge none --n-components 8", "--merge none keeps 8 clusters; leave --merge out, or raise"),
    ],
)
def test_what_cannot_be(
    flags: str, sentence: str, table: tuple[np.ndarray, np.ndarray], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refused(["cluster", "t.npz", *flags.split(), "--device", "cpu"], capsys)
    assert not Path("t-clusters").exists()


TRAIN = [
    "--backbone", "conv-small", "--hidden-dim", "32", "--embedding-dim", "16", "--epochs", "1", "--batch-size", "24",
    "--optimiser", "sgd", "--learning-rate", "0.05", "--n-components", "10", "--cluster-after", "0", "--device", "cpu",
    "--no-tensorboard",
]  # fmt: skip


def test_of_a_training_and_of_one_that_is_finished(tmp_path: Path) -> None:
    images = write_npz(tmp_path, example_images(48, size=(8, 8), n_classes=4))
    run = tmp_path / "run"
    assert main(["train", str(images), "--output", str(run), "--n-groups", "4", *TRAIN]) == 0
    before = (run / "embeddings.npy").read_bytes()
    for n_groups in (4, 3):
        opened = Run.open(run)
        assert opened.groups is not None
        assert opened.n_groups == opened.groups.n_groups == n_groups
        np.testing.assert_array_equal(
            opened.mixture.predict_group(np.asarray(opened.embeddings, dtype=np.float32)), opened.group_N
        )
        assert f"{n_groups} groups, as --n-groups asked" in how_found(opened)["levels"]
        assert main(["train", "--resume", str(run), "--n-groups", "3", "--device", "cpu"]) == 0
    assert (run / "embeddings.npy").read_bytes() == before


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--n-groups 1", "--n-groups is 1, but it must be at least 2"),
        ("--n-groups 13", "--n-groups is 13, but 48 samples can have 2 to 12 groups"),
        ("--n-groups 3 --cluster-loss none", "--n-groups is 3, but --cluster-loss none fits no mixture; leave it out"),
        ("--n-groups 3 --group-after 0.5", "with --group-after 0.5 the number is found; leave one of them out"),
    ],
)
def test_what_a_training_cannot_have(
    flags: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = write_npz(tmp_path, example_images(48, size=(8, 8), n_classes=4))
    arguments = ["train", str(images), "--output", str(tmp_path / "run"), *TRAIN, *flags.split()]
    assert sentence in refused(arguments, capsys, silent=False)
