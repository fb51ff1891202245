"""Augmentation as a whole: torchvision's pipeline on each sample, in any batch, compiled or not, on any device."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as tv

from siammm.core.errors import InputError
from siammm.data import augment, view_settings
from siammm.data.view_settings import ViewParameters, ViewSettings
from tests.data.test_view_settings import rows_of

# Everything happens often, and at a size that is quick.
BUSY = ViewSettings(
    size=24, jitter_probability=0.8, grey=0.3, blur=0.5, blur_sigma=(0.1, 1.5), blur_kernel=7, solarise=0.3
)


def images(n: int, height: int = 24, width: int = 24, channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randint(0, 256, (n, channels, height, width), dtype=torch.uint8, generator=generator)


def drawn(settings: ViewSettings, x: Tensor, view: int = 0) -> ViewParameters:
    return view_settings.draw(settings, x.shape[2], x.shape[3], 1, 2, torch.arange(x.shape[0]) + 50, view)


def by_torchvision(x: Tensor, p: ViewParameters, settings: ViewSettings) -> Tensor:
    """MoCo v3's pipeline in its own order, one sample at a time."""
    results = []
    for i, image in enumerate(x):
        image = image / 255
        box = [int(value[i]) for value in (p.top_N, p.left_N, p.height_N, p.width_N)]
        image = tv.resized_crop(image, *box, size=[settings.size] * 2, antialias=True)
        flip = bool(p.flip_N[i])
        if settings.turns:  # not MoCo v3's, and not the same before and after a flip
            image, flip = tv.horizontal_flip(image) if flip else image, False
            angles = float(p.rotation_N[i]), [0.0, 0.0], 1.0, [float(p.shear_N[i]), 0.0]
            image = tv.affine(image, *angles, interpolation=tv.InterpolationMode.BILINEAR)
        if p.jitter_N[i]:
            for change in p.turn_N4[i].argsort().tolist():
                if change == 0:
                    image = tv.adjust_brightness(image, float(p.brightness_N[i]))
                elif change == 1:
                    image = tv.adjust_contrast(image, float(p.contrast_N[i]))
                elif change == 2:
                    image = tv.adjust_saturation(image, float(p.saturation_N[i]))
                else:
                    image = tv.adjust_hue(image, float(p.hue_N[i]))
        if p.grey_N[i]:
            image = tv.rgb_to_grayscale(image, num_output_channels=3)
        if p.blur_sigma_N[i] > 0:
            image = tv.gaussian_blur(image, [settings.blur_kernel] * 2, [float(p.blur_sigma_N[i])] * 2)
        if p.solarise_N[i]:
            image = tv.solarize(image, 0.5)
        if flip:
            image = tv.horizontal_flip(image)
        results.append(tv.normalize(image, list(settings.mean), list(settings.std)))
    return torch.stack(results)


def assert_nearly_all_close(got: Tensor, expected: Tensor, atol: float) -> None:
    """Close, but for a few pixels in a million that rounding pushes over the threshold of being inverted."""
    off = (got - expected).abs() > atol
    assert off.double().mean() < 2e-5, f"{int(off.sum())} of {off.numel()} pixels are off"


@pytest.mark.parametrize("shape", [(24, 24), (40, 31), (90, 120)])
def test_equals_torchvisions_pipeline(shape: tuple[int, int]):
    x = images(120, *shape)
    p = drawn(BUSY, x)
    got = augment.apply(x, p, BUSY)
    assert got.shape == (120, 3, 24, 24)
    assert got.dtype == torch.float32
    assert_nearly_all_close(got, by_torchvision(x, p, BUSY), 5e-5)


@pytest.mark.parametrize("size", [8, 32, 64])
def test_presets_equal_torchvisions_pipeline(size: int):
    x = images(40, size, size)
    for view, settings in enumerate(view_settings.views(size)):
        p = drawn(settings, x, view)
        assert_nearly_all_close(augment.apply(x, p, settings), by_torchvision(x, p, settings), 5e-5)


def test_224_pixels_equal_torchvisions_pipeline():
    x = images(4, 250, 300)
    for view, settings in enumerate(view_settings.views(224)):
        p = drawn(settings, x, view)
        assert_nearly_all_close(augment.apply(x, p, settings), by_torchvision(x, p, settings), 5e-5)


@pytest.mark.parametrize("shape", [(24, 24), (90, 120)])
def test_a_sample_has_the_same_view_in_any_batch(shape: tuple[int, int]):
    x = images(60, *shape)
    p = drawn(BUSY, x)
    whole = augment.apply(x, p, BUSY)
    for i in (0, 7, 59):
        alone = augment.apply(x[i : i + 1], rows_of(p, slice(i, i + 1)), BUSY)
        torch.testing.assert_close(alone, whole[i : i + 1], rtol=0, atol=1e-6)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(augment.apply(x[order], rows_of(p, order), BUSY), whole[order], rtol=0, atol=1e-6)


def test_twice_gives_the_same_bits_and_leaves_the_images_alone():
    x = images(60)
    before, floats = x.clone(), x / 255
    p = drawn(BUSY, x)
    assert torch.equal(augment.apply(x, p, BUSY), augment.apply(x, p, BUSY))
    assert torch.equal(x, before)
    cropped = augment.crop(floats, p, 24)
    kept = cropped.clone()
    augment.colour(cropped, p, BUSY)
    assert torch.equal(cropped, kept)
    assert torch.equal(floats, x / 255)


def test_bytes_floats_and_memory_formats_give_the_same():
    x = images(30)
    p = drawn(BUSY, x)
    expected = augment.apply(x, p, BUSY)
    assert torch.equal(augment.apply(x / 255, p, BUSY), expected)
    channels_last = x.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(augment.apply(channels_last, p, BUSY), expected, rtol=0, atol=1e-5)
    assert augment.apply((x / 255).double(), p, BUSY).dtype == torch.float64


def test_a_grey_image_is_a_colour_image_with_three_equal_channels():
    x = images(30, channels=1)
    p = drawn(BUSY, x)
    expected = augment.apply(x.expand(-1, 3, -1, -1), p, BUSY)
    torch.testing.assert_close(augment.apply(x, p, BUSY), expected, rtol=0, atol=1e-6)


def test_crop_then_colour_is_apply():
    x = images(30, 31, 40)
    p = drawn(BUSY, x)
    assert torch.equal(augment.colour(augment.crop(x, p, 24), p, BUSY), augment.apply(x, p, BUSY))


def test_images_of_different_sizes_share_a_padded_batch():
    x = images(20, 40, 40)
    height, width = torch.arange(20) + 20, 40 - torch.arange(20)
    index = torch.arange(20)
    p = view_settings.draw(BUSY, height, width, 1, 2, index, 0)
    whole = augment.crop(x, p, 24)
    for i in range(20):
        alone = x[i : i + 1, :, : height[i], : width[i]]
        own = view_settings.draw(BUSY, int(height[i]), int(width[i]), 1, 2, index[i : i + 1], 0)
        torch.testing.assert_close(augment.crop(alone, own, 24), whole[i : i + 1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(24, 24), (300, 200)])
def test_crops_in_bytes_are_the_crops_rounded(shape: tuple[int, int]):
    x = images(12, *shape)
    p = drawn(BUSY, x)
    expected = augment.crop(x, p, 24) * 255
    for i in range(12):
        got = augment.crop_bytes(x[i], rows_of(p, slice(i, i + 1)), 24)
        assert got.dtype == torch.uint8
        assert got.shape == (3, 24, 24)
        # torch resizes bytes in two passes and rounds after each.
        assert (got - expected[i]).abs().max() <= 1.5
    assert augment.crop_bytes(x[0, :1], rows_of(p, slice(0, 1)), 24).shape == (3, 24, 24)


def masked(x: Tensor, p: ViewParameters, settings: ViewSettings, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """What a GPU computes, on the CPU."""
    with monkeypatch.context() as patch:
        patch.setattr(augment.resample, "is_plain_cpu", lambda _: False)
        return augment.apply(x, p, settings)


@pytest.mark.parametrize("settings", [BUSY, replace(BUSY, blur=1.0, grey=0.0), replace(BUSY, jitter_probability=0.0)])
def test_masks_and_subsets_give_the_same(settings: ViewSettings, monkeypatch: pytest.MonkeyPatch):
    x = images(200)
    p = drawn(settings, x)
    difference = (masked(x, p, settings, monkeypatch) - augment.apply(x, p, settings)).abs() * min(settings.std)
    off = difference > 1e-6
    assert off.double().mean() < 2e-5


def test_traces_into_one_graph_for_all_epochs():
    x, index = images(8), torch.arange(8)

    def view(x: Tensor, epoch: Tensor) -> Tensor:
        return augment.apply(x, view_settings.draw(BUSY, 24, 24, 1, epoch, index, 0), BUSY)

    torch.compiler.reset()
    traces = 0

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        nonlocal traces
        traces += 1
        return graph

    compiled = torch.compile(view, backend=count, fullgraph=True)
    for epoch in (0, 5):
        got, expected = compiled(x, torch.tensor(epoch)), view(x, torch.tensor(epoch))
        assert_nearly_all_close(got, expected, 1e-5)
    assert traces == 1


def test_normalise_equals_torchvisions():
    x = torch.rand(5, 3, 6, 6)
    expected = tv.normalize(x, list(view_settings.IMAGENET_MEAN), list(view_settings.IMAGENET_STD))
    torch.testing.assert_close(augment.normalise(x, ViewSettings(size=6)), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "size", "shorter"),
    [((32, 32), 32, 32), ((40, 60), 32, 32), ((60, 41), 32, 32), ((20, 31), 32, 32), ((150, 260), 128, 146)],
)
def test_clean_is_resize_and_centre_crop(shape: tuple[int, int], size: int, shorter: int):
    x = images(3, *shape)
    settings = ViewSettings(size=size)
    expected = tv.center_crop(tv.resize(x / 255, [shorter], antialias=True), [size])
    expected = tv.normalize(expected, list(settings.mean), list(settings.std))
    got = augment.clean(x, size, settings)
    assert got.shape == (3, 3, size, size)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    grey = augment.clean(x[:, :1], size, settings)
    assert torch.equal(grey, augment.clean(x[:, :1].expand(-1, 3, -1, -1), size, settings))


def test_an_empty_batch_stays_empty():
    x = images(0)
    assert augment.apply(x, drawn(BUSY, x), BUSY).shape == (0, 3, 24, 24)
    assert augment.clean(x, 24, BUSY).shape == (0, 3, 24, 24)


def test_other_types_and_channels_are_refused():
    x = images(2)
    p = drawn(BUSY, x)
    with pytest.raises(InputError, match=r"torch.int64, but uint8 or floats"):
        augment.apply(x.long(), p, BUSY)
    with pytest.raises(InputError, match="have 4 channels, but 1 or 3"):
        augment.apply(images(2, channels=4), p, BUSY)
