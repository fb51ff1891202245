"""Folders of images: which files are read, in which order, and what their classes are."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siammm.data.decode import BadImage
from siammm.data.folder_source import FolderSource
from siammm.data.sources import open_source
from tests.data import image_sets
from tests.data.image_sets import encoded
from tests.data.opened import GIVEN, identifiers, refused


def write_files(root: Path, *names: str | bytes) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        path = os.path.join(os.fsencode(root), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(encoded(np.full((4, 4, 3), number, np.uint8)))
    return root


def test_a_folder_is_sorted_and_hidden_files_are_passed_over(tmp_path: Path) -> None:
    root = write_files(tmp_path / "r", "b.png", "a/z.PNG", "a/deep/er/y.jpeg", ".x.png", ".hidden/w.png", "a-b/v.webp")
    (root / "notes.txt").write_text("no image")
    (root / "Thumbs.db").write_bytes(b"")
    assert identifiers(open_source(root)) == ["a-b/v.webp", "a/deep/er/y.jpeg", "a/z.PNG", "b.png"]


@pytest.mark.parametrize(
    ("names", "classes"),
    [
        (["cat/1.png", "cat/2.png", "dog/1.png"], ["cat", "cat", "dog"]),
        (["all/cat/1.png", "all/dog/1.png", "all/dog/x/2.png"], ["cat", "dog", "dog"]),
        (["cat/1.png", "dog/deep/er/1.png"], ["cat", "dog"]),
        (["train/cat/1.png", "train/dog/1.png", "val/cat/1.png"], ["cat", "dog", "cat"]),
        (["cat/1.png", "dog/1.png", "stray.png"], None),
        (["all/cat/1.png", "all/dog/1.png", "all/stray.png"], None),
        (["train/1.png", "val/1.png"], None),
        (["train/cat/1.png", "val/1.png"], None),
        (["only/1.png", "only/2.png"], None),
        (["1.png", "2.png"], None),
    ],
)
def test_classes_are_the_first_folders_that_differ(names: list[str], classes: list[str] | None, tmp_path: Path) -> None:
    source = open_source(write_files(tmp_path / "r", *names))
    if classes is None:
        assert source.labels is None
        assert source.label_names is None
    else:
        assert source.labels is not None
        assert source.label_names == sorted(set(classes))
        assert np.array(source.label_names)[source.labels].tolist() == classes


def test_empty_folders_are_no_classes(tmp_path: Path) -> None:
    root = write_files(tmp_path / "r", "all/cat/1.png", "all/dog/1.png")
    (root / "empty").mkdir()
    assert open_source(root).label_names == ["cat", "dog"]


def test_links_are_followed_and_loops_end(tmp_path: Path) -> None:
    root = write_files(tmp_path / "r", "cat/1.png")
    elsewhere = write_files(tmp_path / "elsewhere", "2.png")
    (root / "dog").symlink_to(elsewhere)
    (root / "cat" / "loop").symlink_to(root)
    (elsewhere / "back").symlink_to(root / "dog")
    (root / "cat" / "linked.png").symlink_to(elsewhere / "2.png")
    source = open_source(root)
    assert identifiers(source) == ["cat/1.png", "cat/linked.png", "dog/2.png"]
    assert source.label_names == ["cat", "dog"]


def test_a_link_to_nothing_is_a_bad_image(tmp_path: Path) -> None:
    root = write_files(tmp_path / "r", "1.png")
    (root / "2.png").symlink_to(root / "gone.png")
    source = open_source(root)
    assert identifiers(source) == ["1.png", "2.png"]
    with pytest.raises(BadImage, match="No such file"):
        source.image(1)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    root = write_files(tmp_path / "r", "1.png")
    os.mkfifo(root / "2.png")
    assert identifiers(open_source(root)) == ["1.png"]


HOSTILE_NAMES: list[str | bytes] = [
    "new\nline.png",
    " .png",
    "'quotes\".png",
    "日本語.png",
    "emoji😀.png",
    "-rf.png",
    "a\tb.png",
    b"latin\xe9.png",
    b"\xff\xfe.png",
    "{0..9}.png",
    "%s%n.png",
]


def test_names_of_any_kind_are_read(tmp_path: Path) -> None:
    try:
        root = write_files(tmp_path / "r", *HOSTILE_NAMES)
    except OSError:
        pytest.skip("this file system takes only Unicode names")
    source = open_source(root)
    assert len(source) == len(HOSTILE_NAMES)
    seen = {int(source.image(i)[0, 0, 0]) for i in range(len(source))}
    assert seen == set(range(len(HOSTILE_NAMES)))
    names = identifiers(source)
    assert "new\nline.png" in names
    assert r"latin\xe9.png" in names
    for name in names:
        name.encode("utf-8")
    assert source.fingerprint() == pickle.loads(pickle.dumps(source)).fingerprint()


def test_folders_of_any_name_are_classes(tmp_path: Path) -> None:
    root = write_files(tmp_path / "r", b"caf\xe9/1.png", "new\nline/2.png")
    source = open_source(root)
    assert source.label_names == ["caf\\xe9", "new\nline"]


def test_a_root_with_a_strange_name_is_refused_in_one_line(tmp_path: Path) -> None:
    refused(tmp_path / "new\nline", "does not exist")
    (tmp_path / "new\nline").mkdir()
    refused(tmp_path / "new\nline", "holds no images")


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    refused(tmp_path, r"holds no images \(1 other files\)")
    (tmp_path / "data.arrow").write_text("x")
    refused(tmp_path, "save_to_disk")


def test_a_folder_has_no_columns(tmp_path: Path) -> None:
    root = write_files(tmp_path / "r", "1.png")
    refused(root, "leave --image-key out", image_key="image")
    refused(root, "leave --label-key out", label_key="label")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    root = write_files(tmp_path / "r", "cat/1.png", "dog/1.png")
    (root / "dog").chmod(0)
    try:
        refused(root, "dog")
    finally:
        (root / "dog").chmod(0o700)


def test_tables_beside_images_do_not_matter_but_shards_do(tmp_path: Path) -> None:
    root = write_files(tmp_path / "r", "1.png", "2.png")
    pq.write_table(pa.table({"file_name": ["1.png"]}), root / "metadata.parquet")
    assert isinstance(open_source(root), FolderSource)
    shards = image_sets.write_tar_shards(tmp_path, GIVEN)
    write_files(shards, "example.png")
    refused(shards, "not clear which")


def test_many_paths_are_packed(tmp_path: Path) -> None:
    names = [f"class{i % 7}/{i:07d}.png" for i in range(20_000)]
    source = FolderSource(tmp_path, sorted(names), name="x")
    assert identifiers(source)[:2] == ["class0/0000000.png", "class0/0000007.png"]
    assert len(pickle.dumps(source)) < 20_000 * 40


def test_a_folder_of_one_split(tmp_path: Path) -> None:
    root = write_files(tmp_path / "r", "train/cat/1.png", "train/dog/2.png", "test/cat/3.png")
    assert identifiers(open_source(f"{root}::train")) == ["cat/1.png", "dog/2.png"]
    refused(f"{root}::val", "no split 'val'")
    refused(f"{root}::../r", "no split")
