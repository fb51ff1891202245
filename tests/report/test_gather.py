"""Everything on the page, from runs of many shapes: what is true of all of them, then what each is for."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siammm.core.errors import InputError
from siammm.report import clusters, tree
from siammm.report.gather import GatherSettings, gather
from siammm.runs import files as run_files
from siammm.runs.run import Run
from tests.data.image_sets import write_folder, write_npz
from tests.report.made_runs import (
    HOSTILE,
    check_contents,
    hostile_folder,
    made_run,
    opened,
    rewrite,
    small_set,
    trained_run,
    without_groups,
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder: evaluations and audits are looked for where the user is."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    return trained_run(folder, write_npz(folder, small_set(folder)))


def test_a_trained_run(trained: Path) -> None:
    run = opened(trained)
    contents = gather(run, GatherSettings()).contents
    check_contents(contents, run)
    assert contents["run"]["n_images"] == 80 == len(contents["images"]["id"])
    assert contents["label_names"] == [f"class00{c}" for c in range(4)]
    assert contents["run"]["epochs"] == 2
    assert contents["run"]["image_size"] == 8
    assert ("optimisation", "epochs", "2") in contents["run"]["settings"]
    assert [epoch for epoch, _ in contents["curves"]["loss"]] == [1, 2]
    assert "seconds" not in contents["curves"]
    assert contents["suspects"] is None
    assert min(contents["images"]["thumbnail"]) == 0
    assert sum(cluster["n_merged"] for cluster in contents["clusters"]) == 10, "the components at the start"
    rounds = contents["merge_rounds"]
    assert rounds[0][1] == 10
    assert rounds[-1][2] == contents["run"]["n_clusters"]
    assert all(before == after for (_, _, after), (_, before, _) in itertools.pairwise(rounds))


def test_merges_are_those_of_the_clusters(trained: Path) -> None:
    """What was stored of which tree is whose agrees with the rule by which runs without it are read."""
    run = opened(trained)
    before = gather(run, GatherSettings()).contents
    merges = json.loads((trained / run_files.MERGES).read_text())
    del merges["nodes"]
    run.merges.pop("nodes")
    after = gather(run, GatherSettings()).contents
    # Those runs have their clusters in the order of the tree, and later ones by size.
    of_each = [sorted((c["n_merged"], c["merges"]) for c in contents["clusters"]) for contents in (before, after)]
    assert of_each[0] == of_each[1]


def test_the_same_run_gives_the_same_page(trained: Path) -> None:
    first, second = (gather(opened(trained), GatherSettings(random_state=3)) for _ in range(2))
    assert first.sheets == second.sheets
    assert first.contents | {"made": ""} == second.contents | {"made": ""}


@pytest.mark.parametrize(
    ("n", "k"), [(1, 1), (2, 1), (2, 2), (3, 3), (7, 3), (40, 1), (300, 7), (12, 12)], ids=lambda value: str(value)
)
def test_any_number_of_images_and_clusters(n: int, k: int, tmp_path: Path) -> None:
    run = opened(made_run(tmp_path, n=n, k=k))
    check_contents(gather(run, GatherSettings()).contents, run)


def test_without_labels(tmp_path: Path) -> None:
    run = opened(made_run(tmp_path, n_labels=0))
    contents = gather(run, GatherSettings()).contents
    check_contents(contents, run)
    assert contents["label_names"] is None
    assert set(contents["images"]["label"]) == {-1}
    assert all(cluster["by_label"] == [] and cluster["purity"] is None for cluster in contents["clusters"])
    assert contents["notes"] == [], "nothing is asked for that needs labels"


def test_some_labels_are_missing(tmp_path: Path) -> None:
    folder = made_run(tmp_path, n=60)
    rewrite(folder, label=[None if i % 3 else f"label {i % 2}" for i in range(60)])
    run = opened(folder)
    contents = gather(run, GatherSettings()).contents
    check_contents(contents, run)
    assert contents["images"]["label"].count(-1) == 40


def test_labels_are_in_natural_order(tmp_path: Path) -> None:
    folder = made_run(tmp_path, n=60)
    rewrite(folder, label=[str(i % 12) for i in range(60)])
    assert gather(opened(folder), GatherSettings()).contents["label_names"] == [str(i) for i in range(12)]
    rewrite(folder, label=pa.array([i % 12 for i in range(60)]))
    assert gather(opened(folder), GatherSettings()).contents["label_names"] == [str(i) for i in range(12)]


def test_empty_clusters(tmp_path: Path) -> None:
    """A cluster may lose all its images in the last step."""
    folder = made_run(tmp_path, n=60, k=4)
    rewrite(folder, cluster=[0] * 30 + [2] * 30)
    run = opened(folder)
    contents = gather(run, GatherSettings()).contents
    check_contents(contents, run)
    assert [cluster["size"] for cluster in contents["clusters"]] == [30, 0, 30, 0]


# -- groups


def test_groups_of_clusters(tmp_path: Path) -> None:
    run = opened(made_run(tmp_path, n=300, k=7, groups=[1, 0, 2, 0, 1, 0, 2]))
    contents = gather(run, GatherSettings()).contents
    check_contents(contents, run)
    assert [sorted(group["clusters"]) for group in contents["groups"]] == [[1, 3, 5], [0, 4], [2, 6]]
    assert contents["title"] == "made: 3 groups and 7 clusters of 300 images"
    assert [group["name"] for group in contents["groups"]] == ["", "", ""]
    assert contents["how_found"]["levels"].startswith("The images form 3 groups. ")
    assert len(contents["images"]["group_probability"]) == 300


def test_a_group_is_of_its_own_images(tmp_path: Path) -> None:
    """Groups are an assignment of their own: the images of a cluster may be in several."""
    run = opened(made_run(tmp_path, n=300, k=7, groups=[1, 0, 2, 0, 1, 0, 2], strays=60))
    contents = gather(run, GatherSettings()).contents
    check_contents(contents, run)
    size_G = np.bincount(run.assignments.column("group").to_numpy())
    assert [group["size"] for group in contents["groups"]] == size_G.tolist()
    of_clusters = [sum(contents["clusters"][k]["size"] for k in group["clusters"]) for group in contents["groups"]]
    assert of_clusters != size_G.tolist(), "groups are no unions of clusters here"
    assert sum(group["n_in_clusters"] for group in contents["groups"]) == 240
    assert "20.0% of all images are in another one" in contents["how_found"]["levels"]


def test_groups_that_are_as_many_as_clusters_and_others(tmp_path: Path) -> None:
    """Groups are not told by their number."""
    folder = made_run(tmp_path, n=90, k=3)
    rewrite(folder, group=((opened(folder).cluster_N + (np.arange(90) % 3 == 0)) % 3).tolist())
    run = opened(folder)
    contents = gather(run, GatherSettings()).contents
    check_contents(contents, run)
    assert (contents["run"]["n_groups"], contents["run"]["has_groups"]) == (3, True)
    assert contents["title"] == "made: 3 groups and 3 clusters of 90 images"


def test_a_group_without_clusters(tmp_path: Path) -> None:
    """All of its images are in clusters that have most of theirs in another."""
    folder = made_run(tmp_path, n=90, k=3)
    group_N = opened(folder).cluster_N.copy()
    group_N[:6] = 7
    rewrite(folder, group=group_N.tolist())
    run = opened(folder)
    contents = gather(run, GatherSettings()).contents
    check_contents(contents, run)
    assert (contents["groups"][3]["size"], contents["groups"][3]["clusters"]) == (6, [])


def test_one_level(tmp_path: Path) -> None:
    run = opened(made_run(tmp_path))
    contents = gather(run, GatherSettings()).contents
    assert [group["clusters"] for group in contents["groups"]] == [[k] for k in range(5)]
    assert contents["title"] == "made: 5 clusters of 200 images"
    assert contents["how_found"]["levels"] == "Groups are looked for only with --merge auto."


def test_a_run_that_did_not_look_for_groups(tmp_path: Path) -> None:
    run = opened(without_groups(made_run(tmp_path, groups=[0, 0, 0, 1, 1])))
    assert run.group_probability_N is None
    contents = gather(run, GatherSettings()).contents
    check_contents(contents, run)
    assert len(contents["groups"]) == 5
    assert "did not look for groups" in contents["how_found"]["levels"]


def test_a_group_with_an_empty_cluster(tmp_path: Path) -> None:
    folder = made_run(tmp_path, n=60, k=4)
    rewrite(folder, cluster=[0] * 20 + [1] * 20 + [2] * 20, group=[0] * 40 + [1] * 20)
    run = opened(folder)
    contents = gather(run, GatherSettings()).contents
    check_contents(contents, run)
    assert [group["size"] for group in contents["groups"]] == [40, 20]


def test_more_clusters_in_a_group_than_images_that_stand_for_it(tmp_path: Path) -> None:
    run = opened(made_run(tmp_path, n=300, k=30, groups=[0] * 29 + [1]))
    contents = gather(run, GatherSettings()).contents
    check_contents(contents, run)
    assert len({contents["images"]["cluster"][row] for row in contents["groups"][0]["central"]}) == 24


def test_names_of_groups(tmp_path: Path) -> None:
    folder = made_run(tmp_path, groups=[0, 0, 1, 1, 1])
    opened(folder).group_names.give(1, "birds")
    contents = gather(opened(folder), GatherSettings()).contents
    assert [group["name"] for group in contents["groups"]] == ["", "birds"]
    assert not any("named" in note for note in contents["notes"])
    rewrite(folder, group=opened(folder).cluster_N.tolist())
    contents = gather(opened(folder), GatherSettings()).contents
    assert {group["name"] for group in contents["groups"]} == {""}
    assert any("in an earlier result of this run, so these names are not shown" in note for note in contents["notes"])


def test_what_is_not_finite(tmp_path: Path) -> None:
    folder = made_run(tmp_path, n=60)
    rewrite(folder, probability=[float("nan")] * 60, outlier_score=[float("inf")] + [float("nan")] * 59)
    run = opened(folder)
    contents = gather(run, GatherSettings()).contents
    check_contents(contents, run)
    assert contents["curves"]["loss"] == [(1.0, 2.0)]


def test_clusters_that_are_chance(tmp_path: Path) -> None:
    folder = made_run(tmp_path, n=60)
    rewrite(folder, probability=[0.21] * 60)
    notes = gather(opened(folder), GatherSettings()).contents["notes"]
    assert any("hardly differ" in note and "at most 0.21, where chance is 0.20" in note for note in notes)
    rewrite(folder, probability=[0.21] * 29 + [0.4] * 31)
    assert not any("hardly differ" in note for note in gather(opened(folder), GatherSettings()).contents["notes"])


def test_identical_images(tmp_path: Path) -> None:
    folder = made_run(tmp_path, n=50, k=2)
    np.save(folder / run_files.EMBEDDINGS, np.tile(np.eye(1, 16, dtype=np.float16), (50, 1)))
    run = opened(folder)
    contents = gather(run, GatherSettings()).contents
    check_contents(contents, run)
    assert set(contents["images"]["x"]) == {0.5}


def test_choice_of_images(tmp_path: Path) -> None:
    run = opened(made_run(tmp_path, n=600, k=4, spread=1.5))
    gathered = gather(run, GatherSettings())
    measured, contents = gathered.measured, gathered.contents
    x_ND, mean_KD = np.asarray(run.embeddings, dtype=np.float64), run.mean_KD
    expected_N = np.einsum("nd,nd->n", x_ND, mean_KD[run.cluster_N])
    np.testing.assert_allclose(measured.cosine_N, expected_N, atol=1e-5)
    for k, cluster in enumerate(contents["clusters"]):
        inside = np.flatnonzero(run.cluster_N == k)
        central = gathered.image_M[cluster["central"]]
        assert list(central) == list(inside[np.argsort(-measured.cosine_N[inside], kind="stable")][:24])
        assert abs(cluster["cohesion"] - expected_N[inside].mean()) < 1e-3
        border = gathered.image_M[cluster["boundary"]]
        share_NK = np.sort(run.mixture.predict_proba(x_ND[border]).toarray(), axis=1)
        gaps = share_NK[:, -1] - share_NK[:, -2]
        assert (np.diff(gaps) >= -1e-4).all()
        assert (gaps < 0.5 + 1e-4).all()
        scores = [contents["images"]["outlier_score"][row] for row in cluster["outliers"]]
        assert scores == sorted(scores, reverse=True)
        assert min(scores, default=1) >= 0.8


def test_many_images_are_drawn_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "MOST_ROWS", 150)
    run = opened(made_run(tmp_path, n=900, k=3))
    contents = gather(run, GatherSettings()).contents
    check_contents(contents, run)
    named = {row for c in contents["clusters"] for row in [*c["central"], *c["boundary"], *c["outliers"], *c["sample"]]}
    assert named <= set(range(len(contents["images"]["id"])))
    assert len(contents["images"]["id"]) < 900
    assert any("of 900 images: examples of each cluster, and a random sample;" in n for n in contents["notes"])


def test_counts_leave_room() -> None:
    for k in (1, 10, 300, 1000, 5000):
        counts = clusters.n_examples(k)
        assert k * sum(counts.values()) <= clusters.MOST_ROWS - 3000
        assert counts["central"] >= 1


def test_too_many_clusters_for_a_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "MOST_CLUSTERS", 3)
    run = opened(made_run(tmp_path))
    contents = gather(run, GatherSettings()).contents
    check_contents(contents, run)
    assert contents["tree"] is None
    assert "5 clusters are too many for a tree" in " ".join(contents["notes"])


def test_umap_that_is_not_installed(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install umap-learn"):
        gather(opened(trained), GatherSettings(map="umap"))


# -- names that are meant to do harm


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("hostile")
    return opened(trained_run(folder, hostile_folder(folder), name="<i>run"))


def test_hostile_names_arrive_as_they_are(hostile: Run) -> None:
    contents = gather(hostile, GatherSettings()).contents
    check_contents(contents, hostile)
    assert sorted(contents["label_names"] or []) == sorted(HOSTILE)
    assert all(r"\xff\xfe" in name and "</script>" in name for name in contents["images"]["id"])
    assert min(contents["images"]["thumbnail"]) == 0, "each is found again by its name"
    assert contents["title"].startswith("<i>run: ")
    assert contents["run"]["data"].endswith(r'images "<b>\xff')


def test_surrogates_become_printable(tmp_path: Path) -> None:
    from siammm.core.text import printable

    assert printable(b"a\xffb".decode("utf-8", "surrogateescape")) == r"a\xffb"
    assert printable("\ud83d alone") == r"\ud83d alone"
    assert printable("\u202eא\x00é") == "\u202eא\x00é"


# -- images that are gone, moved or changed


def test_images_that_are_gone(tmp_path: Path) -> None:
    folder = made_run(tmp_path)
    (tmp_path / "made-images.npy").unlink()
    run = opened(folder)
    gathered = gather(run, GatherSettings())
    check_contents(gathered.contents, run)
    assert gathered.sheets == []
    assert set(gathered.contents["images"]["thumbnail"]) == {-1}
    assert "could not be opened, so none are shown; say where they are with --data" in gathered.contents["notes"][0]


def test_images_that_moved(tmp_path: Path) -> None:
    folder = made_run(tmp_path)
    moved = (tmp_path / "made-images.npy").rename(tmp_path / "moved.npy")
    contents = gather(opened(folder, data=str(moved)), GatherSettings()).contents
    assert min(contents["images"]["thumbnail"]) == 0
    assert contents["run"]["data"] == str(moved)
    with pytest.raises(InputError, match="does not exist"):
        opened(folder, data=str(tmp_path / "elsewhere.npy"))


def test_rows_that_changed_are_not_shown(tmp_path: Path) -> None:
    folder = made_run(tmp_path)
    np.save(tmp_path / "made-images.npy", np.zeros((200, 8, 8, 3), np.uint8))
    contents = gather(opened(folder), GatherSettings()).contents
    assert set(contents["images"]["thumbnail"]) == {-1}
    assert "are not those of the run, so none are shown" in contents["notes"][0]
    with pytest.raises(InputError, match="are not those of the run; give --data"):
        opened(folder, data=str(tmp_path / "made-images.npy"))


def test_files_are_found_by_name(tmp_path: Path) -> None:
    root = write_folder(tmp_path, small_set(tmp_path, 40))
    folder = trained_run(tmp_path, root)
    files = sorted(root.rglob("*.png"))
    files[0].rename(files[0].with_name("new.png"))
    files[1].write_bytes(b"no image any more")
    run = opened(folder)
    contents = gather(run, GatherSettings()).contents
    check_contents(contents, run)
    assert contents["images"]["thumbnail"].count(-1) == 2
    assert "have changed since the run (1 are gone); what is shown is found by name" in contents["notes"][0]
    assert any("2 of the 40 images on this page can no longer be read" in note for note in contents["notes"])


def test_a_run_of_an_earlier_version(tmp_path: Path, trained: Path) -> None:
    """Without embeddings.npy the images are embedded again, to the same."""
    older = tmp_path / "older"
    shutil.copytree(trained, older)
    (older / run_files.EMBEDDINGS).unlink()
    merges = json.loads((older / run_files.MERGES).read_text())
    del merges["nodes"]
    (older / run_files.MERGES).write_text(json.dumps(merges))
    run = opened(older)
    np.testing.assert_allclose(run.embeddings, np.load(trained / run_files.EMBEDDINGS), atol=2e-3)
    check_contents(gather(run, GatherSettings()).contents, run)
    config = json.loads((older / run_files.CONFIG).read_text())
    (older / run_files.CONFIG).write_text(json.dumps(config | {"data_path": "/nowhere"}))
    with pytest.raises(InputError, match="kept no embeddings, and its images are no longer all in /nowhere"):
        opened(older)


def test_an_earlier_run_whose_images_are_damaged(tmp_path: Path) -> None:
    root = write_folder(tmp_path, small_set(tmp_path, 40))
    folder = trained_run(tmp_path, root)
    (folder / run_files.EMBEDDINGS).unlink()
    next(root.rglob("*.png")).write_bytes(b"no image any more")
    with pytest.raises(
        InputError, match=r"kept no embeddings, and not all .* can be read again \(1 of 40 .*; put them"
    ):
        opened(folder)


def test_what_is_no_finished_run(tmp_path: Path, trained: Path) -> None:
    def spoilt(name: str, *gone: str) -> Path:
        shutil.copytree(trained, tmp_path / name)
        for file in gone:
            (tmp_path / name / file).unlink()
        return tmp_path / name

    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for path, message in (
        (tmp_path / "nowhere", "does not exist; give a run folder"),
        (tmp_path / "file", "is a file; give a run folder"),
        (tmp_path / "empty", "is not a run folder: it has no encoder.safetensors"),
        (spoilt("bare", "config.json", "encoder.safetensors"), "it has no encoder.safetensors and no summary.json"),
        (spoilt("unfinished", "encoder.safetensors"), "has not finished; continue with: siammm train --resume"),
        (spoilt("plain", "mixture.safetensors"), "has no clusters, because it was trained without a mixture"),
        (spoilt("torn", "assignments.parquet"), "assignments.parquet cannot be read"),
    ):
        with pytest.raises(ValueError, match=message):
            opened(path)
    other = spoilt("mixed")
    np.save(other / run_files.EMBEDDINGS, np.zeros((3, 3), np.float16))
    with pytest.raises(ValueError, match=r"has the shape \(3, 3\), but the run has \(80, 16\); remove it"):
        opened(other)
    rewrite(other, cluster=[99] * 80)
    with pytest.raises(ValueError, match=r"names a cluster that mixture\.safetensors does not have"):
        opened(other)


def test_embeddings_are_left_beside_assignments(trained: Path) -> None:
    embedding_ND = np.load(trained / run_files.EMBEDDINGS, mmap_mode="r")
    assert embedding_ND.dtype == np.float16
    assert embedding_ND.shape == (pq.read_table(trained / run_files.ASSIGNMENTS).num_rows, 16)
    np.testing.assert_allclose(np.linalg.norm(embedding_ND.astype(np.float64), axis=1), 1, atol=2e-3)
    run = opened(trained)
    agree = run.mixture.predict(np.asarray(embedding_ND, dtype=np.float32)) == run.cluster_N
    assert agree.mean() > 0.97, "but for rounding to 16 bits"
    nodes = json.loads((trained / run_files.MERGES).read_text())["nodes"]
    assert len(set(nodes)) == run.n_clusters
