"""Splits, and the folders that Hugging Face ``datasets`` saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siammm.core.errors import SiamMMError
from siammm.data.set_aside import decode_all
from siammm.data.sources import open_source
from tests.data import image_sets
from tests.data.opened import GIVEN, refused


def test_hub_splits_are_told_apart(tmp_path: Path) -> None:
    root = image_sets.write_parquet_folder(tmp_path, GIVEN)
    pq.write_table(image_sets.image_table(GIVEN, slice(3)), root / "data" / "test-00000-of-00001.parquet")
    refused(root, "several splits.*hub::train|several splits.*hub::test")
    assert len(open_source(f"{root}::train")) == 12
    assert len(open_source(f"{root}::test")) == 3
    refused(f"{root}::validation", "no split 'validation'")
    assert len(open_source(f"{root}/data/train-*.parquet")) == 12
    assert open_source(f"{root}::train").identifier(7) == "train-00001-of-00002.parquet:1"


def test_a_dict_of_datasets_asks_for_a_split(tmp_path: Path) -> None:
    root = image_sets.write_datasets_dict(tmp_path, GIVEN)
    refused(root, "splits train; choose one, for example .*saved_dict::train")
    refused(f"{root}::test", "no split 'test'; it has: train")
    source = open_source(f"{root}::train")
    np.testing.assert_array_equal(decode_all(source).images, GIVEN.images)
    assert source.name == f"{root}::train"


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({"_data_files": [{"filename": "../data.arrow"}]}, "not in its folder"),
        ({"_data_files": [{"filename": "/etc/passwd"}]}, "not in its folder"),
        ({"_data_files": [{"filename": 3}]}, "not in its folder"),
        ({"_data_files": [7]}, "not in its folder"),
        ({"_data_files": []}, "names no Arrow files"),
        ({"_data_files": 7}, "names no Arrow files"),
        ({}, "names no Arrow files"),
        ([], "no table of keys"),
        ("{", "damaged"),
        ({"_data_files": [{"filename": "gone.arrow"}]}, "cannot be read"),
        ({"_data_files": [{"filename": "x"}], "_indices_data_files": [{"filename": "y"}]}, "flatten_indices"),
    ],
)
def test_damaged_saved_datasets_are_refused(state: Any, match: str, tmp_path: Path) -> None:
    root = image_sets.write_datasets(tmp_path, GIVEN)
    (root / "state.json").write_text(state if isinstance(state, str) else json.dumps(state))
    refused(root, match, SiamMMError)


def test_class_names_are_also_found_beside_the_tables(tmp_path: Path) -> None:
    root = tmp_path / "saved"
    root.mkdir()
    table = image_sets.image_table(GIVEN).replace_schema_metadata(None)
    with pa.ipc.new_stream(str(root / "data.arrow"), table.schema) as stream:
        stream.write_table(table)
    (root / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    info = {"features": {"label": {"names": GIVEN.names, "_type": "ClassLabel"}}}
    (root / "dataset_info.json").write_text(json.dumps(info))
    assert open_source(root).label_names == GIVEN.names
