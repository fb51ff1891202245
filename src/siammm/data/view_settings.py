"""What may happen to an image in a view, and what does happen to each: settings, presets, and the draw.

A draw is a table of parameters, one row a sample, made without touching a pixel. A row depends on the seed, the epoch,
the sample's number and the view alone. Of its columns, only the crop depends on the size of the image: workers that
crop on the CPU and a device that colours the rest may therefore draw the same row independently.

Legend:  N samples, T tries of a crop, U uniforms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from siammm.core.device import widest_float
from siammm.core.errors import InputError
from siammm.data.randomness import uniforms

Preset = Literal["auto", "digits", "32", "64", "224"]
PRESETS: tuple[Preset, ...] = ("auto", "digits", "32", "64", "224")

Channels = tuple[float, float, float]
IMAGENET_MEAN: Channels = (0.485, 0.456, 0.406)
IMAGENET_STD: Channels = (0.229, 0.224, 0.225)

# Crops tried before the centre crop is taken, as in torchvision's RandomResizedCrop.
_TRIES = 10

# Each use of randomness has its own slot of the sample's uniforms, used or not: a setting that is switched off changes
# no other draw. New uses go to the end.
_AREA = slice(0, _TRIES)
_RATIO = slice(_TRIES, 2 * _TRIES)
_TOP, _LEFT, _FLIP, _JITTER, _GREY, _BLUR, _SIGMA, _SOLARISE = range(2 * _TRIES, 2 * _TRIES + 8)
_TURN = slice(_SOLARISE + 1, _SOLARISE + 5)
_FACTOR = slice(_SOLARISE + 5, _SOLARISE + 9)
_ROTATION, _SHEAR = _SOLARISE + 9, _SOLARISE + 10
_UNIFORMS = _SOLARISE + 11


# The smallest and the largest value of each setting.
_LIMITS = {
    "flip": (0.0, 1.0), "jitter_probability": (0.0, 1.0), "grey": (0.0, 1.0), "blur": (0.0, 1.0),
    "solarise": (0.0, 1.0), "brightness": (0.0, math.inf), "contrast": (0.0, math.inf), "saturation": (0.0, math.inf),
    "hue": (0.0, 0.5), "rotation": (0.0, 180.0), "shear": (0.0, 60.0), "scale": (1e-6, 1.0), "ratio": (1e-3, 1e3),
    "blur_sigma": (1e-3, math.inf),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ViewSettings:
    """The augmentation of one view; probabilities and ranges are MoCo v3's unless a preset says otherwise."""

    size: int
    """Height and width of the view, in pixels."""
    scale: tuple[float, float] = (0.2, 1.0)
    """Area of the crop, as a share of the image."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Width of the crop over its height."""
    flip: float = 0.5
    """Probability of a horizontal flip."""
    jitter_probability: float = 0.8
    """Probability that brightness, contrast, saturation and hue are changed, in random order."""
    brightness: float = 0.4
    """The brightness is multiplied by 1 - this to 1 + this."""
    contrast: float = 0.4
    """The contrast is multiplied by 1 - this to 1 + this."""
    saturation: float = 0.2
    """The saturation is multiplied by 1 - this to 1 + this."""
    hue: float = 0.1
    """The hue is turned by up to this share of the circle, either way."""
    grey: float = 0.2
    """Probability that the colours are taken away."""
    blur: float = 0.0
    """Probability of a Gaussian blur."""
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    """Standard deviation of the blur, in pixels of the view."""
    blur_kernel: int = 23
    """Pixels that a blurred pixel is made of, in a row: an odd number."""
    solarise: float = 0.0
    """Probability that pixels in the upper half of the brightness are inverted."""
    rotation: float = 0.0
    """The crop is turned by up to this many degrees, either way, over black; no part of MoCo v3's augmentation."""
    shear: float = 0.0
    """The crop is slanted by up to this many degrees, either way, over black; no part of it either."""
    mean: tuple[float, float, float] = IMAGENET_MEAN
    """Taken off the red, green and blue of the view."""
    std: tuple[float, float, float] = IMAGENET_STD
    """What red, green and blue are then divided by."""

    def __post_init__(self) -> None:
        """Refuse what cannot be drawn or applied."""
        if self.size < 1:
            raise InputError(f"size is {self.size}, but a view has at least 1 pixel; give a larger one.")
        for name, (low, high) in _LIMITS.items():
            value = getattr(self, name)
            _check_range(name, value if isinstance(value, tuple) else (value,), low, high)
        if self.blur > 0 and not (self.blur_kernel % 2 == 1 and 1 <= self.blur_kernel <= 2 * self.size - 1):
            raise InputError(
                f"blur_kernel is {self.blur_kernel}, but a view of {self.size} pixels is blurred with an odd number "
                f"from 1 to {2 * self.size - 1}; give one, or set blur to 0."
            )
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise InputError(
                f"mean is {self.mean} and std {self.std}, but both need 3 numbers, and those of std must be above 0."
            )

    @property
    def normalisation(self) -> tuple[Channels, Channels]:
        """Mean and deviation."""
        return self.mean, self.std

    def normalised_by(self, normalisation: tuple[Channels, Channels] | None) -> ViewSettings:
        """The same view with the mean and deviation of known weights, if there are any.

        Pixels are normalised by one rule: a network sees them as its weights were trained to see them. New weights get
        the values above (those of ImageNet, .5 for digits), weights that training starts from bring their own. They are
        a part of the view, and the view goes with the network: into checkpoints, the file of the networks and exports.
        So training, probes, ``embed``, ``evaluate`` and ONNX all normalise alike, wherever the weights came from.
        """
        return self if normalisation is None else replace(self, mean=normalisation[0], std=normalisation[1])

    @property
    def turns(self) -> bool:
        """Whether the crop is ever turned or slanted."""
        return self.rotation > 0 or self.shear > 0

    @property
    def jitters(self) -> bool:
        """Whether brightness, contrast, saturation or hue is ever changed."""
        return self.jitter_probability > 0 and max(self.brightness, self.contrast, self.saturation, self.hue) > 0


def normalisation_from_plain(stored: Any) -> tuple[Channels, Channels]:
    """Mean and deviation as JSON holds them; raises ``ValueError`` or ``TypeError`` if they are none."""
    (r, g, b), (r_std, g_std, b_std) = stored
    return (float(r), float(g), float(b)), (float(r_std), float(g_std), float(b_std))


def _check_range(name: str, values: Sequence[float], low: float, high: float) -> None:
    if not all(low <= value <= high for value in values) or list(values) != sorted(values):
        given = values[0] if len(values) == 1 else tuple(values)
        limit = f"between {low:g} and {high:g}" if math.isfinite(high) else f"at least {low:g}"
        order = "" if len(values) == 1 else ", the smaller first"
        raise InputError(f"{name} is {given}, but it must be {limit}{order}; give such a value.")


def views(size: int, preset: Preset = "auto") -> tuple[ViewSettings, ViewSettings]:
    """The settings of the two views for images of ``size`` pixels.

    "224" is MoCo v3's asymmetric pair: the first view is always blurred, the second seldom but at times solarised.
    "64" is the same with a blur that suits 64 pixels, "32" leaves the blur out, and "digits" crops, turns and slants
    a little and changes brightness and contrast, as pens do, but mirrors nothing: a mirrored digit is another one. The
    blur of "224" and "64" grows with the size. "auto" takes the preset of the nearest size; up to 16 pixels that is
    "digits".
    """
    if preset not in PRESETS:
        raise InputError(f"The preset is {preset!r}, but these exist: {', '.join(PRESETS)}; give one of them.")
    if preset == "auto":
        preset = preset_for(size)
    if preset == "digits":
        plain = ViewSettings(
            size=size, scale=(0.7, 1.0), rotation=15.0, shear=15.0, flip=0.0, saturation=0.0, hue=0.0, grey=0.0,
            mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5),
        )  # fmt: skip
        return plain, plain
    if preset == "32":
        return ViewSettings(size=size), ViewSettings(size=size, solarise=0.2)
    # About a tenth of the view, 23 at 224 pixels as is usual: it reaches three deviations of the widest blur.
    kernel = 2 * min(math.ceil(3 * size / 64), size - 1) + 1
    sigma = (0.1, max(0.2, 2.0 * size / 224 if preset == "224" else size / 64))
    return (
        ViewSettings(size=size, blur=1.0, blur_sigma=sigma, blur_kernel=kernel),
        ViewSettings(size=size, blur=0.1, blur_sigma=sigma, blur_kernel=kernel, solarise=0.2),
    )


def preset_for(size: int) -> Preset:
    """The preset that suits images of ``size`` pixels."""
    return "digits" if size <= 16 else "32" if size <= 40 else "64" if size <= 96 else "224"


@dataclass(frozen=True, kw_only=True)
class ViewParameters:
    """What happens to each sample of a batch in one view."""

    top_N: Tensor
    """First row of the crop; with left_N, height_N and width_N int64, in pixels of the image."""
    left_N: Tensor
    height_N: Tensor
    width_N: Tensor
    flip_N: Tensor
    """Whether the crop is mirrored, left to right."""
    jitter_N: Tensor
    """Whether the four operations below are done."""
    turn_N4: Tensor
    """When brightness, contrast, saturation and hue (columns) are changed: each row holds 0, 1, 2, 3 in some order."""
    brightness_N: Tensor
    """A factor, as contrast_N and saturation_N; 1 changes nothing."""
    contrast_N: Tensor
    saturation_N: Tensor
    hue_N: Tensor
    """A share of the colour circle; 0 changes nothing."""
    grey_N: Tensor
    """Whether the colours are taken away."""
    blur_sigma_N: Tensor
    """Standard deviation of the blur in pixels of the view, 0 for none."""
    solarise_N: Tensor
    """Whether bright pixels are inverted."""
    rotation_N: Tensor
    """Degrees by which the crop is turned, clockwise."""
    shear_N: Tensor
    """Degrees by which it is slanted."""

    def to(self, device: torch.device | str) -> ViewParameters:
        """The same parameters on another device."""
        return ViewParameters(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def draw(
    settings: ViewSettings,
    height_N: Tensor | int,
    width_N: Tensor | int,
    seed: int,
    epoch: int | Tensor,
    index_N: Tensor,
    view: int,
) -> ViewParameters:
    """Draw what happens to each sample in a view, on the device of ``index_N`` and without waiting for it.

    ``height_N`` and ``width_N`` are the sizes of the images (one number where they are all alike), ``index_N`` their
    numbers in the whole data set, ``view`` is 0 or 1, and ``epoch`` may be a tensor, as for ``uniforms``.
    """
    u_NU = uniforms(seed, epoch, index_N, view, _UNIFORMS)
    top_N, left_N, crop_height_N, crop_width_N = _draw_crop(settings, height_N, width_N, u_NU)
    low_high = [(max(0.0, 1.0 - x), 1.0 + x) for x in (settings.brightness, settings.contrast, settings.saturation)]
    low_high.append((-settings.hue, settings.hue))
    brightness_N, contrast_N, saturation_N, hue_N = (
        _between(u_N, *bounds) for u_N, bounds in zip(u_NU[:, _FACTOR].unbind(1), low_high, strict=True)
    )
    blurred_N = u_NU[:, _BLUR] < settings.blur
    return ViewParameters(
        top_N=top_N, left_N=left_N, height_N=crop_height_N, width_N=crop_width_N,
        brightness_N=brightness_N, contrast_N=contrast_N, saturation_N=saturation_N, hue_N=hue_N,
        flip_N=u_NU[:, _FLIP] < settings.flip,
        jitter_N=u_NU[:, _JITTER] < settings.jitter_probability,
        turn_N4=_ranks(u_NU[:, _TURN]),
        grey_N=u_NU[:, _GREY] < settings.grey,
        blur_sigma_N=torch.where(blurred_N, _between(u_NU[:, _SIGMA], *settings.blur_sigma), 0.0),
        solarise_N=u_NU[:, _SOLARISE] < settings.solarise,
        rotation_N=_between(u_NU[:, _ROTATION], -settings.rotation, settings.rotation),
        shear_N=_between(u_NU[:, _SHEAR], -settings.shear, settings.shear),
    )  # fmt: skip


def _draw_crop(
    settings: ViewSettings, height_N: Tensor | int, width_N: Tensor | int, u_NU: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Top, left, height and width of each crop: the first of ten that fits into the image, else the centre crop."""
    # In float64, so that the last bit of a root or an exponential, in which a GPU may differ, moves no crop.
    u_NU = u_NU.to(widest_float(u_NU.device))
    rows_N1, columns_N1 = (
        (size.to(u_NU.dtype) if isinstance(size, Tensor) else u_NU.new_full((u_NU.shape[0],), size))[:, None]
        for size in (height_N, width_N)
    )
    area_NT = rows_N1 * columns_N1 * _between(u_NU[:, _AREA], *settings.scale)
    ratio_NT = _between(u_NU[:, _RATIO], *(math.log(bound) for bound in settings.ratio)).exp()
    width_NT = (area_NT * ratio_NT).sqrt().round()
    height_NT = (area_NT / ratio_NT).sqrt().round()
    fits_NT = (width_NT > 0) & (width_NT <= columns_N1) & (height_NT > 0) & (height_NT <= rows_N1)
    tries_T = torch.arange(_TRIES, device=u_NU.device)
    first_N1 = torch.where(fits_NT, tries_T, _TRIES).amin(dim=1, keepdim=True)
    drawn_N1 = first_N1 < _TRIES
    first_N1 = first_N1.clamp_max(_TRIES - 1)

    narrowest, widest = settings.ratio
    centre_width_N1 = torch.minimum(columns_N1, (rows_N1 * widest).round()).clamp_min(1)
    centre_height_N1 = torch.minimum(rows_N1, (columns_N1 / narrowest).round()).clamp_min(1)
    width_N1 = torch.where(drawn_N1, width_NT.gather(1, first_N1), centre_width_N1)
    height_N1 = torch.where(drawn_N1, height_NT.gather(1, first_N1), centre_height_N1)
    top_N1 = _place(rows_N1 - height_N1, u_NU[:, _TOP, None], drawn_N1)
    left_N1 = _place(columns_N1 - width_N1, u_NU[:, _LEFT, None], drawn_N1)
    top_N, left_N, height_N, width_N = torch.cat([top_N1, left_N1, height_N1, width_N1], dim=1).long().unbind(1)
    return top_N, left_N, height_N, width_N


def _place(spare: Tensor, u: Tensor, drawn: Tensor) -> Tensor:
    """Where a crop begins that leaves ``spare`` pixels over: anywhere if it was drawn, else in the middle."""
    return torch.where(drawn, torch.minimum((u * (spare + 1)).floor(), spare), (spare / 2).floor())


def _between(u: Tensor, low: float, high: float) -> Tensor:
    return u * (high - low) + low


def _ranks(u_N4: Tensor) -> Tensor:
    """The rank of each number in its row, from 0; of equal ones the first comes first. Cheaper than a sort on a GPU."""
    before_N44 = u_N4[:, None, :] < u_N4[:, :, None]
    slot_4 = torch.arange(u_N4.shape[1], device=u_N4.device)
    before_N44 = before_N44 | ((u_N4[:, None, :] == u_N4[:, :, None]) & (slot_4[None, :] < slot_4[:, None]))
    return before_N44.sum(dim=2)
