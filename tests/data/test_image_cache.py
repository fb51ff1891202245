"""Large images are read from small copies: the same picture, made once, never half."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from siammm.core.errors import InputError
from siammm.data import decode
from siammm.data.image_cache import CachedSource
from siammm.data.loader import open_loader
from siammm.data.sources import Source, open_source
from siammm.data.view_settings import views
from tests.data.image_sets import WRITERS, example_images

VIEW = 16  # so that copies have a shorter side of 24


def picture(height: int, width: int, seed: int) -> np.ndarray:
    """Smooth, as photographs are: shrinking must not lose what is compared."""
    coarse = np.random.default_rng(seed).integers(0, 255, (4, 5, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


SIZES = [(120, 90), (64, 200), (20, 30), (26, 25)]


@pytest.fixture
def photos(tmp_path: Path) -> Source:
    folder = tmp_path / "photos"
    for i, (height, width) in enumerate(SIZES):
        path = folder / f"class{i % 2}" / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(height, width, i)).save(path, quality=95)
    return open_source(folder)


def copies(source: CachedSource) -> list[str]:
    return sorted(path.name for path in source.folder.rglob("*.jpg"))


def test_large_ones_are_shrunken_and_small_ones_are_not(photos: Source, tmp_path: Path) -> None:
    small = CachedSource(photos, tmp_path / "cache", view_size=VIEW)
    names = [photos.identifier(i).rsplit("/")[-1] for i in range(len(photos))]
    found = {name: small.image(i) for i, name in enumerate(names)}
    assert {name: image.shape[:2] for name, image in found.items()} == {
        "0.jpg": (32, 24), "1.jpg": (24, 75), "2.jpg": (20, 30), "3.jpg": (26, 25),
    }  # fmt: skip
    assert len(copies(small)) == 2
    for name, (height, width) in zip(["0.jpg", "1.jpg"], SIZES, strict=False):
        shape = found[name].shape
        expected = Image.fromarray(picture(height, width, int(name[0]))).resize((shape[1], shape[0]))
        assert np.abs(found[name].astype(int) - np.asarray(expected).astype(int)).mean() < 3


def test_what_is_read_later_is_what_was_read_first(photos: Source, tmp_path: Path) -> None:
    first = [CachedSource(photos, tmp_path / "cache", view_size=VIEW).image(i) for i in range(len(photos))]
    again = CachedSource(photos, tmp_path / "cache", view_size=VIEW)
    for image, later in zip(first, (again.image(i) for i in range(len(photos))), strict=True):
        np.testing.assert_array_equal(image, later)
    for i in range(len(photos)):  # a worker's copy reads the same
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(again)).image(i), first[i])


def test_the_originals_are_not_read_again(photos: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = CachedSource(photos, tmp_path / "cache", view_size=VIEW)
    large = [i for i in range(len(photos)) if min(photos.size(i)) > 50]
    expected = [small.image(i) for i in large]

    def refuse(*_: Any) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(photos, "encoded", refuse)
    for i, image in zip(large, expected, strict=True):
        np.testing.assert_array_equal(small.image(i), image)


@pytest.mark.parametrize("damage", [b"", b"\xff\xd8 half of a", b"no image at all"])
def test_a_copy_that_is_spoilt_is_made_anew(photos: Source, tmp_path: Path, damage: bytes) -> None:
    small = CachedSource(photos, tmp_path / "cache", view_size=VIEW)
    expected = [small.image(i) for i in range(len(photos))]
    for path in small.folder.rglob("*.jpg"):
        path.write_bytes(damage)
    for i, image in enumerate(expected):
        np.testing.assert_array_equal(small.image(i), image)
    assert all(path.stat().st_size > 100 for path in small.folder.rglob("*.jpg"))
    assert not [path for path in small.folder.rglob(".*") if path.is_file()]


def test_sets_and_sizes_have_copies_of_their_own(photos: Source, tmp_path: Path) -> None:
    other = example_images(4, size=(90, 90), n_classes=2)
    np.savez(tmp_path / "other.npz", images=other.images)
    folders = {
        CachedSource(source, tmp_path / "cache", view_size=size).folder
        for source in (photos, open_source(tmp_path / "other.npz"))
        for size in (VIEW, 2 * VIEW)
    }
    assert len(folders) == 4


@pytest.mark.parametrize("kind", ["folder", "npz", "parquet", "tar"])
def test_of_every_kind_of_source(kind: str, tmp_path: Path) -> None:
    given = example_images(6, size=(80, 60), n_classes=2)
    source = open_source(WRITERS[kind](tmp_path, given))
    small = CachedSource(source, tmp_path / "cache", view_size=VIEW)
    assert {small.image(i).shape for i in range(6)} == {(32, 24, 3)}
    assert [small.identifier(i) for i in range(6)] == [source.identifier(i) for i in range(6)]
    assert small.fingerprint() == source.fingerprint()
    assert len(copies(small)) == 6


def test_a_damaged_original_is_still_set_aside(photos: Source, tmp_path: Path) -> None:
    (tmp_path / "photos" / "class0" / "9.jpg").write_bytes(b"\xff\xd8\xff broken")
    source = open_source(tmp_path / "photos")
    loader = open_loader(
        source, views(VIEW, "32"), torch.device("cpu"), kind="streaming", seed=0, workers=0, limit=0.5,
        image_cache=str(tmp_path / "cache"),
    )  # fmt: skip
    assert loader.n_images == 4
    assert list(loader.set_aside.reasons) == ["class0/9.jpg"]
    [batch] = list(loader.batches(0, [torch.arange(4)]))
    first, second = loader.views(batch, 0, 0)
    assert first.shape == second.shape == (4, 3, VIEW, VIEW)


def test_a_folder_that_cannot_be_written_is_said(photos: Source, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(InputError, match="--image-cache"):
        CachedSource(photos, tmp_path / "cache", view_size=VIEW)


def test_a_jpeg_may_come_smaller(tmp_path: Path) -> None:
    Image.fromarray(picture(400, 320, 0)).save(tmp_path / "one.jpg")
    Image.fromarray(picture(400, 320, 0)).save(tmp_path / "one.png")
    assert decode.decode_reduced(tmp_path / "one.jpg", 75)[0].shape == (100, 80, 3)
    assert decode.decode_reduced(tmp_path / "one.jpg", 300)[0].shape == (400, 320, 3)
    assert decode.decode_reduced(tmp_path / "one.png", 75)[0].shape == (400, 320, 3)
    assert decode.decode_reduced(tmp_path / "one.jpg", 100, of_longer=True)[0].shape == (100, 80, 3)
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(picture(400, 320, 0)).save(tmp_path / "turned.jpg", exif=turned)
    pixels, size = decode.decode_reduced(tmp_path / "turned.jpg", 75)
    assert pixels.shape == (80, 100, 3)
    assert size == decode.read_size(tmp_path / "turned.jpg") == (320, 400)
    data = (tmp_path / "one.jpg").read_bytes()
    with pytest.raises(decode.BadImage, match="damaged"):  # all bytes are read, however few pixels are wanted
        decode.decode_reduced(data[: len(data) // 2], 1)
