"""A part of a source is a source; names mean what a person means by them, or are refused."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from siammm.core.errors import InputError
from siammm.data.loader import open_loader
from siammm.data.sources import open_source
from siammm.data.subset import ABSENT, AMBIGUOUS, SourceSubset, matched, positions_of, read_names
from siammm.data.view_settings import views
from tests.data.image_sets import WRITERS, example_images, write_folder


@pytest.mark.parametrize("kind", ["folder", "npz", "tar"])
def test_a_part_of_a_source_is_a_source(kind: str, tmp_path: Path) -> None:
    given = example_images(12, size=(8, 8))
    source = open_source(WRITERS[kind](tmp_path, given))
    positions = [7, 2, 11]
    part = SourceSubset(source, positions)
    assert len(part) == 3
    for i, position in enumerate(positions):
        assert np.array_equal(part.image(i), source.image(position))
        assert part.identifier(i) == source.identifier(position)
        assert part.size(i) == (8, 8)
        assert part.content(i) == source.content(position)
    assert part.labels is not None
    assert np.array_equal(part.labels, given.labels[positions])
    assert part.label_names == source.label_names
    assert part.uniform_shape() == (8, 8)
    assert part.fingerprint() != source.fingerprint()
    assert np.array_equal(pickle.loads(pickle.dumps(part)).image(1), given.images[2])
    loader = open_loader(part, views(8, "32"), torch.device("cpu"), seed=0, workers=0)
    assert loader.n_images == 3
    with pytest.raises(IndexError):
        part.image(3)


def test_parts_that_are_none() -> None:
    source = open_source(example_images(4).images)
    with pytest.raises(InputError, match="holds no images"):
        SourceSubset(source, [])
    with pytest.raises(InputError, match="the images are 0 to 3"):
        SourceSubset(source, [0, 4])


def test_names_by_whole_name_by_their_end_or_without_extension() -> None:
    available = ["n01/x_1.JPEG", "n01/x_2.JPEG", "n02/y_1.JPEG", "n02/x_1.JPEG", "y.v2"]
    wanted = [
        "n01/x_1.JPEG",
        "x_2.JPEG",
        "x_2",
        "train/n02/x_1.JPEG",
        "x_1.JPEG",
        "n03/x_2.JPEG",
        "x_2.png",
        "none",
        "y.v2",
        "y",
    ]
    assert matched(wanted, available).tolist() == [0, 1, 1, 3, AMBIGUOUS, ABSENT, ABSENT, ABSENT, 4, ABSENT]
    assert matched(["x_2.JPEG"], ["x_2"]).tolist() == [0]
    assert matched([], available).tolist() == []


def test_positions_of_names_are_sorted_and_each_once(tmp_path: Path) -> None:
    source = open_source(write_folder(tmp_path, example_images(12)))
    assert positions_of(source, ["00007.png", "class000/00001.png", "00007"]).tolist() == [1, 7]
    with pytest.raises(InputError, match=r"'b' in the list is no image of .*, and so are 1 more of 3"):
        positions_of(source, ["00001.png", "b", "c"])


def test_an_ambiguous_name_is_refused(tmp_path: Path) -> None:
    root = write_folder(tmp_path, example_images(4, n_classes=2))
    (root / "class001" / "00000.png").write_bytes((root / "class000" / "00000.png").read_bytes())
    with pytest.raises(InputError, match="could be several images"):
        positions_of(open_source(root), ["00000.png"])


def test_lists_of_names(tmp_path: Path) -> None:
    path = tmp_path / "1percent.txt"
    path.write_bytes(b"\xef\xbb\xbfa.jpg\r\n\r\n  b c.jpg \n")
    assert read_names(path) == ["a.jpg", "b c.jpg"]
    path.write_text("\n\n")
    with pytest.raises(InputError, match="holds no names"):
        read_names(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is not text"):
        read_names(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_names(tmp_path / "none.txt")
