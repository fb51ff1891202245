"""Images in tar files: keys, labels, shards, and names that point elsewhere."""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from siammm.core.errors import StoredFileError
from siammm.data.decode import BadImage
from siammm.data.set_aside import decode_all
from siammm.data.sources import open_source
from tests.data import image_sets
from tests.data.image_sets import add_member
from tests.data.opened import GIVEN, PNGS, identifiers, refused


def make_tar(path: Path, fill: Callable[[tarfile.TarFile], Any], **settings: Any) -> Path:
    with tarfile.open(path, "w", **settings) as tar:
        fill(tar)
    return path


def members(*files: tuple[str, bytes]) -> Callable[[tarfile.TarFile], None]:
    def fill(tar: tarfile.TarFile) -> None:
        for name, data in files:
            add_member(tar, name, data)

    return fill


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tar_keys(form: int, tmp_path: Path) -> None:
    long = "deep/" * 20 + "er"
    files = [("a/1.png", PNGS[0]), ("a/1.txt", b"words"), ("b.2/1.seg.png", b"mask"), ("b.2/1.PNG", PNGS[1])]
    files += [(f"{long}.jpeg", PNGS[2]), ("no/image.json", b"{}"), ("._a.png", b"from macOS"), ("x.png.cls", b"3")]
    source = open_source(make_tar(tmp_path / "x.tar", members(*files), format=form))
    assert identifiers(source) == ["a/1", "b.2/1", long]
    for i in range(3):
        np.testing.assert_array_equal(source.image(i), GIVEN.images[i])


def test_tar_members_can_be_chosen(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "x.tar", members(("1.png", PNGS[0]), ("1.seg.png", PNGS[1]), ("2.seg.png", PNGS[2])))
    source = open_source(path, image_key="seg.png")
    np.testing.assert_array_equal(decode_all(source).images, GIVEN.images[1:3])
    refused(path, "no members called .webp", image_key="webp")


@pytest.mark.parametrize(
    ("labels", "expected", "names"),
    [
        ([("cls", b"3"), ("cls", b"1\n")], [3, 1], None),
        ([("cls", b"dog"), ("cls", b" cat ")], [1, 0], ["cat", "dog"]),
        ([("json", b'{"label": 4}'), ("json", b'{"y": 1, "label": 2}')], [4, 2], None),
        ([("json", b'{"label": "b"}'), ("json", b'{"label": "a"}')], [1, 0], ["a", "b"]),
        ([("json", b'{"label": 4}'), ("json", b'{"other": 2}')], None, None),
        ([("cls", b"3"), ("txt", b"1")], None, None),
        ([("cls", b""), ("cls", b"1")], None, None),
        ([("json", b"[1, 2]"), ("json", b"null")], None, None),
        ([("txt", b"3"), ("txt", b"1")], None, None),
    ],
)
def test_tar_labels(labels: list[tuple[str, bytes]], expected: Any, names: Any, tmp_path: Path) -> None:
    files: list[tuple[str, bytes]] = []
    for i, (extension, text) in enumerate(labels):
        files += [(f"{i}.{extension}", text), (f"{i}.png", PNGS[i])]
    source = open_source(make_tar(tmp_path / "x.tar", members(*files)))
    assert (None if source.labels is None else source.labels.tolist()) == expected
    assert source.label_names == names


def test_tar_labels_can_be_chosen(tmp_path: Path) -> None:
    files = [("0.png", PNGS[0]), ("0.json", b'{"label": 1, "fine": 7}'), ("1.png", PNGS[1]), ("1.json", b'{"fine": 5}')]
    path = make_tar(tmp_path / "x.tar", members(*files))
    np.testing.assert_array_equal(open_source(path, label_key="fine").labels, [7, 5])
    refused(path, "1 of 2 samples", label_key="label")
    assert open_source(path).labels is None
    bad = make_tar(tmp_path / "bad.tar", members(("0.png", PNGS[0]), ("0.json", b"{'not': json")))
    refused(bad, "not JSON")
    assert open_source(bad, label_key="").labels is None


def test_tar_folders_are_classes_as_in_an_image_folder(tmp_path: Path) -> None:
    root = image_sets.write_folder(tmp_path, GIVEN)

    def fill(tar: tarfile.TarFile) -> None:
        for path in sorted(root.rglob("*.png")):
            tar.add(path, path.relative_to(tmp_path))

    source = open_source(make_tar(tmp_path / "x.tar", fill))
    np.testing.assert_array_equal(source.labels, GIVEN.labels)
    assert source.label_names == GIVEN.names


def test_shards_with_the_same_keys_are_told_apart(tmp_path: Path) -> None:
    for name in ("a.tar", "b.tar"):
        make_tar(tmp_path / name, members(("0.png", PNGS[0]), ("1.png", PNGS[1])))
    assert identifiers(open_source(tmp_path)) == ["a.tar:0", "a.tar:1", "b.tar:0", "b.tar:1"]
    path = make_tar(tmp_path / "c.tar", members(("0.png", PNGS[0]), ("1.png", PNGS[1]), ("0.png", PNGS[2])))
    assert identifiers(open_source(path)) == ["0", "1", "0#2"]


def test_tar_names_that_point_elsewhere_are_only_names(tmp_path: Path) -> None:
    def fill(tar: tarfile.TarFile) -> None:
        add_member(tar, "/etc/absolute.png", PNGS[0])
        add_member(tar, "../../above.png", PNGS[1])
        for kind, name in (
            (tarfile.SYMTYPE, "soft.png"),
            (tarfile.LNKTYPE, "hard.png"),
            (tarfile.FIFOTYPE, "pipe.png"),
        ):
            link = tarfile.TarInfo(name)
            link.type = kind
            link.linkname = "/etc/passwd"
            tar.addfile(link)
        add_member(tar, "new\nline.png", PNGS[2])
        add_member(tar, "latin\udce9.png", PNGS[3])

    before = set(tmp_path.rglob("*"))
    path = make_tar(tmp_path / "x.tar", fill)
    source = open_source(path)
    assert identifiers(source) == [
        "/etc/absolute", "../../above", "soft", "hard", "pipe", "new\nline", r"latin\xe9",
    ]  # fmt: skip
    for i in (2, 3, 4):
        with pytest.raises(BadImage, match="link or a special file"):
            source.image(i)
    decoded = decode_all(source, limit=0.5)
    np.testing.assert_array_equal(decoded.images, GIVEN.images[:4])
    assert set(tmp_path.rglob("*")) == before | {path}


@pytest.mark.parametrize("name", ["x.tar.gz", "x.tgz", "x.tar", "x.tar.zst"])
def test_compressed_tars_are_refused(name: str, tmp_path: Path) -> None:
    plain = make_tar(tmp_path / "plain", members(("0.png", PNGS[0])))
    (tmp_path / name).write_bytes(gzip.compress(plain.read_bytes()))
    refused(tmp_path / name, "is compressed.*decompress it")


def test_a_tar_without_images_is_refused(tmp_path: Path) -> None:
    refused(make_tar(tmp_path / "x.tar", members(("a.txt", b"text"))), "no members with an image's extension")
    refused(make_tar(tmp_path / "x.tar", members()), "no members")


def test_a_tar_that_lies_about_sizes_is_refused(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "x.tar", members(("0.png", PNGS[0])))
    data = bytearray(path.read_bytes())
    header = tarfile.TarInfo("0.png")
    header.size = 2**33
    data[:512] = header.tobuf(tarfile.GNU_FORMAT)[:512]
    path.write_bytes(data)
    refused(path, "write it again", StoredFileError)
