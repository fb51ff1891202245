"""Images in Parquet files and saved datasets: columns, splits, and tables beyond memory."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siammm.data import table_source
from siammm.data.decode import BadImage
from siammm.data.set_aside import decode_all
from siammm.data.sources import open_source
from tests.data import image_sets
from tests.data.opened import GIVEN, PNGS, identifiers, refused


def test_parquet_is_read_once_when_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(image_sets.write_parquet(tmp_path, GIVEN))
    assert source.note is None
    reads = counted(source, monkeypatch)
    for i in np.random.default_rng(0).integers(0, 12, 50):
        source.image(i)
    assert sorted(reads) == [0, 1, 2]


def counted(source: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    reads: list[int] = []
    read = source._read_group

    def count(group: int) -> Any:
        reads.append(group)
        return read(group)

    monkeypatch.setattr(source, "_read_group", count)
    return reads


def test_parquet_beyond_memory_keeps_a_few_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_source, "IN_MEMORY_LIMIT", 1000)
    monkeypatch.setattr(table_source, "_CACHE_LIMIT", 3000)
    source = open_source(image_sets.write_parquet_folder(tmp_path, GIVEN))
    assert source.note is not None
    assert "slow to read at random" in source.note
    reads = counted(source, monkeypatch)
    np.testing.assert_array_equal(decode_all(source, threads=4).images, GIVEN.images)
    assert len(source._groups) < 4  # type: ignore[attr-defined]
    assert sorted(set(reads)) == [0, 1, 2, 3]
    reads.clear()
    for i in range(12):
        source.image(i)
    assert len(reads) == 4
    assert source.uniform_shape() == (8, 10)
    monkeypatch.undo()
    assert source.fingerprint() == pickle.loads(pickle.dumps(source)).fingerprint()


def parquet(tmp_path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    return tmp_path / "x.parquet"


def test_parquet_columns_are_found(tmp_path: Path) -> None:
    plain = open_source(parquet(tmp_path, photo_data=PNGS, thumbnail=["x"] * 4, target=["b", "a", "b", "c"]))
    np.testing.assert_array_equal(plain.image(3), GIVEN.images[3])
    assert plain.label_names == ["a", "b", "c"]
    np.testing.assert_array_equal(plain.labels, [1, 0, 1, 2])
    coded = pa.array(["x", "y", "x", "x"]).dictionary_encode()
    large = open_source(parquet(tmp_path, img=pa.array(PNGS, pa.large_binary()), label=coded))
    np.testing.assert_array_equal(large.labels, [0, 1, 0, 0])
    np.testing.assert_array_equal(large.image(1), GIVEN.images[1])
    assert large.identifier(1) == "1"


def test_parquet_columns_are_chosen(tmp_path: Path) -> None:
    path = parquet(tmp_path, a=PNGS, b=PNGS[::-1], number=[1, 2, 3, 4], real=[0.5] * 4)
    refused(path, "2 columns that could be images; give --image-key one of: a, b")
    refused(path, "no column 'c'", image_key="c")
    refused(path, "holds int64", image_key="number")
    refused(path, "does not exist", image_key="a", label_key="c")
    refused(path, "no integers or strings", image_key="a", label_key="real")
    source = open_source(path, image_key="b", label_key="number")
    np.testing.assert_array_equal(source.image(0), GIVEN.images[3])
    np.testing.assert_array_equal(source.labels, [1, 2, 3, 4])
    refused(parquet(tmp_path, file_name=["a.png"]), "no column of images.*embed")
    refused(parquet(tmp_path, image=pa.array([], pa.binary())), "0 rows")


def test_missing_values_in_tables(tmp_path: Path) -> None:
    path = parquet(tmp_path, image=[PNGS[0], None, b"", PNGS[1]], label=[0, None, 1, 1])
    source = open_source(path)
    assert source.labels is None
    refused(path, "1 of 4 rows.*no label", label_key="label")
    for i in (1, 2):
        with pytest.raises(BadImage, match="empty"):
            source.image(i)
    rows = [{"bytes": None, "path": "/etc/hostname"}, {"bytes": PNGS[0], "path": None}]
    source = open_source(parquet(tmp_path, image=rows))
    with pytest.raises(BadImage, match="no bytes in its row"):
        source.image(0)
    np.testing.assert_array_equal(source.image(1), GIVEN.images[0])


def test_parquet_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        pq.write_table(pa.table({"image": PNGS[:2]}), tmp_path / folder / "x.parquet", row_group_size=1)
    assert identifiers(open_source(tmp_path)) == ["a/x.parquet:0", "a/x.parquet:1", "b/x.parquet:0", "b/x.parquet:1"]


def test_parquet_files_must_be_of_one_kind(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": PNGS}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"picture": PNGS}), tmp_path / "b.parquet")
    refused(tmp_path, "'image' is binary in .* but no such column")


def test_a_saved_dataset_is_mapped(tmp_path: Path) -> None:
    root = image_sets.write_datasets(tmp_path, GIVEN)
    before = pa.total_allocated_bytes()
    source = open_source(root, label_key="")
    assert pa.total_allocated_bytes() - before < 10_000
    assert source.identifier(8) == "8"
    assert len(open_source(next(root.glob("*.arrow")))) == 6
