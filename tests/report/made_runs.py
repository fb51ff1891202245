"""Finished runs to look at: made in a moment, with any number of images and clusters, or trained for two epochs.

    folder = made_run(tmp_path, n=200, k=5)
    run = opened(folder)
    check_contents(gather(run, GatherSettings()).contents, run)

``check_contents`` holds what is true of every page.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from siammm.cli import main
from siammm.data.sources import open_source
from siammm.data.view_settings import views
from siammm.learn.build import build_network
from siammm.metrics.outliers import outlier_score
from siammm.mixture.estimator import VonMisesFisherMixture
from siammm.report.schema import Contents
from siammm.runs import files as run
from siammm.runs.network_file import save_network
from siammm.runs.run import Run
from siammm.settings.training import DataConfig
from tests.commands import TINY
from tests.data.image_sets import ExampleImages, encoded, example_images
from tests.learn.small_runs import small_config
from tests.runs.parts import begun

CPU = torch.device("cpu")

HOSTILE = [
    '"><img src=x onerror=window.hit=1>',
    "' onmouseover='window.hit=1",
    "javascript:window.hit=1",
    "<script>window.hit=1<",
    "<!--<script>",
    "line\nbreak\r\u2028\u2029",
    "\u202ertl\u200f \u05d0\u05d1",
    "{{ 7 * 7 }}{% raw %}",
    "&lt;b&gt;&amp;",
    "tab\tand\x07bell\x1b[31m",
]
"""Names of folders, hence labels; ``script>`` as the name of a file in one that ends in ``<`` closes a script."""


def trained_run(folder: Path, images: Path, *, seed: int = 0, name: str = "run") -> Path:
    """A run of two epochs on real images."""
    arguments = ["train", str(images), "--output", str(folder / name), *TINY, "--random-state", str(seed)]
    assert main(arguments) == 0
    return folder / name


def hostile_folder(folder: Path, n: int = 40) -> Path:
    """Images whose labels and names are as bad as a file system allows, some of their bytes no UTF-8."""
    given = example_images(n, size=(8, 8), n_classes=len(HOSTILE))
    root = folder / os.fsdecode(b'images "<b>\xff')
    for i, (image, label) in enumerate(zip(given.images, given.labels, strict=True)):
        # Below a folder that ends in "<", the path holds </script>.
        below = root / HOSTILE[label] / "x<"
        below.mkdir(parents=True, exist_ok=True)
        raw = bytes(below) + b"/script>" + f"<svg onload=window.hit={i}>".encode() + b"\xff\xfe" + f"{i}.png".encode()
        with open(raw, "wb") as file:
            file.write(encoded(image))
    return root


def made_run(
    folder: Path,
    *,
    n: int = 200,
    k: int = 5,
    d: int = 16,
    size: int = 8,
    n_labels: int = 3,
    seed: int = 0,
    name: str = "made",
    spread: float = 0.3,
    pixels: np.ndarray | None = None,
    backbone: str = "conv-small",
    groups: list[int] | None = None,
    strays: int = 0,
) -> Path:
    """A run folder as training leaves it, around random clusters, with its images beside it.

    ``groups`` is the group of each cluster; by default each is its own, as where no coarser level is found. So many
    ``strays`` are in the group after that, as images that groups and clusters divide differently.
    """
    random = np.random.default_rng(seed)
    centre_KD = random.normal(size=(k, d))
    centre_KD /= np.linalg.norm(centre_KD, axis=1, keepdims=True)
    cluster_N = random.integers(0, k, n) if n > k else np.arange(n) % k
    x_ND = (centre_KD[cluster_N] + spread * random.normal(size=(n, d)) / np.sqrt(d)).astype(np.float32)
    x_ND /= np.linalg.norm(x_ND, axis=1, keepdims=True)
    mixture = VonMisesFisherMixture(k, max_iter=2, random_state=0, device="cpu").fit(x_ND, init=centre_KD)
    images = pixels if pixels is not None else random.integers(0, 255, (n, size, size, 3), dtype=np.uint8)
    path = folder / f"{name}-images.npy"
    np.save(path, images)
    source = open_source(path)
    config = small_config(embedding_dim=d, data=str(path), backbone=backbone)
    facts = {"data_path": str(path), "fingerprint": source.fingerprint(), "n_images": n, "kind": source.kind}
    made = begun(folder / name, config, facts)
    made.add_metrics({"epoch": 1, "loss": 2.0, "n_clusters": k, "seconds": 1.5})
    made.add_metrics({"epoch": 2, "loss": math.inf, "n_clusters": k, "seconds": 1.5})
    network = build_network(config, size)
    save_network(made.path / run.ENCODER, network, config, views(size)[0])
    mixture.save(made.path / run.MIXTURE)
    np.save(made.path / run.EMBEDDINGS, x_ND.astype(np.float16))
    label_N = np.asarray(mixture.labels_, dtype=np.int32)
    group_N = np.asarray(range(k) if groups is None else groups, dtype=np.int32)[label_N]
    group_N[:strays] = (group_N[:strays] + 1) % (group_N.max() + 1)
    columns: dict[str, Any] = {
        "id": [source.identifier(i) for i in range(n)],
        "cluster": label_N,
        "group": group_N,
        "probability": np.asarray(mixture.predict_proba(x_ND).max(axis=1).toarray().ravel(), dtype=np.float32),
        "outlier_score": outlier_score(np.asarray(mixture.score_samples(x_ND))),
    }
    if groups is not None:
        columns["group_probability"] = random.uniform(0.3, 1, n).astype(np.float32)
    if n_labels:
        columns["label"] = [f"label {c}" for c in (cluster_N % n_labels).tolist()]
    pq.write_table(pa.table(columns), made.path / run.ASSIGNMENTS)
    merges = {"linkage": [], "n_merges": 0, "n_components": [k], "nodes": list(range(k)), "n_clusters_by_epoch": []}
    (made.path / run.MERGES).write_text(json.dumps(merges))
    return made.path


def rewrite(folder: Path, **columns: Any) -> None:
    """Put other columns into the run's table of assignments."""
    table = pq.read_table(folder / run.ASSIGNMENTS).to_pydict() | columns
    if "cluster" in columns and "group" not in columns:
        table["group"] = table["cluster"]
    pq.write_table(pa.table(table), folder / run.ASSIGNMENTS)


def without_groups(folder: Path) -> Path:
    """The run as an earlier version left it, which did not look for groups."""
    table = pq.read_table(folder / run.ASSIGNMENTS)
    kept = [name for name in table.column_names if not name.startswith("group")]
    pq.write_table(table.select(kept), folder / run.ASSIGNMENTS)
    return folder


def opened(folder: Path, *, data: str | None = None, **reading: Any) -> Run:
    run = Run.open(folder)
    run.find_images(data, DataConfig(**reading))
    assert len(run.embeddings) == run.n_images
    return run


def small_set(folder: Path, n: int = 80, *, seed: int = 0) -> ExampleImages:
    return example_images(n, size=(8, 8), n_classes=4, seed=seed)


# -- what is true of every page ----------------------------------------------------------------------------------------


def check_contents(contents: Contents, opened_run: Run) -> None:
    assert_plain(contents)
    assert json.loads(json.dumps(contents, allow_nan=False)) == as_lists(contents)
    images: Any = contents["images"]
    m = len(images["id"])
    sure_N = opened_run.group_probability_N
    own = [] if sure_N is None else ["group_probability"]
    assert {len(images[name]) for name in (*own, *(set(images) - {"position", "group_probability"}))} == {m}
    assert len(images["group_probability"]) == (0 if sure_N is None else m)
    assert len(set(images["id"])) == m <= opened_run.n_images
    n_labels = len(contents["label_names"] or [])
    assert all(-1 <= label < n_labels for label in images["label"])
    for name in ("probability", "group_probability", "outlier_score", "x", "y"):
        assert all(0 <= value <= 1 for value in images[name]), name
    place = {name: i for i, name in enumerate(opened_run.ids)}
    row_of = [place[name] for name in images["id"]]
    assert images["cluster"] == opened_run.cluster_N[row_of].tolist()
    assert images["group"] == opened_run.group_N[row_of].tolist()
    assert images["label"] == opened_run.label_N[row_of].tolist()
    if sure_N is not None:
        np.testing.assert_allclose(images["group_probability"], sure_N[row_of], atol=1e-3)
    assert images["position"] == (row_of if contents["live"] else [])
    check_quality(contents, opened_run)
    check_thumbnails(contents)
    check_clusters(contents, opened_run.n_images)
    check_groups(contents, opened_run)
    if contents["tree"] is not None:
        check_tree(contents, opened_run)
    for suspect in contents["suspects"] or []:
        assert 0 <= suspect["image"] < m
        assert -1 <= min(suspect["given"], suspect["proposed"]) <= max(suspect["given"], suspect["proposed"]) < n_labels
        assert 0 <= suspect["score"] <= 1
        assert all(0 <= value <= 1 for _, value in suspect["evidence"])


def check_quality(contents: Contents, opened_run: Run) -> None:
    quality, m = contents["quality"], len(contents["images"]["id"])
    assert (quality is None) == (contents["live"] or opened_run.images.source is None)
    if quality is None:
        return
    assert quality["n_images"] == sum(number >= 0 for number in contents["images"]["thumbnail"])
    found: list[Any] = [*quality["odd"], *quality["duplicates"]]
    for each in found:
        assert len(set(each["images"])) == len(each["images"]) == len(each["sizes"])
        assert all(0 <= row < m for row in each["images"])
        assert all(min(size) >= 1 for size in each["sizes"])
    for each in quality["duplicates"]:
        assert len(each["images"]) == len(each["similarities"]) >= 2
        areas = [width * height for width, height in each["sizes"]]
        assert areas[0] == max(areas)
    rows = [row for each in quality["duplicates"] for row in each["images"]]
    assert len(rows) == len(set(rows)), "an image is in one set"


def check_thumbnails(contents: Contents) -> None:
    sheets = contents["thumbnails"]["sheets"]
    numbers = [number for number in contents["images"]["thumbnail"] if number >= 0]
    assert sorted(numbers) == list(range(len(numbers)))
    assert sum(sheet["n_thumbnails"] for sheet in sheets) == len(numbers)
    assert all(sheet["n_thumbnails"] == contents["thumbnails"]["per_sheet"] for sheet in sheets[:-1])
    held = [sheet["url"] is None for sheet in sheets]
    assert held == sorted(held, reverse=True), "those that the page holds come first"


def check_clusters(contents: Contents, n_images: int) -> None:
    images, clusters = contents["images"], contents["clusters"]
    assert len(clusters) == contents["run"]["n_clusters"]
    assert sum(cluster["size"] for cluster in clusters) == n_images == contents["run"]["n_images"]
    assert abs(sum(cluster["weight"] for cluster in clusters) - 1) < 1e-3
    for k, cluster in enumerate(clusters):
        named = [*cluster["central"], *cluster["boundary"], *cluster["outliers"], *cluster["sample"]]
        named += [row for _, rows in cluster["by_label"] for row in rows]
        assert all(0 <= row < len(images["id"]) for row in named)
        assert all(images["cluster"][row] == k for row in named)
        for kind in ("central", "boundary", "outliers", "sample"):
            assert len(set(cluster[kind])) == len(cluster[kind])
        assert bool(cluster["central"]) == (cluster["size"] > 0)
        for label, rows in cluster["by_label"]:
            assert rows
            assert all(images["label"][row] == label for row in rows)
        counts = [count for _, count in cluster["label_counts"]]
        assert counts == sorted(counts, reverse=True)
        assert sum(counts) <= cluster["size"]
        if counts:
            assert cluster["label"] == cluster["label_counts"][0][0]
            assert cluster["purity"] is not None
            assert abs(cluster["purity"] - counts[0] / sum(counts)) < 1e-3
        else:
            assert (cluster["label"], cluster["purity"]) == (-1, None)
        assert -1 <= cluster["cohesion"] <= 1
        assert cluster["foreign"] is None or 0 <= cluster["foreign"] <= 1
        assert not cluster["is_catch_all"] or (cluster["foreign"] or 0) > 0.4
        cosines = [cosine for _, cosine in cluster["nearest"]]
        assert cosines == sorted(cosines, reverse=True)
        assert k not in [other for other, _ in cluster["nearest"]]
        assert cluster["n_merged"] == 1 + len(cluster["merges"])
        if cluster["merges"]:
            assert sum(cluster["merges"][0][1:]) == cluster["n_merged"]
            epochs = [epoch for epoch, _, _ in cluster["merges"]]
            assert epochs == sorted(epochs, reverse=True)


def check_groups(contents: Contents, opened_run: Run) -> None:
    """A group is of its images, whatever clusters these are in."""
    groups, clusters, images = contents["groups"], contents["clusters"], contents["images"]
    cluster_N, group_N = opened_run.cluster_N, opened_run.group_N
    assert contents["run"]["has_groups"] == bool((cluster_N != group_N).any())
    assert len(groups) == contents["run"]["n_groups"] == opened_run.n_groups
    assert [cluster["group"] for cluster in clusters] == opened_run.group_K.tolist()
    assert sorted(k for group in groups for k in group["clusters"]) == list(range(len(clusters)))
    table = Counter(zip(cluster_N.tolist(), group_N.tolist(), strict=True))
    for k, cluster in enumerate(clusters):
        assert cluster["n_in_group"] == table[k, cluster["group"]]
        assert cluster["n_in_group"] == max((table[k, g] for g in range(len(groups))), default=0)
    for g, group in enumerate(groups):
        assert group["size"] == int((group_N == g).sum())
        own = [clusters[k] for k in group["clusters"]]
        assert all(cluster["group"] == g for cluster in own)
        sizes = [cluster["size"] for cluster in own]
        assert sizes == sorted(sizes, reverse=True)
        assert group["n_in_clusters"] == sum(cluster["n_in_group"] for cluster in own) <= group["size"]
        assert bool(group["central"]) == (group["size"] > 0)
        assert len(set(group["central"])) == len(group["central"]) <= 24
        assert {images["group"][row] for row in group["central"]} <= {g}
        # One image of each of its clusters, that with the most images here first, before the second of any.
        there = sorted((k for k in group["clusters"] if table[k, g]), key=lambda k: (-table[k, g], k))
        first = group["central"][: len(there)]
        assert [images["cluster"][row] for row in first] == there[: len(first)]
        strays = [images["cluster"][row] not in group["clusters"] for row in group["central"]]
        assert strays == sorted(strays), "those in clusters of others come last"
        counts = Counter(label for label in opened_run.label_N[group_N == g].tolist() if label >= 0)
        assert dict(group["label_counts"]) == dict(counts)
        assert group["label"] == max(counts, key=lambda label: (counts[label], -label), default=-1)
        share = counts[group["label"]] / counts.total() if counts else None
        assert (group["purity"] is None) == (share is None)
        assert share is None or abs((group["purity"] or 0) - share) < 1e-3


def check_tree(contents: Contents, opened_run: Run) -> None:
    tree, n_images = contents["tree"], opened_run.n_images
    assert tree is not None
    n, k = tree["n_leaves"], tree["n_clusters"]
    assert k == contents["run"]["n_clusters"] <= n
    assert len(tree["left"]) == len(tree["right"]) == len(tree["height"]) == n - 1
    for name in ("size", "cluster", "group", "label", "purity", "examples"):
        assert len(tree[name]) == 2 * n - 1, name
    assert sum(tree["size"][:n]) == n_images == tree["size"][-1]
    assert tree["height"] == sorted(tree["height"])
    used = Counter([*tree["left"], *tree["right"]])
    assert used == Counter(range(2 * n - 2)), "each node but the last is joined once"
    for i, (a, b) in enumerate(zip(tree["left"], tree["right"], strict=True)):
        assert max(a, b) < n + i, "what is joined exists already"
        assert tree["size"][n + i] == tree["size"][a] + tree["size"][b]
        if i < n - k:
            assert tree["cluster"][a] == tree["cluster"][b] == tree["cluster"][n + i] >= 0
        else:
            assert tree["cluster"][n + i] == -1
    for count in {1, min(2, n), k, (k + n) // 2, n}:
        parts = cut(contents, count)
        assert len(parts) == count
        assert sum(tree["size"][node] for node in parts) == n_images
    sizes = {tree["cluster"][node]: tree["size"][node] for node in cut(contents, k)}
    assert sizes == {i: cluster["size"] for i, cluster in enumerate(contents["clusters"])}
    for node in cut(contents, k):
        assert tree["label"][node] == contents["clusters"][tree["cluster"][node]]["label"]
        assert tree["purity"][node] == contents["clusters"][tree["cluster"][node]]["purity"]
    parts, groups = cut(contents, tree["n_groups"]), contents["groups"]
    with_clusters = [g for g, group in enumerate(groups) if group["clusters"]]
    assert sorted(tree["group"][node] for node in parts) == with_clusters, "a cut gives the clusters of each group"
    for node in parts:
        own = groups[tree["group"][node]]["clusters"]
        assert tree["size"][node] == sum(contents["clusters"][k]["size"] for k in own)
    for node, cluster in enumerate(tree["cluster"]):
        assert cluster < 0 or tree["group"][node] == contents["clusters"][cluster]["group"]
    for node, rows in enumerate(tree["examples"]):
        assert bool(rows) == (tree["size"][node] > 0)
        assert all(0 <= row < len(contents["images"]["id"]) for row in rows)
        if tree["cluster"][node] >= 0:
            assert {contents["images"]["cluster"][row] for row in rows} <= {tree["cluster"][node]}


def cut(contents: Contents, count: int) -> list[int]:
    """The nodes of a cut into so many groups: all that are left when the last joins are undone."""
    tree = contents["tree"]
    assert tree is not None
    kept = tree["n_leaves"] - count
    joined = {*tree["left"][:kept], *tree["right"][:kept]}
    return [node for node in range(tree["n_leaves"] + kept) if node not in joined]


def assert_plain(value: Any) -> None:
    """Nothing but what JSON knows, and that finite and valid."""
    if isinstance(value, dict):
        assert all(type(key) is str for key in value)
        for inner in value.values():
            assert_plain(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            assert_plain(inner)
    elif type(value) is str:
        value.encode("utf-8")
    else:
        assert value is None or type(value) in (int, float, bool), type(value)
        assert value is None or math.isfinite(value)


def as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_lists(inner) for key, inner in value.items()}
    return [as_lists(inner) for inner in value] if isinstance(value, (list, tuple)) else value
