"""Thumbnails and their sheets."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from siammm.data.sources import open_source
from siammm.report import thumbnails
from siammm.report.thumbnails import Layout, layout, make_sheets, n_within, thumbnail
from tests.data.image_sets import encoded


def read(data: bytes) -> np.ndarray:
    picture = Image.open(io.BytesIO(data))
    assert picture.format == "WEBP"
    return np.asarray(picture.convert("RGBA"))


def nothing(done: int, total: int) -> None: ...


def test_small_images_are_shown_pixel_by_pixel() -> None:
    images = np.random.default_rng(0).integers(0, 255, (60, 8, 8, 3), dtype=np.uint8)
    source = open_source(images)
    shape = layout(source, 60, None)
    assert (shape.width, shape.height, shape.enlarge, shape.columns) == (32, 32, 4, 48)
    sheets, number_M = make_sheets(source, range(60), shape, nothing)
    assert number_M == list(range(60))
    assert len(sheets) == 1
    sheet = read(sheets[0])
    assert sheet.shape == (64, 48 * 32, 4)
    for i in range(60):
        row, column = divmod(i, 48)
        cell = sheet[32 * row : 32 * row + 32, 32 * column : 32 * column + 32]
        np.testing.assert_array_equal(cell[::4, ::4, :3], images[i])
        assert (cell[..., 3] == 255).all()
    assert len(np.unique(sheet[32:, 32 * 12 :, :3])) == 1, "the rest is empty"


@pytest.mark.parametrize(
    ("count", "wanted", "expected"), [(100, None, 96), (5000, None, 64), (20_000, None, 48), (20_000, 120, 120)]
)
def test_the_more_the_smaller(count: int, wanted: int | None, expected: int) -> None:
    source = open_source(np.zeros((2, 200, 100, 3), np.uint8))
    shape = layout(source, count, wanted)
    assert (shape.width, shape.height) == (expected // 2, expected)
    assert shape.columns * shape.width <= 1536


def test_images_are_not_enlarged_but_tiny_ones() -> None:
    assert layout(open_source(np.zeros((2, 40, 40, 3), np.uint8)), 10, None).width == 40
    assert layout(None, 0, None).width == 96


def test_aspect_is_kept_by_padding(tmp_path: Path) -> None:
    for name, shape in (("a", (100, 300)), ("b", (300, 100)), ("c", (20, 20))):
        image = np.full((*shape, 3), (200, 30, 30), np.uint8)
        (tmp_path / f"{name}.png").write_bytes(encoded(image))
    source = open_source(tmp_path)
    shape = layout(source, 3, None)
    assert (shape.width, shape.height) == (96, 96)
    sheet = read(make_sheets(source, [0, 1, 2], shape, nothing)[0][0])
    for i, (height, width) in enumerate([(32, 96), (96, 32), (96, 96)]):
        cell = sheet[:96, 96 * i : 96 * i + 96]
        opaque = cell[..., 3] > 128
        rows, columns = np.flatnonzero(opaque.any(axis=1)), np.flatnonzero(opaque.any(axis=0))
        assert (len(rows), len(columns)) == (height, width)
        assert abs(rows.mean() - 47.5) <= 1
        assert abs(columns.mean() - 47.5) <= 1
        np.testing.assert_allclose(cell[opaque][:, :3].mean(axis=0), (200, 30, 30), atol=12)


@pytest.mark.parametrize(("side", "sharp"), [(32, True), (8, True), (40, True), (20, True), (64, False), (72, False)])
def test_a_small_image_among_large_ones_fills_its_cell(side: int, sharp: bool) -> None:
    """As the pixels that it has, if they are few; one that is nearly large enough is enlarged smoothly."""
    image = np.random.default_rng(0).integers(0, 255, (side, side, 3), dtype=np.uint8)
    found = np.asarray(thumbnail(image, Layout(width=96, height=96, enlarge=1)))
    assert found.shape == (96, 96, 3)
    if 96 % side == 0:
        np.testing.assert_array_equal(found, image.repeat(96 // side, axis=0).repeat(96 // side, axis=1))
    middle = ((np.arange(side) + 0.5) * 96 / side).astype(int)  # the middle of each pixel has its colour
    away = np.abs(found[np.ix_(middle, middle)].astype(int) - image)
    assert (np.median(away) == 0) == sharp


def test_a_very_long_image_has_a_cell() -> None:
    shape = layout(open_source(np.zeros((2, 4, 4000, 3), np.uint8)), 2, None)
    assert shape.height >= 24
    assert thumbnail(np.zeros((4, 4000, 3), np.uint8), shape).size == (shape.width, shape.height)
    assert thumbnail(np.zeros((4000, 1, 3), np.uint8), shape).size == (shape.width, shape.height)


def test_what_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    for i in range(5):
        (tmp_path / f"{i}.png").write_bytes(encoded(np.zeros((8, 8, 3), np.uint8)) if i % 2 == 0 else b"no image")
    source = open_source(tmp_path)
    _, number_M = make_sheets(source, [4, 1, -1, 0, 2], layout(source, 5, None), nothing)
    assert number_M == [0, -1, -1, 1, 2]


def test_sheets_are_full_but_for_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thumbnails, "_SHEET_SIDE", 96)
    source = open_source(np.zeros((20, 8, 8, 3), np.uint8))
    shape = layout(source, 20, None)
    assert shape.per_sheet == 9
    sheets, _ = make_sheets(source, range(20), shape, nothing)
    entry = thumbnails.sheets_entry(shape, 20, [None, None, "x/sheet-2.webp"])
    assert len(sheets) == 3
    assert [sheet["n_thumbnails"] for sheet in entry["sheets"]] == [9, 9, 2]


def test_how_many_sheets_a_page_holds() -> None:
    shape = Layout(width=48, height=48, enlarge=1)
    sheets = [bytes(100)] * 10
    assert shape.per_sheet == 1024
    assert n_within(sheets, shape, 10_000, 10_000) == 10
    assert n_within(sheets, shape, 10_001, 10_000) == 9
    assert n_within(sheets, shape, 10_000, 0) == 0
    assert n_within(sheets, shape, 10_000, 10_000, most_bytes=350) == 3
    assert n_within([], shape, 0, 10_000) == 0
