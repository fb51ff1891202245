"""The two views of an image: MoCo v3's asymmetric augmentation, per sample, for a whole batch on its device.

    parameters = draw(settings, height, width, seed, epoch, index, view)
    view = apply(images, parameters, settings)

The order is MoCo v3's: crop and resize, jitter, grey, blur, solarise, flip, normalise; the flip is done with the crop,
which gives the same. Every step equals torchvision's on the same parameters. Unlike torchvision's transforms, each
sample of a batch has its own parameters, and they hang on its number and not on its place in the batch.

On a GPU, and wherever torch compiles, nothing is read back and every shape is fixed, so that a CUDA graph can hold it
all: what a sample does not need is computed and masked. On the CPU it is not computed.

Legend:  N samples, C channels (1 or 3), H and W height and width of an image, S of a view.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from siammm.core.errors import InputError
from siammm.data import colours, resample
from siammm.data.view_settings import ViewParameters, ViewSettings


def apply(x_NCHW: Tensor, parameters: ViewParameters, settings: ViewSettings) -> Tensor:
    """The views of a batch of images: uint8, or floats from 0 to 1, to normalised floats, N x 3 x S x S."""
    return colour(crop(x_NCHW, parameters, settings.size), parameters, settings)


def crop(x_NCHW: Tensor, parameters: ViewParameters, size: int) -> Tensor:
    """Crop, resize and flip: floats from 0 to 1, N x 3 x ``size`` x ``size``.

    Images of different sizes may share a batch, padded to one shape, since a crop stays within the size it was drawn
    for.
    """
    p = parameters
    x_NCHW = _as_float(x_NCHW)
    view_NCSS = resample.resized_crop(x_NCHW, p.top_N, p.left_N, p.height_N, p.width_N, p.flip_N, size)
    return _three_channels(view_NCSS)


def crop_bytes(x_CHW: Tensor, parameters: ViewParameters, size: int) -> Tensor:
    """``crop`` of one uint8 image, rounded to uint8: for worker processes, which send a quarter of what floats take.

    ``parameters`` hold this sample alone.
    """
    p = parameters
    top, left, height, width = (int(value_N) for value_N in (p.top_N, p.left_N, p.height_N, p.width_N))
    box_1CHW = x_CHW[None, :, top : top + height, left : left + width]
    view_CSS = resample.resized(box_1CHW, (size, size))[0]
    return _three_channels(view_CSS.flip(-1) if bool(p.flip_N) else view_CSS)


def colour(x_NCHW: Tensor, parameters: ViewParameters, settings: ViewSettings) -> Tensor:
    """What comes after the crop, for uint8 or floats from 0 to 1: jitter, grey, blur, solarise, normalise."""
    p = parameters
    x_NCHW = _three_channels(_as_float(x_NCHW))
    if settings.turns:
        x_NCHW = resample.turned(x_NCHW, p.rotation_N, p.shear_N)
    if settings.jitters:
        factor_N4 = torch.stack([p.brightness_N, p.contrast_N, p.saturation_N, p.hue_N], dim=1)
        jitter = colours.jitter_by_subsets if resample.is_plain_cpu(x_NCHW) else colours.jitter_by_masks
        x_NCHW = jitter(x_NCHW, p.jitter_N, p.turn_N4, factor_N4.to(x_NCHW.dtype))
    if settings.grey > 0:
        x_NCHW = _where(p.grey_N, colours.grey, x_NCHW)
    if settings.blur > 0:
        x_NCHW = _blurred(x_NCHW, p.blur_sigma_N, settings.blur_kernel)
    if settings.solarise > 0:
        x_NCHW = _where(p.solarise_N, colours.solarise, x_NCHW)
    return normalise(x_NCHW, settings)


def normalise(x_NCHW: Tensor, settings: ViewSettings) -> Tensor:
    """Take off each channel's mean and divide by its deviation, as the settings have them."""
    return (x_NCHW - _per_channel(settings.mean, x_NCHW)).div_(_per_channel(settings.std, x_NCHW))


def clean(x_NCHW: Tensor, size: int, settings: ViewSettings) -> Tensor:
    """The view for evaluation, without chance: resize the shorter side, cut out the centre, normalise.

    From 128 pixels on, the shorter side is resized to 256/224 of ``size``, as is usual for ImageNet; below, to ``size``
    itself, since small images have no border to lose.
    """
    height, width = x_NCHW.shape[2:]
    shorter = clean_side(size)
    tall, wide = (int(shorter * side / min(height, width)) for side in (height, width))
    x_NCHW = resample.resized(_as_float(x_NCHW), (tall, wide))
    top, left = round((tall - size) / 2), round((wide - size) / 2)
    return normalise(_three_channels(x_NCHW[:, :, top : top + size, left : left + size]), settings)


def clean_side(size: int) -> int:
    """The shorter side of the image that a view without chance is cut from."""
    return round(size * 256 / 224) if size >= 128 else size


def _blurred(x_NCHW: Tensor, sigma_N: Tensor, kernel: int) -> Tensor:
    """Blur the samples whose deviation is above 0."""
    if resample.is_plain_cpu(x_NCHW):
        row_R = (sigma_N > 0).nonzero()[:, 0]
        if not row_R.numel():
            return x_NCHW
        blurred = resample.gaussian_blur(x_NCHW.index_select(0, row_R), sigma_N.index_select(0, row_R), kernel)
        return x_NCHW.index_copy(0, row_R, blurred)
    # Any deviation will do for the samples that keep their sharpness, as long as nothing is divided by 0.
    blurred = resample.gaussian_blur(x_NCHW, torch.where(sigma_N > 0, sigma_N, 1.0), kernel)
    return torch.where((sigma_N > 0)[:, None, None, None], blurred, x_NCHW)


def _where(chosen_N: Tensor, change: Callable[[Tensor], Tensor], x_NCHW: Tensor) -> Tensor:
    """Change the chosen samples."""
    if not resample.is_plain_cpu(x_NCHW):
        return torch.where(chosen_N[:, None, None, None], change(x_NCHW), x_NCHW)
    row_R = chosen_N.nonzero()[:, 0]
    return x_NCHW.index_copy(0, row_R, change(x_NCHW.index_select(0, row_R))) if row_R.numel() else x_NCHW


def _as_float(x_NCHW: Tensor) -> Tensor:
    """Floats from 0 to 1, in float32 unless they are float64."""
    if x_NCHW.dtype == torch.uint8:
        return x_NCHW.to(torch.float32).div_(255.0)
    if not x_NCHW.is_floating_point():
        raise InputError(f"The images are {x_NCHW.dtype}, but uint8 or floats from 0 to 1 are needed; convert them.")
    return x_NCHW if x_NCHW.dtype == torch.float64 else x_NCHW.to(torch.float32)


def _three_channels(x: Tensor) -> Tensor:
    """A grey image as a colour image."""
    channels = x.shape[-3]
    if channels not in (1, 3):
        raise InputError(f"The images have {channels} channels, but 1 or 3 are needed; keep red, green and blue.")
    return x if channels == 3 else x.expand(*x.shape[:-3], 3, *x.shape[-2:])


def _per_channel(values: tuple[float, float, float], like: Tensor) -> Tensor:
    """Three numbers beside the channels, filled in on the device: a copy from the host may not be part of a graph."""
    return torch.cat([like.new_full((1, 1, 1, 1), value) for value in values], dim=1)
