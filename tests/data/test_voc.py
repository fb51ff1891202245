"""VOC's layout and tables of targets: what is read, what it means, and what is refused in one sentence."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from siammm.core.errors import InputError, StoredFileError
from siammm.data.loader import open_loader
from siammm.data.sources import open_source
from siammm.data.view_settings import views
from siammm.data.voc import VOC_CLASSES, open_targets, open_voc
from siammm.metrics.multilabel import SvmSettings, svm_map

Objects = list[tuple[str, int]]

COLOURS = {"bird": (200, 40, 40), "boat": (40, 200, 40), "dog": (40, 40, 200)}


def annotation(objects: Objects) -> str:
    things = "".join(
        f"<object><name>{name}</name><difficult>{difficult}</difficult>"
        "<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>5</xmax><ymax>5</ymax></bndbox></object>"
        for name, difficult in objects
    )
    return f"<annotation><folder>VOC2007</folder><size><width>16</width><height>12</height></size>{things}</annotation>"


def jpeg(classes: set[str], seed: int) -> bytes:
    """A dim noise with a bright patch for each class, in its colour and at its place."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 60, (12, 16, 3), dtype=np.uint8)
    for place, name in enumerate(COLOURS):
        if name in classes:
            pixels[2:10, 5 * place + 1 : 5 * place + 5] = COLOURS[name]
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=95)
    return stream.getvalue()


def write_voc(root: Path, splits: dict[str, dict[str, Objects]]) -> Path:
    folder = root / "VOC2007"
    for part in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for split, images in splits.items():
        (folder / "ImageSets" / "Main" / f"{split}.txt").write_text("".join(f"{name}\n" for name in images))
        for number, (name, objects) in enumerate(images.items()):
            (folder / "Annotations" / f"{name}.xml").write_text(annotation(objects))
            (folder / "JPEGImages" / f"{name}.jpg").write_bytes(jpeg({label for label, _ in objects}, number))
    (folder / "ImageSets" / "Main" / "dog_trainval.txt").write_text("000001  1\n")
    return folder


FEW: dict[str, Objects] = {
    "000007": [("dog", 0), ("dog", 1), ("bird", 1)],
    "000001": [],
    "000003": [("boat", 0), ("bird", 0)],
}


@pytest.fixture
def voc(tmp_path: Path) -> Path:
    return write_voc(tmp_path, {"trainval": FEW, "test": {"000009": [("dog", 0)]}})


# -- VOC's layout


def test_targets_follow_the_list_and_difficult_objects_count_neither_way(voc: Path) -> None:
    found = open_voc(voc)
    assert [found.source.identifier(i) for i in range(3)] == [f"JPEGImages/{name}.jpg" for name in FEW]
    assert found.class_names == list(VOC_CLASSES)
    bird, boat, dog = (found.targets[:, VOC_CLASSES.index(name)].tolist() for name in ("bird", "boat", "dog"))
    # One object that is not difficult is enough.
    assert (bird, boat, dog) == ([-1, 0, 1], [0, 0, 1], [1, 0, 0])
    assert found.targets.shape == (3, 20)
    assert found.targets.dtype == np.int8
    assert found.source.image(1).shape == (12, 16, 3)
    assert found.source.labels is None
    assert open_voc(voc, "test").targets.sum() == 1


def test_the_folder_above_will_do(voc: Path) -> None:
    assert np.array_equal(open_voc(voc.parent).targets, open_voc(voc).targets)
    (voc.parent / "VOC2012" / "JPEGImages").mkdir(parents=True)
    with pytest.raises(InputError, match=r"2 folders of VOC \(VOC2007, VOC2012\)"):
        open_voc(voc.parent)


def test_other_classes_are_in_alphabetical_order_and_can_be_given(tmp_path: Path) -> None:
    folder = write_voc(tmp_path, {"train": {"a": [("zebra", 0)], "b": [("ant", 0)]}, "test": {"c": [("ant", 0)]}})
    train = open_voc(folder, "train")
    assert train.class_names == ["ant", "zebra"]
    assert open_voc(folder, "test", class_names=train.class_names).targets.tolist() == [[1, 0]]
    with pytest.raises(InputError, match="The image a shows the class 'zebra', which is none of the 1 known"):
        open_voc(folder, "train", class_names=["ant"])


def test_images_need_not_be_jpegs(voc: Path) -> None:
    with Image.open(voc / "JPEGImages" / "000001.jpg") as image:
        image.save(voc / "JPEGImages" / "000001.png")
    (voc / "JPEGImages" / "000001.jpg").unlink()
    assert open_voc(voc).source.identifier(1) == "JPEGImages/000001.png"


def test_from_files_to_average_precision(tmp_path: Path) -> None:
    """Reading, features of the pixels, SVMs: the patches are found."""
    rng = np.random.default_rng(0)
    names = list(COLOURS)

    def images(first: int, count: int) -> dict[str, Objects]:
        return {
            f"{number:06d}": [(name, int(rng.random() < 0.1)) for name in names if rng.random() < 0.4]
            for number in range(first, first + count)
        }

    folder = write_voc(tmp_path, {"trainval": images(0, 60), "test": images(60, 40)})
    features, targets = [], []
    for split in ("trainval", "test"):
        found = open_voc(folder, split)
        loader = open_loader(found.source, views(12, "32"), torch.device("cpu"), seed=0, workers=0)
        features.append(torch.cat([x.flatten(1) for _, x in loader.clean(0, loader.n_images)]))
        targets.append(found.targets[:, [VOC_CLASSES.index(name) for name in names]])
    assert (targets[0] == -1).any()
    result = svm_map(features[0], targets[0], features[1], targets[1], SvmSettings(costs=(0.1, 1.0)), class_names=names)
    assert result.mean_average_precision > 0.99
    assert list(result.average_precision) == names


# -- what is refused


def test_a_split_that_is_not_there(voc: Path) -> None:
    for split in ("val", "../Main/test", ""):
        with pytest.raises(InputError, match=r"has no split .*; it has: test, trainval\."):
            open_voc(voc, split)


def test_an_image_without_annotation_or_file(voc: Path) -> None:
    (voc / "Annotations" / "000003.xml").unlink()
    with pytest.raises(InputError, match="The image 000003 has no annotation"):
        open_voc(voc)
    (voc / "JPEGImages" / "000001.jpg").unlink()
    with pytest.raises(InputError, match="000001 is in the split trainval, but"):
        open_voc(voc)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<annotation><object>", "is not well-formed XML"),
        ("", "is not well-formed XML"),
        ("\0\0", "is not well-formed XML"),
        ("<?xml version='1.0' encoding='nonsense'?><annotation/>", "is not well-formed XML"),
        ("<annotation><object><name> </name></object></annotation>", "has no name"),
        ("<annotation><object><name>dog</name><difficult>very</difficult></object></annotation>", "by 'very'"),
        ("<!DOCTYPE a [<!ENTITY b 'c'>]><annotation>&b;</annotation>", "<!DOCTYPE>"),
        ("<!DOCTYPE annotation SYSTEM 'file:///etc/passwd'><annotation/>", "<!DOCTYPE>"),
    ],
)
def test_a_bad_annotation(voc: Path, text: str, message: str) -> None:
    (voc / "Annotations" / "000003.xml").write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        open_voc(voc)
    assert "000003.xml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_entities_are_not_expanded(voc: Path) -> None:
    """A billion laughs: refused at the first line, before any entity is known."""
    bomb = "".join(f'<!ENTITY e{i} "{f"&e{i - 1};" * 10}">' for i in range(1, 12))
    text = f'<!DOCTYPE x [<!ENTITY e0 "ha">{bomb}]><annotation><object><name>&e11;</name></object></annotation>'
    (voc / "Annotations" / "000003.xml").write_text(text)
    with pytest.raises(InputError, match="not read for safety"):
        open_voc(voc)


@pytest.mark.parametrize(
    ("lines", "message"),
    [("../000003\n", "is not the name of an image"), ("000003\n000003\n", "twice"), ("\n \n", "holds no names")],
)
def test_a_bad_list(voc: Path, lines: str, message: str) -> None:
    (voc / "ImageSets" / "Main" / "trainval.txt").write_text(lines)
    with pytest.raises(InputError, match=message):
        open_voc(voc)


def test_a_folder_that_is_not_vocs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a folder"):
        open_voc(tmp_path / "nothing")
    with pytest.raises(InputError, match="holds no JPEGImages"):
        open_voc(tmp_path)
    (tmp_path / "JPEGImages").mkdir()
    with pytest.raises(InputError, match="has no folder Annotations"):
        open_voc(tmp_path)


# -- tables


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("cats/a.jpg", "cats/b.jpg", "dogs/c.jpg"):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(set(), 0))
    return tmp_path / "images"


EXPECTED = [[1, 0], [0, 1], [1, 1]]


def test_a_column_for_each_class(folder: Path, tmp_path: Path) -> None:
    """In any order, with rows for other images, with base names or whole ones, as numbers or truths."""
    source = open_source(folder)
    path = tmp_path / "targets.csv"
    path.write_text("filename,fur,bark\nc.jpg,1,1\nother.jpg,1,0\ncats/b.jpg,0,1\nimages/cats/a.jpg,true,False\n")
    found = open_targets(source, path)
    assert (found.class_names, found.targets.tolist()) == (["fur", "bark"], EXPECTED)
    assert found.targets.dtype == np.int8
    table = pa.table({"image": ["cats/a", "b.jpg", "c.jpg"], "fur": [1.0, 0.0, None], "bark": [False, True, True]})
    pq.write_table(table, tmp_path / "targets.parquet")
    found = open_targets(source, tmp_path / "targets.parquet")
    assert found.targets.tolist() == [[1, 0], [0, 1], [-1, 1]]
    assert open_targets(source, tmp_path / "targets.parquet", class_names=["bark"]).targets.tolist() == [[0], [1], [1]]


@pytest.mark.parametrize("form", ["lists", ";", "|", ",", "json"])
def test_a_column_of_lists(folder: Path, tmp_path: Path, form: str) -> None:
    source, rows = open_source(folder), {"a.jpg": ["fur"], "b.jpg": ["bark"], "c.jpg": ["bark", "fur"]}
    if form == "lists":
        path = tmp_path / "targets.parquet"
        pq.write_table(pa.table({"path": list(rows), "labels": list(rows.values())}), path)
    else:
        path = tmp_path / "targets.tsv"
        written = {
            name: json.dumps(row).replace('"', '""') if form == "json" else form.join(row) for name, row in rows.items()
        }
        path.write_text("path\tlabels\n" + "".join(f'{name}\t"{text}"\n' for name, text in written.items()))
    found = open_targets(source, path, class_names=["fur", "bark"])
    assert (found.class_names, found.targets.tolist()) == (["fur", "bark"], EXPECTED)
    assert open_targets(source, path).class_names == ["bark", "fur"]
    with pytest.raises(InputError, match="shows the class 'bark'"):
        open_targets(source, path, class_names=["fur"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("filename,fur\na.jpg,1\n", "The image cats/b.jpg has no row in"),
        ("filename,fur\na.jpg,1\na.jpg,0\n", "'a.jpg' is in the column 'filename' of"),
        ("filename,fur\na.jpg,1\nb.jpg,2\nc.jpg,0\n", "no column for the class"),
        ("what,fur\na.jpg,1\n", "no column of image names by a usual name"),
        ("filename,fur\n", "has 0 rows"),
        ("filename,fur\na.jpg,1,1\n", "is not a complete table"),
        ("filename,fur,fur\na.jpg,1,1\n", "two columns of the same name"),
    ],
)
def test_a_bad_table(folder: Path, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "targets.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        open_targets(open_source(folder), path, class_names=["fur", "bark"] if "2" in text else None)
    assert "\n" not in str(caught.value)


def test_tables_that_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    source = open_source(folder)
    with pytest.raises(InputError, match="cannot be read"):
        open_targets(source, tmp_path / "none.csv")
    with pytest.raises(InputError, match=r"ends in '\.xls'"):
        open_targets(source, tmp_path / "none.xls")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and nothing")
    with pytest.raises(StoredFileError, match="is not a complete Parquet file"):
        open_targets(source, tmp_path / "bad.parquet")
    (tmp_path / "odd.csv").write_text("filename,fur\na.jpg,1\nb.jpg,7\nc.jpg,0\n")
    with pytest.raises(InputError, match=r"Row 1 of the column 'fur' in .* holds '7'"):
        open_targets(source, tmp_path / "odd.csv")
