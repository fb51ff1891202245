"""Draws: crops inside the image, each choice as often as set, and nothing that hangs on the batch."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from siammm.core.errors import InputError
from siammm.data.view_settings import PRESETS, ViewParameters, ViewSettings, draw, views

N = 20_000
INDEX = torch.arange(N)


def drawn(settings: ViewSettings, height: int, width: int, view: int = 0, epoch: int = 0) -> ViewParameters:
    return draw(settings, height, width, 3, epoch, INDEX, view)


def rows_of(parameters: ViewParameters, index: torch.Tensor | slice) -> ViewParameters:
    return ViewParameters(**{field.name: getattr(parameters, field.name)[index] for field in fields(parameters)})


def same(one: ViewParameters, other: ViewParameters) -> bool:
    return all(torch.equal(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))


@pytest.mark.parametrize("shape", [(32, 32), (8, 8), (375, 500), (500, 375), (1, 1), (1, 40), (200, 3)])
def test_crops_lie_within_the_image(shape: tuple[int, int]):
    height, width = shape
    p = drawn(ViewSettings(size=32), height, width)
    assert p.top_N.dtype == p.height_N.dtype == torch.int64
    assert p.top_N.min() >= 0
    assert p.left_N.min() >= 0
    assert p.height_N.min() >= 1
    assert p.width_N.min() >= 1
    assert (p.top_N + p.height_N).max() <= height
    assert (p.left_N + p.width_N).max() <= width


def test_crops_have_the_areas_and_ratios_that_were_set():
    settings = ViewSettings(size=224, scale=(0.2, 0.4))
    p = drawn(settings, 4000, 4000)
    area = (p.height_N * p.width_N).double() / 4000**2
    log_ratio = (p.width_N.double() / p.height_N).log()
    assert area.min() > 0.2 - 1e-3
    assert area.max() < 0.4 + 1e-3
    assert abs(area.mean() - 0.3) < 2e-3
    assert log_ratio.abs().max() < math.log(4 / 3) + 1e-3
    assert abs(log_ratio.mean()) < 5e-3


def plain_crop_shapes(settings: ViewSettings, height: int, width: int, n: int) -> np.ndarray:
    """Crops drawn one at a time, as torchvision's RandomResizedCrop describes it."""
    random = np.random.default_rng(0)
    shapes = []
    for _ in range(n):
        for _ in range(10):
            area = height * width * random.uniform(*settings.scale)
            ratio = math.exp(random.uniform(math.log(settings.ratio[0]), math.log(settings.ratio[1])))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                top, left = random.integers(0, height - h + 1), random.integers(0, width - w + 1)
                break
        else:
            in_ratio = width / height
            if in_ratio < settings.ratio[0]:
                w, h = width, round(width / settings.ratio[0])
            elif in_ratio > settings.ratio[1]:
                w, h = round(height * settings.ratio[1]), height
            else:
                w, h = width, height
            top, left = (height - h) // 2, (width - w) // 2
        shapes.append((top, left, h, w))
    return np.array(shapes)


@pytest.mark.parametrize("shape", [(32, 32), (100, 60), (20, 90)])
def test_crops_are_spread_as_torchvision_draws_them(shape: tuple[int, int]):
    settings = ViewSettings(size=32)
    p = drawn(settings, *shape)
    got = torch.stack([p.top_N, p.left_N, p.height_N, p.width_N], dim=1).numpy()
    expected = plain_crop_shapes(settings, *shape, n=N)
    deviation = np.sqrt(expected.var(axis=0) + got.var(axis=0)) / np.sqrt(N) + 1e-9
    assert (np.abs(got.mean(axis=0) - expected.mean(axis=0)) < 5 * deviation).all()
    np.testing.assert_allclose(got.std(axis=0), expected.std(axis=0), rtol=0.05, atol=1e-9)


@pytest.mark.parametrize(("shape", "box"), [((100, 10), (43, 0, 13, 10)), ((10, 100), (0, 43, 10, 13))])
def test_an_image_that_no_crop_fits_gives_its_centre(shape: tuple[int, int], box: tuple[int, ...]):
    p = drawn(ViewSettings(size=32, scale=(1.0, 1.0)), *shape)
    got = torch.stack([p.top_N, p.left_N, p.height_N, p.width_N], dim=1)
    assert torch.equal(got, torch.tensor(box).expand(N, 4))


def test_the_whole_image_where_only_that_is_asked_for():
    p = drawn(ViewSettings(size=32, scale=(1.0, 1.0), ratio=(1.0, 1.0)), 17, 17)
    assert torch.equal(p.height_N, torch.full((N,), 17))
    assert torch.equal(p.top_N + p.left_N, torch.zeros(N, dtype=torch.int64))


def test_choices_are_made_as_often_as_set():
    settings = replace(views(224)[1], blur=0.3)
    p = drawn(settings, 300, 300)
    for flags, probability in [
        (p.flip_N, 0.5),
        (p.jitter_N, 0.8),
        (p.grey_N, 0.2),
        (p.blur_sigma_N > 0, 0.3),
        (p.solarise_N, 0.2),
    ]:
        assert abs(flags.double().mean() - probability) < 5 * math.sqrt(0.25 / N)
    sigma = p.blur_sigma_N[p.blur_sigma_N > 0]
    assert sigma.min() >= 0.1
    assert sigma.max() <= 2.0
    assert abs(sigma.mean() - 1.05) < 0.05
    for factor, middle, reach in [
        (p.brightness_N, 1.0, 0.4),
        (p.contrast_N, 1.0, 0.4),
        (p.saturation_N, 1.0, 0.2),
        (p.hue_N, 0.0, 0.1),
    ]:
        assert (factor - middle).abs().max() <= reach + 1e-6
        assert (factor - middle).abs().max() > 0.99 * reach
        assert abs(factor.double().mean() - middle) < 5 * reach / math.sqrt(3 * N)


def test_certain_and_impossible_choices():
    settings = ViewSettings(size=32, flip=1.0, jitter_probability=0.0, grey=1.0, blur=0.0, solarise=1.0)
    p = drawn(settings, 32, 32)
    assert p.flip_N.all()
    assert not p.jitter_N.any()
    assert p.grey_N.all()
    assert not p.blur_sigma_N.any()
    assert p.solarise_N.all()


def test_a_large_factor_stops_at_0():
    p = drawn(ViewSettings(size=32, brightness=2.0), 32, 32)
    assert p.brightness_N.min() >= 0.0
    assert p.brightness_N.max() > 2.9


def test_all_24_orders_of_the_jitter_are_equally_likely():
    turn = drawn(ViewSettings(size=32), 32, 32).turn_N4
    assert torch.equal(turn.sort(dim=1).values, torch.arange(4).expand(N, 4))
    _, counts = turn.unique(dim=0, return_counts=True)
    assert counts.shape == (24,)
    assert (counts - N / 24).abs().max() < 5 * math.sqrt(N / 24)


def test_choices_are_independent_of_each_other():
    p = drawn(replace(views(224)[1], blur=0.5), 300, 300)
    columns = [p.top_N, p.left_N, p.height_N * p.width_N, p.width_N / p.height_N, p.flip_N, p.jitter_N, p.brightness_N]
    columns += [p.contrast_N, p.saturation_N, p.hue_N, p.grey_N, p.blur_sigma_N, p.solarise_N, p.turn_N4[:, 0]]
    correlation = torch.corrcoef(torch.stack([column.double() for column in columns])) - torch.eye(len(columns))
    correlation[2, :2] = correlation[:2, 2] = 0.0  # a large crop has less room
    correlation[0, 1] = correlation[1, 0] = 0.0
    correlation[3, :2] = correlation[:2, 3] = 0.0
    assert correlation.abs().max() < 5 / math.sqrt(N)


def test_views_epochs_and_seeds_draw_differently():
    settings = ViewSettings(size=32)
    tables = [drawn(settings, 32, 32, view, epoch).brightness_N for view in range(2) for epoch in range(2)]
    tables.append(draw(settings, 32, 32, 4, 0, INDEX, 0).brightness_N)
    correlation = torch.corrcoef(torch.stack(tables).double()) - torch.eye(5)
    assert correlation.abs().max() < 5 / math.sqrt(N)


def test_a_sample_is_drawn_alike_in_any_batch():
    settings = views(224)[1]
    whole = drawn(settings, 300, 200)
    rows = torch.tensor([17, 3, 9_999, 0])
    assert same(draw(settings, 300, 200, 3, 0, rows, 0), rows_of(whole, rows))
    sizes = torch.full((4,), 300), torch.full((4,), 200)
    assert same(draw(settings, *sizes, 3, torch.tensor(0), rows, 0), rows_of(whole, rows))


def test_only_the_crop_hangs_on_the_size_of_the_image():
    small, large = drawn(views(224)[1], 30, 40), drawn(views(224)[1], 300, 500)
    for field in fields(small):
        if field.name not in ("top_N", "left_N", "height_N", "width_N"):
            assert torch.equal(getattr(small, field.name), getattr(large, field.name))


def test_a_setting_that_is_switched_off_changes_no_other_draw():
    with_blur = drawn(views(224)[0], 300, 300)
    without = drawn(replace(views(224)[0], blur=0.0), 300, 300)
    assert torch.equal(with_blur.hue_N, without.hue_N)
    assert torch.equal(with_blur.top_N, without.top_N)


def test_presets():
    first, second = views(224)
    assert (first.blur, second.blur, first.solarise, second.solarise) == (1.0, 0.1, 0.0, 0.2)
    assert (first.blur_kernel, first.blur_sigma) == (23, (0.1, 2.0))
    assert first.scale == (0.2, 1.0)
    assert views(32)[0].blur == views(32)[1].blur == 0.0
    assert views(64)[0].blur == 1.0
    assert views(64)[0].blur_sigma == (0.1, 1.0)
    assert views(64)[0].blur_kernel == 7
    for digits in views(8):
        assert digits.flip == digits.grey == digits.blur == digits.solarise == digits.saturation == digits.hue == 0.0
        assert (digits.jitter_probability, digits.brightness, digits.contrast) == (0.8, 0.4, 0.4)
        assert digits.scale == (0.7, 1.0)
        assert (digits.rotation, digits.shear, digits.turns) == (15.0, 15.0, True)
    assert not views(32)[0].turns
    assert views(28, "digits")[0].flip == 0.0


@pytest.mark.parametrize("size", [1, 2, 8, 16, 17, 28, 32, 40, 41, 48, 64, 96, 97, 128, 160, 224, 384])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_suits_every_size(size: int, preset: str):
    for settings in views(size, preset):  # pyright: ignore[reportArgumentType]
        assert settings.size == size
        if settings.blur:
            assert settings.blur_kernel // 2 >= 2.99 * settings.blur_sigma[1] or size < 14


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"size": 0}, "size is 0"),
        ({"flip": 1.5}, "flip is 1.5"),
        ({"grey": -0.1}, "grey is -0.1"),
        ({"hue": 0.6}, "hue is 0.6"),
        ({"brightness": -1.0}, "brightness is -1.0"),
        ({"scale": (0.0, 1.0)}, r"scale is \(0.0, 1.0\)"),
        ({"scale": (0.8, 0.2)}, "the smaller first"),
        ({"ratio": (2.0, 0.5)}, "the smaller first"),
        ({"blur": 0.5, "blur_kernel": 4}, "blur_kernel is 4"),
        ({"blur": 0.5, "blur_kernel": 65}, "blur_kernel is 65"),
        ({"blur_sigma": (0.0, 1.0)}, "blur_sigma"),
        ({"std": (0.0, 1.0, 1.0)}, "std"),
        ({"grey": float("nan")}, "grey is nan"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict, named: str):
    with pytest.raises(InputError, match=named):
        ViewSettings(**{"size": 32, **wrong})


def test_an_unknown_preset_is_refused():
    with pytest.raises(InputError, match=r"'tiny', but these exist: auto, digits"):
        views(32, "tiny")  # pyright: ignore[reportArgumentType]
