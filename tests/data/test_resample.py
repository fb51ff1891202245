"""Resized crops and blurs: torchvision's result on each sample, whatever the others' crops."""

import pytest
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as tv

from siammm.data import resample


def boxes(n: int, height: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Top, left, height, width and flip of random boxes; the first is the whole image, the second one pixel."""
    generator = torch.Generator().manual_seed(0)

    def upto(limit: Tensor) -> Tensor:
        return (torch.rand(n, generator=generator) * (limit + 1)).long().clamp_max(limit)

    tall, wide = upto(torch.full((n,), height - 1)) + 1, upto(torch.full((n,), width - 1)) + 1
    tall[0], wide[0], tall[1], wide[1] = height, width, 1, 1
    return upto(height - tall), upto(width - wide), tall, wide, torch.arange(n) % 2 == 1


def expected_crops(x: Tensor, box: tuple[Tensor, ...], size: int) -> Tensor:
    crops = []
    for image, top, left, height, width, flip in zip(x, *box, strict=True):
        crop = tv.resized_crop(image, int(top), int(left), int(height), int(width), [size, size], antialias=True)
        crops.append(tv.horizontal_flip(crop) if flip else crop)
    return torch.stack(crops)


# Growing, shrinking, both at once, single pixels; the last two go through torch's own kernel, one by one.
SHAPES = [
    (32, 32, 32),
    (8, 8, 8),
    (50, 37, 24),
    (48, 80, 8),
    (7, 9, 33),
    (1, 1, 4),
    (64, 64, 1),
    (96, 75, 32),
    (9, 9, 80),
]


@pytest.mark.parametrize(("height", "width", "size"), SHAPES)
@pytest.mark.parametrize("channels", [1, 3])
def test_resized_crops_equal_torchvisions(height: int, width: int, size: int, channels: int):
    x = torch.rand(40, channels, height, width, generator=torch.Generator().manual_seed(1))
    box = boxes(40, height, width)
    got = resample.resized_crop(x, *box, size)
    assert got.shape == (40, channels, size, size)
    torch.testing.assert_close(got, expected_crops(x, box, size), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("height", "width"), [(8, 8), (9, 12), (32, 20)])
def test_turning_equals_torchvisions(height: int, width: int):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(20, 3, height, width, generator=generator)
    rotation, shear = torch.rand(2, 20, generator=generator) * 60 - 30
    rotation[0] = shear[0] = 0
    expected = [
        tv.affine(image, float(turn), [0.0, 0.0], 1.0, [float(slant), 0.0], interpolation=tv.InterpolationMode.BILINEAR)
        for image, turn, slant in zip(x, rotation, shear, strict=True)
    ]
    got = resample.turned(x, rotation, shear)
    torch.testing.assert_close(got, torch.stack(expected), rtol=0, atol=1e-5)
    torch.testing.assert_close(got[0], x[0], rtol=0, atol=1e-6)


def test_matrices_equal_the_loop_also_for_large_images():
    x = torch.rand(6, 3, 375, 500, generator=torch.Generator().manual_seed(1))
    top, left, height, width, flip = boxes(6, 375, 500)
    rows = resample.interpolation_matrices(top, height, 375, 224, torch.float32)
    columns = resample.interpolation_matrices(left, width, 500, 224, torch.float32, flip)
    expected = expected_crops(x, (top, left, height, width, flip), 224)
    torch.testing.assert_close(resample.mixed(x, rows, columns), expected, rtol=0, atol=1e-5)


def test_interpolation_weighs_only_the_box_and_sums_to_1():
    start, length = torch.tensor([0, 3, 10]), torch.tensor([20, 5, 1])
    weight = resample.interpolation_matrices(start, length, 20, 9, torch.float64)
    torch.testing.assert_close(weight.sum(dim=2), torch.ones(3, 9, dtype=torch.float64))
    assert weight.min() >= 0
    assert weight[1, :, :3].abs().max() == weight[1, :, 8:].abs().max() == 0
    assert torch.equal(weight[2, :, 10], torch.ones(9, dtype=torch.float64))


def test_a_crop_of_the_size_of_the_view_is_copied():
    x = torch.rand(2, 3, 16, 16)
    zero, whole = torch.zeros(2, dtype=torch.int64), torch.full((2,), 16)
    got = resample.resized_crop(x, zero, zero, whole, whole, torch.tensor([False, True]), 16)
    assert torch.equal(got, torch.stack([x[0], x[1].flip(-1)]))


@pytest.mark.parametrize(
    ("height", "width", "kernel"), [(32, 32, 3), (16, 24, 7), (40, 40, 23), (12, 12, 23), (5, 5, 1)]
)
def test_blur_equals_torchvisions(height: int, width: int, kernel: int):
    x = torch.rand(10, 3, height, width, generator=torch.Generator().manual_seed(2))
    sigma = torch.linspace(0.1, 4.0, 10)
    expected = torch.stack(
        [tv.gaussian_blur(image, [kernel, kernel], [float(value)] * 2) for image, value in zip(x, sigma, strict=True)]
    )
    torch.testing.assert_close(resample.gaussian_blur(x, sigma, kernel), expected, rtol=0, atol=2e-6)


def test_blur_keeps_the_mean_of_a_flat_image_and_narrows_others():
    sigma = torch.tensor([0.5, 2.0])
    flat = torch.full((2, 1, 20, 20), 0.3)
    torch.testing.assert_close(resample.gaussian_blur(flat, sigma, 9), flat)
    x = torch.rand(1, 3, 20, 20).expand(2, 3, 20, 20)
    spread = resample.gaussian_blur(x, sigma, 9).std(dim=(1, 2, 3))
    assert spread[1] < spread[0] < x[0].std()


def test_products_are_not_made_in_half_precision():
    x, box = torch.rand(4, 3, 20, 20), boxes(4, 20, 20)
    expected = resample.resized_crop(x, *box, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(resample.resized_crop(x, *box, 16), expected)


def test_resized_leaves_images_of_the_right_size_alone():
    x = torch.randint(0, 256, (2, 3, 10, 12), dtype=torch.uint8)
    assert resample.resized(x, (10, 12)) is x
    assert resample.resized(x, (5, 6)).dtype == torch.uint8
