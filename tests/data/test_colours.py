"""Changes of colour: torchvision's result on each sample, whatever the others' factors."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as tv

from siammm.data import colours

ORDERS = torch.tensor(list(itertools.permutations(range(4))))
CHANGES = (tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue)


def images(n: int = 24, seed: int = 0, height: int = 13, width: int = 17) -> Tensor:
    """Random images, some of them awkward: all grey, all of one colour, black, white, 8 bits deep."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 3, height, width, generator=generator)
    x[0] = x[0, :1]
    x[1] = torch.tensor([0.2, 0.7, 0.7])[:, None, None]
    x[2] = 0.0
    x[3] = 1.0
    x[4:8] = (x[4:8] * 255).round() / 255
    x[8] = x[8].round()
    x[9] = 0.5 + 1e-6 * x[9]
    return x


def factors(low: float, high: float, n: int = 24) -> Tensor:
    factor = torch.linspace(low, high, n)
    return factor[torch.randperm(n, generator=torch.Generator().manual_seed(1))]


@pytest.mark.parametrize(
    ("ours", "theirs", "low", "high"),
    [
        (colours.adjust_brightness, tv.adjust_brightness, 0.0, 2.0),
        (colours.adjust_contrast, tv.adjust_contrast, 0.0, 2.5),
        (colours.adjust_saturation, tv.adjust_saturation, 0.0, 2.5),
        (colours.adjust_hue, tv.adjust_hue, -0.5, 0.5),
    ],
)
def test_each_change_equals_torchvisions(ours: Callable, theirs: Callable, low: float, high: float):
    x, factor = images(), factors(low, high)
    expected = torch.stack([theirs(image, float(value)) for image, value in zip(x, factor, strict=True)])
    torch.testing.assert_close(ours(x, factor), expected, rtol=0, atol=2e-6)
    before = x.clone()
    ours(x, factor)
    assert torch.equal(x, before)


@pytest.mark.parametrize("shift", [-0.5, -1 / 3, -1 / 6, 0.0, 1e-4, 1 / 6, 1 / 3, 0.5])
def test_hue_at_the_corners_of_the_colour_circle(shift: float):
    corners = torch.tensor(list(itertools.product([0.0, 0.25, 1.0], repeat=3))).T.reshape(1, 3, 9, 3)
    expected = tv.adjust_hue(corners, shift)
    torch.testing.assert_close(colours.adjust_hue(corners, torch.tensor([shift])), expected, rtol=0, atol=2e-6)


def test_hue_keeps_value_and_chroma_and_comes_back_after_a_circle():
    x, shift = images(), factors(-0.5, 0.5)
    turned = colours.adjust_hue(x, shift)
    torch.testing.assert_close(turned.amax(dim=1), x.amax(dim=1))
    torch.testing.assert_close(turned.amin(dim=1), x.amin(dim=1), rtol=0, atol=2e-6)
    torch.testing.assert_close(colours.adjust_hue(turned, -shift), x, rtol=0, atol=3e-6)


def test_grey_and_solarise_equal_torchvisions():
    x = images()
    torch.testing.assert_close(colours.grey(x), tv.rgb_to_grayscale(x, num_output_channels=3), rtol=0, atol=1e-7)
    torch.testing.assert_close(colours.solarise(x), tv.solarize(x, 0.5), rtol=0, atol=1e-7)


def test_solarise_agrees_with_the_8_bit_rule():
    levels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(1, 3, 16, 16)
    expected = tv.solarize(levels, 128)
    assert torch.equal((colours.solarise(levels / 255) * 255).round().to(torch.uint8), expected)


def jittered_one_by_one(x: Tensor, jitter: Tensor, order: Tensor, factor: Tensor) -> Tensor:
    result = []
    for image, on, turns, values in zip(x, jitter, order, factor, strict=True):
        for change in turns.tolist() if on else ():
            image = CHANGES[change](image, float(values[change]))
        result.append(image)
    return torch.stack(result)


@pytest.mark.parametrize("jitter", [colours.jitter_by_masks, colours.jitter_by_subsets])
def test_jitter_in_all_orders_equals_torchvisions(jitter: Callable):
    n = 72
    x = images(n)
    order = ORDERS.repeat(3, 1)
    on = torch.arange(n) % 5 != 0
    factor = torch.stack(
        [factors(0.6, 1.4, n), factors(0.6, 1.4, n).flip(0), factors(0.8, 1.2, n), factors(-0.1, 0.1, n)], dim=1
    )
    got = jitter(x, on, order.argsort(dim=1), factor)
    torch.testing.assert_close(got, jittered_one_by_one(x, on, order, factor), rtol=0, atol=1e-5)
    assert torch.equal(got[~on], x[~on])


def test_both_ways_to_jitter_agree():
    n = 240
    x, turn, on = images(n), ORDERS.repeat(10, 1), torch.arange(n) % 4 != 0
    factor = torch.stack([factors(0.6, 1.4, n)] * 3 + [factors(-0.1, 0.1, n)], dim=1)
    by_masks, by_subsets = (way(x, on, turn, factor) for way in (colours.jitter_by_masks, colours.jitter_by_subsets))
    torch.testing.assert_close(by_masks, by_subsets, rtol=0, atol=1e-6)


def test_values_stay_between_0_and_1():
    n = 240
    x, turn, on = images(n), ORDERS.repeat(10, 1), torch.ones(n, dtype=torch.bool)
    factor = torch.stack([factors(0.0, 3.0, n)] * 3 + [factors(-0.5, 0.5, n)], dim=1)
    got = colours.jitter_by_masks(x, on, turn, factor)
    assert got.isfinite().all()
    assert got.min() >= -1e-6
    assert got.max() <= 1 + 1e-6
