"""Blur, darkness, odd shapes, and hashes that survive what happens to a file."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter
from scipy.ndimage import gaussian_filter

from siammm.report.image_quality import Look, OddKind, beyond, blur, look, odd_images, perceptual_hashes


def picture(seed: int, size: tuple[int, int] = (120, 160), *, coarse: float = 6.0) -> Image.Image:
    """Shapes with sharp edges, and no two alike."""
    random = np.random.default_rng(seed)
    shapes = gaussian_filter(random.normal(size=(*size, 3)), (coarse, coarse, 0))
    shapes = 128 + 60 * np.sign(shapes) + 40 * shapes / np.abs(shapes).max()
    return Image.fromarray(np.clip(shapes + random.normal(0, 3, shapes.shape), 0, 255).astype(np.uint8))


def seen(image: Image.Image) -> Look:
    return look(np.asarray(image))


def bits(first: int, second: int) -> int:
    return (first ^ second).bit_count()


def test_the_more_blur_the_larger_the_figure() -> None:
    image = picture(0)
    figures = [seen(image.filter(ImageFilter.GaussianBlur(radius))).blur for radius in (0, 1, 2, 4, 8)]
    assert figures == sorted(figures)
    assert figures[0] < 0.5 < figures[-1] <= 1


def test_the_steps_of_eight_bits_are_no_edges() -> None:
    """A smooth image of little contrast has a few grey levels, with a border between each and the next."""
    smooth = gaussian_filter(np.random.default_rng(0).normal(size=(128, 128)), 12)
    levels = np.round(128 + 30 * smooth / np.abs(smooth).max()).astype(np.uint8)
    assert look(levels[..., None].repeat(3, axis=2)).blur > 0.8


def test_blur_along_one_axis_is_blur() -> None:
    grey = np.random.default_rng(0).random((96, 96)).astype(np.float32)
    moved = gaussian_filter(grey, (0, 8))
    assert blur(moved) == pytest.approx(blur(moved.T))
    assert blur(moved) > blur(grey) + 0.3


def test_blur_does_not_depend_on_contrast_or_brightness() -> None:
    grey = gaussian_filter(np.random.default_rng(0).random((96, 96)), 1).astype(np.float32)
    assert blur(0.1 * grey + 0.5) == pytest.approx(blur(grey), abs=1e-3)


@pytest.mark.parametrize(
    "change",
    [
        lambda image: image.resize((80, 60)),
        lambda image: image.resize((640, 480)),
        lambda image: ImageEnhance.Brightness(image).enhance(0.7),
        lambda image: ImageEnhance.Contrast(image).enhance(0.6),
        lambda image: image.filter(ImageFilter.GaussianBlur(1)),
        lambda image: image.convert("L").convert("RGB"),
    ],
)
def test_a_hash_survives_what_happens_to_a_file(change) -> None:
    for seed in range(4):
        assert bits(seen(picture(seed)).hash, seen(change(picture(seed))).hash) <= 6


def test_hashes_of_other_images_are_far() -> None:
    hashes = [seen(picture(seed)).hash for seed in range(12)]
    assert min(bits(a, b) for i, a in enumerate(hashes) for b in hashes[:i]) > 14
    assert all(0 < one < 2**64 for one in hashes)


def test_the_mirrored_hash_is_that_of_the_mirror_image() -> None:
    image = picture(3).convert("L")
    mirrored = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    assert perceptual_hashes(image) == perceptual_hashes(mirrored)[::-1]
    assert bits(*perceptual_hashes(image)) > 10


@pytest.mark.parametrize("size", [(1, 1), (1, 400), (15, 15), (8, 300)])
def test_tiny_images_are_measured_as_far_as_that_goes(size: tuple[int, int]) -> None:
    image = look(np.random.default_rng(0).integers(0, 255, (*size, 3), dtype=np.uint8))
    assert (image.height, image.width) == size
    assert math.isnan(image.blur)
    assert image.hash == image.mirrored_hash == 0


def looks_of(images: list[Image.Image]) -> list[Look | None]:
    return [seen(image) for image in images]


def test_odd_images_are_found_and_no_others() -> None:
    usual = [picture(seed) for seed in range(30)]
    odd: dict[OddKind, Image.Image] = {
        "blurred": usual[0].filter(ImageFilter.GaussianBlur(7)),
        "dark": ImageEnhance.Brightness(usual[1]).enhance(0.15),
        "bright": Image.eval(usual[2], lambda value: 238 + value // 16),
        "plain": Image.new("RGB", (160, 120), (90, 120, 30)),
        "shape": usual[3].resize((700, 60)),
        "size": usual[4].resize((1280, 960)),
    }
    looks: list[Look | None] = [*looks_of(usual), None, *looks_of(list(odd.values()))]
    found = odd_images(looks)
    assert tuple(found) == get_args(OddKind)
    for at, kind in enumerate(odd, len(usual) + 1):
        assert at in [i for i, _ in found[kind]], kind
        assert all(i > len(usual) for i, _ in found[kind]), (kind, found[kind])
    assert [i for i, _ in found["shape"]] == [35]
    assert found["shape"][0][1] == pytest.approx(700 / 60)
    assert found["size"][0] == (36, pytest.approx(math.sqrt(1280 * 960)))


def test_what_is_usual_in_a_set_is_not_odd() -> None:
    night = [ImageEnhance.Brightness(picture(seed)).enhance(0.12 + 0.005 * seed) for seed in range(20)]
    assert all(one is not None and one.lights < 0.3 for one in looks_of(night))
    assert odd_images(looks_of(night))["dark"] == []
    soft = [picture(seed).filter(ImageFilter.GaussianBlur(5)) for seed in range(20)]
    assert all(one is not None and one.blur > 0.7 for one in looks_of(soft))
    assert len(odd_images(looks_of(soft))["blurred"]) <= 1


def test_the_oddest_come_first() -> None:
    images = [picture(seed) for seed in range(20)]
    images += [ImageEnhance.Brightness(picture(99)).enhance(share) for share in (0.2, 0.05, 0.1)]
    assert [i for i, _ in odd_images(looks_of(images))["dark"]] == [21, 22, 20]


def test_a_set_of_one_and_none() -> None:
    assert all(not found for found in odd_images([seen(Image.new("RGB", (9, 9)))]).values())
    assert all(not found for found in odd_images([None]).values())
    assert all(not found for found in odd_images([]).values())


def test_beyond_needs_both() -> None:
    values = np.array([0.0, 0.1, 0.2, 0.1, 5.0, np.nan])
    assert beyond(values, 1.0).tolist() == [False] * 4 + [True, False]
    assert not beyond(values, 6.0).any(), "below the limit"
    assert not beyond(np.arange(10.0), 5.0).any(), "usual for the set"
