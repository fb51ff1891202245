"""Tables that DuckDB, pandas and our own commands read as they are."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from siammm import SiamMM, VonMisesFisherMixture
from siammm.core.errors import InputError
from siammm.data.embeddings import read_embeddings
from siammm.data.sources import open_source
from siammm.export.tables import clusters_table
from siammm.runs.encoded_images import encode_to_file
from siammm.runs.image_table import ImageTable, file_paths, image_table, write_npz, write_parquet
from siammm.runs.models import open_model
from siammm.runs.run import Run
from siammm.settings.training import DataConfig
from tests.data.image_sets import encoded as png
from tests.export.runs import N_IMAGES, pictures


@pytest.fixture(scope="module")
def own(run_folder: Path) -> Run:
    return Run.open(run_folder)


@pytest.fixture(scope="module")
def table(own: Run, tmp_path_factory: pytest.TempPathFactory) -> ImageTable:
    loader = own.loader(None, DataConfig())
    spool = tmp_path_factory.mktemp("spool") / "rows.npy"
    return image_table(loader, encode_to_file(own.embedding_rows, loader, spool, mixture=own.mixture))


def test_it_is_what_the_run_found(table: ImageTable, run_folder: Path) -> None:
    assignments = pq.read_table(run_folder / "assignments.parquet")
    for name in ("id", "cluster", "group", "label"):
        assert table.columns[name].to_pylist() == assignments.column(name).to_pylist()
    for name in ("probability", "outlier_score"):
        np.testing.assert_allclose(table.columns[name], assignments.column(name), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(table.rows, axis=1), 1, atol=1e-6)


def test_parquet_as_pandas_and_duckdb_read_it(
    table: ImageTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("siammm.runs.image_table._BYTES_OF_A_GROUP", 0)
    monkeypatch.setattr("siammm.runs.image_table._LEAST_ROWS", 50)
    path = tmp_path / "embeddings.parquet"
    write_parquet(path, table)
    stored = pq.ParquetFile(path)
    assert stored.num_row_groups == 3
    assert stored.schema_arrow.field("embedding").type == pa.list_(pa.float32(), 16)
    assert stored.schema_arrow.names == [
        "id", "embedding", "filepath", "cluster", "group", "probability", "group_probability", "outlier_score", "label",
    ]  # fmt: skip
    frame = pd.read_parquet(path)
    np.testing.assert_array_equal(np.stack(list(frame["embedding"])), table.rows)
    assert all(Path(file).is_file() for file in frame["filepath"])
    counted = answer(f"SELECT cluster, count(*) AS n FROM '{path}' GROUP BY cluster ORDER BY cluster")
    assert dict(counted) == frame["cluster"].value_counts().to_dict()
    nearest = answer(
        f"""
        SELECT b.id FROM '{path}' a, '{path}' b WHERE a.id = ? ORDER BY list_cosine_similarity(a.embedding, b.embedding)
        DESC LIMIT 1
        """,
        frame["id"][5],
    )
    assert nearest == [(frame["id"][5],)]


@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
def test_our_own_reader_takes_it(table: ImageTable, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"table{suffix}"
    (write_parquet if suffix == ".parquet" else write_npz)(path, table)
    read = read_embeddings(path)
    np.testing.assert_array_equal(read.embeddings, table.rows)
    assert read.ids is not None
    assert read.ids.tolist() == table.columns["id"].to_pylist()
    assert read.labels is not None
    assert read.labels.tolist() == table.columns["label"].to_pylist()


def test_clusters(table: ImageTable, own: Run, tmp_path: Path) -> None:
    found = clusters_table(own.mixture, table)
    frame: Any = pd.DataFrame({"cluster": table.columns["cluster"], "label": table.columns["label"]})
    assert sum(found.column("size").to_pylist()) == N_IMAGES
    for row in found.to_pylist():
        inside = frame[frame["cluster"] == row["cluster"]]["label"]
        assert row["size"] == len(inside)
        if len(inside):
            assert row["purity"] == pytest.approx(inside.value_counts(normalize=True).max())
            assert (inside == row["majority_label"]).sum() == inside.value_counts().max()
        else:
            assert row["majority_label"] is None
            assert row["purity"] is None
        assert np.linalg.norm(row["mean_direction"]) == pytest.approx(1, abs=1e-5)
    assert sum(found.column("weight").to_pylist()) == pytest.approx(1)
    pq.write_table(found, tmp_path / "clusters.parquet")
    assert len(answer(f"SELECT * FROM '{tmp_path}/clusters.parquet'")) == own.mixture.n_components_


def test_groups(grouped_folder: Path, tmp_path: Path) -> None:
    """Those of the run for its own images, and the rule's for others; clusters say which group they are in."""
    own = Run.open(grouped_folder)
    assert own.groups is not None
    loader = own.loader(None, DataConfig())
    table = image_table(loader, encode_to_file(own.embedding_rows, loader, tmp_path / "a.npy", mixture=own.mixture))
    assert table.columns["group"].to_pylist() == own.group_N.tolist()
    assert clusters_table(own.mixture, table).column("group").to_pylist() == own.group_K.tolist()
    np.save(tmp_path / "images.npy", pictures(50, 8))
    loader = own.loader(str(tmp_path / "images.npy"), DataConfig())
    features = open_model(str(own.path)).features
    found = encode_to_file(features, loader, tmp_path / "b.npy", mixture=own.mixture)
    assert found.group_N is not None
    model = SiamMM.load(grouped_folder, device="cpu")
    np.testing.assert_array_equal(found.group_N, model.predict_group(str(tmp_path / "images.npy")))


def test_a_mixture_that_knows_no_groups(own: Run, tmp_path: Path) -> None:
    """As earlier versions saved it."""
    mixture = deepcopy(own.mixture)
    mixture.groups_ = None
    loader = own.loader(None, DataConfig())
    table = image_table(loader, encode_to_file(own.embedding_rows, loader, tmp_path / "a.npy", mixture=mixture))
    assert "group" not in table.columns
    assert "group" not in clusters_table(mixture, table).column_names


def test_a_cluster_without_images_and_numbers_for_labels() -> None:
    mixture = VonMisesFisherMixture(3, random_state=0, device="cpu").fit(np.eye(6, 4) + 0.01)
    columns: dict[str, Any] = {"cluster": pa.array([0, 0, 2, 2, 2], pa.int32()), "label": pa.array([7, 7, 7, 1, 1])}
    found = clusters_table(mixture, ImageTable(rows=np.zeros((5, 4), np.float32), columns=columns))
    assert found.column("majority_label").to_pylist() == [7, None, 1]
    assert found.column("purity").to_pylist() == [1.0, None, 2 / 3]
    assert (
        "purity"
        not in clusters_table(
            mixture, ImageTable(rows=np.zeros((5, 4), np.float32), columns={"cluster": columns["cluster"]})
        ).column_names
    )


def test_names_that_are_no_unicode_have_no_path(tmp_path: Path) -> None:
    folder = bytes(tmp_path / "images")
    (tmp_path / "images").mkdir()
    for name in (b"a.png", b"b\xff.png"):
        with open(folder + b"/" + name, "wb") as file:
            file.write(png(pictures(1, 8)[0]))
    source = open_source(str(tmp_path / "images"))
    paths = file_paths(source, np.arange(2))
    assert paths == [str(tmp_path / "images" / "a.png"), None]
    assert file_paths(open_source(pictures(2, 8)), np.arange(2)) is None


def test_features_are_those_of_the_online_encoder(own: Run, tmp_path: Path) -> None:
    images = pictures(10, 8)
    np.save(tmp_path / "images.npy", images)
    loader = own.loader(str(tmp_path / "images.npy"), DataConfig())
    model = open_model(str(own.path))
    found = encode_to_file(model.features, loader, tmp_path / "rows.npy", mixture=own.mixture)
    from siammm.data.augment import clean

    with torch.no_grad():
        x = clean(torch.from_numpy(images).permute(0, 3, 1, 2), 8, own.view)
        np.testing.assert_allclose(found.row_ND, own.network.encoder.features(x).numpy(), rtol=1e-5, atol=1e-5)
    assert found.cluster_N is not None


def test_a_run_without_images_asks_for_them(own: Run) -> None:
    saved = Run.of("it", own.network, own.config, own.view, own.mixture)
    with pytest.raises(InputError, match="it comes without images; give some with --data"):
        saved.loader(None, DataConfig())


def answer(question: str, *values: Any) -> list[tuple[Any, ...]]:
    relation: Any = duckdb.sql(question, params=values or None)
    return relation.fetchall()
